"""nanorook/positions.py against python-chess: rules, mirror, PGN writer; and every format that is read."""

import collections
import gzip
import random
import time

import chess
import chess.pgn
import pytest

from nanorook import positions as P
from nanorook.positions import DataError, Position

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
    start = time.process_time()
    loaded = P.load("builtin")
    assert time.process_time() - start < 3
    return loaded


# -----------------------------------------------------------------------------
# Boards: dots, mirror, held out


def test_expanded_boards_have_a_character_for_each_square_and_contract_again(positions):
    for fen in (p.fen for p in positions):
        board, rest = P.expand_board(fen).split(" ", 1)
        squares = "".join(reversed(board.split("/")))
        pieces = map(chess.Board(fen).piece_at, chess.SQUARES)
        assert squares == "".join(piece.symbol() if piece else "." for piece in pieces)
        assert rest == fen.split(" ", 1)[1] and P.contract_board(f"{board} {rest}") == fen == P.contract_board(fen)
    assert P.contract_board("8/8 w - - .. 1") == "8/8 w - - .. 1"  # dots are empty squares on the board alone


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


# -----------------------------------------------------------------------------
# Moves to ask about


def kind_of_illegal(board, move):
    piece = board.piece_at(move.from_square)
    if piece is None:
        return "empty square"
    if piece.color != board.turn:
        return "opponent's piece"
    return "king in check" if board.is_pseudo_legal(move) else "impossible"


def test_moves_to_ask_about_are_of_every_kind(builtin):
    rng, kinds, count = random.Random(4), collections.Counter(), 4000
    sample = [(chess.Board(p.fen), p.moves[0][0]) for p in rng.sample(builtin, count)]
    start = time.process_time()
    moves = [P.environment_move(board, rng, 1 / 4, best) for board, best in sample]
    assert (time.process_time() - start) / count < 1e-3
    for (board, _), uci in zip(sample, moves):
        move = chess.Move.from_uci(uci)
        if not board.is_legal(move):
            kinds.update(["illegal", kind_of_illegal(board, move)])
            continue
        kinds["en passant"] += board.is_en_passant(move)
        kinds["O-O" if board.is_kingside_castling(move) else "O-O-O"] += board.is_castling(move)
        kinds["promotion"] += move.promotion == chess.QUEEN
        kinds["underpromotion"] += move.promotion in (chess.KNIGHT, chess.BISHOP, chess.ROOK)
        if end := P.game_end(board, move):
            kinds[end.name] += 1
    assert 0.22 < kinds["illegal"] / count < 0.28
    least = dict.fromkeys(("impossible", "opponent's piece", "empty square", "king in check"), 0.015 * count)
    least |= {"en passant": 5, "O-O": 40, "O-O-O": 10, "promotion": 8, "underpromotion": 15}
    least |= {"CHECKMATE": 20, "STALEMATE": 2, "INSUFFICIENT_MATERIAL": 1}
    for kind, number in least.items():
        assert kinds[kind] >= number, (kind, kinds)


def test_the_move_that_mates_is_asked_about_often():
    rng, board = random.Random(5), chess.Board(MATE_IN_ONE)
    assert 120 < sum(P.environment_move(board, rng, 1 / 4, "a1a8") == "a1a8" for _ in range(200)) < 190


def test_without_legal_moves_or_on_request_the_move_is_illegal(positions):
    rng, mated = random.Random(6), chess.Board("R5k1/5ppp/8/8/8/8/5PPP/6K1 b - - 1 1")
    for board in [mated, *(chess.Board(p.fen) for p in positions[:300])]:
        assert P.environment_move(board, rng, 1) not in {move.uci() for move in board.legal_moves}
    assert P.environment_move(mated, rng, 0)


# -----------------------------------------------------------------------------
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


@pytest.mark.parametrize("name", ["a.txt", "a.txt.gz", "renamed.gz"])
def test_own_format_round_trip(positions, tmp_path, name):
    positions = [*positions, Position(START, (), ()), Position(MATE_IN_ONE, ("h7h6",), (("a1a8", 99999),))]
    lines = [P.write_position(position) for position in positions]
    assert [P.read_position(line) for line in lines] == positions
    path = save(tmp_path / name, lines)
    if name == "renamed.gz":  # the content decides, not the name
        path = path.rename(tmp_path / "renamed.txt")
    assert P.load(path) == positions == P.load(str(path))
    expanded = [P.write_position(p._replace(fen=P.expand_board(p.fen))) for p in positions]
    assert P.load(save(path, expanded)) == positions


def test_an_en_passant_square_that_no_pawn_can_use_is_removed():
    """One board must not be held out in one spelling and trained on in the other."""
    fen = "rnbqkbnr/pppppppp/8/8/4P3/8/PPPP1PPP/RNBQKBNR b KQkq {} 0 1"
    assert P.read_position(fen.format("e3") + ";e2e4;").fen == fen.format("-")
    assert P.read_position(f"{EN_PASSANT};d7d5;").fen == EN_PASSANT


def test_long_files_in_own_format_are_verified_at_their_start(positions, tmp_path, monkeypatch):
    monkeypatch.setattr(P, "VERIFIED_LINES", 500)
    lines = [P.write_position(position) for position in positions[:1200]]
    illegal = f"{START};;e2e5:10"
    wrong_start, wrong_end, broken_end = lines.copy(), lines.copy(), lines.copy()
    wrong_start[100:160] = wrong_end[700:760] = [illegal] * 60
    broken_end[700:760] = [illegal[:-3]] * 60  # the format is checked in every line
    assert len(P.load(save(tmp_path / "a", wrong_end))) == 1200
    for broken, line in (wrong_start, 101), (broken_end, 701):
        with pytest.raises(DataError, match=f"b, line {line}: "):
            P.load(save(tmp_path / "b", broken))


@pytest.mark.parametrize("write", [str, P.expand_board])
def test_rookworld_policy_lines(positions, tmp_path, write):
    lines = [policy_line(p, p.moves[-1][0]).replace(p.fen, write(p.fen)) for p in positions]  # with a wrong B:
    for loaded, position in zip(P.load(save(tmp_path / "rook.txt", lines)), positions, strict=True):
        assert loaded.fen == position.fen and set(loaded.moves) == set(position.moves)
        assert [cp for _, cp in loaded.moves] == [cp for _, cp in position.moves]


def test_rookworld_policy_line_for_black_and_with_an_illegal_move(tmp_path):
    line, fen = "P: {}   M: h7h1 {} h7a7 E: -0.1 -999.98 2.5 B: {}", "7k/7r/8/8/8/8/6R1/K7 b - - 0 1"
    best_first = ("h7a7", 250), ("h7h1", -10), ("h7g7", -99998)
    assert P.load(save(tmp_path / "a", [line.format(fen, "h7g7", "h7g7")])) == [Position(fen, (), best_first)]
    with pytest.raises(DataError, match="illegal uci: 'h8g8'"):  # g8 is attacked
        P.load(save(tmp_path / "a", [line.format(fen, "h8g8", "h8g8")]))


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
    lines = [
        "\ufeff# a comment, and an empty line",
        "",
        START,
        P.expand_board(EN_PASSANT) + "  ",
        "rnbqkbnr/pppppppp/8/8/4P3/8/PPPP1PPP/RNBQKBNR b KQkq e3 0 1",  # no pawn can use e3
        '1k1r4/pp1b1R2/3q2pp/4p3/2B5/4Q3/PPP2B2/2K5 b - - bm Qd1+; id "BK.01; with a mark";',
        "8/8/8/4k3/8/8/4P3/4K3 w - -",
        "8/8/8/4k3/8/8/4P3/4K3 w - - 5 40 bm e4",
    ]
    (tmp_path / "fens").write_text("\r\n".join(lines), encoding="utf-8")
    assert P.load(tmp_path / "fens") == [
        (START, (), (), None),
        (EN_PASSANT, (), (), None),
        ("rnbqkbnr/pppppppp/8/8/4P3/8/PPPP1PPP/RNBQKBNR b KQkq - 0 1", (), (), None),
        ("1k1r4/pp1b1R2/3q2pp/4p3/2B5/4Q3/PPP2B2/2K5 b - - 0 1", (), (), None),
        ("8/8/8/4k3/8/8/4P3/4K3 w - - 0 1", (), (), None),
        ("8/8/8/4k3/8/8/4P3/4K3 w - - 5 40", (), (), None),
    ]


def test_formats_may_be_mixed_line_by_line(positions, tmp_path):
    first, second = positions[50:52]
    lines = [P.write_position(first), policy_line(second, second.moves[0][0]), first.fen]
    expected = [first, second._replace(history=()), first._replace(history=(), moves=())]
    assert P.load(save(tmp_path / "mixed", lines)) == expected


@pytest.mark.parametrize("name", ["games.pgn", "games.PGN.gz", "games.txt"])
def test_pgn(tmp_path, name):
    texts, expected = [], []
    for seed in range(12):
        *_, board = random_game(seed)
        game = chess.pgn.Game.from_board(board)
        game.add_variation(chess.Move.from_uci("a2a3"), comment="a comment")  # ignored
        texts.append(str(game))
        replay = chess.Board()
        for move in board.move_stack:
            expected.append(as_position(replay)._replace(asked=move.uci()))
            replay.push(move)
    from_fen = chess.pgn.Game()
    from_fen.setup(MATE_IN_ONE)
    from_fen.add_main_variation(chess.Move.from_uci("a1a8"))
    expected.append(Position(MATE_IN_ONE, (), (), "a1a8"))
    text = "\n\n".join([*texts, str(from_fen)]).encode()
    (tmp_path / name).write_bytes(gzip.compress(text) if name.endswith("gz") else text)
    assert P.load(tmp_path / name) == expected


BAD_GAMES = {
    "illegal move": "1. e4 e4 *",
    "null move": "1. e4 -- 2. d4 *",
    "Chess960": '[Variant "Chess960"]\n[FEN "bqnbrkrn/pppppppp/8/8/8/8/PPPPPPPP/BQNBRKRN w KQkq - 0 1"]\n\n1. e4 *',
    "no king": '[FEN "8/8/8/4k3/8/8/4P3/8 w - - 0 1"]\n\n1. e4 *',
    "no FEN": '[FEN "what"]\n\n1. e4 *',
    "huge number": "1. e4 $" + "9" * 5000 + " e5 *",
}


@pytest.mark.parametrize("name", BAD_GAMES)
def test_bad_games_are_left_out_if_they_are_few(tmp_path, capfd, name):
    good = '[Event "x"]\n\n1. e4 e5\n2. Nf3 *\n\n'
    (tmp_path / "few.pgn").write_text(good * 200 + BAD_GAMES[name] + "\n\n" + good)
    assert len(P.load(tmp_path / "few.pgn")) == 3 * 201
    out, err = capfd.readouterr()
    assert err.count("\n") == 1 and "1 of 202 games" in err and "line 1001: expected" in err
    (tmp_path / "many.pgn").write_text(good + "\n\n" + BAD_GAMES[name])
    with pytest.raises(DataError, match="many.pgn, line 8: expected .*1 of 2 games"):
        P.load(tmp_path / "many.pgn")
    assert capfd.readouterr() == ("", "")


def hub_dataset(tmp_path, monkeypatch, lines, column="text"):
    """A dataset in a cache of the hub's own client, which is offline in the tests."""
    pyarrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    repo = tmp_path / "datasets--jrahn--rookworld_7m"
    folder = repo / "snapshots" / ("0" * 40) / "data"
    folder.mkdir(parents=True)
    (repo / "refs").mkdir()
    (repo / "refs" / "main").write_text("0" * 40)
    parquet.write_table(pyarrow.table({column: lines}), folder / "train-00000-of-00003.parquet")


def test_hub_dataset(positions, tmp_path, monkeypatch, capsys):
    hub_dataset(tmp_path, monkeypatch, [policy_line(p, p.moves[0][0]) for p in positions[:300]] + ["?"] * 10)
    assert [p.fen for p in P.load("hub:jrahn/rookworld_7m")] == [p.fen for p in positions[:300]]
    assert "left out 10 of 310 lines" in capsys.readouterr().err
    monkeypatch.setattr(P, "HUB_LINES", 200)
    assert len(P.load("hub:jrahn/rookworld_7m")) == 200


def test_hub_without_network_or_text(tmp_path, monkeypatch):
    with pytest.raises(DataError, match="^hub:nobody/nothing: (the hub did not give|.*pyarrow)") as error:
        P.load("hub:nobody/nothing")
    assert "\n" not in str(error.value)
    hub_dataset(tmp_path, monkeypatch, ["?"], column="moves")
    with pytest.raises(DataError, match="text"):
        P.load("hub:jrahn/rookworld_7m")


# -----------------------------------------------------------------------------
# Bad files

NINES = "9" * 400  # would not fit into a float
BAD_FILES = [
    (b"", "found none"),
    (b"\n\n# only a comment\n", "found none"),
    (bytes(range(256)) * 20, "line 2: expected text in UTF-8, found the byte 0x80"),
    (b"\0\0\0\0", "line 1: expected a FEN"),
    (START.encode() + b"\n# caf\xe9\n", "line 2: expected text in UTF-8, found the byte 0xe9"),
    (gzip.compress(START.encode() * 999)[:-9], "damaged or cut short"),
    (b"\x1f\x8b\x08junk and more junk", "damaged or cut short"),
    ("Hello, world", "line 1: expected a FEN, an EPD, .* found 'Hello, world'"),
    ("8/8/8/8/8/8/8/8 w - - 0 1", "line 1: expected a position that chess allows"),
    ("4k3/8/8/8/8/8/8/4K2r b - - 0 1", "line 1: expected a position that chess allows"),  # the king can be taken
    ("4k3/8/8/8/8/8/4K3 w - - 0 1", "line 1: "),  # seven ranks
    ("\n\n4k3/8/8/8/8/8/8/4K3 x - - 0 1", "line 3: expected a FEN"),
    (f"{START};;e2e5:10", "line 1: illegal uci: 'e2e5'"),
    (f"{START};;e2e4:10 e2e4:5", "line 1: expected each move once"),
    (f"{START};;e2e4:10 d2d4:15", "line 1: expected each move once, best first"),
    (f"{START};;e2e4", "line 1: expected a FEN"),
    (f"{START};;e2e4:{NINES}", "line 1: expected a FEN"),
    (f"{START};e2e9;", "line 1: expected a FEN"),
    (f"P: {START}   M: e2e4 d2d4 E: 0.3 B: e2e4", "line 1: expected as many evaluations as moves"),
    (f"P: {START}   M: e2e4 E: nan B: e2e4", "line 1: expected a FEN"),
    (f"P: {START}   M: e2e4 E: {NINES} B: e2e4", "line 1: expected a FEN"),
    (f"A: {START}+e2e4+d2d4+{START}+0.001+0+0", "line 1: expected the recent moves to end with"),
    (f"{START}+e2e4+e2e4+{START}+0.001+0", "line 1: expected a FEN"),
    (f"{START}+e2e4++{START}+0.001+0+0", "line 1: expected a FEN"),
]


@pytest.mark.parametrize("content, expected", BAD_FILES)
def test_a_bad_file_is_refused_in_one_sentence(tmp_path, content, expected):
    (tmp_path / "bad").write_bytes(content if isinstance(content, bytes) else content.encode() + b"\n")
    with pytest.raises(DataError, match=expected) as error:
        P.load(tmp_path / "bad")
    message = str(error.value)
    assert message.startswith(str(tmp_path / "bad")) and message.endswith(".")
    assert "\n" not in message and len(message) < 420


def test_missing_files_and_folders(tmp_path):
    for path in tmp_path / "missing.txt", tmp_path:
        with pytest.raises(DataError, match=f"^{path}: expected a file of positions, .*\\.$"):
            P.load(path)


@pytest.mark.parametrize("line", [START, f"{START};;e2e4", f"P: {START}", ""])
def test_read_position_refuses_other_lines(line):
    with pytest.raises(ValueError, match="expected 'FEN;recent moves"):
        P.read_position(line)


def test_few_bad_lines_are_counted_and_many_refused(positions, tmp_path, capsys):
    lines = [P.write_position(position) for position in positions[:990]]
    assert P.load(save(tmp_path / "none", lines)) == positions[:990] and capsys.readouterr().err == ""
    assert P.load(save(tmp_path / "few", lines[:500] + ["?"] * 9 + lines[500:])) == positions[:990]
    err = capsys.readouterr().err
    assert err.count("\n") == 1 and "few: left out 9 of 999 lines" in err and "line 501: expected" in err
    with pytest.raises(DataError, match=r"many, line 501: expected .*\(11 of 1001 lines"):
        P.load(save(tmp_path / "many", lines[:500] + ["?"] * 11 + lines[500:]))
