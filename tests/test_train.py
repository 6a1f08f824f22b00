"""train.py: what a run leaves, how it goes on, and what it refuses."""

import gc
import gzip
import json

import pytest
import torch

import toy
import train
from model import GPT
from nanorook import checkpoint, hardware, monitor, parallel
from toy import ROOT, user_runs


@pytest.fixture(scope="module")
def chess_run(tmp_path_factory):
    """A run of the embedded model, with settings from the arguments and the environment, on few of its positions."""
    out, data = tmp_path_factory.mktemp("chess") / "out", tmp_path_factory.mktemp("data") / "positions.txt"
    data.write_bytes(b"".join(gzip.open(ROOT / "data" / "positions.txt.gz").readlines()[:400]))
    arguments = "STEPS=2 BATCH_POSITIONS=2 GROUP_SIZE=3 MIX_ENV_RATIO=0.5 WARMUP_STEPS=0 DTYPE=float32 EVAL_POSITIONS=2"
    started = "train.py", *arguments.split(), f"DATA={data}"
    result = user_runs(*started, OUT_DIR=str(out), SAVE_EVERY="1", MODELS="/srv/models")
    assert result.returncode == 0, result.stderr
    return out, result


def test_a_run_leaves_what_it_promises(chess_run):
    out, result = chess_run
    assert [row["step"] for row in toy.rows(out)] == [1, 2]
    assert "<html" in (out / "report.html").read_text().lower()
    assert [folder.name for folder in checkpoint.folders(out)] == ["step-000002", "step-000001"]
    assert {"policy reward T=0", "environment reward T=1"} <= {*json.loads((out / "skill.json").read_text())["after"]}
    assert json.loads((out / "settings.json").read_text())["SAVE_EVERY"] == 1
    assert {"command", "commit", "machine", "dtype"} <= {*json.loads((out / "run.json").read_text())}
    assert "step 2/2 reward" in result.stdout and "● " in result.stdout
    assert "warning: the environment has MODELS" in result.stderr  # another program's: no error


def test_transformers_opens_the_trained_model_and_all_its_weights_have_learnt(chess_run):
    from transformers import AutoModelForCausalLM

    trained, start = GPT.load(chess_run[0] / "model"), GPT.load(ROOT / "weights" / "tiny")
    for name, weight in trained.state_dict().items():
        assert not torch.equal(weight, start.state_dict()[name]), name
    tokens = torch.arange(100)[None]
    hf = AutoModelForCausalLM.from_pretrained(chess_run[0] / "model")
    torch.testing.assert_close(hf(tokens).logits, trained(tokens), atol=1e-4, rtol=0)


def test_an_error_is_one_sentence(tmp_path):
    for setting, beginning in (("MODEL=nowhere", "error: nowhere"), ("DEVICE=gpu", "error: gpu is no device")):
        result = user_runs("train.py", setting, OUT_DIR=str(tmp_path))
        assert result.returncode == 1 and result.stdout == ""
        assert result.stderr.startswith(beginning) and result.stderr.count("\n") == 1


def test_fresh_deletes_nothing_that_it_needs(toy_run, tmp_path):
    toy_run()
    for change, sentence in (
        (dict(MODEL=str(tmp_path / "out/latest")), "lies in OUT_DIR"),
        (dict(MODEL="x"), "no such"),
    ):
        with pytest.raises(SystemExit, match=sentence):
            toy_run(FRESH=True, **change)
        assert toy.rows(tmp_path / "out") and (tmp_path / "out/latest/config.json").exists()


def test_a_run_is_the_same_each_time_and_its_seed_is_kept(toy_run, tmp_path):
    rows = toy_run("a")
    assert toy_run("b") == rows != toy_run("c", SEED=1)
    gc.collect()
    with pytest.raises(SystemExit, match="started with SEED=1; use that again, or name another OUT_DIR"):
        toy_run("c", SEED=2)
    gc.collect()
    assert toy_run("c", SEED=0, FRESH=True) == rows
    gc.collect()
    with pytest.raises(SystemExit, match="holds a finished run of 2 steps; name another OUT_DIR, raise STEPS"):
        toy_run("c", SEED=0)
    gc.collect()
    toy_run("c", SEED=0, STEPS=3)
    assert list(json.loads((tmp_path / "c" / "skill.json").read_text())) == ["before", "step 2", "after"]


def test_todays_settings_and_optimizer_count(toy_run, tmp_path, monkeypatch, capsys):
    toy_run(STEPS=1, LR=1e-3, LR_SCHEDULE="constant")
    row = toy_run(STEPS=2, LR=1e-2, KL_COEF=0.2, GROUP_SIZE=3, LR_SCHEDULE="constant")[1]
    assert row["kl_coef"] == 0.2 and row["lr"] == 1e-2
    printed = capsys.readouterr().out
    assert "KL_COEF was 0.01 and is now 0.2" in printed and "GROUP_SIZE was 4 and is now 3" in printed
    monkeypatch.setattr(train, "make_optimizer", lambda model: torch.optim.AdamW(model.parameters(), weight_decay=0.5))
    toy_run(STEPS=3, KL_COEF=0.3)
    state = torch.load(tmp_path / "out" / "latest" / "trainer.pt", weights_only=True)
    assert state["settings"]["KL_COEF"] == 0.3 and state["optimizer"]["param_groups"][0]["weight_decay"] == 0.5


def test_a_reference_that_has_moved_is_kept_or_left_out(toy_run):
    changes = dict(REF_UPDATE_EVERY=2, STEPS=3, LR=0.01, LR_SCHEDULE="constant")
    kl = [row["kl"] for row in toy_run(**changes)]
    assert kl[0] < 1e-6 < kl[1] and kl[2] < 1e-6  # the policy has become the reference after step 2
    assert "kl" not in toy_run(**changes | {"STEPS": 5, "KL_COEF": 0.0})[4]
    assert toy_run(**changes | {"STEPS": 6})[5]["kl"] > 1e-6


def test_the_best_checkpoint_is_kept_whenever_it_is_evaluated(toy_run, monkeypatch, tmp_path):
    scores = {0: 0.0, 2: 0.9, 4: 0.5, 6: 0.1, 8: 0.1, 9: 0.2}
    figures = lambda model, exam, file, step: {f"kind reward T={t}": (scores[step], 0.0) for t in (0, 1)}  # noqa: E731
    monkeypatch.setattr(train, "evaluate", figures)
    toy_run(STEPS=9, EVAL_EVERY=2, SAVE_EVERY=3)
    assert [folder.name for folder in checkpoint.folders(tmp_path / "out")] == [f"step-{n:06d}" for n in (9, 8, 2)]


def test_the_dtype_is_decided_once_by_the_first_process(toy_run, monkeypatch, tmp_path):
    monkeypatch.setattr(hardware, "fastest_dtype", lambda device: torch.bfloat16)
    toy_run(DTYPE="auto", STEPS=1)
    monkeypatch.setattr(hardware, "fastest_dtype", lambda device: torch.float32)
    toy_run(DTYPE="auto", STEPS=2)
    monkeypatch.setattr(parallel, "from_lead", lambda value: "bfloat16" if value == "float32" else value)
    toy_run("other", DTYPE="auto", STEPS=1)
    for out in ("out", "other"):  # as at the run's start, and as the first process says, although another is faster now
        assert json.loads((tmp_path / out / "run.json").read_text())["dtype"] == "bfloat16"


def test_a_batch_that_cannot_be_filled_or_divided_is_refused(toy_run, monkeypatch):
    """Divided among processes that were asked for, not among those that a machine could run."""
    with pytest.raises(SystemExit, match="100 items to train on, fewer than BATCH_POSITIONS=101"):
        toy_run("large", BATCH_POSITIONS=101)
    assert toy_run(BATCH_POSITIONS=3, STEPS=1)[0]["tokens"] > 0
    monkeypatch.setattr(parallel, "world", lambda: 2)
    monkeypatch.setattr(parallel, "start", lambda device, processes: device)
    with pytest.raises(SystemExit, match="BATCH_POSITIONS=3 cannot be divided among 2 processes; use a multiple of 2"):
        toy_run("two", BATCH_POSITIONS=3)


def test_evaluation_is_the_mean_of_the_grades(toy_settings, tmp_path):
    model, questions = toy.model(), toy.questions(40)
    figures = train.evaluate(model, questions, tmp_path / "samples.jsonl", 7)
    noise = torch.rand(40, 1, 7, generator=torch.Generator().manual_seed(0))
    samples = [s for _, some in train.sample(model, questions, 1, 1.0, noise) for s in some]
    expected = {f"{name} T=1": figure for name, figure in monitor.intervals(samples).items()}
    assert len(expected) == 4 and figures | expected == figures
