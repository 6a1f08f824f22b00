import os
import random
import shutil
import signal
import sys

import chess
import pytest
import torch

import architectures
import pretend_cuda
import rewards
import toy
from model import GPT
from nanorook import hardware, lora
from nanorook.tokenizer import Tokenizer
from rollout import detokenize
from rook import positions
from rook.positions import contract_board
from tools import chess_pretrain as pretrain
from tools import chess_texts as texts
from tools.chess_label import write_position

SHAPE = "--layers 1 --width 32 --heads 2".split()
TOKENIZERS = {"squares": Tokenizer.of_bytes(chess.SQUARE_NAMES), "expanded": Tokenizer.of_bytes()}
LABELLED = positions.split(positions.load("builtin")[:6000])[0]
RARE = texts.rare_kinds(LABELLED)
FEN = "r1b1k2r/pp3ppp/2n5/3qP3/3P4/2P2N2/P4PPP/R1BQK2R w KQkq - 1 11"


@pytest.fixture
def run(monkeypatch, tmp_path):
    """run("folder", "--steps", 3, at_2=action) is a run in this process, with something that happens at a step."""

    def run(out, *arguments, **at):
        schedule = pretrain.schedule
        shape = [] if "--init" in arguments else SHAPE
        monkeypatch.setattr(hardware, "fastest_dtype", lambda device: torch.float32)
        monkeypatch.setattr(sys, "argv", ["pretrain", str(tmp_path / out), *shape, "--rows", "8", *map(str, arguments)])
        with monkeypatch.context() as patch:
            patch.setattr(pretrain, "schedule", lambda step, *end: at.get(f"at_{step}", int)() or schedule(step, *end))
            pretrain.main()
        return tmp_path / out

    return run


@pytest.fixture(scope="module")
def few(tmp_path_factory):
    file = tmp_path_factory.mktemp("positions") / "few.txt"
    file.write_text("\n".join(map(write_position, LABELLED[:10])))
    return file


def draw(step, text_format="squares", rows=96):
    return texts.draw(random.Random(step), texts.task_rows(step, rows, text_format, True), LABELLED, RARE, text_format)


def board_of(prompt):
    return chess.Board(contract_board(prompt[3:].split("+")[0].strip()))


@pytest.mark.parametrize("text_format", [*TOKENIZERS, "rookworld"])
def test_every_text_is_a_perfect_answer(text_format):
    both = [*LABELLED, *map(texts.mirror, LABELLED)]
    drawn, known = draw(2000, text_format), {p.fen: p for p in both}
    for prompt, answer in drawn["policy"]:
        question = rewards.policy_question(known[board_of(prompt).fen()], text_format)
        assert question.prompt == prompt and rewards.grade(question, answer).reward == pytest.approx(1)
    first = [answer.split("M: ")[1].startswith(answer.split("B: ")[1]) for _, answer in drawn["policy"]]
    assert all(first) or text_format == "rookworld" and any(first)  # it alone lists moves in random order
    for prompt, answer in drawn["environment"]:
        move, history = prompt.split("+")[1:3]
        assert history.split()[-1] == move
        truth = rewards.transition(board_of(prompt).fen(), move)
        assert rewards.grade(rewards.Question("environment", prompt, truth), answer).reward == pytest.approx(1)
    assert drawn.keys() == texts.TASKS.keys() or text_format == "rookworld"
    for prompt, answer in drawn.get("legal", []):
        legal, moves = {move.uci() for move in board_of(prompt).legal_moves}, answer.split()
        assert set(moves) <= legal and len(set(moves)) == len(moves) == min(19, len(legal))
    for prompt, answer in drawn.get("judge", []):
        legal = {move.uci() for move in board_of(prompt).legal_moves}
        assert [(word[:-1] in legal) == (word[-1] == "+") for word in answer.split()] == [True] * 16
        assert {word[-1] for word in answer.split()} == {"+", "-"}
    assert min(map(len, drawn.values())) >= 11


def test_no_text_shows_a_held_out_board_and_what_is_rare_comes_often():
    checks, legal, captures, drawn = 0, 0, 0, draw(4000, rows=2000)
    for prompt, answer in (text for some in drawn.values() for text in some):
        board = board_of(prompt)
        checks += board.is_check()
        assert not positions.held_out(board.fen())
        if prompt.startswith("A: "):
            assert not positions.held_out(contract_board(answer.split("+")[0]))
            legal += answer.endswith("+0")
            captures += answer.endswith("+0") and board.is_capture(chess.Move.from_uci(prompt.split("+")[1]))
    assert 0.12 < checks / 2000 < 0.25 and 0.34 < captures / legal < 0.46  # a twelfth of boards in games are checks


def test_what_is_easy_counts_less_and_what_decides_counts_more():
    question = rewards.environment_question(positions.Position(FEN, (), (), "e1g1"), random.Random(0), "squares")
    answer, tokenizer = texts.environment_completion(*question.truth, "squares"), TOKENIZERS["squares"]
    _, _, targets, weights, *_ = texts.tokenize([(question.prompt, answer)], tokenizer, "squares")
    decisive = texts.DECISIVE_WEIGHT
    wanted = [texts.UNCHANGED_WEIGHT] * 71 + [1] * (len(tokenizer.encode(answer)) + 1 - 71)
    wanted[7 * 9 + 5] = wanted[7 * 9 + 7] = 1  # the rook leaves h1 for f1
    wanted[7 * 9 + 4] = wanted[7 * 9 + 6] = wanted[answer.index(" 2 11+") + 1] = decisive  # e1, g1, the clock
    wanted = [0, 0, decisive] + [texts.ENVIRONMENT_WEIGHT * weight for weight in wanted]  # "+" marks a legal move
    assert weights.tolist() == pytest.approx(wanted)
    assert detokenize(tokenizer, targets[3:].tolist())[0] == answer and targets[-1] == tokenizer.eos
    policy = rewards.policy_prompt(FEN, "squares"), "M: e1g1 d1d3 E: 0.9 0.2 B: e1g1"
    _, _, _, weights, *_ = texts.tokenize([policy], tokenizer, "squares")
    assert weights[-3:].tolist() == [decisive, decisive, 1] and set(weights[:-3].tolist()) == {1}  # the move after B:


@pytest.mark.parametrize("text_format", TOKENIZERS)
def test_probability_that_leads_to_no_legal_move_is_counted_wherever_a_text_has_moves(text_format):
    """At each token of a move: the tokens with which some move that is legal, and not listed before, goes on."""
    tokenizer = TOKENIZERS[text_format]
    for task, some in draw(2000, text_format, rows=64).items():
        _, _, targets, weights, moves, allowed = texts.tokenize(some, tokenizer, text_format)
        right = allowed[range(len(moves)), targets[moves]]
        if task == "judge":  # only its marks count
            assert len(moves) == 0 and (weights > 0).sum() == 16 * len(some)
        else:  # the environment is asked about illegal moves, too, and no move of a prompt is predicted by itself
            assert 0.6 < right.mean() < 1 and not weights[moves].any() if task == "environment" else right.all()

    promotion, king, nowhere = "a7/a1 a8 q/r/b/n", "a7/a1 a2/b1/b2", "a7/a1 a2/b1/b2"
    if text_format != "squares":  # no legal move goes on after a1h
        promotion, king, nowhere = "a 7/1 a 8 q/r/b/n", "a 7/1 a/b 1/2", "a 7/1 a/b"
    fen, environment = "8/P6k/8/8/8/8/8/K7 w - - 0 1", rewards.environment_prompt
    policy = rewards.policy_prompt(fen, text_format), "M: a7a8n a1b1 E: 1 2 B: a1b1", f"{promotion} {king}"
    asked = [(environment(fen, m, [m], text_format), "...", t) for m, t in (("a7a8n", promotion), ("a1h8", nowhere))]
    for prompt, answer, wanted in (policy, *asked):
        marks = [tokens for _, tokens in texts.legal_tokens(prompt, answer, tokenizer)]
        found = [{detokenize(tokenizer, [token])[0] for token in tokens} for tokens in marks]
        assert found == [{*n.split("/")} for n in wanted.split()]


def test_rookworlds_texts_are_whole_lines_in_gpt2s_tokens_which_all_count_the_same(gpt2_folder):
    gpt2 = Tokenizer.load(gpt2_folder)
    for some in draw(0, "rookworld").values():
        inputs, _, targets, weights, moves, _ = texts.tokenize(some, gpt2, "rookworld")
        lines = [gpt2.encode(prompt + answer) for prompt, answer in some]
        assert [[t for t in row if t] for row in inputs.tolist()] == lines  # 0 is "!"
        answers = [token for prompt, answer in some for token in (*gpt2.encode(answer), gpt2.eos)]
        assert targets.tolist() == answers and {*weights.tolist()} == {1} and len(moves) == 0
    assert texts.task_rows(0, 64, "rookworld", True) == {"policy": 38, "environment": 26, "judge": 0, "legal": 0}


def test_a_gpu_trains_as_the_cpu_does(run, few, monkeypatch):
    models = [GPT.load(run("cpu", "--data", few, "--steps", 1))]
    with pretend_cuda.on(monkeypatch):
        monkeypatch.setattr(hardware, "compiles", lambda *a: False)
        models.append(GPT.load(run("gpu", "--data", few, "--steps", 1)))
    for a, b in zip(*(model.state_dict().values() for model in models), strict=True):
        torch.testing.assert_close(a, b)


def test_killed_and_resumed_equals_never_killed(run, few, tmp_path, capsys):
    arguments = "--data", few, "--steps", 6, "--save-every", 2
    run("whole", *arguments)
    with pytest.raises(ZeroDivisionError):
        run("broken", *arguments, at_5=lambda: 1 / 0)  # the end of step 4 was saved, step 5 is lost
    with pytest.raises(SystemExit, match="stopped at step 5; the same command resumes from there"):
        run("broken", *arguments, at_4=lambda: os.kill(os.getpid(), signal.SIGTERM))
    run("broken", *arguments, "--workers", 2)  # no draw depends on how many processes make the texts
    assert "resumed" in capsys.readouterr().out
    whole, broken = (torch.load(tmp_path / name / "trainer.pt") for name in ("whole", "broken"))
    for name in "step", "model", "optimizers":
        torch.testing.assert_close(whole[name], broken[name], rtol=0, atol=0)
    weights = tmp_path / "broken/model.safetensors"
    written = weights.read_bytes()
    weights.write_bytes(b"")  # as after a kill between trainer.pt and the model
    run("broken", *arguments)
    assert weights.read_bytes() == written


def test_a_llama_that_is_trained_further_is_resumed_and_adapters_are_merged(run, few, tmp_path, capsys):
    sizes = dict(vocab_size=300, hidden_size=32, intermediate_size=48, num_hidden_layers=1, num_attention_heads=2)
    sizes |= dict(max_position_embeddings=512, chess_format="expanded")
    folder = toy.save_hf(toy.hf_model("llama", **sizes), tmp_path / "llama")
    model = architectures.load(folder)
    lora.add(model, 2, 0, str(folder))
    lora.save(model, tmp_path / "adapters")
    arguments = "--init", tmp_path / "adapters", "--data", few, "--steps", 2, "--save-every", 1
    with pytest.raises(ZeroDivisionError):
        run("more", *arguments, at_1=lambda: 1 / 0)
    run("more", *arguments)
    assert "resumed" in capsys.readouterr().out


def test_only_five_labels_are_taught(few):
    [position] = positions.load(few)[:1]
    many = position._replace(moves=tuple((uci, 0) for uci in "a2a3 b2b3 c2c3 d2d3 e2e3 f2f3 g2g3".split()))
    _, text = texts.policy_text(many, random.Random(0), "squares")
    assert text.startswith("M: a2a3 b2b3 c2c3 d2d3 e2e3 E:")


def test_learning_rates_rise_are_held_and_fall_to_zero_at_the_end():
    rates = [pretrain.schedule(step, 1000, 0.3) for step in (0, 49, 99, 400, 700, 850, 999)]
    assert rates == pytest.approx([0.01, 0.5, 1, 1, 1, 0.5, 1 / 300]) and pretrain.schedule(999, 1000, 0) == 1


def test_it_learns(run, few, monkeypatch):
    """The loss of the ideal answers to its training positions falls from chance, log 321 = 5.8, to far below it."""
    monkeypatch.setattr(pretrain, "WARMUP", 5)
    model = GPT.load(run("m", "--data", few, "--steps", 40, "--lr", 0.01, "--lr-matrix", 0.03))
    some = [texts.policy_text(p, random.Random(0), "squares") for p in positions.load(few)]
    inputs, places, targets, *_ = map(torch.from_numpy, texts.tokenize(some, model.tokenizer, "squares"))
    assert len(some) == 10 and torch.nn.functional.cross_entropy(model(inputs).flatten(0, 1)[places], targets) < 3.5


def test_weights_of_the_loss_reach_the_update(run, few, monkeypatch):
    models = [GPT.load(run("m", "--data", few, "--steps", 1))]
    for module, weight in (pretrain, "LEGAL_WEIGHT"), (texts, "DECISIVE_WEIGHT"):
        with monkeypatch.context() as patch:
            patch.setattr(module, weight, 0)
            models.append(GPT.load(run(weight, "--data", few, "--steps", 1)))
    assert len({model.wte.weight.sum().item() for model in models}) == 3


def test_gpt2s_kind_of_model_in_rookworlds_format(run, few, bpe_folder, monkeypatch):
    monkeypatch.setitem(pretrain.TOKENIZERS, "rookworld", lambda: Tokenizer.load(bpe_folder))
    first = run("m", "--data", few, "--steps", 2, "--format", "rookworld", "--positions", 512, "--half")
    model = GPT.load(run("n", "--data", few, "--steps", 1, "--init", first))
    assert model.config.extra["chess_format"] == "rookworld"
    assert model.config.vocab_size == model.tokenizer.vocab_size


def test_folders_that_are_not_its_own_are_refused(run, few, tmp_path):
    weights = shutil.copytree("weights/tiny", tmp_path / "m") / "model.safetensors"
    before = weights.read_bytes()
    with pytest.raises(SystemExit, match="m holds a model that this program has not made; name another folder"):
        run("m", "--data", few, "--steps", 1)
    torch.save({"step": 8}, tmp_path / "m/trainer.pt")  # a checkpoint of train.py's has one of its own
    with pytest.raises(SystemExit, match="trainer.pt belongs to another model; name another folder"):
        run("m", "--data", few, "--steps", 1)
    assert weights.read_bytes() == before
    file = run("n", "--data", few, "--steps", 1) / "trainer.pt"
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1  # among the weights
    file.write_bytes(content)
    with pytest.raises(ValueError, match="archive/data"):
        run("n", "--data", few, "--steps", 2)


def test_what_cannot_be_done_is_said(run, few, tmp_path, capsys):
    (tmp_path / "fens.txt").write_text("4k3/8/8/8/8/8/8/4K2R w K - 0 1\n4k3/8/8/8/8/8/8/R3K3 w Q - 0 1")
    for arguments, said in (
        (f"--data {tmp_path}/fens.txt", "no labelled position"),
        ("--lr nan", "argument --lr: nan is not a number from 0 to 1"),
        ("--heads 3", "--width 32 has to be a multiple of --heads 3"),
        ("--init weights/tiny --layers 6", "--init has a shape and a format of its own; leave out --layers"),
        ("--init weights/tiny --format squares", "--init has a shape and a format of its own; leave out --format"),
    ):
        with pytest.raises(SystemExit) as stopped:
            run("m", "--steps", 1, *arguments.split())
        assert said in str(stopped.value) + capsys.readouterr().err
