"""The texts that tools.chess_pretrain teaches: questions with their ideal answers, as tokens with weights.

In RookWorld's format these are all texts, and all tokens count the same, as in RookWorld-LM's own training. In the
formats of small models, two more tasks teach the rules: to list the legal moves of a position (L:), which is most of
the mix at first and fades, and to mark moves as legal or not (J:).
"""

import re

import chess
import numpy as np

import rewards
from nanorook.task import prompt_ids
from rook import positions
from rook.stockfish import CANDIDATES, MATE

RARE = 1 / 3  # the share of texts about boards of rare_kinds(), which games seldom show
CAPTURES = 0.35  # the chance of a capture where there is one; 40 % of the legal moves asked about are captures
ILLEGAL = 0.35  # the share of illegal moves among the rest; they are 30 % of all moves
LEGAL, LEGAL_STEPS = 0.56, 4000  # the first step's share of texts that list legal moves; it falls to 0 over LEGAL_STEPS
JUDGE = 0.12  # the share of texts that mark moves as legal or not
ENVIRONMENT = 0.4  # the environment's share of the other texts
ENVIRONMENT_WEIGHT = 2.0  # of their loss: rules decide every token, while a policy's moves and numbers are half chance
UNCHANGED_WEIGHT = 0.3  # of the loss on squares that the move does not change: most of them, and easy to learn
DECISIVE_WEIGHT = 5.0  # of the loss on the few tokens of an answer that matter most, see weigh()
BUCKET = 16  # sequences are padded to a multiple of this, so that compiled code and kernels meet few shapes


def policy_completion(fen, moves, text_format):
    """The ideal answer: `moves` in the order given, their evaluations in pawns, the best of them."""
    names = " ".join(uci for uci, _ in moves)
    evals = " ".join(str(cp / 100) for _, cp in moves)
    best = max(moves, key=lambda m: m[1])[0]
    if text_format in rewards.WIDTH:
        return f"M: {names} E: {evals} B: {best}"
    padding = " " * (90 - len(fen))  # RookWorld pads its fields, and the model writes the padding
    return f"{padding}M: {names:30}E: {evals:40}B: {best}"


def environment_completion(next_fen, reward, terminated, truncated, text_format):
    fen = positions.expand_board(next_fen) if text_format in rewards.WIDTH else next_fen
    return f"{fen}+{reward}+{int(terminated)}+{int(truncated)}"


def policy_text(position, rng, text_format):
    """RookWorld lists its moves in random order. In the formats of small models the best comes first: with a random one
    such a model never learned (in 250,000 texts) to choose the move that its own numbers rank first."""
    fen, moves = position.fen, position.moves[:CANDIDATES]
    if text_format not in rewards.WIDTH:
        moves = rng.sample(moves, len(moves))
    return rewards.policy_prompt(fen, text_format), policy_completion(fen, moves, text_format)


def environment_text(position, rng, text_format):
    """Half of the texts have a short history, down to the move alone. If there were always ten moves, the model would
    read the move at the tenth place, and fail where that is empty. Captures change most, so they are frequent."""
    if rng.random() < 0.5:
        earlier = rng.randrange(10)
        position = position._replace(history=position.history[-earlier:] if earlier else ())
    if rng.random() < CAPTURES and (captures := list(chess.Board(position.fen).generate_legal_captures())):
        position = position._replace(asked=rng.choice(captures).uci())
    question = rewards.environment_question(position, rng, text_format, ILLEGAL)
    return question.prompt, environment_completion(*question.truth, text_format)


def legal_text(position, rng, text_format):
    moves = [move.uci() for move in chess.Board(position.fen).legal_moves]
    prompt = "L" + rewards.policy_prompt(position.fen, text_format)[1:]
    return prompt, " ".join(rng.sample(moves, min(19, len(moves))))  # which makes the text as long as a policy's


def judge_text(position, rng, text_format):
    """16 moves, each with + if legal and - if not. This is practice for the environment, whose texts judge one move."""
    board = chess.Board(position.fen)
    legal = [move.uci() for move in board.legal_moves]
    moves = [rng.choice(legal) if rng.random() < 0.5 else positions.illegal_move(board, rng).uci() for _ in range(16)]
    prompt = "J" + rewards.policy_prompt(position.fen, text_format)[1:]
    return prompt, " ".join(f"{move}{'+' if move in legal else '-'}" for move in moves)


TASKS = {"policy": policy_text, "environment": environment_text, "judge": judge_text, "legal": legal_text}


def rare_kinds(labelled):
    """Boards for special rules, which games seldom show; a list for each kind."""
    rights = {"e1g1": "K", "e1c1": "Q", "e8g8": "k", "e8c8": "q"}
    kinds = [
        [p for p in labelled if p.moves[0][1] == MATE - 1],
        [p for p in labelled if any(rights.get(uci, "?") in p.fen.split(" ")[2] for uci, _ in p.moves)],  # castlings
        [p for p in labelled if any(len(uci) == 5 for uci, _ in p.moves)],  # promotions
        [p for p in labelled if p.fen.split(" ")[3] != "-"],  # en passant
        [p for p in labelled if len(p.moves) < CANDIDATES],  # few legal moves: in check, or with few pieces
        [p for p in labelled if chess.Board(p.fen).is_check()],
        [p for p in labelled if int(p.fen.split(" ")[5]) <= 3],  # the first moves of games
        [p for p in labelled if int(p.fen.split(" ")[5]) <= 8],
    ]
    return [kind for kind in kinds if kind]


def task_rows(step, rows, text_format, beginner):
    """How many texts of each task a step has. A `beginner` starts from random weights and has to learn the rules."""
    unit = max(1, rows // 32)  # multiples of it keep the number of shapes small
    legal = judge = 0
    if text_format in rewards.WIDTH:
        fades = max(0, 1 - step / LEGAL_STEPS) if beginner else 0
        legal = round(LEGAL * fades * rows / unit) * unit
        judge = round(JUDGE * rows / unit) * unit
    environment = round(ENVIRONMENT * (rows - legal - judge) / unit) * unit
    policy = rows - environment - judge - legal
    return {"policy": policy, "environment": environment, "judge": judge, "legal": legal}


def mirror(position):
    return positions.Position(
        positions.mirror_fen(position.fen),
        tuple(map(positions.mirror_move, position.history)),
        tuple((positions.mirror_move(uci), cp) for uci, cp in position.moves),
        position.asked and positions.mirror_move(position.asked),
    )


def draw(rng, rows, labelled, rare, text_format):
    def draw():
        position = rng.choice(rng.choice(rare) if rare and rng.random() < RARE else labelled)
        return mirror(position) if rng.random() < 0.5 else position

    return {task: [TASKS[task](draw(), rng, text_format) for _ in range(n)] for task, n in rows.items() if n}


def tokenize(texts, tokenizer, text_format):
    """Inputs (R, S), places (K,) in R·S whose next token is to be predicted, these tokens (K,), their weights (K,), the
    rows (M,) of these K that are tokens of moves, the tokens that are legal there (M, V)."""
    rows = []
    for prompt, answer in texts:
        pieces = weigh(prompt, answer, text_format)
        weighed = [(token, weight) for piece, weight in pieces for token in tokenizer.encode(piece)]
        rows.append((prompt_ids(prompt, tokenizer), *zip(*weighed, (tokenizer.eos, pieces[-1][1]))))
    S = -(-max(len(prompt) + len(answer) - 1 for prompt, answer, _ in rows) // BUCKET) * BUCKET
    inputs, targets = np.zeros((len(texts), S), dtype=np.int64), np.full((len(texts), S), -1)
    weights, legal = np.ones((len(texts), S), dtype=np.float32), []
    for i, ((prompt, answer), (asked, answered, answer_weights)) in enumerate(zip(texts, rows)):
        ids = [*asked, *answered]
        predicted = slice(len(asked) - 1, len(ids) - 1)  # a token is predicted at the one before it
        inputs[i, : len(ids) - 1] = ids[:-1]
        targets[i, predicted] = answered
        weights[i, predicted] = answer_weights
        if text_format not in rewards.WIDTH or prompt.startswith("J: "):
            continue
        for place, tokens in legal_tokens(prompt, answer, tokenizer):
            weights[i, place] *= targets[i, place] >= 0  # the move in an environment's prompt is not itself a target
            targets[i, place] = ids[place + 1]
            legal.append((i * S + place, tokens))
        if prompt.startswith("A: "):
            # After the move in the prompt, the target is a judge's mark instead of the history's first token.
            place = len(tokenizer.encode("+".join(prompt.split("+")[:2]))) - 1
            targets[i, place], weights[i, place] = ord("+" if answer.endswith("+0") else "-"), DECISIVE_WEIGHT
    places, allowed = np.flatnonzero(targets >= 0), np.zeros((len(legal), tokenizer.vocab_size), dtype=bool)
    for row, (_, tokens) in zip(allowed, legal):
        row[tokens] = True
    moves = np.searchsorted(places, np.array([place for place, _ in legal], dtype=np.int64))
    return inputs, places, targets.ravel()[places], weights.ravel()[places], moves, allowed


def place_on_board(square):
    return 9 * (7 - chess.square_rank(square)) + chess.square_file(square)  # 9: a slash ends a rank


def weigh(prompt, answer, text_format):
    """[(piece of the answer, weight of each of its tokens), ...]; the end token weighs as much as the last piece."""
    if prompt.startswith("L: ") or text_format not in rewards.WIDTH:
        return [(answer, 1)]
    if prompt.startswith("J: "):  # the marks alone
        return [(piece, DECISIVE_WEIGHT if piece in ("+", "-") else 0) for piece in re.split("([+-])", answer)]
    if prompt.startswith("P: "):  # the best move, which repeats the first
        before, header, best = answer.rpartition("B: ")
        return [(before + header, 1), (best, DECISIVE_WEIGHT), ("", 1)]
    # Decisive are the squares of the move, which show whether it was legal, and the clock of the 50-move rule, which
    # at weight 1 was still wrong after a quarter of legal moves.
    board, fields, clock, rest = re.fullmatch(r"(.{71})( \S+ \S+ \S+ )(\d+)(.*)", answer).groups()
    move = prompt.split("+")[1]
    decisive = [place_on_board(chess.parse_square(name)) for name in (move[:2], move[2:4])]
    weights = [UNCHANGED_WEIGHT if old == new else 1 for old, new in zip(prompt[3:], board)]
    weights = [DECISIVE_WEIGHT if place in decisive else weight for place, weight in enumerate(weights)]
    pieces = [*zip(board, weights), (fields, 1), (clock, DECISIVE_WEIGHT), (rest, 1)]
    return [(piece, ENVIRONMENT_WEIGHT * weight) for piece, weight in pieces]


def legal_tokens(prompt, answer, tokenizer):
    """For each token of a text's moves, (place, the tokens that continue a legal move which was not listed before).
    A text shows one of thirty legal moves; a loss on all probability that leads to none teaches the rule itself."""
    board = chess.Board(positions.read_prompt(prompt)[0])
    if prompt.startswith("A: "):
        before, listed = prompt.partition("+")[0] + "+", prompt.split("+")[1]
    else:
        header, listed = re.match("(M: )?(.*?)(?= E:|$)", answer).groups("")
        before = prompt + header
    legal = [tokenizer.encode(move.uci()) for move in board.legal_moves]
    place = len(tokenizer.encode(before)) - 1
    for move in listed.split():
        move = tokenizer.encode(move)
        for k in range(len(move)):
            if tokens := [other[k] for other in legal if other[:k] == move[:k] and len(other) > k]:
                yield place + k, tokens
        legal = [other for other in legal if other != move]
        place += len(move) + 1  # and the space
