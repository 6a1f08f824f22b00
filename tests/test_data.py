"""data.py against python-chess: the rules, its own mirror, its PGN writer; and every format that can be read."""

import collections
import gzip
import random
import time

import chess
import chess.pgn
import pytest

import data
import tasks

START = chess.STARTING_FEN
MATE_IN_ONE = "6k1/5ppp/8/8/8/8/5PPP/R5K1 w - - 0 1"
EN_PASSANT = "4k3/8/8/3pP3/8/8/8/4K3 w - d6 0 2"
CASTLING = "r3k2r/8/8/8/8/8/8/R3K2R w KQkq - 0 1"


def random_game(seed):
    """Boards of a random game, python-chess's own."""
    rng, board = random.Random(seed), chess.Board()
    while not board.is_game_over() and board.ply() < 120:
        yield board
        moves = list(board.legal_moves)
        forced = [m for m in moves if board.is_en_passant(m) or board.is_castling(m) or m.promotion]
        board.push(rng.choice(forced or moves))


def as_position(board, moves=()):
    return tasks.Position(board.fen(), tuple(m.uci() for m in board.move_stack[-10:]), moves)


@pytest.fixture(scope="module")
def positions():
    """Positions of random games, each with five legal moves and made-up evaluations."""
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
    loaded = data.load("builtin")
    return loaded, time.process_time() - start


# ---------------------------------------------------------------------------------------------------------------------
# The text


def test_texts_are_written_as_documented():
    fen, moves = "7k/8/8/8/8/8/R7/K7 w - - 0 1", (("a2h2", 512), ("a2a3", -30), ("a1b1", 99998))
    pad = " " * (90 - len(fen))
    assert tasks.policy_prompt(fen, "rookworld") == f"P: {fen}"
    assert tasks.policy_completion(fen, moves, "rookworld") == (
        f"{pad}M: {'a2h2 a2a3 a1b1':30}E: {'5.12 -0.3 999.98':40}B: a1b1"
    )
    expanded = ".......k/......../......../......../......../......../R......./K....... w - - 0 1"
    assert tasks.policy_prompt(fen, "expanded") == f"P: {expanded}".ljust(94)
    assert tasks.policy_completion(fen, moves, "expanded") == "M: a2h2 a2a3 a1b1 E: 5.12 -0.3 999.98 B: a1b1"
    assert tasks.environment_prompt(fen, "a2h2", ("a8b8", "a2h2"), "rookworld") == f"A: {fen}+a2h2+a8b8 a2h2+"
    assert tasks.environment_prompt(fen, "a2h2", ("a2h2",), "expanded") == f"A: {expanded}+a2h2+a2h2+".ljust(160)
    assert tasks.environment_completion(fen, 0.001, False, True, "rookworld") == f"{fen}+0.001+0+1"
    assert tasks.environment_completion(fen, 1.0, True, False, "expanded") == f"{expanded}+1.0+1+0"


def test_expanded_boards_have_a_character_for_each_square_and_contract_again(positions):
    for fen in (p.fen for p in positions):
        expanded = tasks.expand(fen)
        board, rest = expanded.split(" ", 1)
        squares = "".join(reversed(board.split("/"))).replace("/", "")
        pieces = map(chess.Board(fen).piece_at, chess.SQUARES)
        assert squares == "".join(piece.symbol() if piece else "." for piece in pieces)
        assert rest == fen.split(" ", 1)[1] and tasks.contract(expanded) == fen == tasks.contract(fen)


def test_the_longest_prompts_fit_their_width():
    fen = "1n1qkbnr/p1p1p1p1/1p1p1p1p/r7/7R/1P1P1P1P/P1P1P1P1/RNBQK1N1 w KQkq e3 149 249"
    history = ("a7a8q",) * 10
    assert len(tasks.policy_prompt(fen, "expanded")) == tasks.WIDTH["P: "]
    assert len(tasks.environment_prompt(fen, "a7a8q", ("a2a4",) * 9 + ("a7a8q",), "expanded")) == tasks.WIDTH["A: "]
    assert len(tasks.environment_prompt(fen, "a7a8q", history, "rookworld").split("+")[2].split()) == 10


# ---------------------------------------------------------------------------------------------------------------------
# The environment


@pytest.mark.parametrize(
    "fen, move, expected",
    [
        (START, "e2e4", ("rnbqkbnr/pppppppp/8/8/4P3/8/PPPP1PPP/RNBQKBNR b KQkq - 0 1", 0.001, False, False)),
        ("8/P6k/8/8/8/8/8/K7 w - - 3 9", "a7a8n", ("N7/7k/8/8/8/8/8/K7 b - - 0 9", 0.5, True, False)),  # bare material
        ("8/P6k/8/8/8/8/8/K7 w - - 3 9", "a7a8q", ("Q7/7k/8/8/8/8/8/K7 b - - 0 9", 0.001, False, False)),
        (CASTLING, "e1g1", ("r3k2r/8/8/8/8/8/8/R4RK1 b kq - 1 1", 0.001, False, False)),
        (CASTLING, "e1c1", ("r3k2r/8/8/8/8/8/8/2KR3R b kq - 1 1", 0.001, False, False)),
        (CASTLING.replace("w", "b"), "e8g8", ("r4rk1/8/8/8/8/8/8/R3K2R w KQ - 1 2", 0.001, False, False)),
        (CASTLING.replace("w", "b"), "e8c8", ("2kr3r/8/8/8/8/8/8/R3K2R w KQ - 1 2", 0.001, False, False)),
        (EN_PASSANT, "e5d6", ("4k3/8/3P4/8/8/8/8/4K3 b - - 0 2", 0.001, False, False)),
        ("4k3/3p4/8/4P3/8/8/8/4K3 b - - 0 1", "d7d5", (EN_PASSANT, 0.001, False, False)),
        (MATE_IN_ONE, "a1a8", ("R5k1/5ppp/8/8/8/8/5PPP/6K1 b - - 1 1", 1.0, True, False)),
        (
            "rnbqkbnr/pppp1ppp/8/4p3/6P1/5P2/PPPPP2P/RNBQKBNR b KQkq - 0 2",
            "d8h4",
            ("rnb1kbnr/pppp1ppp/8/4p3/6Pq/5P2/PPPPP2P/RNBQKBNR w KQkq - 1 3", 1.0, True, False),
        ),
        ("7k/8/8/6Q1/8/8/8/K7 w - - 0 1", "g5g6", ("7k/8/6Q1/8/8/8/8/K7 b - - 1 1", 0.5, True, False)),  # stalemate
        ("8/8/8/4k3/8/8/3p4/3K4 w - - 0 1", "d1d2", ("8/8/8/4k3/8/8/3K4/8 b - - 0 1", 0.5, True, False)),
        ("8/8/4k3/8/8/8/R7/K7 w - - 149 99", "a2b2", ("8/8/4k3/8/8/8/1R6/K7 b - - 150 99", 0.5, True, False)),
        ("8/8/4k3/8/8/8/R7/K7 w - - 148 99", "a2b2", ("8/8/4k3/8/8/8/1R6/K7 b - - 149 99", 0.001, False, False)),
        ("8/8/4k3/8/8/p7/R7/K7 w - - 149 99", "a2a3", ("8/8/4k3/8/8/R7/8/K7 b - - 0 99", 0.001, False, False)),
        (MATE_IN_ONE.replace("0 1", "149 99"), "a1a8", ("R5k1/5ppp/8/8/8/8/5PPP/6K1 b - - 150 99", 1.0, True, False)),
    ],
)
def test_transition_by_hand(fen, move, expected):
    assert tasks.transition(fen, move) == expected


@pytest.mark.parametrize(
    "fen, move",
    [
        (START, "e2e5"),  # own piece, impossible place
        (START, "a1a3"),  # through its own pawn
        (START, "e7e5"),  # the opponent's piece
        (START, "e4e5"),  # an empty square
        ("4k3/4r3/8/8/8/8/4B3/4K3 w - - 0 1", "e2d3"),  # pinned
        ("4k3/3r4/8/8/8/8/8/4K3 w - - 0 1", "e1d1"),  # into check
        ("4k3/8/8/8/4r3/8/P7/4K3 w - - 0 1", "a2a3"),  # stays in check
        ("4kr2/8/8/8/8/8/8/4K2R w K - 0 1", "e1g1"),  # castles through check
        ("8/P6k/8/8/8/8/8/K7 w - - 0 1", "a7a8"),  # promotes to nothing
        (START, "e2e4q"),
        (START, "e2e2"),
        (START, "e2"),
        (START, "0000"),
        (START, ""),
        (START, "e2x9"),
    ],
)
def test_an_illegal_move_leaves_the_position(fen, move):
    assert tasks.transition(fen, move) == (fen, -1.0, False, True)


def test_transition_equals_python_chess_for_every_move_of_random_boards(positions):
    rng = random.Random(2)
    for position in rng.sample(positions, 300):
        board = chess.Board(position.fen)
        board.halfmove_clock = rng.choice([board.halfmove_clock, 149]) if not board.ep_square else 0
        for move in rng.sample(list(board.pseudo_legal_moves), 5) if board.legal_moves.count() >= 5 else ():
            after = board.copy(stack=False)
            after.push(move)
            if not after.is_valid():  # the mover's king could be taken
                assert tasks.transition(board.fen(), move.uci()) == (board.fen(), -1.0, False, True)
                continue
            draw = after.is_stalemate() or after.is_insufficient_material() or after.is_seventyfive_moves()
            reward = 1.0 if after.is_checkmate() else 0.5 if draw else 0.001
            expected = (after.fen(), reward, after.is_game_over(), False)
            assert tasks.transition(board.fen(), move.uci()) == expected


def test_environment_samples_hold_the_truth_and_show_ten_moves(positions):
    rng = random.Random(3)
    for position in rng.sample(positions, 300):
        sample = tasks.environment_sample(position, rng, "expanded")
        fen, move, history, rest = sample.prompt.removeprefix("A: ").split("+")
        fen = tasks.contract(fen)
        assert rest.strip() == "" and history.split() == [*position.history, move][-10:]
        assert tasks.board_key(fen) == tasks.board_key(position.fen)  # only the counters may be others
        assert sample.labels == tasks.transition(fen, move)
    asked = tasks.Position(MATE_IN_ONE, ("h7h6",), (), "a1a8")
    labels = ("R5k1/5ppp/8/8/8/8/5PPP/6K1 b - - 1 1", 1.0, True, False)
    assert tasks.environment_sample(asked, rng, "rookworld") == (f"A: {MATE_IN_ONE}+a1a8+h7h6 a1a8+", labels)


def kind_of_illegal(board, move):
    piece = board.piece_at(move.from_square)
    if piece is None:
        return "empty square"
    if piece.color != board.turn:
        return "opponent's piece"
    return "king in check" if board.is_pseudo_legal(move) else "impossible"


def test_environment_prompts_have_every_kind(builtin):
    rng, kinds, count = random.Random(4), collections.Counter(), 4000
    start = time.process_time()
    samples = [tasks.environment_sample(p, rng, "rookworld") for p in rng.sample(builtin[0], count)]
    assert (time.process_time() - start) / count < 1e-3
    for sample in samples:
        fen, uci, *_ = sample.prompt.removeprefix("A: ").split("+")
        board, move = chess.Board(fen), chess.Move.from_uci(uci)
        if sample.labels[3]:
            kinds.update(["illegal", kind_of_illegal(board, move)])
            continue
        kinds["en passant"] += board.is_en_passant(move)
        kinds["O-O" if board.is_kingside_castling(move) else "O-O-O"] += board.is_castling(move)
        kinds["promotion"] += move.promotion == chess.QUEEN
        kinds["underpromotion"] += move.promotion in (chess.KNIGHT, chess.BISHOP, chess.ROOK)
        kinds["high clock, no draw"] += board.halfmove_clock >= 100 and not sample.labels[2]
        if sample.labels[2]:
            board.push(move)
            kinds[board.outcome().termination.name] += 1
    assert 0.22 < kinds["illegal"] / count < 0.28
    for kind in ("impossible", "opponent's piece", "empty square", "king in check"):
        assert kinds[kind] > 0.015 * count, kind
    expected = {"en passant": 5, "O-O": 40, "O-O-O": 10, "promotion": 8, "underpromotion": 15, "CHECKMATE": 20}
    expected |= {"STALEMATE": 2, "SEVENTYFIVE_MOVES": 25, "INSUFFICIENT_MATERIAL": 1, "high clock, no draw": 25}
    for kind, least in expected.items():
        assert kinds[kind] >= least, (kind, kinds)


def test_the_move_that_mates_is_asked_often():
    rng, position = random.Random(5), tasks.Position(MATE_IN_ONE, (), (("a1a8", 99999), ("a1b1", 500)))
    mates = sum(tasks.environment_sample(position, rng, "rookworld").labels[1] == 1.0 for _ in range(200))
    assert 120 < mates < 190


# ---------------------------------------------------------------------------------------------------------------------
# Mirrored and held-out boards


def test_mirror_is_python_chess_mirror_and_an_involution(positions):
    for position in positions:
        mirrored, board = tasks.mirror(position), chess.Board(position.fen)
        assert mirrored.fen == board.mirror().fen() and tasks.mirror(mirrored) == position
        legal = {move.uci() for move in chess.Board(mirrored.fen).legal_moves}
        assert {tasks.mirror_move(move.uci()) for move in board.legal_moves} == legal
        assert [cp for _, cp in mirrored.moves] == [cp for _, cp in position.moves]
    asked = tasks.Position(EN_PASSANT, ("d7d5",), (("e5d6", 3),), "e5e6")
    assert tasks.mirror(asked) == ("4k3/8/8/8/3Pp3/8/8/4K3 b - d3 0 2", ("d2d4",), (("e4d3", 3),), "e4e3")


def test_a_mirrored_game_has_the_same_transitions(positions):
    for position in positions[::20]:
        move = position.moves[0][0]
        fen, *rest = tasks.transition(position.fen, move)
        mirrored, *mirrored_rest = tasks.transition(tasks.mirror_fen(position.fen), tasks.mirror_move(move))
        pieces = [" ".join(f.split()[:5]) for f in (mirrored, tasks.mirror_fen(fen))]  # the move number counts by Black
        assert pieces[0] == pieces[1] and rest == mirrored_rest


def test_held_out_goes_by_the_board_alone(positions):
    shares = []
    for position in positions:
        held, four = tasks.held_out(position.fen), " ".join(position.fen.split()[:4])
        assert held == tasks.held_out(tasks.mirror_fen(position.fen)) == tasks.held_out(f"{four} 77 123")
        shares.append(held)
    assert 0.07 < sum(shares) / len(shares) < 0.11
    # Trained models rely on this choice: it may never change.
    board, squares = chess.Board("8/8/8/4k3/8/8/8/K7 w - - 0 1"), []
    for square in chess.SquareSet(~board.occupied):
        rook = board.copy()
        rook.set_piece_at(square, chess.Piece.from_symbol("R"))
        squares += [chess.square_name(square)] * tasks.held_out(rook.fen())
    assert [s for s in squares if s[0] != "e" and s[1] != "5"] == ["h4", "d6", "g7", "h7"]
    train, held = data.split(positions)
    assert len(train) + len(held) == len(positions) and held
    assert not {tasks.board_key(p.fen) for p in train} & {tasks.board_key(p.fen) for p in held}


def test_no_training_sample_shows_or_reaches_a_held_out_board(positions):
    rng, reached = random.Random(6), 0
    train, held = data.split(positions)
    asks = [p._replace(ask=uci) for p in train for uci, _ in p.moves if tasks.held_out(tasks.transition(p.fen, uci)[0])]
    assert len(asks) > 100  # without the rule these would get through
    for position in train[:500] + asks[:200]:
        sample = tasks.environment_sample(position, rng, "rookworld")
        assert not tasks.held_out(sample.prompt[3:].split("+")[0]) and not tasks.held_out(sample.labels[0])
    for position in held[:100]:
        sample = tasks.environment_sample(position, rng, "rookworld")
        assert tasks.held_out(sample.prompt[3:].split("+")[0])
        reached += not tasks.held_out(sample.labels[0])
    assert reached > 50


# ---------------------------------------------------------------------------------------------------------------------
# Formats


def rookworld_line(position, best):
    """As the original generator writes it, from the description of the format."""
    moves = random.Random(position.fen).sample(position.moves, len(position.moves))
    names, evals = " ".join(uci for uci, _ in moves), " ".join(str(cp / 100) for _, cp in moves)
    return f"P: {position.fen:90}M: {names:30}E: {evals:40}B: {best}"


def save(path, lines):
    text = "".join(f"{line}\n" for line in lines)
    if path.suffix == ".gz":
        path.write_bytes(gzip.compress(text.encode()))
    else:
        path.write_text(text)
    return path


def test_builtin(builtin):
    positions, seconds = builtin
    train, held = data.split(positions)
    assert 18000 <= len(train) <= 22500 and 1600 <= len(held) <= 2600
    assert data.BUILTIN.stat().st_size <= 2_000_000 and seconds < 3
    for position in positions[::4]:
        board = chess.Board(position.fen)
        assert board.is_valid() and board.fen() == position.fen and len(position.history) <= 10
        assert all(board.is_legal(chess.Move.from_uci(uci)) for uci, _ in position.moves)
        assert len(position.moves) == min(5, board.legal_moves.count())
        assert [cp for _, cp in position.moves] == sorted((cp for _, cp in position.moves), reverse=True)


@pytest.mark.parametrize("name", ["a.txt", "a.txt.gz", "misnamed.gz"])
def test_own_format_round_trip(positions, tmp_path, name):
    positions = [*positions, tasks.Position(START, (), ()), tasks.Position(MATE_IN_ONE, ("h7h6",), (("a1a8", 99999),))]
    lines = [data.write_position(position) for position in positions]
    assert [data.read_position(line) for line in lines] == positions
    path = save(tmp_path / name.replace("misnamed.gz", "b.gz"), lines)
    if name == "misnamed.gz":  # the content decides, not the name
        path = path.rename(tmp_path / "b.txt")
    assert data.load(path) == positions and data.load(str(path)) == positions


def test_own_format_with_expanded_boards(positions, tmp_path):
    lines = [data.write_position(p._replace(fen=tasks.expand(p.fen))) for p in positions[:200]]
    assert data.load(save(tmp_path / "a", lines)) == positions[:200]


def test_long_files_in_own_format_are_proven_at_their_start(positions, tmp_path, monkeypatch):
    monkeypatch.setattr(data, "PROVEN", 500)
    lines = [data.write_position(position) for position in positions[:1200]]
    illegal = f"{START};;e2e5:10"
    wrong_start, wrong_end, broken_end = lines.copy(), lines.copy(), lines.copy()
    wrong_start[100:160] = wrong_end[700:760] = [illegal] * 60
    broken_end[700:760] = [illegal[:-3]] * 60  # the shape is looked at everywhere
    assert len(data.load(save(tmp_path / "a", wrong_end))) == 1200
    for broken, line in (wrong_start, 101), (broken_end, 701):
        with pytest.raises(data.DataError, match=f"b, line {line}: "):
            data.load(save(tmp_path / "b", broken))


def test_rookworld_policy_lines(positions, tmp_path):
    for write in str, tasks.expand:
        lines = [rookworld_line(p, p.moves[-1][0]).replace(p.fen, write(p.fen)) for p in positions]  # a wrong B:
        loaded = data.load(save(tmp_path / "rook.txt", lines))
        assert [p.fen for p in loaded] == [p.fen for p in positions]
        assert [[cp for _, cp in p.moves] for p in loaded] == [[cp for _, cp in p.moves] for p in positions]
        assert [set(p.moves) for p in loaded] == [set(p.moves) for p in positions]
    black = "P: 7k/7r/8/8/8/8/6R1/K7 b - - 0 1   M: h7h1 h8g8 h7a7 E: -0.1 -999.98 2.5 B: h8g8"
    position = tasks.Position("7k/7r/8/8/8/8/6R1/K7 b - - 0 1", (), (("h7a7", 250), ("h7h1", -10), ("h8g8", -99998)))
    with pytest.raises(data.DataError, match="illegal uci: 'h8g8'"):  # g8 is attacked
        data.load(save(tmp_path / "one.txt", [black]))
    black, label = black.replace("h8g8", "h7g7"), ("h7g7", -99998)
    assert data.load(save(tmp_path / "one.txt", [black])) == [position._replace(moves=(*position.moves[:2], label))]


def test_our_own_completions_read_back(positions, tmp_path):
    for chess_format in "rookworld", "expanded":
        texts = [
            tasks.policy_prompt(p.fen, chess_format) + tasks.policy_completion(p.fen, p.moves, chess_format)
            for p in positions[:300]
        ]
        loaded = data.load(save(tmp_path / chess_format, texts))
        assert loaded == [p._replace(history=()) for p in positions[:300]]


def test_rookworld_environment_lines(positions, tmp_path):
    rng, lines, expected = random.Random(7), [], []
    for position in positions[:500]:
        sample = tasks.environment_sample(position, rng, "rookworld")
        fen, move, history, _ = sample.prompt.removeprefix("A: ").split("+")
        wrong = (START, 0.001, False, False)  # the file's answer is not believed
        line = sample.prompt + tasks.environment_completion(*wrong, "rookworld")
        lines.append(rng.choice([line, line.removeprefix("A: ")]))
        expected.append(tasks.Position(fen, tuple(history.split()[:-1]), (), move))
    loaded = data.load(save(tmp_path / "arbiter.txt", lines))
    assert loaded == expected
    sample = tasks.environment_sample(loaded[0], rng, "rookworld")
    assert sample.labels == tasks.transition(loaded[0].fen, loaded[0].ask)


def test_fen_and_epd_lists(tmp_path):
    lines = [
        "\ufeff# a comment, and an empty line",
        "",
        START,
        tasks.expand(EN_PASSANT) + "  ",
        "rnbqkbnr/pppppppp/8/8/4P3/8/PPPP1PPP/RNBQKBNR b KQkq e3 0 1",  # nobody can take on e3
        '1k1r4/pp1b1R2/3q2pp/4p3/2B5/4Q3/PPP2B2/2K5 b - - bm Qd1+; id "BK.01; with a mark";',
        "8/8/8/4k3/8/8/4P3/4K3 w - -",
        "8/8/8/4k3/8/8/4P3/4K3 w - - 5 40 bm e4",
    ]
    (tmp_path / "fens").write_text("\r\n".join(lines), encoding="utf-8")
    assert data.load(tmp_path / "fens") == [
        (START, (), (), None),
        (EN_PASSANT, (), (), None),
        ("rnbqkbnr/pppppppp/8/8/4P3/8/PPPP1PPP/RNBQKBNR b KQkq - 0 1", (), (), None),
        ("1k1r4/pp1b1R2/3q2pp/4p3/2B5/4Q3/PPP2B2/2K5 b - - 0 1", (), (), None),
        ("8/8/8/4k3/8/8/4P3/4K3 w - - 0 1", (), (), None),
        ("8/8/8/4k3/8/8/4P3/4K3 w - - 5 40", (), (), None),
    ]


def test_formats_may_be_mixed_line_by_line(positions, tmp_path):
    first, second = positions[50:52]
    lines = [data.write_position(first), rookworld_line(second, second.moves[0][0]), first.fen]
    loaded = data.load(save(tmp_path / "mixed", lines))
    assert loaded == [first, second._replace(history=()), first._replace(history=(), moves=())]


@pytest.mark.parametrize("name", ["games.pgn", "games.PGN.gz", "games.txt"])
def test_pgn(tmp_path, name):
    texts, expected = [], []
    for seed in range(12):
        *_, board = random_game(seed)
        board = board.copy()
        game = chess.pgn.Game.from_board(board)
        variation = game.add_variation(chess.Move.from_uci("a2a3"))  # ignored
        variation.comment = "a comment"
        texts.append(str(game))
        replay = chess.Board()
        for move in board.move_stack:
            expected.append(as_position(replay)._replace(ask=move.uci()))
            replay.push(move)
    from_fen = chess.pgn.Game()
    from_fen.setup(MATE_IN_ONE)
    from_fen.add_main_variation(chess.Move.from_uci("a1a8"))
    expected.append(tasks.Position(MATE_IN_ONE, (), (), "a1a8"))
    text = "\n\n".join([*texts, str(from_fen)]).encode()
    (tmp_path / name).write_bytes(gzip.compress(text) if name.endswith("gz") else text)
    assert data.load(tmp_path / name) == expected


CHESS960 = '[Variant "Chess960"]\n[FEN "bqnbrkrn/pppppppp/8/8/8/8/PPPPPPPP/BQNBRKRN w KQkq - 0 1"]\n\n1. e4 *'
NO_KING = '[FEN "8/8/8/4k3/8/8/4P3/8 w - - 0 1"]\n\n1. e4 *'


@pytest.mark.parametrize("bad", ["1. e4 e4 *", "1. e4 -- 2. d4 *", CHESS960, NO_KING, '[FEN "what"]\n\n1. e4 *'])
def test_pgn_games_with_errors(tmp_path, capfd, bad):
    good = '[Event "x"]\n\n1. e4 e5\n2. Nf3 *\n\n'
    (tmp_path / "few.pgn").write_text(good * 200 + bad + "\n\n" + good)
    assert len(data.load(tmp_path / "few.pgn")) == 3 * 201
    out, err = capfd.readouterr()
    assert err.count("\n") == 1 and "1 of 202 games" in err and "line 1001: expected" in err
    (tmp_path / "many.pgn").write_text(good + "\n\n" + bad)
    with pytest.raises(data.DataError, match="many.pgn, line 8: expected .*1 of 2 games"):
        data.load(tmp_path / "many.pgn")
    assert capfd.readouterr() == ("", "")


def hub_dataset(tmp_path, monkeypatch, lines, column="text"):
    """A dataset in a cache of the hub's own client, which is offline in the tests."""
    import pyarrow
    from huggingface_hub import constants
    from pyarrow import parquet

    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    repo = tmp_path / "datasets--jrahn--rookworld_7m"
    folder = repo / "snapshots" / ("0" * 40) / "data"
    folder.mkdir(parents=True)
    (repo / "refs").mkdir()
    (repo / "refs" / "main").write_text("0" * 40)
    parquet.write_table(pyarrow.table({column: lines}), folder / "train-00000-of-00003.parquet")


def test_hub_dataset(positions, tmp_path, monkeypatch, capsys):
    hub_dataset(tmp_path, monkeypatch, [rookworld_line(p, p.moves[0][0]) for p in positions[:300]] + ["?"] * 10)
    assert [p.fen for p in data.load("hub:jrahn/rookworld_7m")] == [p.fen for p in positions[:300]]
    assert "left out 10 of 310 lines" in capsys.readouterr().err
    monkeypatch.setattr(data, "HUB_LINES", 200)
    assert len(data.load("hub:jrahn/rookworld_7m")) == 200


def test_hub_without_network_or_text(tmp_path, monkeypatch):
    with pytest.raises(data.DataError) as error:
        data.load("hub:nobody/nothing-of-this-name")
    assert str(error.value).startswith("hub:nobody/nothing-of-this-name: the hub did not give") and one_sentence(error)
    hub_dataset(tmp_path, monkeypatch, ["?"], column="moves")
    with pytest.raises(data.DataError, match="text"):
        data.load("hub:jrahn/rookworld_7m")


# ---------------------------------------------------------------------------------------------------------------------
# Bad input


def one_sentence(error):
    message = str(error.value)
    return "\n" not in message and message.endswith((".", ").")) and len(message) < 420


@pytest.mark.parametrize(
    "content, expected",
    [
        (b"", "found none"),
        (b"\n\n# only a comment\n", "found none"),
        (bytes(range(256)) * 20, "line 2: expected text in UTF-8, found the byte 0x80"),
        (b"\0\0\0\0", "line 1: expected a FEN"),
        (START.encode() + b"\n# caf\xe9\n", "line 2: expected text in UTF-8, found the byte 0xe9"),
        (gzip.compress(START.encode() * 999)[:-9], "damaged or cut short"),
        (b"\x1f\x8b\x08junk and more junk", "damaged or cut short"),
        (b"Hello, world\n", "line 1: expected a FEN, an EPD, .* found 'Hello, world'"),
        (b"8/8/8/8/8/8/8/8 w - - 0 1\n", "line 1: expected a position that chess allows"),
        (b"4k3/8/8/8/8/8/8/4K2r b - - 0 1\n", "line 1: expected a position that chess allows"),  # the king can be taken
        (b"P3k3/8/8/8/8/8/8/4K3 w - - 0 1\n", "line 1: expected a position that chess allows"),
        (b"4k3/8/8/8/8/8/8/4K3 w KQ - 0 1\n", "line 1: expected a position that chess allows"),
        (b"4k3/8/8/8/8/8/4K3 w - - 0 1\n", "line 1: "),  # seven ranks
        (b"4k4/8/8/8/8/8/8/4K3 w - - 0 1\n", "line 1: "),
        (b"\n\n4k3/8/8/8/8/8/8/4K3 x - - 0 1\n", "line 3: expected a FEN"),
        (f"{START};;e2e5:10\n".encode(), "line 1: illegal uci: 'e2e5'"),
        (f"{START};;e2e4:10 e2e4:5\n".encode(), "line 1: expected each move once, best first"),
        (f"{START};;e2e4:10 d2d4:15\n".encode(), "line 1: expected each move once, best first"),
        (f"{START};;e2e4\n".encode(), "line 1: expected a FEN"),
        (f"{START};e2e9;\n".encode(), "line 1: expected a FEN"),
        (f"P: {START}   M: e2e4 d2d4 E: 0.3 B: e2e4\n".encode(), "line 1: expected as many evaluations as moves"),
        (f"P: {START}   M: e2e4 E: nan B: e2e4\n".encode(), "line 1: expected a FEN"),
        (f"A: {START}+e2e4+d2d4+{START}+0.001+0+0\n".encode(), "line 1: expected the recent moves to end with"),
        (f"{START}+e2e4+e2e4+{START}+0.001+0\n".encode(), "line 1: expected a FEN"),
        (f"{START}+e2e4++{START}+0.001+0+0\n".encode(), "line 1: expected a FEN"),
    ],
)
def test_one_clear_sentence_for_bad_files(tmp_path, content, expected):
    (tmp_path / "bad").write_bytes(content)
    with pytest.raises(data.DataError, match=expected) as error:
        data.load(tmp_path / "bad")
    assert str(error.value).startswith(str(tmp_path / "bad")) and one_sentence(error)


def test_missing_files_and_folders(tmp_path):
    for path in tmp_path / "missing.txt", tmp_path:
        with pytest.raises(data.DataError, match=f"^{path}: ") as error:
            data.load(path)
        assert one_sentence(error)


def test_read_position_refuses_other_lines():
    for line in START, f"{START};;e2e4", f"P: {START}", "":
        with pytest.raises(ValueError, match="expected 'FEN;recent moves"):
            data.read_position(line)


def test_few_bad_lines_are_counted_and_many_refused(positions, tmp_path, capsys):
    lines = [data.write_position(position) for position in positions[:990]]
    few = lines[:500] + ["?"] * 9 + lines[500:]
    assert data.load(save(tmp_path / "few", few)) == positions[:990]
    err = capsys.readouterr().err
    assert err.count("\n") == 1 and "left out 9 of 999 lines" in err and "few: " in err and "line 501: expected" in err
    with pytest.raises(data.DataError, match=r"many, line 501: expected .*\(11 of 1001 lines"):
        data.load(save(tmp_path / "many", lines[:500] + ["?"] * 11 + lines[500:]))
    assert data.load(save(tmp_path / "none", lines)) == positions[:990] and capsys.readouterr().err == ""
