"""Positions on a page: what a model said of each, as arrows on python-chess's boards, and what it was paid for."""

import re
import statistics
from html import escape

import chess
import chess.svg

import rewards
import tasks

CARDS = 100  # positions on the page: the worst and the best, when there are more
FIELDS = "to move", "castling", "en passant", "half-moves", "move", "reward", "terminated", "truncated"

# How good a move is: its colour on the board (the same in both themes), its mark and its meaning in the text.
QUALITIES = {
    "best": ("#15803d", "★", "the engine's best"),
    "five": ("#2563eb", "●", "in the engine's five"),
    "legal": ("#d97706", "○", "legal"),
    "illegal": ("#dc2626", "✕", "illegal"),
}
BOARD = {"square light": "#efe9dd", "square dark": "#bfb29c", "margin": "#00000000", "coord": "#8a8f99"}
WEIGHTS = {"P": rewards.POLICY, "A": rewards.ENVIRONMENT}


def table(head, rows, css=""):
    """Cells are HTML; a row is its name and its cells, and a row without cells is a heading."""
    head = "".join(f"<th>{cell}</th>" for cell in head)
    body = "".join(
        f"<tr><th>{name}</th>{''.join(f'<td>{cell}</td>' for cell in cells)}</tr>"
        if cells else f'<tr><th class="heading" colspan="9">{name}</th></tr>'
        for name, *cells in rows
    )  # fmt: skip
    return f'<div class="scroll"><table class="{css}"><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>'


def span(css, text):
    return f'<span class="{css}">{escape(text)}</span>'


def board_svg(board, turn, told, arrows=(), wrong=()):
    """python-chess's board without its pieces, squares and coordinates: those are in the page once, for all boards."""
    fill = dict.fromkeys(wrong, "#dc262699")
    svg = chess.svg.board(board, orientation=turn, arrows=arrows, fill=fill, colors=BOARD)
    own = re.sub(
        r'<svg .*?>|<desc>.*?</desc>|<defs>.*?</defs>|<g .*?</g>|<rect [^>]*(class="square|stroke-width)[^>]*>'
        r'|xlink:href="[^"]*" ', "", svg, flags=re.DOTALL,
    )  # fmt: skip
    label = escape(f"{told} {board.board_fen()}")
    return f'<svg class="board" viewBox="0 0 390 390" role="img" aria-label="{label}"><use href="#board-{turn}"/>{own}'


def shared_parts():
    page = "".join(chess.svg.PIECES.values())
    for turn in chess.COLORS:
        empty = re.sub("</?svg.*?>|<defs.*?/>", "", chess.svg.board(None, orientation=turn, colors=BOARD))
        page += f'<g id="board-{turn}">{empty}</g>'
    return page


def quality(uci, sample):
    if uci not in rewards.legal_moves(sample["prompt"]):
        return "illegal"
    five = dict(sorted(sample["labels"] or (), key=lambda move: -move[1])[:5])
    return "legal" if uci not in five else "best" if five[uci] == max(five.values()) else "five"


def arrow(uci, colour):
    return chess.svg.Arrow(chess.parse_square(uci[:2]), chess.parse_square(uci[2:4]), color=colour)


def figure(picture, title, told, samples=()):
    if samples:
        title = f"{title}</b> · reward {statistics.fmean(s['reward'] for s in samples):.2f}<b>"
        told += "<br>cut off at its limit" * any(s["parts"].get("runaway") for s in samples)
    said = "".join(f"<pre>{escape(s['completion'].strip())}</pre>" for s in samples)
    return f"<figure>{picture}<figcaption><b>{title}</b><br>{told}</figcaption>{said}</figure>"


def policy_figure(title, samples):
    """The position with the moves of all its completions: those played in full colour, the other candidates faint."""
    board, sample = chess.Board(tasks.contract(samples[0]["prompt"][3:].strip())), samples[0]
    answers = [answer for s in samples if (answer := rewards.read_policy(s["completion"])[1])]
    played = {answer[2]: quality(answer[2], sample) for answer in answers}
    listed = {uci: quality(uci, sample) for answer in answers for uci in answer[0] if uci not in played}
    arrows = [arrow(uci, QUALITIES[good][0] + "58") for uci, good in listed.items()]
    arrows += [arrow(uci, QUALITIES[good][0] + "e8") for uci, good in played.items()]
    told = "".join(
        f"plays {span(good, f'{QUALITIES[good][1]} {uci}')} {QUALITIES[good][2]}<br>" for uci, good in played.items()
    ) + " ".join(span(good, f"{QUALITIES[good][1]} {uci}") for uci, good in listed.items())  # fmt: skip
    label = f"{title}: {', '.join(f'{uci} is {QUALITIES[good][2]}' for uci, good in played.items())}."
    return figure(board_svg(board, board.turn, label, arrows), title, told or "no move that can be read", samples)


def read_board(fen):
    """The pieces of any text that should start with a board, as far as they stand on one."""
    board = chess.BaseBoard.empty()
    for rank, row in enumerate(fen.split(" ")[0].split("/")[:8]):
        row = re.sub("[1-8]", lambda digit: "." * int(digit[0]), row)
        for file, letter in enumerate(row[:8]):
            if letter in "pnbrqkPNBRQK":
                board.set_piece_at(chess.square(file, 7 - rank), chess.Piece.from_symbol(letter))
    return board


def environment_figures(prompt, known):
    """What was asked, what is true, and the model's next boards with the squares marked that are wrong."""
    fen, move, *_ = prompt[3:].split("+")
    board, (true_fen, *_, illegal) = chess.Board(tasks.contract(fen)), truth(known[0][1][0])
    true = read_board(true_fen)
    asked = [arrow(move, QUALITIES["illegal" if illegal else "best"][0] + "e8")]
    told = f"{move} is {'illegal' if illegal else 'legal'}"
    page = figure(board_svg(board, board.turn, f"Asked: {told}.", asked), "asked", told)
    page += figure(board_svg(true, board.turn, "The true next board."), "truth", "what the rules say")
    for title, sample in ((title, sample) for title, samples in known for sample in samples):
        answer = rewards.read_environment(sample["completion"])
        said = read_board(answer[0]) if answer else chess.BaseBoard.empty()
        wrong = [square for square in chess.SQUARES if said.piece_at(square) != true.piece_at(square)]
        told = f"{len(wrong)} wrong squares" if wrong else "every square is right"
        told = told if answer else "an answer that cannot be read"
        page += figure(board_svg(said, board.turn, f"{title}: {told}.", (), wrong), title, told, [sample])
    return page


def truth(sample):
    return sample["labels"] or rewards.truth(sample["prompt"])


def field_rows(known):
    """Everything but the board, as said and as it should be."""
    answers = [truth(known[0][1][0]), *(rewards.read_environment(samples[0]["completion"]) for _, samples in known)]
    texts = [
        [*(answer[0].split(" ")[1:] + ["–"] * 5)[:5], *(f"{float(value):g}" for value in answer[1:])] if answer
        else ["–"] * len(FIELDS)
        for answer in answers
    ]  # fmt: skip
    for name, true, *said in zip(FIELDS, *texts):
        marks = [span("best", f"{s[:9]} ✓") if s == true else span("illegal", f"{s[:9]} ✕") for s in said]
        yield f"{name} {span('soft', f'is {true}')}", *marks


def part_rows(task, known):
    """What was paid, each with what it could have been, and the parts of a grade that pay nothing themselves."""
    weights = WEIGHTS[task]
    names = dict.fromkeys(name for _, samples in known for sample in samples for name in sample["parts"])
    yield "reward in all", *(f"{statistics.fmean(s['reward'] for s in samples):.3f}" for _, samples in known)
    for name in sorted(names, key=lambda name: "earned/" not in name):
        plain = name.removeprefix("earned/")
        if plain == name and name in weights:
            continue  # what it earned says the same
        cells = []
        for _, samples in known:
            values = [sample["parts"][name] for sample in samples if name in sample["parts"]]
            mean = statistics.fmean(values) if values else None
            share = mean / weights[plain] if values and plain in weights else 0
            text = "–" if mean is None else f"{mean:.2f}"
            cells.append(f'<i class="paid" style="--share:{max(0, min(1, share)):.0%}">{text}</i>')
        most = f" {span('soft', f'of {weights[plain]:g}')}" if plain != name and plain in weights else ""
        yield escape(plain.replace("_", " ")) + most, *cells


def card(prompt, stages):
    """A position: what was asked, what was said at each stage, what that was paid."""
    known = [(escape(title), asked[prompt]) for title, asked in stages if prompt in asked]
    means = [statistics.fmean(sample["reward"] for sample in samples) for _, samples in known]
    board = chess.Board(tasks.contract(prompt[3:].strip().split("+")[0]))
    if prompt[0] == "P":
        boards, rows = "".join(policy_figure(*stage) for stage in known), []
    else:
        boards, rows = environment_figures(prompt, known), [("fields",), *field_rows(known), ("paid for",)]
    return (
        f'<article class="card" data-task="{prompt[0]}" data-reward="{means[-1]}" data-gain="{means[-1] - means[0]}">'
        f"<h3>{'White' if board.turn else 'Black'} to move <code>{escape(board.fen())}</code></h3>"
        f'<div class="boards">{boards}</div>'
        f"{table(('', *(title for title, _ in known)), [*rows, *part_rows(prompt[0], known)])}</article>"
    )


def cards(runs):
    stages = [(run.label + title, asked) for run in runs for title, asked in run.stages]
    last = {prompt: samples for _, asked in stages for prompt, samples in asked.items()}
    order = sorted(last, key=lambda prompt: statistics.fmean(sample["reward"] for sample in last[prompt]))
    if len(order) > CARDS:
        order = order[: CARDS // 2] + order[-CARDS // 2 :]
    return "".join(card(prompt, stages) for prompt in order)
