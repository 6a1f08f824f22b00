import json
import os
import random
import runpy
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock

import chess
import pytest
import torch

import pretend_cuda
import rewards
from model import GPT, causal_attention
from nanorook import hardware
from nanorook.tokenizer import Tokenizer
from rollout import detokenize
from rook import positions
from rook.positions import contract_board
from tools import chess_pretrain as pretrain
from tools import chess_texts as texts
from tools.chess_label import write_position

SHAPE, TINY = "--layers 1 --width 32 --heads 2".split(), "--rows 8 --eval-positions 4 --dtype float32".split()
BYTES = Tokenizer.of_bytes()
TOKENIZERS = {"squares": Tokenizer.of_bytes(chess.SQUARE_NAMES), "expanded": BYTES, "rookworld": BYTES}
LABELLED = positions.split(positions.load("builtin")[:6000])
DATA = LABELLED[0], texts.rare_kinds(LABELLED[0])
FEN = "r1b1k2r/pp3ppp/2n5/3qP3/3P4/2P2N2/P4PPP/R1BQK2R w KQkq - 1 11"


@pytest.fixture
def run(monkeypatch, tmp_path):
    """run("folder", "--steps", 3, at_2=action) is a run in this process, with something that happens at a step."""

    def run(out, *arguments, **at):
        schedule = pretrain.schedule
        shape = [] if "--init" in arguments else SHAPE
        monkeypatch.setattr(sys, "argv", ["pretrain", str(tmp_path / out), *shape, *TINY, *map(str, arguments)])
        with monkeypatch.context() as patch:
            for kind in rewards.LIMITS:
                patch.setitem(rewards.LIMITS, kind, 4)
            patch.setattr(pretrain, "schedule", lambda step, *end: at.get(f"at_{step}", int)() or schedule(step, *end))
            pretrain.main()
        return tmp_path / out

    return run


@pytest.fixture(scope="module")
def gpt2(gpt2_folder):
    return Tokenizer.load(gpt2_folder)


@pytest.fixture(scope="module")
def few(tmp_path_factory):
    file = tmp_path_factory.mktemp("positions") / "few.txt"
    file.write_text("\n".join(map(write_position, LABELLED[0][:10] + LABELLED[1][:4])))
    return file


def draw(step, text_format="squares", rows=96):
    return texts.draw(random.Random(step), texts.task_rows(step, rows, text_format, True), *DATA, text_format)


def board_of(prompt):
    return chess.Board(contract_board(prompt[3:].split("+")[0].strip()))


@pytest.mark.parametrize("text_format", TOKENIZERS)
def test_every_text_is_a_perfect_answer(text_format):
    both = [*LABELLED[0], *map(texts.mirror, LABELLED[0])]
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
    for prompt, answer in drawn["legal"]:
        legal, moves = {move.uci() for move in board_of(prompt).legal_moves}, answer.split()
        assert set(moves) <= legal and len(set(moves)) == len(moves) == min(19, len(legal))
    assert ("judge" in drawn) == (text_format != "rookworld")
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
    _, _, targets, weights, *_ = texts.tokenize([(question.prompt, answer)], tokenizer, 512, "squares")
    decisive = texts.DECISIVE_WEIGHT
    wanted = [texts.UNCHANGED_WEIGHT] * 71 + [1] * (len(tokenizer.encode(answer)) + 1 - 71)
    wanted[7 * 9 + 5] = wanted[7 * 9 + 7] = 1  # the rook leaves h1 for f1
    wanted[7 * 9 + 4] = wanted[7 * 9 + 6] = wanted[answer.index(" 2 11+") + 1] = decisive  # e1, g1, the clock
    wanted = [0, 0, decisive] + [texts.ENVIRONMENT_WEIGHT * weight for weight in wanted]  # "+" marks a legal move
    assert weights.tolist() == pytest.approx(wanted)
    assert detokenize(tokenizer, targets[3:].tolist())[0] == answer and targets[-1] == tokenizer.eos
    policy = rewards.policy_prompt(FEN, "squares"), "M: e1g1 d1d3 E: 0.9 0.2 B: e1g1"
    _, _, _, weights, *_ = texts.tokenize([policy], tokenizer, 512, "squares")
    assert weights[-3:].tolist() == [decisive, decisive, 1] and set(weights[:-3].tolist()) == {1}  # the move after B:


@pytest.mark.parametrize("text_format", TOKENIZERS)
def test_probability_that_leads_to_no_legal_move_is_counted_wherever_a_text_has_moves(text_format, gpt2):
    """At each token of a move: the tokens with which some move that is legal, and not listed before, goes on."""
    tokenizer = gpt2 if text_format == "rookworld" else TOKENIZERS[text_format]
    for task, some in draw(2000, text_format, rows=64).items():
        _, _, targets, weights, moves, allowed = texts.tokenize(some, tokenizer, 512, text_format)
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
        marks = [tokens for _, tokens in texts.legal_tokens(prompt, answer, tokenizer, text_format)]
        found = [{detokenize(tokenizer, [token])[0] for token in tokens} for tokens in marks]
        if text_format == "rookworld" and prompt[0] == "P":  # a space belongs to the token after it
            wanted = wanted.replace("a 7/1", "_a 7/1")
        assert found == [{*n.replace("_", " ").split("/")} for n in wanted.split()]


def test_rookworlds_texts_in_gpt2s_tokens(gpt2):
    """They are those of the whole line, whatever pieces were weighed; texts of similar length are padded to one."""
    assert [gpt2.token_bytes[token] for token in gpt2.encode(" a7a8q")] == [b" a", b"7", b"a", b"8", b"q"]
    for task, some in draw(2000, "rookworld").items():
        parts = [inputs for _, (inputs, *_) in texts.batches({task: some}, gpt2, 320, "rookworld")]
        lines = [gpt2.encode(prompt + answer) for prompt, answer in some]
        assert sorted([t for t in row if t] for part in parts for row in part.tolist()) == sorted(lines)  # 0 is "!"
        assert all(pretrain.TEXT_TOKEN.fullmatch(gpt2.token_bytes[t].decode()) for line in lines for t in line)
        widths = [part.shape[1] for part in parts]
        assert len(parts) == 4 and widths == sorted(widths) and (widths[0] < widths[3] or task == "moves")


def test_what_counts_less_and_more_in_rookworlds_texts(gpt2):
    half, two, ten = 2 * texts.UNCHANGED_WEIGHT, 2, 2 * texts.DECISIVE_WEIGHT
    board = {"r1b1k2r": half, "2P2N2": half, "R1BQK2R": half, " KQkq": half, " 11": half, "0.001": two}
    for move, changes in (
        ("e1g1", {"R1BQ1RK1": two, " b": two, " kq": two, " 2": ten}),  # castles
        ("e1e3", {"R1BQK2R": two, "2P2N2": two, " w": half, " 1": ten, "-1.0": two}),  # is illegal, which shows there
    ):
        question = rewards.environment_question(positions.Position(FEN, (), (), move), random.Random(0), "rookworld")
        answer = texts.environment_completion(*question.truth, "rookworld")
        pieces = dict(texts.weigh(question.prompt, answer, "rookworld"))
        assert "".join(piece for piece, _ in texts.weigh(question.prompt, answer, "rookworld")) == answer
        for piece in pieces.keys() & (board | changes).keys():
            assert pieces[piece] == pytest.approx((board | changes)[piece]), piece
        assert changes.keys() <= pieces.keys()
    labels = (("e1g1", 90), ("d1d3", 20))
    prompt, line = texts.policy_text(positions.Position(FEN, (), labels), random.Random(0), "rookworld")
    fields = [(" " * 28, 0.1), (" M: d1d3 e1g1", 1), (" " * 20, 0.1), (" E: 0.2 0.9", 0.3), (" " * 32, 0.1)]
    assert texts.weigh(prompt, line, "rookworld") == [*fields, (" B: e1g1", 3)]
    prompt, line = texts.moves_text(positions.Position(FEN, (), labels), random.Random(0), "rookworld")
    _, _, targets, weights, *_ = texts.tokenize([(prompt, line)], gpt2, 320, "rookworld")
    assert targets[-1] == gpt2.eos and weights[-9:].tolist() == [1] * 8 + [0]  # it does not end there


def test_whole_lines_of_rookworlds_become_more():
    shares = [texts.task_rows(step, 64, "rookworld", True, 100) for step in (0, 50, 100)]
    assert [(rows["policy"], rows["moves"]) for rows in shares] == [(4, 12), (18, 10), (38, 0)]
    assert texts.task_rows(0, 64, "rookworld", False) == shares[2] | {"moves": 0}


def test_unused_tokens_share_a_row_as_if_the_softmax_had_all_of_them(run, few, gpt2_folder):
    arguments = "--data", few, "--format", "rookworld", "--tokenizer", gpt2_folder, "--eval-every", 1
    run("m", *arguments, "--steps", 1)
    folder = run("m", *arguments, "--steps", 2)  # resumed
    model, all_rows = GPT.load(folder), GPT.load(folder)
    text = texts.policy_text(positions.split(positions.load(few))[0][0], random.Random(0), "rookworld")
    inputs, places, targets, *_ = map(torch.from_numpy, texts.tokenize([text], model.tokenizer, 320, "rookworld"))
    unused = pretrain.unused_tokens(model)
    assert len(unused) == 50257 and unused.sum() == 48421

    row_of = pretrain.share_unused_row(model)
    assert len(model.wte.weight) == 1837 and torch.equal(row_of == 1836, unused)
    full = all_rows(inputs)[0, places].log_softmax(-1)
    states = pretrain.hidden(model, row_of[inputs])[0, places]
    shared = pretrain.log_probabilities(model, states, row_of.bincount())
    torch.testing.assert_close(shared[:, :-1], full[:, ~unused], rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(shared[:, -1], full[:, unused].logsumexp(-1), rtol=0, atol=1e-4)
    (full[range(len(targets)), targets].sum() + full[:, unused].logsumexp(-1).sum()).backward()
    (shared[range(len(targets)), row_of[targets]].sum() + shared[:, -1].sum()).backward()
    gradient = all_rows.wte.weight.grad
    near = {"rtol": 1e-3, "atol": 5e-4 * gradient.abs().max().item()}
    torch.testing.assert_close(model.wte.weight.grad[:-1], gradient[~unused], **near)
    torch.testing.assert_close(model.wte.weight.grad[-1], gradient[unused].sum(0), **near)
    for name, weight in pretrain.with_rows(model, row_of).state_dict().items():
        assert torch.equal(weight, all_rows.state_dict()[name])
    all_rows.wte.weight.data[0] += 1  # of a model that was trained on other texts, too
    assert torch.equal(pretrain.share_unused_row(all_rows), torch.arange(50257))


def test_which_squares_a_token_stands_for(gpt2):
    """Those that its letters or its number fill on python-chess's board, in texts of every task; all others, none."""
    squares = pretrain.squares_of_rows(SimpleNamespace(tokenizer=gpt2), torch.arange(gpt2.vocab_size))
    for prompt, answer in (text for some in draw(2000, "rookworld").values() for text in some):
        line, board = gpt2.encode(prompt + answer), board_of(prompt)
        found = pretrain.squares_of_tokens(torch.tensor([line]), squares)[0]
        for token, places in zip(line, found):
            pieces = [board.piece_at(place ^ 56) for place in places.nonzero()[:, 0].tolist()]  # a FEN begins at a8
            text = gpt2.token_bytes[token].decode().strip()
            assert not pieces or text == ("".join(map(str, pieces)) if any(pieces) else str(len(pieces)))
        assert found.sum(0).tolist() == [1] * 64 and not found[:2].any()


def test_the_probe_reads_what_the_first_layers_know_and_is_no_part_of_the_model(run, few, gpt2_folder):
    arguments = "--data", few, "--format", "rookworld", "--tokenizer", gpt2_folder, "--eval-every", 100, "--lr", 0.01
    losses = []
    for steps in 1, 60:
        folder = run("m", *arguments, "--steps", steps, "--decay", 0, "--mix", "moves=8")
        weights, model = torch.load(folder / "trainer.pt")["model"], GPT.load(folder)
        assert {"places.weight", "places.bias"} == weights.keys() - model.state_dict().keys()
        probe = torch.nn.Linear(model.config.n_embd, 64)
        probe.load_state_dict({name: weights[f"places.{name}"] for name in ("weight", "bias")})
        squares = pretrain.squares_of_rows(model, torch.arange(model.config.vocab_size))
        inputs = torch.tensor([model.tokenizer.encode(f"P: {FEN}")])
        early = model.blocks(model.wte(inputs) + model.wpe(torch.arange(inputs.shape[1])), causal_attention)
        losses.append(pretrain.places_loss(probe, early, inputs, squares).item())
    assert losses[0] > 30 and losses[1] < 10  # 64 · log 2 = 44 is that of a probe that knows nothing


def test_a_gpu_trains_as_the_cpu_does(run, few, gpt2_folder, monkeypatch):
    arguments = "--data", few, "--format", "rookworld", "--tokenizer", gpt2_folder, "--steps", 2
    arguments += "--mix", "moves=4", "environment=4"
    models = [GPT.load(run("cpu", *arguments))]
    with pretend_cuda.on(monkeypatch):
        monkeypatch.setattr(hardware, "compiles", lambda *a: False)
        models.append(GPT.load(run("gpu", *arguments, "--device", "cuda")))
    for a, b in zip(*(model.state_dict().values() for model in models), strict=True):
        torch.testing.assert_close(a, b)


def test_an_evaluation_that_was_killed_is_made_up_for(run, few, tmp_path, monkeypatch):
    arguments = "m", "--data", few, "--steps", 2, "--eval-every", 1
    with monkeypatch.context() as patch, pytest.raises(ZeroDivisionError):
        patch.setattr(pretrain, "evaluate", Mock(side_effect=[{}, ZeroDivisionError]))
        run(*arguments)
    for _ in range(2):  # the second time nothing is left to do
        run(*arguments)
        assert [json.loads(row)["step"] for row in open(tmp_path / "m" / "skill.jsonl")] == [1, 2]


def test_killed_and_resumed_equals_never_killed(run, few, tmp_path, capsys):
    arguments = "--data", few, "--steps", 6, "--eval-every", 2
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
    rows = [[json.loads(row) for row in open(tmp_path / name / "skill.jsonl")] for name in ("whole", "broken")]
    assert [{**row, "seconds": 0} for row in rows[0]] == [{**row, "seconds": 0} for row in rows[1]]
    assert [row["texts"] for row in rows[0]] == [16, 32, 48] and "environment next_state T=1" in rows[0][0]
    os.remove(tmp_path / "broken/config.json")  # as after a kill between trainer.pt and the model
    GPT.load(run("broken", *arguments))


def test_learning_rates_rise_are_held_and_fall_to_zero_at_the_end():
    rates = [pretrain.schedule(step, 1000, 0.3) for step in (0, 49, 99, 400, 700, 850, 999)]
    assert rates == pytest.approx([0.01, 0.5, 1, 1, 1, 0.5, 1 / 300]) and pretrain.schedule(999, 1000, 0) == 1


def test_it_learns(run, few, monkeypatch):
    """The loss of the ideal answers to its training positions falls from chance, log 321 = 5.8, to far below it."""
    monkeypatch.setattr(pretrain, "WARMUP", 5)
    model = GPT.load(run("m", "--data", few, "--steps", 80, "--eval-every", 1000, "--lr", 0.01, "--lr-matrix", 0.03))
    some = [texts.policy_text(p, random.Random(0), "squares") for p in positions.split(positions.load(few))[0]]
    inputs, places, targets, *_ = map(torch.from_numpy, texts.tokenize(some, model.tokenizer, 320, "squares"))
    assert len(some) == 10 and torch.nn.functional.cross_entropy(model(inputs).flatten(0, 1)[places], targets) < 2.5


@pytest.mark.parametrize("module, weight", [(pretrain, "LEGAL_WEIGHT"), (texts, "DECISIVE_WEIGHT")])
def test_weights_of_the_loss_reach_the_update(module, weight, run, few, monkeypatch):
    plain = GPT.load(run("m", "--data", few, "--steps", 1)).wte.weight
    monkeypatch.setattr(module, weight, 0)
    assert not torch.equal(GPT.load(run("n", "--data", few, "--steps", 1)).wte.weight, plain)


def test_gpt2s_kind_of_model_in_rookworlds_format(run, few, bpe_folder):
    shape = "--tokenizer", bpe_folder, "--format", "rookworld", "--positions", 512, "--half"
    model = GPT.load(run("n", "--data", few, "--steps", 1, "--init", run("m", "--data", few, "--steps", 2, *shape)))
    assert model.config.extra["chess_format"] == "rookworld"
    assert model.config.vocab_size == model.tokenizer.vocab_size


@pytest.mark.parametrize("given", [("layers", 6), ("format", "squares"), ("positions", 512)])
def test_what_a_start_model_decides_is_not_ignored(given, run, few, capsys):
    name, value = given  # a default, too, says something else than the model may have
    with pytest.raises(SystemExit):
        run("m", "--data", few, "--init", "weights/tiny", f"--{name}", value)
    assert f"--init has a shape and a format of its own; leave out --{name}." in capsys.readouterr().err


def test_another_architecture_is_refused_before_the_first_step(run, few, monkeypatch, byte_model):
    llama = type("Llama", (GPT,), {})(byte_model.config)
    monkeypatch.setattr("architectures.load", lambda source: llama)
    with pytest.raises(SystemExit, match="--init: some/llama is not a GPT-2"):
        run("m", "--data", few, "--init", "some/llama")


def test_a_folder_that_is_not_its_own_is_refused_before_the_first_step(run, few, tmp_path):
    weights = shutil.copytree("weights/tiny", tmp_path / "m") / "model.safetensors"
    before = weights.read_bytes()
    with pytest.raises(SystemExit, match="config.json is a file; name a folder to write to"):
        run("m/config.json", "--data", few, "--steps", 1)
    with pytest.raises(SystemExit, match="m holds a model that this program has not made; name another folder"):
        run("m", "--data", few, "--steps", 1)
    torch.save({"step": 8}, tmp_path / "m/trainer.pt")  # a checkpoint of train.py's has one of its own
    with pytest.raises(SystemExit, match="damaged or belongs to another model; name another folder"):
        run("m", "--data", few, "--steps", 1)
    assert weights.read_bytes() == before


def test_a_run_that_stands_further_is_not_continued(run, few):
    run("m", "--data", few, "--steps", 2)
    with pytest.raises(SystemExit, match="m holds 2 steps of training, and --steps 1 is below that; raise it"):
        run("m", "--data", few, "--steps", 1)
    run("m", "--data", few, "--steps", 2)  # which writes the model again


def test_a_folder_that_another_process_trains_is_refused(run, few, tmp_path):
    (tmp_path / "m").mkdir()
    code = "import fcntl, sys; file = open(sys.argv[1], 'w'); fcntl.lockf(file, fcntl.LOCK_EX); print('held'); input()"
    command = [sys.executable, "-uc", code, tmp_path / "m/.lock"]
    with subprocess.Popen(command, stdin=-1, stdout=-1, text=True) as other:
        assert other.stdout.readline() == "held\n"
        with pytest.raises(SystemExit, match="m is in use by another run; wait for it to end"):
            run("m", "--data", few, "--steps", 1)
        other.communicate("\n")
    run("m", "--data", few, "--steps", 1)


def test_a_save_stays_within_its_folder_and_is_whole_on_a_full_disk(run, few, tmp_path, monkeypatch):
    """A folder that is a mount point is a disk of its own; a killed process leaves what it has not finished."""
    (tmp_path / "m/.unfinished/model").mkdir(parents=True)
    for name in ("replace", "rename"):
        move = getattr(os, name)
        within = lambda a, b, move=move: move(a, b) if (tmp_path / "m") in Path(a).parents else 1 / 0  # noqa: E731
        monkeypatch.setattr(os, name, within)
    run("m", "--data", few, "--steps", 1)
    assert [path.name for path in tmp_path.iterdir()] == ["m"] and not (tmp_path / "m/.unfinished").exists()
    before = {path: path.read_bytes() for path in (tmp_path / "m").iterdir()}
    for full in "trainer.pt", "model.safetensors":

        def write_bytes(path, content, full=full, honest=Path.write_bytes):
            if path.name == full:
                raise OSError(28, "No space left on device")
            return honest(path, content)

        with monkeypatch.context() as patch:
            patch.setattr(Path, "write_bytes", write_bytes)
            arguments = [*SHAPE, *TINY, "--data", str(few), "--steps", "2"]
            patch.setattr(sys, "argv", ["pretrain", str(tmp_path / "m"), *arguments])
            with pytest.raises(SystemExit, match="error: a file could not be read or written .*No space left"):
                runpy.run_module("tools.chess_pretrain", run_name="__main__")
        assert all(path.read_bytes() == content for path, content in before.items())
    run("m", "--data", few, "--steps", 2)


def test_changed_bytes_of_its_state_are_noticed(run, few, tmp_path):
    file = run("m", "--data", few, "--steps", 1) / "trainer.pt"
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1  # among the weights
    file.write_bytes(content)
    with pytest.raises(SystemExit, match="trainer.pt is damaged or belongs to another model"):
        run("m", "--data", few, "--steps", 2)


def test_a_mix_of_ones_own(run, few, bpe_folder, tmp_path, monkeypatch):
    drawn, draw = [], texts.draw
    monkeypatch.setattr(texts, "draw", lambda rng, rows, *data: drawn.append(rows) or draw(rng, rows, *data))
    shape = "--tokenizer", bpe_folder, "--format", "rookworld", "--positions", 512
    run("m", "--data", few, "--steps", 2, *shape, "--mix", "moves=6", "environment=3")
    assert drawn == 2 * [{"moves": 6, "environment": 3}]
    run("m", "--data", few, "--steps", 3, *shape, "--mix", "moves=4", "environment=1")
    lines = (tmp_path / "m/skill.jsonl").read_text().splitlines()
    assert [json.loads(line)["texts"] for line in lines] == [18, 23]


def test_what_cannot_be_done_is_said(run, few, tmp_path, capsys):
    (tmp_path / "fens.txt").write_text("4k3/8/8/8/8/8/8/4K2R w K - 0 1\n4k3/8/8/8/8/8/8/R3K3 w Q - 0 1")
    for arguments, said in (
        (f"--data {tmp_path}/fens.txt", "no labelled position"),
        ("--tokenizer nowhere", "squares has a tokenizer of its own"),
        ("--mix moves", "argument --mix:  is not a whole number of at least 1"),
        (f"--data {few} --mix policy=8 moves=8", "'moves' is not a task of the format squares"),
        ("--lr nan", "argument --lr: nan is not a number from 0 to 1"),
        ("--heads 3", "--width 32 has to be a multiple of --heads 3"),
    ):
        with pytest.raises(SystemExit) as stopped:
            run("m", "--steps", 1, *arguments.split())
        assert said in str(stopped.value) + capsys.readouterr().err
