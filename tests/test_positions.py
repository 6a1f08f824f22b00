"""nanorook/positions.py against python-chess: rules, mirror, PGN writer; and every format that is read."""

import gzip
import random

import chess
import chess.pgn
import pytest

from nanorook import positions as P
from nanorook.positions import Position

START = chess.STARTING_FEN
MATE_IN_ONE = "6k1/5ppp/8/8/8/8/5PPP/R5K1 w - - 0 1"
EN_PASSANT = "4k3/8/8/3pP3/8/8/8/4K3 w - d6 0 2"


def random_game(seed):
    """The boards of a random game that takes every chance to castle, promote or capture en passant."""
    rng, board = random.Random(seed), chess.Board()
    while not board.is_game_over() and board.ply() < 120:
        yield board
        moves = list(board.legal_moves)
        rare = [m for m in moves if board.is_en_passant(m) or board.is_castling(m) or m.promotion]
        board.push(rng.choice(rare or moves))


def as_position(board, moves=()):
    return Position(board.fen(), tuple(m.uci() for m in board.move_stack[-10:]), moves)


@pytest.fixture(scope="module")
def positions():
    """Positions of random games, each with five legal moves and invented evaluations."""
    rng, found = random.Random(1), []
    for board in (board for seed in range(14) for board in random_game(seed)):
        moves = [m.uci() for m in board.legal_moves][:5]
        scores = sorted((rng.randrange(-900, 900) for _ in moves), reverse=True)
        found.append(as_position(board, tuple(zip(moves, scores))))
    assert len(found) > 1300
    return found


@pytest.fixture(scope="module")
def builtin():
    return P.load("builtin")


# Boards: dots, mirror, held out
def test_expanded_boards_have_a_character_for_each_square_and_contract_again(positions):
    for fen in (p.fen for p in positions):
        board, rest = P.expand_board(fen).split(" ", 1)
        squares = "".join(reversed(board.split("/")))
        pieces = map(chess.Board(fen).piece_at, chess.SQUARES)
        assert squares == "".join(piece.symbol() if piece else "." for piece in pieces)
        assert rest == fen.split(" ", 1)[1] and P.contract_board(f"{board} {rest}") == fen == P.contract_board(fen)


def test_mirror_is_python_chess_mirror_and_an_involution(positions):
    for position in positions:
        mirrored, board = P.mirror(position), chess.Board(position.fen)
        assert mirrored.fen == board.mirror().fen() and P.mirror(mirrored) == position
        legal = {move.uci() for move in chess.Board(mirrored.fen).legal_moves}
        assert {P.mirror_move(move.uci()) for move in board.legal_moves} == legal
        assert [cp for _, cp in mirrored.moves] == [cp for _, cp in position.moves]
    position = Position(EN_PASSANT, ("d7d5",), (("e5d6", 3),), "e5e6")
    assert P.mirror(position) == ("4k3/8/8/8/3Pp3/8/8/4K3 b - d3 0 2", ("d2d4",), (("e4d3", 3),), "e4e3")


def test_held_out_depends_on_the_board_alone(positions):
    shares = []
    for position in positions:
        held, four = P.held_out(position.fen), " ".join(position.fen.split()[:4])
        assert held == P.held_out(P.mirror_fen(position.fen)) == P.held_out(f"{four} 77 123")
        shares.append(held)
    assert 0.07 < sum(shares) / len(shares) < 0.11
    train, held = P.split(positions)
    assert len(train) + len(held) == len(positions) and held
    assert not {P.board_key(p.fen) for p in train} & {P.board_key(p.fen) for p in held}


def test_the_choice_of_held_out_boards_never_changes():
    """Trained models rely on it."""
    board, squares = chess.Board("8/8/8/4k3/8/8/8/K7 w - - 0 1"), []
    for square in chess.SquareSet(~board.occupied):
        rook = board.copy()
        rook.set_piece_at(square, chess.Piece.from_symbol("R"))
        squares += [chess.square_name(square)] * P.held_out(rook.fen())
    assert [s for s in squares if s[0] != "e" and s[1] != "5"] == ["h4", "d6", "g7", "h7"]


def test_builtin(builtin):
    train, held = P.split(builtin)
    assert 18000 <= len(train) <= 22500 and 1600 <= len(held) <= 2600
    assert P.BUILTIN.stat().st_size <= 2_000_000
    for position in builtin[::4]:
        board = chess.Board(position.fen)
        assert board.is_valid() and board.fen() == position.fen and len(position.history) <= 10
        assert all(board.is_legal(chess.Move.from_uci(uci)) for uci, _ in position.moves)
        assert len(position.moves) == min(5, board.legal_moves.count())
        assert [cp for _, cp in position.moves] == sorted((cp for _, cp in position.moves), reverse=True)


# Moves to ask about
def test_the_move_that_mates_is_asked_about_often_and_where_none_is_legal_an_illegal_one():
    rng, board = random.Random(5), chess.Board(MATE_IN_ONE)
    assert 120 < sum(P.environment_move(board, rng, 1 / 4, "a1a8") == "a1a8" for _ in range(200)) < 190
    assert P.environment_move(chess.Board("R5k1/5ppp/8/8/8/8/5PPP/6K1 b - - 1 1"), random.Random(6), 0)


# Formats
def save(path, lines):
    text = "".join(f"{line}\n" for line in lines).encode()
    path.write_bytes(gzip.compress(text) if path.suffix == ".gz" else text)
    return path


def policy_line(position, best):
    """As the original generator of RookWorld's data writes it, from the description of the format."""
    moves = random.Random(position.fen).sample(position.moves, len(position.moves))
    names, evals = " ".join(uci for uci, _ in moves), " ".join(str(cp / 100) for _, cp in moves)
    return f"P: {position.fen:90}M: {names:30}E: {evals:40}B: {best}"


@pytest.mark.parametrize("name", ["a.txt", "a.txt.gz"])
def test_own_format_round_trip(positions, tmp_path, name):
    positions = [*positions, Position(START, (), ()), Position(MATE_IN_ONE, ("h7h6",), (("a1a8", 99999),))]
    path = save(tmp_path / name, map(P.write_position, positions))
    path = path.rename(tmp_path / "renamed")  # the content decides, not the name
    assert P.load(path) == positions
    expanded = [P.write_position(p._replace(fen=P.expand_board(p.fen))) for p in positions]
    assert P.load(save(path, expanded)) == positions


@pytest.mark.parametrize("verified", [0, 1])
def test_an_en_passant_square_that_no_pawn_can_use_is_removed(tmp_path, monkeypatch, verified):
    """One board must not be held out in one spelling and trained on in the other."""
    monkeypatch.setattr(P, "VERIFIED_LINES", verified)
    fen = "rnbqkbnr/pppppppp/8/8/4P3/8/PPPP1PPP/RNBQKBNR b KQkq {} 0 1"
    path = save(tmp_path / "a.txt", [fen.format("e3") + ";e2e4;", f"{EN_PASSANT};d7d5;"])
    assert [position.fen for position in P.load(path)] == [fen.format("-"), EN_PASSANT]


@pytest.mark.parametrize("write", [str, P.expand_board])
def test_rookworld_policy_lines(positions, tmp_path, write):
    lines = [policy_line(p, p.moves[-1][0]).replace(p.fen, write(p.fen)) for p in positions]  # with a wrong B:
    for loaded, position in zip(P.load(save(tmp_path / "rook.txt", lines)), positions, strict=True):
        assert loaded.fen == position.fen and set(loaded.moves) == set(position.moves)
        assert [cp for _, cp in loaded.moves] == [cp for _, cp in position.moves]


def test_rookworld_environment_lines(positions, tmp_path):
    rng, lines, expected = random.Random(7), [], []
    for position in positions[1:500]:
        move = P.environment_move(chess.Board(position.fen), rng, 1 / 4)
        history = " ".join((*position.history, move)[-10:])
        line = f"A: {position.fen}+{move}+{history}+{START}+0.001+0+0"  # the wrong next state is not believed
        lines.append(rng.choice([line, line.removeprefix("A: ")]))
        expected.append(Position(position.fen, position.history[-9:], (), move))
    assert P.load(save(tmp_path / "arbiter.txt", lines)) == expected


def test_fen_and_epd_lists(tmp_path):
    """Own format may stand between them: each line is recognised by itself."""
    lines = [
        "\ufeff# a comment, and an empty line",
        "",
        P.expand_board(EN_PASSANT) + "  ",
        '1k1r4/pp1b1R2/3q2pp/4p3/2B5/4Q3/PPP2B2/2K5 b - - bm Qd1+; id "BK.01; with a mark";',
        f"{START};;e2e4:20",
        "8/8/8/4k3/8/8/4P3/4K3 w - - 5 40 bm e4",
    ]
    (tmp_path / "fens").write_text("\r\n".join(lines), encoding="utf-8")
    assert P.load(tmp_path / "fens") == [
        (EN_PASSANT, (), (), None),
        ("1k1r4/pp1b1R2/3q2pp/4p3/2B5/4Q3/PPP2B2/2K5 b - - 0 1", (), (), None),
        (START, (), (("e2e4", 20),), None),
        ("8/8/8/4k3/8/8/4P3/4K3 w - - 5 40", (), (), None),
    ]


@pytest.mark.parametrize("name", ["games.pgn", "games.pgn.gz"])
def test_pgn(tmp_path, name):
    texts, expected = [], []
    for seed in range(12):
        *_, board = random_game(seed)
        game = chess.pgn.Game.from_board(board)
        game.add_variation(chess.Move.from_uci("a2a3"), comment="a comment")  # ignored
        texts.append(str(game))
        replay = chess.Board()
        for move in board.move_stack:
            expected.append(as_position(replay))
            replay.push(move)
    assert P.load(save(tmp_path / name, texts)) == expected


@pytest.mark.parametrize(
    "bad", ["1. e4 e4 *", "1. e4 -- *", '[FEN "what"]\n\n1. e4 *', '[Variant "Atomic"]\n\n1. e4 *']
)
def test_bad_games_are_left_out_if_they_are_few(tmp_path, capsys, caplog, bad):
    good = '[Event "x"]\n\n1. e4 e5\n2. Nf3 *\n\n'
    (tmp_path / "few.pgn").write_text(good * 200 + bad + "\n\n" + good)
    assert len(P.load(tmp_path / "few.pgn")) == 3 * 201
    assert capsys.readouterr().err.startswith(f"{tmp_path}/few.pgn: left out 1 of 202 games") and not caplog.text
    (tmp_path / "many.pgn").write_text(good + "\n\n" + bad)
    with pytest.raises(SystemExit, match="many.pgn, line 8: expected .*1 of 2 games"):
        P.load(tmp_path / "many.pgn")


def test_hub_dataset(positions, tmp_path, monkeypatch, capsys):
    """In a cache of the hub's own client, which is offline in the tests."""
    pyarrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    repo = tmp_path / "datasets--jrahn--rookworld_7m"
    folder = repo / "snapshots" / ("0" * 40) / "data"
    folder.mkdir(parents=True)
    (repo / "refs").mkdir()
    (repo / "refs" / "main").write_text("0" * 40)
    lines = [policy_line(p, p.moves[0][0]) for p in positions[:300]] + ["?"] * 10
    parquet.write_table(pyarrow.table({"text": lines}), folder / "train-00000-of-00003.parquet")
    assert [p.fen for p in P.load("hub:jrahn/rookworld_7m")] == [p.fen for p in positions[:300]]
    assert "left out 10 of 310 lines" in capsys.readouterr().err


def test_a_hub_that_cannot_be_reached_is_one_sentence():
    with pytest.raises(SystemExit, match="^error: hub:nobody/nothing cannot be read: ") as error:
        P.load("hub:nobody/nothing")
    assert "\n" not in str(error.value)


# Bad files
BAD_FILES = [
    (None, "expected a file of positions, but it cannot be read"),
    (gzip.compress(START.encode() * 999)[:-9], "expected a file of positions, but it cannot be read"),
    (b"# only a comment\n", "expected positions, found none"),
    (b"\n\nHello, world", "line 3: expected a FEN, an EPD, .* found 'Hello, world'"),
    (b"4k3/8/8/8/8/8/8/4K2r b - - 0 1", "line 1: expected a position that chess allows"),  # the king can be taken
    (f"{START};;e2e5:10", "line 1: illegal uci: 'e2e5'"),
    (f"{START};;e2e4:10 d2d4:15", "line 1: expected each move once, best first"),
    (f"P: {START}   M: e2e4 d2d4 E: 0.3 B: e2e4", "line 1: expected as many evaluations as moves"),
    (f"A: {START}+e2e4+d2d4+{START}+0.001+0+0", "line 1: expected .*recent moves and the move"),
]


@pytest.mark.parametrize("content, expected", BAD_FILES)
def test_a_bad_file_is_refused_in_one_sentence(tmp_path, content, expected):
    if content:
        (tmp_path / "bad").write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(SystemExit, match=expected) as error:
        P.load(tmp_path / "bad")
    message = str(error.value)
    assert message.startswith(f"error: {tmp_path}/bad") and message.endswith(".")
    assert "\n" not in message and len(message) < 420


def test_few_bad_lines_are_counted_and_many_refused(positions, tmp_path, capsys, monkeypatch):
    """Also beyond the lines that are verified, where one without eight ranks is bad as well."""
    monkeypatch.setattr(P, "VERIFIED_LINES", 100)
    lines, odd = [P.write_position(position) for position in positions[:990]], "8/8/8 w - - 0 1;;a1a2:1"
    assert P.load(save(tmp_path / "few", [*lines[:500], odd, *["?"] * 8, *lines[500:]])) == positions[:990]
    assert "few: left out 9 of 999 lines" in capsys.readouterr().err
    with pytest.raises(SystemExit, match=r"many, line 501: expected .*\(11 of 1001 lines"):
        P.load(save(tmp_path / "many", lines[:500] + ["?"] * 11 + lines[500:]))
