"""What transformers.generate takes for the same completions, in a few settings; for tools/bench.py."""

import tempfile
import time

import torch

from tools.limits import synchronise

SETTINGS = {  # dtype, cache, activation (GPT-2's gelu_new is written out as many small operations), compiled
    "default (float32, dynamic cache)": (torch.float32, "dynamic", "gelu_new", False),
    "float32, dynamic cache, fused GELU": (torch.float32, "dynamic", "gelu_pytorch_tanh", False),
    "float32, static cache, fused GELU": (torch.float32, "static", "gelu_pytorch_tanh", False),
    "bfloat16, dynamic cache, fused GELU": (torch.bfloat16, "dynamic", "gelu_pytorch_tanh", False),
    "bfloat16, static cache, fused GELU": (torch.bfloat16, "static", "gelu_pytorch_tanh", False),
    "bfloat16, static cache, fused GELU, compiled": (torch.bfloat16, "static", "gelu_pytorch_tanh", True),
}
DEFAULT = next(iter(SETTINGS))


def generate(model, prompts, group_size, new, device):
    """{setting: a function of the run's number that gives seconds}, with the same weights and prompts; none of them
    where transformers is not installed."""
    try:
        from transformers import CompileConfig, GPT2LMHeadModel, logging
    except ImportError:
        return {}
    logging.disable_progress_bar()
    compiling = CompileConfig()
    compiling._compile_all_devices = True  # also on CPU, where transformers leaves it out
    longest, models = max(map(len, prompts)), {}
    padded = [[0] * (longest - len(p)) + p for p in prompts]  # on the left, as generate wants it
    mask = [[0] * (longest - len(p)) + [1] * len(p) for p in prompts]
    inputs = {"input_ids": torch.tensor(padded).to(device), "attention_mask": torch.tensor(mask).to(device)}
    with tempfile.TemporaryDirectory() as folder:
        model.save(folder)
        for dtype, _, activation, _ in SETTINGS.values():
            if (dtype, activation) not in models:
                peer = GPT2LMHeadModel.from_pretrained(folder, dtype=dtype, activation_function=activation)
                peer.generation_config.eos_token_id = None  # nothing ends early
                models[dtype, activation] = peer.eval().to(device)

    def runner(dtype, cache, activation, compiled):
        def run(i):
            torch.manual_seed(i)
            synchronise(device)
            start = time.perf_counter()
            out = models[dtype, activation].generate(
                **inputs, num_return_sequences=group_size, max_new_tokens=new, do_sample=True, top_k=0, pad_token_id=0,
                cache_implementation=cache, disable_compile=not compiled,
                compile_config=compiling if compiled else None,
            )  # fmt: skip
            synchronise(device)
            seconds = time.perf_counter() - start
            assert out.shape == (len(prompts) * group_size, longest + new)
            return seconds

        return run

    return {name: runner(*setting) for name, setting in SETTINGS.items()}


def look(run):
    """Seconds of a setting, the better of two runs after one; or why there are none."""
    try:
        return min([run(i) for i in range(3)][1:])
    except Exception as error:  # no compiler, or a cache that this version does not have
        return f"failed ({type(error).__name__})"
