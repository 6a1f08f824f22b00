"""nanorook/hardware.py: the device that a setting names, or one sentence."""

import pytest
import torch

import pretend_cuda
from nanorook.hardware import choose_device


@pytest.mark.parametrize("name", ["mps", "meta", "gpu", "cuda:x", "cuda:", "cuda:2"])
def test_a_device_that_cannot_train_is_refused(monkeypatch, name):
    with pretend_cuda.on(monkeypatch, devices=2):
        assert [str(choose_device(name)) for name in ("auto", "cuda:1", "cpu")] == ["cuda", "cuda:1", "cpu"]
        with pytest.raises(SystemExit, match=f"^error: .*{name}.*; use auto"):
            choose_device(name)


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")
def test_without_a_gpu_cuda_is_refused():
    assert str(choose_device()) == "cpu"
    with pytest.raises(SystemExit, match="no device cuda to train on; use auto, cpu"):
        choose_device("cuda")
