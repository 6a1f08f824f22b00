"""OCaml as people write it: problems with tests, for an instruction-tuned model.

    TASK=examples/ocaml_problems.py MODEL=Qwen/Qwen2.5-Coder-1.5B-Instruct DTYPE=auto COMPILE=auto ./train.sh

A problem is a comment with examples and a signature; an answer is the body that follows it, or the whole definition, in
a fence or bare. It may use all of OCaml. ocaml_toplevel.py says whether it parses, has the right type and passes the
tests. Without a MODEL, SmolLM2-135M-Instruct is trained, which fits on a CPU and solves almost nothing.

DATA names a file of other problems, .csv or .jsonl, perhaps with .gz. A row has an id, a problem (or prompt) that ends
with the signature and `=`, tests (`let () = assert (...); ...`), and perhaps a solution, which is used only where the
signature does not say all types. Rows with held_out=true are evaluated on; if no row says so, one problem in ten.
"""

import re
import zlib
from pathlib import Path

from examples.chat import chat, chat_template
from examples.ocaml_toplevel import Problem, judge, paid, prepare
from examples.rows import read_rows
from examples.start import smollm2 as start_model  # noqa: F401, a part of the task
from nanorook import parallel
from nanorook.settings import ROOT, fail, setting
from nanorook.task import Grade, Question, runaway

DEFAULTS = dict(STEPS=200, BATCH_POSITIONS=8, GROUP_SIZE=8, LR=1e-5, TEMPERATURE=1.0, EVAL_EVERY=0)
DEFAULTS |= dict(OUT_DIR="runs/ocaml-problems")
LARGE = True  # these are for models above 50M parameters, see nanorook/sizes.py
MAX_NEW_TOKENS = setting("MAX_NEW_TOKENS", 400, "the most tokens of an answer, its end token included", low=2)
LIMITS = {"ocaml": MAX_NEW_TOKENS}
NAMES = {"ocaml right": "right programs", "ocaml typed": "programs of the right type"}
PROBLEMS = ROOT / "data" / "ocaml_problems.jsonl"
WEIGHTS = {"parse": 0.1, "type": 0.2, "tests": 0.7}
STYLE = -0.05  # for more than one fence, and again for words after the last one
ASKED = """Complete this function in OCaml. Answer with code alone, in one fence: \
either the body, which follows the =, or the whole definition.
```ocaml
{}
```"""
FENCE = re.compile(r"```[^\n`]*\n(.*?)(?:```|\Z)", re.DOTALL)  # an answer that is cut off has not closed its last one


def load(source, config):
    """(training items, held-out items), each a Problem."""
    file = PROBLEMS if source == "builtin" else Path(source)
    found, left_out = {}, []
    for number, row in enumerate(read_rows(file), 1):
        name = str(row.get("id") or f"row {number}")
        text, tests = row.get("problem") or row.get("prompt"), row.get("tests")
        if isinstance(text, str) and isinstance(tests, str):
            outcome = prepare(name, text, tests, str(row.get("solution") or ""))  # a Problem, or what is wrong
        else:
            outcome = "it has no problem or no tests"
        if isinstance(outcome, Problem):
            found[outcome] = row
        else:
            left_out.append(f"{name}: {outcome}")
    if left_out:
        parallel.log(f"{file}: {len(left_out)} of {number} problems are left out; the first one is {left_out[0]}.")
    held_out = [problem for problem, row in found.items() if str(row.get("held_out")).lower() == "true"]
    if not held_out:
        by_text = sorted(found, key=lambda problem: zlib.crc32(problem.text.encode()))
        held_out = by_text[: max(1, len(found) // 10)]
    items = [problem for problem in found if problem not in held_out]
    if not items:
        fail(f"DATA={file} has {len(found)} problems that can be used; at least one to train on and one held out are "
             "needed.")  # fmt: skip
    return items, held_out


def make_questions(items, count, rng, config):
    return [ask(problem, config) for problem in rng.sample(items, count)]


def ask(problem, config):
    """The Question, in a chat if the model has been taught to chat; its truth is the Problem."""
    if chat_template(config):
        return Question("ocaml", chat(config, [{"role": "user", "content": ASKED.format(problem.text)}]), problem)
    return Question("ocaml", problem.text, problem)


def grade(question, text, hit_limit=False):
    """Partial credit: what does not parse has no type, and what does not have the right type is not run. Assertions
    that the problem shows are not rewarded, and each value that the others expect is rewarded alike, however many
    expect it: where six of seven expect false, the constant false gets half of the reward for tests."""
    problem = Problem(*question.truth)
    fences = [*FENCE.finditer(text)]
    verdict = judge(problem, fences[-1][1] if fences else text)
    code = [fences[-1].span()] if fences else []
    pieces = [("parse", WEIGHTS["parse"] * verdict.parses, *code), ("type", WEIGHTS["type"] * verdict.typed, *code)]
    shares = passed_by_value(problem, verdict)
    pieces += [(f"tests {i}", WEIGHTS["tests"] / len(shares) * share, *code) for i, share in enumerate(shares)]
    others = [fence.span() for fence in fences[:-1]]
    after = (fences[-1].end(), len(text)) if fences and text[fences[-1].end() :].strip() else None
    pieces.append(("fences", STYLE * bool(others and verdict.parses), *others))
    pieces.append(("words", STYLE * bool(after and verdict.parses), *[after] * bool(after)))
    if hit_limit or verdict.ran_away:
        pieces.append(runaway(pieces))
    # "parses" is not called "structure": a run whose first answers lack that is refused, and few of SmolLM2's parse.
    metrics = {"parses": verdict.parses, "typed": verdict.typed, "tests": sum(shares) / len(shares)}
    metrics["right"] = verdict.right
    return Grade(tuple(pieces), {name: float(value) for name, value in metrics.items()})


def passed_by_value(problem, verdict):
    """For each value that assertions expect which the problem does not show, the share of them that pass."""
    shares = []
    for value in dict.fromkeys(paid(problem)):
        places = [i for i, v in enumerate(problem.expected) if v == value and not problem.shown[i]]
        shares.append(sum(verdict.passed[i] for i in places) / len(places) if verdict.passed else 0.0)
    return shares
