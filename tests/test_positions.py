import gzip
import random
import types

import chess
import chess.pgn
import pytest

import rewards
from examples import mates
from rook import positions as P
from rook.positions import Position
from rook.stockfish import MATE
from tools.chess_label import write_position
from tools.chess_texts import mirror

START = chess.STARTING_FEN
MATE_IN_ONE = "6k1/5ppp/8/8/8/8/5PPP/R5K1 w - - 0 1"
EN_PASSANT = "4k3/8/8/3pP3/8/8/8/4K3 w - d6 0 2"


@pytest.fixture(scope="module")
def positions():
    return P.load("builtin")[:1200]


def test_expanded_boards_have_a_character_for_each_square_and_contract_again(positions):
    for fen in (p.fen for p in positions):
        board, rest = P.expand_board(fen).split(" ", 1)
        squares = "".join(reversed(board.split("/")))
        pieces = map(chess.Board(fen).piece_at, chess.SQUARES)
        assert squares == "".join(piece.symbol() if piece else "." for piece in pieces)
        assert rest == fen.split(" ", 1)[1] and P.contract_board(f"{board} {rest}") == fen == P.contract_board(fen)


def test_mirror_is_python_chess_mirror_and_an_involution(positions):
    for position in positions:
        mirrored, board = mirror(position), chess.Board(position.fen)
        assert mirrored.fen == board.mirror().fen() and mirror(mirrored) == position
        legal = {move.uci() for move in chess.Board(mirrored.fen).legal_moves}
        assert {P.mirror_move(move.uci()) for move in board.legal_moves} == legal
        assert [cp for _, cp in mirrored.moves] == [cp for _, cp in position.moves]
    position = Position(EN_PASSANT, ("d7d5",), (("e5d6", 3),), "e5e6")
    assert mirror(position) == ("4k3/8/8/8/3Pp3/8/8/4K3 b - d3 0 2", ("d2d4",), (("e4d3", 3),), "e4e3")


def test_held_out_depends_on_the_board_alone_and_never_changes(positions):
    """Trained models rely on the choice."""
    board, squares = chess.Board("8/8/8/4k3/8/8/8/K7 w - - 0 1"), []
    for square in chess.SquareSet(~board.occupied):
        (rook := board.copy()).set_piece_at(square, chess.Piece.from_symbol("R"))
        squares += [chess.square_name(square)] * P.held_out(rook.fen())
    assert [s for s in squares if s[0] != "e" and s[1] != "5"] == ["h4", "d6", "g7", "h7"]
    shares = []
    for position in positions:
        held, four = P.held_out(position.fen), " ".join(position.fen.split()[:4])
        assert held == P.held_out(P.mirror_fen(position.fen)) == P.held_out(f"{four} 77 123")
        shares.append(held)
    assert 0.07 < sum(shares) / len(shares) < 0.11
    train, held = P.split(positions)
    assert len(train) + len(held) == len(positions) and held
    assert not {P.board_key(p.fen) for p in train} & {P.board_key(p.fen) for p in held}


def test_builtin():
    lines = gzip.decompress(P.BUILTIN.read_bytes()).decode().splitlines()
    builtin = P.load("builtin")
    assert builtin == list(map(P.read_position, lines))  # in this order, each of them: runs depend on it
    train, held = P.split(builtin)
    assert 18000 <= len(train) <= 22500 and 1600 <= len(held) <= 2600
    for position in builtin[::16]:
        board = chess.Board(position.fen)
        assert P.verify(position) == position and len(position.history) <= 10
        assert len(position.moves) == min(5, board.legal_moves.count())


def save(path, lines):
    text = "".join(f"{line}\n" for line in lines).encode()
    path.write_bytes(gzip.compress(text) if path.suffix == ".gz" else text)
    return path


@pytest.mark.parametrize("name", ["a.txt", "a.txt.gz"])
def test_own_format_round_trip(positions, tmp_path, name):
    positions = [*positions[::4], Position(EN_PASSANT, (), ()), Position(MATE_IN_ONE, ("h7h6",), (("a1a8", 99999),))]
    path = save(tmp_path / name, map(write_position, positions))
    assert P.load(path.rename(tmp_path / "renamed")) == positions  # the content decides, not the name
    expanded = [write_position(p._replace(fen=P.expand_board(p.fen))) for p in positions]
    assert P.load(save(path, expanded)) == positions


@pytest.mark.parametrize("verified", [0, 1])
def test_an_en_passant_square_that_no_pawn_can_use_is_removed(tmp_path, monkeypatch, verified):
    """One board must not be held out in one spelling and trained on in the other."""
    monkeypatch.setattr(P, "VERIFIED_LINES", verified)
    fen = "rnbqkbnr/pppppppp/8/8/4P3/8/PPPP1PPP/RNBQKBNR b KQkq {} 0 1"
    path = save(tmp_path / "a.txt", [fen.format("e3") + ";e2e4;", f"{EN_PASSANT};d7d5;"])
    assert [position.fen for position in P.load(path)] == [fen.format("-"), EN_PASSANT]


def test_a_board_is_loaded_once_and_each_move_that_is_asked_of_it(tmp_path):
    """Counters and colours make no other board; of copies the labelled one stays, at the place of the first."""
    after = "rnbqkbnr/pppppppp/8/8/8/N7/PPPPPPPP/R1BQKBNR b KQkq - {} 1"
    mirrored = "r1bqkbnr/pppppppp/n7/8/8/8/PPPPPPPP/RNBQKBNR w KQkq - 1 9"
    asked = [f"A: {START}+{move}+{move}+{START}+0.001+0+0" for move in ("e2e4", "d2d4", "e2e4")]
    lines = [after.format(1), START, f"{mirrored};;e2e4:20", after.format(7), f"{mirrored};;d2d4:10", *asked]
    expected = [(START, (), (), move) for move in (None, "e2e4", "d2d4")]
    assert P.load(save(tmp_path / "some", lines)) == [(mirrored, (), (("e2e4", 20),), None), *expected]
    (tmp_path / "games.pgn").write_text("1. e4 e5 2. Nf3 *\n\n1. e4 c5 2. Nf3 *\n\n" * 20)
    assert [len(p.history) for p in P.load(tmp_path / "games.pgn")] == [0, 1, 2, 2]


@pytest.mark.parametrize("write", [str, P.expand_board])
def test_rookworlds_lines(positions, tmp_path, write):
    """As the original generator writes them, from the description of the format; with what is wrong there."""
    rng, lines, expected = random.Random(7), [], []
    for p in positions[1:500]:
        moves = rng.sample(p.moves, len(p.moves))
        names, evals = " ".join(uci for uci, _ in moves), " ".join(str(cp / 100) for _, cp in moves)
        lines.append(f"P: {write(p.fen):90}M: {names:30}E: {evals:40}B: {p.moves[-1][0]}")  # the worst, as for Black
        move = P.environment_move(chess.Board(p.fen), rng, 1 / 4)
        history = " ".join((*p.history, move)[-10:])
        line = f"A: {write(p.fen)}+{move}+{history}+{START}+0.001+0+0"  # the wrong next state
        lines.append(rng.choice([line, line.removeprefix("A: ")]))
        expected += [(p.fen, (), sorted(p.moves), None), (p.fen, p.history[-9:], [], move)]
    loaded = P.load(save(tmp_path / "rook.txt", lines))
    assert [(p.fen, p.history, sorted(p.moves), p.asked) for p in loaded] == expected
    assert all([cp for _, cp in p.moves] == sorted((cp for _, cp in p.moves), reverse=True) for p in loaded)


def test_fen_and_epd_lists(tmp_path):
    epd, king = "1k1r4/pp1b1R2/3q2pp/4p3/2B5/4Q3/PPP2B2/2K5 b - -", "8/8/8/4k3/8/8/4P3/4K3 w - - 5 40"
    lines = ["\ufeff# a comment, and an empty line", "", P.expand_board(EN_PASSANT) + "  "]
    lines += [epd + ' bm Qd1+; id "BK.01; with a mark";', f"{START};;e2e4:20", f"{king} bm e4"]
    lines += [f"{(perft := '8/8/8/4k3/8/8/3P4/4K3 w - - 0 1')} ;D1 7 ;D2 49"]
    (tmp_path / "fens").write_text("\r\n".join(lines), encoding="utf-8")
    labels = [(), (), (("e2e4", 20),), (), ()]
    expected = [(fen, (), moves, None) for fen, moves in zip((EN_PASSANT, f"{epd} 0 1", START, king, perft), labels)]
    assert P.load(tmp_path / "fens") == expected


@pytest.mark.parametrize("name", ["games.pgn", "games.pgn.gz"])
def test_pgn(tmp_path, name):
    rng, texts, expected = random.Random(0), [], {}
    for _ in range(12):
        board = chess.Board()
        while not board.is_game_over() and board.ply() < 60:
            history = tuple(move.uci() for move in board.move_stack[-10:])
            expected.setdefault(P.board_key(board.fen()), Position(board.fen(), history, ()))
            board.push(rng.choice(list(board.legal_moves)))
        game = chess.pgn.Game.from_board(board)
        game.add_variation(chess.Move.from_uci("a2a3"), comment="a comment")  # ignored
        texts.append(str(game))
    assert P.load(save(tmp_path / name, texts)) == [*expected.values()]


BAD_GAMES = ["1. e4 e4 *", "1. e4 -- *", '[FEN "what"]\n\n1. e4 *', '[Variant "Atomic"]\n\n1. e4 *']


@pytest.mark.parametrize("bad", BAD_GAMES)
def test_bad_games_are_left_out_if_they_are_few(tmp_path, capsys, caplog, bad):
    good = '[Event "x"]\n\n1. e4 e5\n2. Nf3 *\n\n'
    (tmp_path / "few.pgn").write_text(good * 20 + bad + "\n\n" + good)
    assert len(P.load(tmp_path / "few.pgn")) == 3
    assert capsys.readouterr().err.startswith(f"{tmp_path}/few.pgn: left out 1 of 22 games") and not caplog.text
    (tmp_path / "many.pgn").write_text(good + "\n\n" + bad)
    with pytest.raises(SystemExit, match="many.pgn, game 2: expected .*1 of 2 games"):
        P.load(tmp_path / "many.pgn")


BAD_FILES = [
    (None, "expected a file of positions, but it cannot be read"),
    (gzip.compress(START.encode() * 999)[:-9], "expected a file of positions, but it cannot be read"),
    (b"# only a comment\n", "expected positions, found none"),
    (b"\n\nHello, world", "line 3: expected a FEN, an EPD, .* found 'Hello, world'"),
    (b"4k3/8/8/8/8/8/8/4K2r b - - 0 1", "line 1: expected a position that chess allows"),  # the king can be taken
    (f"{START};;e2e5:10", "line 1: illegal uci: 'e2e5'"),
    (f"{START};;e2e4:10 d2d4:15", "line 1: expected each move once, best first"),
    (f"P: {START}   M: e2e4 d2d4 E: 0.3 B: e2e4", "line 1: expected as many evaluations as moves"),
    (f"A: {START}+a1a1+a1a1+{START}+-1.0+0+1", "line 1: invalid uci"),
    (f"A: {START}+e2e4+d2d4+{START}+0.001+0+0", "line 1: expected .*recent moves and the move"),
]


@pytest.mark.parametrize("content, expected", BAD_FILES)
def test_a_bad_file_is_refused_in_one_sentence(tmp_path, content, expected):
    if content:
        (tmp_path / "bad").write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(SystemExit, match=expected) as error:
        P.load(tmp_path / "bad")
    message = str(error.value)
    assert message.startswith(f"error: {tmp_path}/bad") and "\n" not in message and len(message) < 420


def test_wrong_lines_that_were_not_verified_are_replaced_when_they_are_drawn(positions, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(P, "VERIFIED_LINES", 20)
    monkeypatch.setattr(P, "UNVERIFIED", {})
    lines = [write_position(position) for position in positions[:60]]
    wrong = [f"{START};;e2e5:10", "rnbqkbnr/8p/8/8/8/8/8/RNBQKBNR w KQkq - 0 1;;a1a2:5"]
    wrong += ["r3k2r/8/8/8/8/8/8/4K3 w qk - 0 1;;e1e2:5", "4k3/8/8/8/8/8/8/4K2R w K - 0 1;;e1h1:5"]
    path = save(tmp_path / "some", [*lines[:30], *wrong, *lines[30:]])
    items, config = P.load(path), types.SimpleNamespace(extra={"chess_format": "expanded"})
    assert len(items) == 64 and capsys.readouterr().err == ""
    drawn, again = (P.draw(items, 64, random.Random(1)) for _ in range(2))
    assert drawn == again and {*drawn} <= {*positions[:60]} and len({*drawn}) > 56
    said = capsys.readouterr().err.splitlines()  # once
    for number, reason in zip(range(31, 35), ("illegal uci: 'e2e5'", "expected 8 columns per row", "way", "way")):
        assert [line for line in said if line.startswith(f"{path}, line {number}, is left out: ") and reason in line]
    assert len(said) == 4
    sound = random.Random(1).sample(items, 64)
    assert [new for old, new in zip(sound, drawn) if old in positions] == [p for p in sound if p in positions]
    for task in rewards, mates:
        ask = [("ordinary", position) for position in items]
        for question in task.make_questions(ask, 64, random.Random(2), config):
            if question.kind != "mates":  # which has positions of its own
                assert P.contract_board(question.prompt[3:].split("M:")[0].split("+")[0].strip())[:20] in "".join(lines)
    with pytest.raises(SystemExit, match="error: too many lines are wrong, see above"):
        P.draw([position for position in items if position not in positions], 1, random.Random(0))


def test_no_line_that_was_not_verified_becomes_a_mate(tmp_path, monkeypatch):
    monkeypatch.setattr(P, "VERIFIED_LINES", 0)
    mate, wrong = "6k1/5ppp/8/8/8/8/5PPP/R5K1 w - - 0 1", "6k1/8p/8/8/8/8/5PPP/R5K1 w - - 0 1"
    lines = [f"{fen};;a1a8:{MATE - 1}" for fen in (wrong, mate)]
    mates.make(tmp_path / "mates.gz", [save(tmp_path / "some", lines)])
    assert P.read_text(tmp_path / "mates.gz") == f"{mate}\n"
    with pytest.raises(SystemExit, match="no labelled position has a best move that mates; label positions"):
        mates.make(tmp_path / "none.gz", [save(tmp_path / "some", [f"{mate};;a1a7:10"])])
    assert not (tmp_path / "none.gz").exists()


def test_a_move_is_mirrored_with_its_board():
    white, black = chess.STARTING_FEN, P.mirror_fen(chess.STARTING_FEN)
    asked = [(white, "e2e4"), (black, "e7e5"), (black, "e2e4"), (white, "e7e5"), (white, None), (black, None)]
    found = P.distinct(P.Position(fen, (), (), move) for fen, move in asked)
    assert [(position.fen, position.asked) for position in found] == [asked[0], asked[2], asked[4]]


def test_few_bad_lines_are_counted_and_many_refused(positions, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(P, "VERIFIED_LINES", 100)
    lines, odd = [write_position(position) for position in positions[:990]], "8/8/8 w - - 0 1;;a1a2:1"
    assert P.load(save(tmp_path / "few", [*lines[:500], odd, *["?"] * 8, *lines[500:]])) == positions[:990]
    assert "few: left out 9 of 999 lines" in capsys.readouterr().err
    with pytest.raises(SystemExit, match=r"many, line 501: expected .*\(700 of 1690 lines"):
        P.load(save(tmp_path / "many", lines[:500] + ["?"] * 700 + lines[500:]))
