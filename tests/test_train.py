"""train.py as a user runs it: a short run leaves all it promises, and what cannot work is refused in one sentence."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from model import GPT, GPTConfig
from tokenizer import Tokenizer

ROOT = Path(__file__).parent.parent
SMALL = {"BATCH_POSITIONS": "4", "GROUP_SIZE": "4", "MIX_ENV_RATIO": "0.5", "EVAL_POSITIONS": "4", "STEPS": "2"}


def train(out, **settings):
    env = {**os.environ, **SMALL, "OUT_DIR": str(out), "DTYPE": "float32", **settings}
    return subprocess.run([sys.executable, "train.py"], cwd=ROOT, env=env, capture_output=True, text=True, timeout=300)


@pytest.fixture(scope="module")
def short_run(tmp_path_factory):
    out = tmp_path_factory.mktemp("run") / "out"
    result = train(out, EPOCHS="2", SAVE_EVERY="1", KEEP_CHECKPOINTS="1")
    assert result.returncode == 0, result.stderr
    return out, result


def test_a_short_run_leaves_what_it_promises(short_run):
    out, result = short_run
    rows = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows] == [1, 2]
    assert (out / "curves.png").read_bytes().startswith(b"\x89PNG")
    assert [folder.name for folder in out.glob("step-*")] == ["step-000002"]
    assert torch.load(out / "step-000002" / "trainer.pt", weights_only=True)["step"] == 2
    trained, start = GPT.load(out / "model"), GPT.load(ROOT / "weights" / "tiny")
    assert any(not torch.equal(a, b) for a, b in zip(trained.state_dict().values(), start.state_dict().values()))
    tokens = torch.arange(100)[None]
    hf = AutoModelForCausalLM.from_pretrained(out / "model")
    torch.testing.assert_close(hf(tokens).logits, trained(tokens), atol=1e-4, rtol=0)
    skill = json.loads((out / "skill.json").read_text())
    assert set(skill) == {"before", "after"} and "policy legal T=0" in skill["before"]
    assert "step 2/2 reward" in result.stdout and "● " in result.stdout


def test_the_feed_forward_layers_and_the_norms_gains_learn(short_run):
    """Four updates of Adam, of about a rate each: two at LR / 5, two at 2 LR / 5 in the warm-up; gains at 72 times, the
    last norm's at 1200 times."""
    trained, start = (GPT.load(folder).state_dict() for folder in (short_run[0] / "model", ROOT / "weights" / "tiny"))
    for name, weights in trained.items():
        moved = (weights - start[name]).abs().max().item() / (1.2 * 1e-4)
        gains = {"ln_1.weight": 72, "ln_2.weight": 72, "ln_f.weight": 1200}
        rate = next((rate for norm, rate in gains.items() if name.endswith(norm)), ".mlp." in name)
        assert 0.5 * rate <= moved <= 1.2 * rate, name


def test_the_first_step_starts_from_the_reference(short_run):
    rows = [json.loads(line) for line in (short_run[0] / "metrics.jsonl").read_text().splitlines()]
    assert abs(rows[0]["kl"]) < 1e-7 < abs(rows[1]["kl"])  # before any update KL is 0, after one it is not
    assert all(row["logprob_gap"] < 1e-4 for row in rows)  # sampling and training are one distribution
    assert all(row["skipped"] == 0 and row["grad_norm"] > 0 for row in rows)


def test_random_weights_are_refused_with_words(tmp_path):
    torch.manual_seed(0)
    model = GPT(GPTConfig(257, 384, 32, 1, 2, eos_token_id=256, chess_format="expanded"))
    model.tokenizer = Tokenizer.of_bytes()
    model.save(tmp_path / "random")
    result = train(tmp_path / "out", MODEL=str(tmp_path / "random"))
    assert result.returncode == 1 and "Traceback" not in result.stderr
    assert (
        result.stderr.strip().splitlines()[-1].startswith("error: only 0% of the first completions have the structure")
    )


@pytest.mark.parametrize(
    "settings, said",
    [
        ({"MODEL": "nowhere"}, "nowhere"),
        ({"DATA": "nowhere.pgn"}, "nowhere.pgn"),
        ({"KL_TARGET": "0.1", "KL_COEF": "0"}, "KL_TARGET"),
        ({"GROUP_SIZE": "1"}, "GROUP_SIZE=1 is out of range"),
        ({"STEP": "5"}, "did you mean STEPS?"),
    ],
)
def test_impossible_settings_are_refused_in_one_sentence(tmp_path, settings, said):
    result = train(tmp_path / "out", **settings)
    assert result.returncode == 1 and said in result.stderr
    assert result.stderr.startswith("error: ") and result.stderr.count("\n") == 1
    assert not (tmp_path / "out").exists()
