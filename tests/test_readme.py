"""README.md: its Python runs as it stands there."""

import random
import re
from pathlib import Path

import chess
import torch

import data
import rewards
import tasks
import train
from model import GPT

README = (Path(__file__).parent.parent / "README.md").read_text()
BLOCKS = re.findall(r"```python\n(.*?)```", README, re.DOTALL)


def block(mark):
    (found,) = [text for text in BLOCKS if mark in text]
    return found


def test_sampling_with_the_embedded_model(capsys):
    exec(block("from rollout import generate"), {})
    answers = capsys.readouterr().out.splitlines()
    assert len(answers) == 4 and all(answer.startswith("M: ") for answer in answers)


def test_a_task_of_ones_own(monkeypatch):
    monkeypatch.setitem(rewards.TASKS, "L: ", None)  # put back afterwards
    grading, asking = block("# rewards.py"), block("# tasks.py")
    assert len((grading + asking).splitlines()) <= 30
    exec(grading, {**vars(rewards)})
    names = {**vars(tasks)}
    exec(asking, names)
    positions = data.load("builtin")[:2]
    samples = [names["legal_sample"](position, "expanded") for position in positions]
    legal = [move.uci() for move in chess.Board(positions[0].fen).legal_moves]
    random.Random(0).shuffle(legal)
    said = [[], ["a1a1"], legal[:3], legal[:-1], legal]
    paid = [rewards.grade(samples[0].prompt, " ".join(moves), (), False).reward for moves in said]
    assert paid == sorted(set(paid)) and paid[0] == rewards.MALFORMED and paid[-1] == 1

    for name, value in dict(BATCH_POSITIONS=2, GROUP_SIZE=2, DTYPE=torch.float32, TASKS={"L: ": 40}).items():
        monkeypatch.setattr(train, name, value)
    model = GPT.load("weights/tiny")
    batches, graded = train.rollout(model, samples, 0)
    assert all(set(grade.parts) >= {"found", "only", "earned/found"} for _, _, grade in graded)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    assert train.update(model, None, optimizer, batches, 0.0)["grad_norm"] > 0
