"""The chess task: questions, their reference answers, and the reward of an answer.

Another task is another file of this kind, TASK=FILE.py; the contract that all of them follow is in nanorook/task.py.

Two kinds of questions, named as in RookWorld's data ("policy" is elsewhere the model in training), and two more that
ask for the first candidate of a policy answer alone:

    policy        P: a position             ->  five candidate moves, their evaluations, the best of them
    environment   A: a position and a move  ->  the next position, reward, terminated, truncated
    moves         P: a position  M:         ->  a move
    mates         P: a position  M:         ->  a move that mates

Stockfish's labels say which moves are good; python-chess knows everything else.
"""

import math
import re
from pathlib import Path

import chess
from rapidfuzz.distance import Levenshtein

from nanorook import parallel
from nanorook.settings import fail, setting
from nanorook.task import Grade, Question, runaway
from rook import mating, positions, stockfish
from rook.board import draw
from rook.positions import contract_board, environment_move, expand_board, held_out

# fmt: off
MIX_ENV_RATIO              = setting("MIX_ENV_RATIO", 0.09, "share of environment questions (A:); the prompts of the others begin with P:", low=0, high=1)
MIX_FIRST_RATIO            = setting("MIX_FIRST_RATIO", 0.96, "share of the prompts with P: that ask for the first candidate alone (kinds moves and mates), half of them in positions with a mate in one; the others are of the kind policy", low=0, high=1)
MAX_NEW_TOKENS             = setting("MAX_NEW_TOKENS", 144, "the most tokens of a whole answer", low=1)
MATES_KL                   = setting("MATES_KL", 0.2, "KL_COEF is multiplied by this for questions about mates", low=0)
# fmt: on

DEFAULTS = {"KL_COEF": 0.2, "WARMUP_STEPS": 25}
KL_WEIGHTS = {"mates": MATES_KL}
LIMITS = {"policy": MAX_NEW_TOKENS, "environment": MAX_NEW_TOKENS, "moves": 6, "mates": 6}  # moves: "e7e8q "
NAMES = {  # of the figures that a verdict names first
    "mates mate": "mates found",
    "moves legal": "legal moves",
    "moves top5": "moves among the engine's five best",
    "moves best": "best moves",
    "policy legal": "legal moves in whole answers",
    "environment next_state": "right next positions",
}
ILLEGAL_SHARE = 1 / 2  # of the random moves that are asked about; with fewer, next states after illegal ones got worse
CHECK_SHARE = 1 / 4  # of the ordinary positions in which a first move is asked for; in games it is one in eleven


def start_model():
    return str(Path(__file__).parent / "weights" / "tiny")


show = draw  # on the pages of tools.report


def load(source, config):
    """(training items, held-out items), each (pool, position): "mates" is the pool for questions about mates,
    "ordinary" the one for all other kinds."""
    training, test = positions.split(positions.load_unfinished(source))
    items = mating.beside(source, training, test)
    warn_of_missing_labels([p for side in items for pool, p in side if pool == "ordinary"])
    return items


def warn_of_missing_labels(ordinary):
    unknown = sum(not position.moves for position in ordinary)
    if unknown and not stockfish.find():
        parallel.log(f"warning: {unknown} of {len(ordinary)} positions have no labels, so the best moves get "
                     "no more reward there than other legal ones: install Stockfish, with which tools.chess_label can "
                     "also label them once.")  # fmt: skip


def make_questions(items, count, rng, config):
    """Questions about different positions: environment, policy, moves; and mates, about positions of their own."""
    text_format = chess_format(config)
    with_mate = [position for pool, position in items if pool == "mates"]
    ordinary = [position for pool, position in items if pool == "ordinary"]

    # How many of each kind. Rounded in favour of whole answers, so that a small step has some, too; to nine digits
    # first, as 100 * 0.07 is more than 7.
    n_environment = math.ceil(round(count * MIX_ENV_RATIO, 9))
    n_first = math.floor(round((count - n_environment) * MIX_FIRST_RATIO, 9))  # questions for a first candidate alone
    n_policy = count - n_environment - n_first
    n_mates = min(n_first // 2, len(with_mate))
    n_mates = max(n_mates, count - len(ordinary))
    n_moves = max(0, n_first - n_mates)

    mates = rng.sample(with_mate, n_mates)
    others = draw_ordinary(ordinary, count - n_mates, n_moves, rng)
    about_environment = others[:n_environment]
    about_policy = others[n_environment : n_environment + n_policy]
    about_moves = others[n_environment + n_policy :]
    questions = [environment_question(p, rng, text_format) for p in about_environment]
    questions += [policy_question(p, text_format) for p in about_policy]
    questions += [first_question("moves", p, text_format) for p in about_moves]
    return questions + [first_question("mates", p, text_format) for p in mates]


def draw_ordinary(ordinary, count, n_moves, rng):
    """`count` positions. The last `n_moves` are for questions about moves, and CHECK_SHARE of these are in check, or
    fewer if eight times as many positions, drawn at random, do not hold that many."""
    drawn = positions.draw(ordinary, min(8 * count, len(ordinary)), rng)
    for_other_kinds = drawn[: count - n_moves]
    candidates = drawn[count - n_moves :]  # for questions about moves; usually many more than needed
    checks = [p for p in candidates if chess.Board(p.fen).is_check()]
    checks = checks[: round(CHECK_SHARE * n_moves)]
    others = [p for p in candidates if p not in checks]
    others = others[: n_moves - len(checks)]  # may hold further checks where these are dense
    return for_other_kinds + others + checks


def question(text, config):
    """A user's question: "FEN" asks the policy, "FEN e2e4" or "FEN e4" the environment."""
    text_format = chess_format(config)
    words = text.split()
    has_move = len(words) > 4 and not words[-1].isdigit()  # a FEN's counters are digits
    move = words.pop() if has_move else ""
    typed = positions.typed_board(" ".join(words))
    fen = typed.fen()
    if move:
        if not UCI.fullmatch(move):
            move = positions.typed_move(typed, move)
        prompt = environment_prompt(fen, move, [move], text_format)
        return Question("environment", prompt, transition(fen, move))
    if not any(typed.legal_moves):
        fail(f"no move is legal in {fen}; ask about another position, or add a move.")
    return policy_question(positions.Position(fen, (), ()), text_format)


# Questions and ideal answers as text. `rookworld` is RookWorld-LM's own format. `expanded` and `squares` are for models
# whose tokens are bytes, or bytes and squares' names (tools/chess_pretrain.py): a board has one character for each square and
# a prompt has a fixed number of tokens, so that a square is always in the same place.

WIDTH = {  # of a prompt in tokens: the longest FEN, move and history fit
    "expanded": {"P: ": 94, "A: ": 160},
    "squares": {"P: ": 92, "A: ": 128},
}


def chess_format(config):
    name = config.extra.get("chess_format", "rookworld")
    if name not in ("rookworld", *WIDTH):
        fail(f"config.json: chess_format is {name!r}, but it must be 'rookworld', 'expanded' or 'squares'.")
    return name


def write_prompt(prefix, fen, rest, text_format):
    if text_format not in WIDTH:
        return prefix + fen + rest
    text = prefix + expand_board(fen) + rest
    one_a_token = re.sub("[a-h][1-8]", "x", text) if text_format == "squares" else text
    return text + " " * (WIDTH[text_format][prefix] - len(one_a_token))


def policy_prompt(fen, text_format):
    return write_prompt("P: ", fen, "", text_format)


def first_prompt(fen, text_format):
    """The policy's prompt and the first header of its answer. GPT-2's tokens begin with the space before them, so there
    the header ends before the space, and the prompt's tokens are those with which a whole line begins."""
    if text_format in WIDTH:
        return policy_prompt(fen, text_format) + "M: "
    return f"P: {fen:90}M:"


def environment_prompt(fen, move, history, text_format):
    """`history` ends with `move`."""
    return write_prompt("A: ", fen, f"+{move}+{' '.join(history)}+", text_format)


def policy_question(position, text_format):
    return Question("policy", policy_prompt(position.fen, text_format), policy_truth(position))


def policy_truth(position):
    """The legal moves, and the evaluations in pawns of the engine's five; without labels, an engine is asked."""
    legal = [move.uci() for move in chess.Board(position.fen).legal_moves]
    labels = position.moves or stockfish.label(position.fen)
    five = {uci: centipawns / 100 for uci, centipawns in labels[:5]}
    return {"legal": legal, "five": five}


def first_question(kind, position, text_format):
    """Asks for the first candidate alone; the truth lists the moves that reach each rung of the reward. A rung pays its
    whole weight or nothing."""
    board = chess.Board(position.fen)
    rungs = {"legal": [move.uci() for move in board.legal_moves]}
    if kind == "mates":
        checks = [move.uci() for move in board.legal_moves if board.gives_check(move)]
        rungs |= {"check": checks, "mate": sorted(positions.mating_moves(board))}
    else:
        five = policy_truth(position)["five"]
        if five:
            highest = max(five.values())
            rungs |= {"top5": [*five], "best": [uci for uci in five if five[uci] == highest]}
    unknown = {*FIRST_WEIGHTS[kind]} - {"structure", "top5", "best", *rungs}
    if unknown:
        fail(f"FIRST_WEIGHTS pays for {unknown.pop()!r}, but first_question lists no moves for it.")
    prompt = first_prompt(position.fen, text_format)
    begins_with_space = prompt.endswith(":")
    return Question(kind, prompt, rungs, stop=" ", stop_after=int(begins_with_space))


def answers(question):
    """A first move can be any legal one; for others the reward is next to nothing. The space that ends a move belongs
    to it."""
    if question.kind not in FIRST_WEIGHTS:
        return []
    return [" " * question.stop_after + move + " " for move in question.truth["legal"]]


def environment_question(position, rng, text_format, illegal_share=ILLEGAL_SHARE):
    """Asks about the position's own move, or a random one, which is illegal in `illegal_share` of the cases; none leads
    from a training board to a held-out one."""
    board = chess.Board(position.fen)
    move = position.asked
    if move is None and not board.ep_square and rng.random() < 0.03:  # near a draw by the 75-move rule, rare in games
        board.halfmove_clock = rng.choice([149, rng.randrange(100, 150)])
        board.fullmove_number += 74
    fen = board.fen()
    if move is None:
        best = position.moves[0][0] if position.moves else None
        move = environment_move(board, rng, illegal_share, best)
    truth = transition(fen, move)
    while held_out(truth[0]) and not held_out(fen):
        move = environment_move(board, rng, illegal_share)
        truth = transition(fen, move)
    history = (*position.history, move)[-10:]
    return Question("environment", environment_prompt(fen, move, history, text_format), truth)


def transition(fen, move):
    """What follows `move` by the rules: (next FEN, reward, terminated, truncated), as RookWorld's data has it. An
    illegal move leaves the position as it was. Draws are those that end a game without a claim: stalemate,
    insufficient material, 75 moves. (A fivefold repetition takes 16 half-moves, more than the ten that a prompt shows.)"""
    board = chess.Board(fen)
    if move not in {legal.uci() for legal in board.legal_moves}:
        return fen, -1.0, False, True
    board.push_uci(move)
    outcome = board.outcome()
    if outcome is None:
        return board.fen(), 0.001, False, False
    reward = 0.5 if outcome.winner is None else 1.0
    return board.fen(), reward, True, False


# ---- The reward: pieces with weights that add up to 1 ------------------------------------------------------

MALFORMED = -0.3
MAX_CHARACTERS = 4096  # a longer answer is malformed and not read; a right one is not a tenth as long
MAX_PAWNS = 10.0  # evaluations count up to here: beyond it, and at a mate, a game is won
# Cost of an illegal, repeated or sixth candidate. A legal one gives 1, so a list helps if over 20 % of it is legal.
WASTED = 0.25

# The ladder of the best move: legal < top5 < best. Each rung outweighs everything else that can be earned (clean to
# evals, and what wasted candidates cost), so no list of candidates makes up for a worse move.
POLICY_WEIGHTS = {
    "structure": 0.02,  # the headers M:, E:, B: in order
    "parse": 0.04,  # moves and numbers can be read
    "clean": 0.02,  # no text after the last field
    "listed": 0.01,  # the move after B: is one of the candidates
    "candidates_legal": 0.08,
    "candidates": 0.05,  # candidates that are among the engine's five
    "evals": 0.03,
    "legal": 0.22,
    "top5": 0.22,
    "sound": 0.09,  # how little the move gives away, within the engine's five
    "best": 0.22,
}

# For the first candidate alone: partial credit in steps, each of which the model reaches more rarely than the last.
FIRST_WEIGHTS = {
    "moves": {"structure": 0.05, "legal": 0.65, "top5": 0.2, "best": 0.1},
    "mates": {"structure": 0.05, "legal": 0.25, "check": 0.25, "mate": 0.45},
}

# The next position outweighs the other three fields together.
ENVIRONMENT_WEIGHTS = {
    "structure": 0.1,
    "next_state": 0.25,  # the exact FEN
    "words": 0.3,  # share of its words that are right: eight ranks, turn, castling, en passant, two clocks
    "similarity": 0.1,  # how close each word is, by edit distance
    "reward": 0.05,  # by distance
    "reward_match": 0.05,
    "terminated": 0.075,
    "truncated": 0.075,
}


def grade(question, text, hit_limit=False):
    """The worth of `text`, an answer without its end token; `hit_limit`: it was cut off at its limit."""
    graders = {"policy": grade_policy, "environment": grade_environment, "moves": grade_first, "mates": grade_first}
    pieces, metrics = graders[question.kind](question, text)
    judged = "next_state" if question.kind == "environment" else "legal"
    for category in positions.groups(question.prompt):  # such as in_check
        metrics[f"{judged}_{category}"] = metrics[judged]
    reward = sum(value for _, value, *_ in pieces)
    if hit_limit and reward > 0:
        pieces.append(runaway(pieces))
    metrics = {name: float(value) for name, value in metrics.items()}
    return Grade(tuple(pieces), metrics)


# ---- The grammar of answers. Only spaces separate words, and a run of them counts as one; digits are ASCII.

UCI = re.compile(positions.UCI)
NUMBER = re.compile(r"-?[0-9]+(?:\.[0-9]+)?")
NEXT_STATE = re.compile(rf"([^+]+\+)( *{NUMBER.pattern} *\+)( *[01] *\+)( *[01] *)")


def find_words(text, separators=" "):
    """(word, (start, end)) for each word; the span includes the separator that ends the word."""
    if len(text) > MAX_CHARACTERS:
        return []
    word = rf"([^{separators}]+)[{separators}]?"
    return [(match[1], match.span()) for match in re.finditer(word, text)]


def parse_policy(text):
    """(structure, answer) of `M: moves E: numbers B: move`. `structure`: the headers are in order. The answer is (moves,
    numbers, best, words after it), each with its span, or None if it cannot be read."""
    words_and_spans = find_words(text)
    words = [word for word, _ in words_and_spans]
    if not words or words[0] != "M:" or "E:" not in words:
        return False, None
    e = words.index("E:")
    if "B:" not in words[e:]:
        return False, None
    b = words.index("B:", e)
    moves = words_and_spans[1:e]
    numbers = words_and_spans[e + 1 : b]
    rest = words_and_spans[b + 1 :]
    if not moves or not rest or len(moves) != len(numbers):
        return True, None
    best, rest = rest[0], rest[1:]
    if not all(UCI.fullmatch(move) for move, _ in [*moves, best]):
        return True, None
    if not all(NUMBER.fullmatch(number) for number, _ in numbers):
        return True, None
    numbers = [(float(number), span) for number, span in numbers]
    return True, (moves, numbers, best, rest)


def parse_environment(text):
    """The four fields of `FEN+reward+terminated+truncated`, each with its span, or None. The FEN may be any text."""
    match = NEXT_STATE.fullmatch(text) if len(text) <= MAX_CHARACTERS else None
    if match is None:
        return None
    fields = []
    for i in (1, 2, 3, 4):
        words = match[i].strip(" +")
        fields.append((re.sub(" +", " ", words), match.span(i)))
    return fields


# ---- P: the policy -----------------------------------------------------------------------------------------


def pawns_apart(a, b):
    a, b = (max(-MAX_PAWNS, min(MAX_PAWNS, pawns)) for pawns in (a, b))
    return abs(a - b)


def grade_policy(question, text):
    """Without labels (no engine), only what the rules can judge is graded."""
    weights, legal, five = POLICY_WEIGHTS, question.truth["legal"], question.truth["five"]
    structure, answer = parse_policy(text)
    metrics = {"structure": structure, "parse": 0.0, "legal": 0.0, "candidates_legal": 0.0}
    metrics |= {"top5": 0.0, "best": 0.0, "candidates": 0.0} if five else {"unlabelled": True}
    pieces = [("structure", weights["structure"]) if structure else ("malformed", MALFORMED)]
    if answer is None:
        return pieces, metrics
    moves, numbers, (best, best_span), rest = answer
    metrics["parse"] = 1.0
    pieces.append(("parse", weights["parse"]))
    pieces.append(("clean", weights["clean"] * (not rest)))

    # Each candidate counts the same, and a longer list makes each count less: listing more moves gains nothing.
    wanted = min(5, len(legal))
    length = max(wanted, len(moves))
    per_candidate = {name: weights[name] / length for name in ("candidates_legal", "candidates", "evals")}
    useful, errors = set(), {}
    for i, (move, move_span) in enumerate(moves):
        number, number_span = numbers[i]
        is_new = move in legal and move not in useful and len(useful) < wanted
        is_found = move in five and move not in errors
        if is_new:
            useful.add(move)
        if is_found:
            errors[move] = pawns_apart(number, five[move])
        legal_share = 1 if is_new else -WASTED
        evals_share = 1 / (1 + errors[move]) if is_found else 0.0
        pieces.append((f"candidates_legal {i}", per_candidate["candidates_legal"] * legal_share, move_span))
        pieces.append((f"candidates {i}", per_candidate["candidates"] * is_found, move_span))
        pieces.append((f"evals {i}", per_candidate["evals"] * evals_share, number_span))
    distinct = {move for move, _ in moves}
    metrics["candidates_legal"] = len(distinct.intersection(legal)) / len(moves)
    if errors:
        metrics["eval_error"] = sum(errors.values()) / len(errors)
    if five:
        metrics["candidates"] = len(errors) / len(five)

    # If the move after B: is also a candidate, its pieces judge both places.
    listed_spans = [span for move, span in moves if move == best]
    best_spans = [best_span, *listed_spans[:1]]
    shares = {"listed": bool(listed_spans), "legal": best in legal, "top5": best in five, "sound": 0, "best": 0}
    metrics["legal"] = best in legal
    if best in five:
        top = max(five.values())
        metrics["move_error"] = pawns_apart(top, five[best])  # in pawns
        metrics["top5"] = 1.0
        metrics["best"] = five[best] == top  # one of two mates in one is as good as the other
        shares |= {"sound": 1 / (1 + metrics["move_error"]), "best": metrics["best"]}
    for name, share in shares.items():
        pieces.append((name, weights[name] * share, *best_spans))
    return pieces, metrics


def grade_first(question, text):
    """A move, paid for each rung that it reaches; the space that ends it is a part of the answer."""
    # After "M:" a space comes first, and the token that ends the move may begin the next one.
    pattern = " ([^ ]+) .*" if question.stop_after else "([^ ]+) "
    match = re.fullmatch(pattern, text, re.DOTALL)
    move = match[1] if match else ""
    weights = FIRST_WEIGHTS[question.kind]
    metrics = {"structure": UCI.fullmatch(move) is not None}
    metrics |= {rung: move in moves for rung, moves in question.truth.items()}
    pieces = [(name, weights[name] * reached) for name, reached in metrics.items() if name in weights]
    if question.kind == "moves" and "best" not in metrics:
        metrics["unlabelled"] = True
    return pieces, metrics


# ---- A: the environment ------------------------------------------------------------------------------------


def grade_environment(question, text):
    next_fen, true_reward, terminated, truncated = question.truth
    names = "structure", "next_state", "similarity", "reward_match", "terminated", "truncated"
    metrics = dict.fromkeys(names, 0.0)
    weights = ENVIRONMENT_WEIGHTS
    answer = parse_environment(text)
    if answer is None:
        return [("malformed", MALFORMED)], metrics
    (fen, fen_span), (reward, reward_span), (over, over_span), (illegal, illegal_span) = answer
    fen, reward = contract_board(fen), float(reward)
    metrics["structure"] = 1.0
    metrics["next_state"] = fen == next_fen
    metrics["reward_match"] = reward == true_reward
    metrics["terminated"] = (over == "1") == terminated
    metrics["truncated"] = (illegal == "1") == truncated
    metrics["similarity"] = Levenshtein.normalized_similarity(fen, next_fen)
    pieces = [("structure", weights["structure"])]
    # Word by word: an edit distance between whole FENs may align one word with its neighbour, and a better word could
    # then make the whole worse.
    said = find_words(text[: fen_span[1]], " /+")
    true = re.split("[ /]", next_fen)
    count = max(len(said), len(true))
    wrong = []  # spans of words
    for i, ((word, span), truth) in enumerate(zip(said, true)):
        if i < 8:
            word = contract_board(word)
        if word != truth:
            wrong.append(span)
        likeness = Levenshtein.normalized_similarity(word, truth)
        pieces.append((f"words {i}", weights["words"] / count * (word == truth), span))
        pieces.append((f"similarity {i}", weights["similarity"] / count * likeness, span))
    # A wrong next state is the fault of its wrong words; where no word is wrong, the whole FEN is judged.
    judged = wrong or [fen_span]
    pieces.append(("next_state", weights["next_state"] * metrics["next_state"], *judged))

    error = min(2.0, abs(reward - true_reward))  # rewards are between -1 and 1
    pieces.append(("reward", weights["reward"] * (1 - error / 2), reward_span))
    pieces.append(("reward_match", weights["reward_match"] * metrics["reward_match"], reward_span))
    pieces.append(("terminated", weights["terminated"] * metrics["terminated"], over_span))
    pieces.append(("truncated", weights["truncated"] * metrics["truncated"], illegal_span))
    return pieces, metrics
