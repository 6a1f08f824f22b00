"""Defaults by the size of the model: which one is taken, and that a run tells."""

import json
import runpy
import sys
from unittest import mock

import pytest
import torch

import architectures
import pretend_cuda
import rewards
import toy
import train
from model import GPT, GPTConfig
from nanorook import hardware, settings, sizes
from nanorook.tokenizer import Tokenizer
from toy import ROOT

LARGE, SMALL = dict(n_embd=768, n_layer=12), dict(n_embd=384, n_layer=6)
BOTH_SIDES = {50_000_000: {}, 50_000_001: sizes.TABLE[50e6], 494_000_000: sizes.TABLE[50e6] | {"TEMPERATURE": 1.0}}


@pytest.fixture
def shape(tmp_path):
    """shape(n_layer=12, ...) is a folder that has a config.json and nothing else."""

    def write(**sizes):
        (tmp_path / "config.json").write_text(json.dumps({"model_type": "gpt2", **sizes}))
        return str(tmp_path)

    return write


def settings_of(*arguments, **environment):
    """train.py's, as a user's command sets them."""
    with pytest.MonkeyPatch.context() as patch, mock.patch.dict("os.environ", environment):
        for name in ("SETTINGS", "HEADINGS"):
            patch.setattr(settings, name, {})
        patch.setattr(settings, "GIVEN", dict(settings.GIVEN))
        patch.setattr(sys, "argv", ["train.py", *arguments])
        settings.read_user()
        runpy.run_path(str(ROOT / "train.py"))
        return settings.values()


def test_a_users_value_comes_before_the_sizes_before_the_tasks_before_the_programs(shape):
    mates, model = "TASK=examples/mates.py", f"MODEL={shape(**LARGE)}"
    found = settings_of(mates, model, "GROUP_SIZE=4", TEMPERATURE="0.9")
    assert (found["GROUP_SIZE"], found["TEMPERATURE"]) == (4, 0.9)  # the user's
    assert (found["LR"], found["BATCH_POSITIONS"]) == (1e-5, 8)  # the size's, where mates has 3e-4 and 64
    assert (found["STEPS"], found["KL_COEF"], found["CLIP_RANGE"]) == (300, 0.03, 0.2)  # the task's, and train.py's
    own = settings_of(model)
    assert [own[name] for name in sizes.TABLE[50e6]] == [1e-5, 8, 8, 0.7] and own["KL_COEF"] == 0.2  # of chess
    small = f"MODEL={shape(**SMALL)}"
    assert [settings_of(mates, small)[name] for name in sizes.TABLE[50e6]] == [3e-4, 64, 32, 1.0]
    assert settings_of(small) | {"MODEL": ""} == settings_of()


def test_the_defaults_of_a_task_for_large_models_come_before_those_of_the_size(shape):
    gsm8k, model = "TASK=examples/gsm8k.py", f"MODEL={shape(**LARGE)}"
    assert [settings_of(gsm8k, model)[name] for name in sizes.TABLE[50e6]] == [1e-5, 16, 8, 1.0]
    task = mock.Mock(LARGE=True, DEFAULTS={"LR": 5e-5})
    found = sizes.defaults(shape(**LARGE), task, architectures.count_parameters)
    assert found == {"BATCH_POSITIONS": 8, "GROUP_SIZE": 8, "TEMPERATURE": 0.7}  # what the task does not name


@pytest.mark.parametrize("parameters", BOTH_SIDES)
def test_both_sides_of_50_million_parameters(parameters):
    assert sizes.defaults("a/b", mock.Mock(LARGE=False), lambda model: parameters) == BOTH_SIDES[parameters]


@pytest.mark.parametrize("words", [(), ("--help",)])
def test_the_size_is_known_without_the_weights_and_help_needs_no_network(words, monkeypatch, shape, capsys):
    asked = []

    def hub(source, allow_patterns):
        asked.append(allow_patterns)
        return shape(**LARGE)

    monkeypatch.setattr("huggingface_hub.snapshot_download", hub)
    found = settings_of("MODEL=jrahn/RookWorld-LM-124M", *words)
    assert (asked, found["LR"]) == (([], 2e-4) if words else ([["config.json", "adapter_config.json"]], 1e-5))


def test_a_run_tells_in_one_line_what_was_chosen_and_a_resumed_one_keeps_it(tmp_path, toy_model, monkeypatch, capsys):
    monkeypatch.setattr(sizes, "TABLE", {1e3: {"LR": 0.25, "GROUP_SIZE": 2, "TEMPERATURE": 1.0}})
    monkeypatch.delitem(toy.SETTINGS, "LR")
    monkeypatch.delitem(toy.SETTINGS, "GROUP_SIZE")
    changes = dict(MODEL=toy_model, TEMPERATURE=0.9, LR_SCHEDULE="constant")
    for steps in (1, 2):
        assert toy.main(tmp_path, STEPS=steps, **changes) is None
        [told] = [line for line in capsys.readouterr().out.splitlines() if line.startswith("LR=")]
        assert told.startswith(f"LR=0.25 SEED=0 STEPS={steps} BATCH_POSITIONS=4 GROUP_SIZE=2 TEMPERATURE=0.9 ")
        assert told.endswith(" (by the size of the model: LR, GROUP_SIZE)")
    first, second = toy.rows(tmp_path)
    assert first["lr"] == second["lr"] == 0.25


def test_a_model_of_another_format_is_refused_before_the_first_step(tmp_path, few_positions, byte_model):
    byte_model.config.extra["chess_format"] = "uci"
    byte_model.save(tmp_path / "model")
    said = toy.main(tmp_path / "out", TASK="rewards.py", DATA=few_positions, MODEL=tmp_path / "model")
    assert said.startswith("error: config.json: chess_format is 'uci', but it must be 'rookworld', 'expanded' or 'sq")
    assert not (tmp_path / "out" / "metrics.jsonl").exists() and not (tmp_path / "out" / "skill.json").exists()


def test_a_step_of_124_million_parameters_takes_less_than_22_of_24_gb(toy_settings, monkeypatch, gpt2_folder):
    """By the formula of hardware.py, for the largest microbatch, with reference, optimizer and the sampler's copy."""
    with torch.device("meta"):
        model = GPT(GPTConfig()).set_compute_dtype(torch.bfloat16)
    loaded = hardware.bytes_loaded(model, has_reference=True)
    toy.set_all(monkeypatch, sizes.TABLE[50e6] | {"MICROBATCH_TOKENS": 0}, rewards)
    prompt = rewards.policy_prompt("r1bqkb1r/pppp1ppp/2n2n2/4p2Q/2B1P3/8/PPPP1PPP/RNB1K1NR w KQkq - 4 4", "rookworld")
    with pretend_cuda.on(monkeypatch, free=24e9 - loaded):
        model.to_empty(device="cuda")
        model.tokenizer = Tokenizer.load(gpt2_folder)
        kind, limit = max(rewards.LIMITS.items(), key=lambda item: item[1])
        tokens, keys = train.plan_memory(model, [toy.Question(kind, prompt, None)]), len(model.tokenizer.encode(prompt))
        keys += limit
        used = hardware.bytes_in_training(model, tokens, keys)
    assert not model.recompute and tokens > train.GROUP_SIZE * (keys + limit)
    assert loaded + used < 22e9
