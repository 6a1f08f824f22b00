"""An answer about a position as SVG: the moves after `P: FEN`, or the next position after `A: FEN+move+...`."""

import re

import chess
import chess.svg

from rook.positions import UCI, contract_board, read_prompt

BEST, FIVE, LEGAL, ILLEGAL = "#009e73", "#0072b2", "#e69f00", "#c8203c"  # green, blue, amber, red


def draw(question, text):
    """Arrows are the moves of an answer: green for the engine's best or a mate, blue for another of its five or a
    check, amber for legal, red for illegal; candidates are faint. Red squares differ from the true next position."""
    fen, asked = read_prompt(question.prompt)
    shown, truth, wrong = chess.Board(fen), question.truth, {}
    colours, turn = {move.uci(): LEGAL for move in shown.legal_moves}, shown.turn
    if asked:
        moves = {asked[0]: ""}
        try:
            shown = chess.BaseBoard(contract_board(text.split("+")[0]).split(" ")[0])
        except ValueError:
            return ""
        true = chess.BaseBoard(truth[0].split(" ")[0])
        wrong = {at: ILLEGAL + "99" for at in chess.SQUARES if shown.piece_at(at) != true.piece_at(at)}
    else:
        five = truth.get("five", {})
        best = [move for move, value in five.items() if value == max(five.values())]
        colours |= dict.fromkeys([*five, *truth.get("top5", ()), *truth.get("check", ())], FIVE)
        colours |= dict.fromkeys([*best, *truth.get("best", ()), *truth.get("mate", ())], BEST)
        listed, _, best = text.partition("B:")
        if "M:" in question.prompt:  # which asks for one move
            listed, best = "", listed
        moves = dict.fromkeys(re.findall(UCI, listed), "59") | dict.fromkeys(re.findall(UCI, best)[:1], "")  # opacity
    ends = {move: (chess.parse_square(move[:2]), chess.parse_square(move[2:4])) for move in moves}
    arrows = [chess.svg.Arrow(*ends[move], color=colours.get(move, ILLEGAL) + moves[move]) for move in moves]
    colors = {"square light": "#efe9dd", "square dark": "#c5b9a4"}
    svg = chess.svg.board(shown, orientation=turn, arrows=arrows, fill=wrong, coordinates=False, colors=colors)
    # The library draws coordinates as outlines, which would double the size of a page; these are letters.
    rows = zip(*(names[:: 1 if turn else -1] for names in (chess.FILE_NAMES, chess.RANK_NAMES[::-1])))
    names = (f'<text x="{45 * i + 22}" y="374">{file}</text><text x="-9" y="{45 * i + 28}">{rank}</text>'
             for i, (file, rank) in enumerate(rows))  # fmt: skip
    names = f'<g font-size="15" fill="#858a94" text-anchor="middle">{"".join(names)}</g></svg>'
    return svg.replace('viewBox="0 0 360 360"', 'viewBox="-18 0 378 378"').replace("</svg>", names)
