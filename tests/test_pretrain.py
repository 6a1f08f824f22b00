"""tools/pretrain.py as a user runs it: it learns, it can be killed, and what it makes opens everywhere."""

import argparse
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import chess
import pytest
import torch
from transformers import AutoModelForCausalLM

import data
import tasks
from model import GPT, GPTConfig
from rollout import pad_prompts
from tools import pretrain

ROOT = Path(__file__).parent.parent
ENV = {**os.environ, "OMP_NUM_THREADS": "1"}  # these models are too small for two threads to help
TINY = ["--layers", "1", "--width", "32", "--heads", "2", "--rows", "8", "--eval-positions", "4"]
TINY += ["--dtype", "float32"]  # not the faster one, which a busy machine may measure differently each time


def command(out, *arguments):
    return [sys.executable, "-m", "tools.pretrain", str(out), *TINY, *map(str, arguments)]


def run(*arguments):
    return subprocess.run(command(*arguments), cwd=ROOT, env=ENV, capture_output=True, text=True, timeout=120)


@pytest.fixture(scope="module")
def few_positions(tmp_path_factory):
    file = tmp_path_factory.mktemp("positions") / "few.txt"
    train, held_out = data.split(data.load("builtin"))
    file.write_text("\n".join(map(data.write_position, train[:10] + held_out[:4])))
    return file


@pytest.mark.slow
def test_killed_and_resumed_equals_never_killed(few_positions, tmp_path):
    arguments = "--data", few_positions, "--steps", "9", "--eval-every", "3"
    whole = run(tmp_path / "whole", *arguments)
    assert whole.returncode == 0, whole.stderr
    broken = subprocess.Popen(command(tmp_path / "broken", *arguments), cwd=ROOT, env=ENV, stderr=subprocess.DEVNULL)
    while not (tmp_path / "broken" / "skill.jsonl").exists():  # written after the first save
        assert broken.poll() is None
        time.sleep(0.02)
    broken.send_signal(signal.SIGKILL)
    broken.wait()
    first = torch.load(tmp_path / "broken" / "trainer.pt", weights_only=True)
    assert 0 < first["step"] < 9
    again = run(tmp_path / "broken", *arguments)
    assert again.returncode == 0 and "resumed" in again.stderr + again.stdout
    a, b = (GPT.load(tmp_path / name).state_dict() for name in ("whole", "broken"))
    assert all(torch.equal(a[name], b[name]) for name in a)
    last = [json.loads((tmp_path / n / "skill.jsonl").read_text().splitlines()[-1]) for n in ("whole", "broken")]
    assert last[0]["step"] == last[1]["step"] == 9
    assert {**last[0], "seconds": 0} == {**last[1], "seconds": 0}
    hf = AutoModelForCausalLM.from_pretrained(tmp_path / "whole")
    tokens = torch.arange(60)[None]
    torch.testing.assert_close(hf(tokens).logits, GPT.load(tmp_path / "whole")(tokens), atol=1e-4, rtol=0)


@pytest.mark.slow
def test_a_state_of_another_model_is_refused(few_positions, tmp_path):
    (tmp_path / "m").mkdir()
    for state in {"model": {}, "optimizers": []}, {"something": 1}:
        torch.save(state, tmp_path / "m" / "trainer.pt")
        result = run(tmp_path / "m", "--data", few_positions, "--steps", "1")
        assert result.returncode == 1 and "Traceback" not in result.stderr
        assert "trainer.pt is damaged or of another model" in result.stderr


def test_asked_to_stop_it_saves_and_says_so(few_positions, tmp_path):
    with open(tmp_path / "stderr", "w") as stderr:
        arguments = "--data", few_positions, "--minutes", "5", "--eval-every", "1000"
        process = subprocess.Popen(command(tmp_path / "m", *arguments), cwd=ROOT, env=ENV, stderr=stderr)
    try:
        while "policy=" not in (tmp_path / "stderr").read_text():  # the bar shows losses: it trains
            assert process.poll() is None
            time.sleep(0.05)
        process.send_signal(signal.SIGTERM)
        assert process.wait(timeout=60) != 0
    finally:
        process.kill()
    assert "goes on from there" in (tmp_path / "stderr").read_text()
    assert torch.load(tmp_path / "m" / "trainer.pt", weights_only=True)["step"] >= 10
    GPT.load(tmp_path / "m")


@pytest.mark.slow
def test_it_learns(few_positions, tmp_path):
    """The loss of the ideal answers to its training positions falls from chance to far below it."""
    arguments = "--data", few_positions, "--steps", "300", "--eval-every", "300", "--lr", "0.005", "--lr-matrix", "0.03"
    result = run(tmp_path / "m", *arguments)
    assert result.returncode == 0, result.stderr
    model, losses = GPT.load(tmp_path / "m"), []
    for position in data.split(data.load(few_positions))[0]:
        prompt = tasks.policy_prompt(position.fen, "expanded")
        answer = tasks.policy_completion(position.fen, position.moves, "expanded")
        answer = torch.tensor([model.tokenizer.encode(answer)])
        logits = model.score(*pad_prompts([model.tokenizer.encode(prompt)], "cpu"), answer)
        losses.append(torch.nn.functional.cross_entropy(logits[0], answer[0]).item())
    assert len(losses) == 10 and sum(losses) / 10 < 1.5  # chance is log 257 = 5.5


@pytest.mark.slow
def test_gpt2s_kind_of_model_in_rookworlds_format(few_positions, tmp_path):
    """The 124M configuration in small: its text format, a byte-level BPE from a folder, weights to start from."""
    from tokenizers import ByteLevelBPETokenizer

    from tests.test_tokenizer import chess_lines

    bpe = ByteLevelBPETokenizer()
    bpe.train_from_iterator(chess_lines(100), vocab_size=400, special_tokens=["<|endoftext|>"], show_progress=False)
    (tmp_path / "bpe").mkdir()
    bpe.save_model(str(tmp_path / "bpe"))
    shape = "--tokenizer", tmp_path / "bpe", "--format", "rookworld", "--positions", "512"
    first = run(tmp_path / "m", "--data", few_positions, "--steps", "2", *shape)
    assert first.returncode == 0, first.stderr
    second = run(tmp_path / "n", "--data", few_positions, "--steps", "1", "--init", tmp_path / "m")
    assert second.returncode == 0, second.stderr
    model = GPT.load(tmp_path / "n")
    assert model.config.chess_format == "rookworld" and model.config.vocab_size == 400
    assert model.tokenizer.vocab_size == 400


@pytest.mark.parametrize(
    "arguments, said",
    [
        ((), "either --steps or --minutes"),
        (("--steps", "1", "--data", "nowhere.txt"), "nowhere.txt"),
        (("--steps", "1", "--init", "nowhere"), "nowhere"),
        (("--steps", "1", "--tokenizer", "nowhere"), "nowhere"),
        (("--steps", "1", "--data", "unlabelled"), "no labelled position"),
        (("--steps", "1", "--rows", "4"), "--rows"),
        (("--steps", "1", "--positions", "200"), "--positions"),
    ],
)
def test_what_cannot_be_done_is_said_in_one_sentence(tmp_path, arguments, said):
    (tmp_path / "fens.txt").write_text("4k3/8/8/8/8/8/8/4K2R w K - 0 1\n4k3/8/8/8/8/8/8/R3K3 w Q - 0 1")
    result = run(tmp_path / "m", *(tmp_path / "fens.txt" if a == "unlabelled" else a for a in arguments))
    assert result.returncode != 0 and "Traceback" not in result.stderr
    assert said in result.stderr.strip().splitlines()[-1]
    assert not (tmp_path / "m").exists()


def test_rare_kinds_are_those_of_python_chess():
    positions = data.split(data.load("builtin"))[0][:4000]
    mates, castlings, promotions, en_passants, few = pretrain.rare_kinds(positions)
    assert all(len(kind) >= 10 for kind in (mates, castlings, promotions, en_passants, few))
    boards = {p: chess.Board(p.fen) for p in positions}
    for p, board in boards.items():
        best, *_ = moves = [chess.Move.from_uci(uci) for uci, _ in p.moves]
        assert (p in castlings) == any(map(board.is_castling, moves))
        assert (p in promotions) == any(move.promotion for move in moves)
        assert (p in en_passants) == board.has_legal_en_passant()
        assert (p in few) == (board.legal_moves.count() < 5)
        board.push(best)
        assert (p in mates) == board.is_checkmate()


def test_a_fifth_of_the_texts_is_of_rare_kinds(monkeypatch):
    fens = chess.STARTING_FEN, "7k/8/8/8/8/8/8/K7 w - - 0 1"
    common, rare = (tasks.Position(fen, (), (("a1a2", 0),)) for fen in fens)
    asked = []

    def text(position, *_):
        asked.append(tasks.board_key(position.fen))  # the same for its mirror image

    monkeypatch.setattr(pretrain, "tokenize", lambda texts: None)
    names = dict.fromkeys(["policy_text", "environment_text", "legal_text"], text)
    names |= dict(args=argparse.Namespace(seed=0, rows=2000), positions=[common], rare=[[rare]], config=GPTConfig())
    for name, value in names.items():
        monkeypatch.setattr(pretrain, name, value, raising=False)
    pretrain.make_batch(1, 0.5)
    assert len(asked) == 2000 and 0.16 < asked.count(tasks.board_key(rare.fen)) / 2000 < 0.24
