"""The report in a real browser: what it shows, how it is worked, that nothing a model wrote runs; and broken runs."""

import gzip
import json
import math
import random
import re
import shutil
import subprocess
import sys
from html import unescape
from pathlib import Path

import chess
import chess.svg
import pytest
from PIL import Image

import data
import rewards
import tasks
from tools import boards, plots, report

ROOT = Path(__file__).parent.parent
STEPS = 30
HOSTILE = (
    "M: e2e4 </pre><script>document.title = 'owned'</script><img src=x onerror=\"document.title='owned'\">"
    "<svg onload=\"document.title='owned'\"> $hash ${title} \ud800 & <b>bold</b>"
)


# ---------------------------------------------------------------------------------------------------------------------
# A run to report: made-up metrics, real positions and real grades


def answers(sample):
    """Completions for one prompt, from right to wrong."""
    if sample.prompt.startswith("P: "):
        others = sorted(rewards.legal_moves(sample.prompt) - {uci for uci, _ in sample.labels})
        right = tasks.policy_completion("", sample.labels, "expanded")
        legal = tasks.policy_completion("", [(uci, 0) for uci in others[:5]], "expanded")
        return right, right[:-4] + sample.labels[1][0], legal, "M: a1h8 E: 0.1 B: a1h8", HOSTILE
    right = tasks.environment_completion(*sample.labels, "expanded")
    return right, right.replace(".", "Q", 1), right.replace("/", "", 1), "x" + right, HOSTILE


def make_samples():
    lines = gzip.open(data.BUILTIN, "rt").read().splitlines()[:400]
    positions = [data.read_position(line) for line in lines if line[0] != "#"]
    positions = [p for p in positions if len(p.moves) == 5 and chess.Board(p.fen).legal_moves.count() > 10][:5]
    samples = [tasks.policy_sample(p, "expanded") for p in positions]
    samples += [tasks.environment_sample(p, random.Random(0), "expanded") for p in positions]
    for step in (0, STEPS):
        for i, sample in enumerate(samples):
            text = answers(sample)[(i + (step == 0)) % 5]
            g = rewards.grade(sample.prompt, text, sample.labels, i == 1)
            yield {
                "step": step, "task": sample.prompt[0], "prompt": sample.prompt, "completion": text,
                "labels": sample.labels, **g._asdict(),
            }  # fmt: skip


def make_metrics():
    for step in range(1, STEPS + 1):
        state, advice = {7: ("yellow", "look <here>"), 9: ("red", "skipped")}.get(step, ("green", ""))
        row = dict.fromkeys("reward_max kl entropy clip_low clip_high frac_zero_std length runaway".split(), step / 100)
        row |= {f"P/{name}": 0.5 for name in ("structure", "legal", "top5", "best", "candidates_legal")}
        row |= {f"P/earned/{name}": w / 2 for name, w in rewards.POLICY.items()} | {"P/earned/malformed": -0.01}
        row |= {f"A/earned/{name}": w / 2 for name, w in rewards.ENVIRONMENT.items()} | {"A/earned/malformed": 0.0}
        row |= {"A/next_state": 0.1, "tokens": 9800, "tokens_per_second": 1900.0, "logprob_gap": 0.001}
        row |= {"step": step, "reward": 0.3 + step / 100, "grad_norm": math.nan if step == 9 else 0.4}
        yield row | {"state": state, "advice": advice, "seconds": {"rollout": 2.0, "update": 4.0}}


def write_lines(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def make_run(folder, lr=1e-4):
    folder.mkdir()
    write_lines(folder / "metrics.jsonl", make_metrics())
    write_lines(folder / "samples.jsonl", make_samples())
    skill = {"before": {"policy legal T=0": [0.8, 0.02], "policy cp_loss T=0": [2.0, 0.1]}}
    skill["step 15"] = skill["after"] = {"policy legal T=0": [0.9, 0.02], "policy cp_loss T=0": [1.0, 0.1]}
    (folder / "skill.json").write_text(json.dumps(skill))
    (folder / "settings.json").write_text(json.dumps({"MODEL": "<i>m</i>", "LR": lr, "MAX_GRAD_NORM": 1.0}))
    about = {"versions": {"torch": "2.13.0"}, "commit": "c0ffee1", "machine": "two cores", "command": "./train.sh LR=1"}
    (folder / "run.json").write_text(json.dumps(about))
    return folder


@pytest.fixture
def run(tmp_path):
    return make_run(tmp_path / "run")


@pytest.fixture(scope="module")
def page(tmp_path_factory):
    return report.write(make_run(tmp_path_factory.mktemp("page") / "run"))


# ---------------------------------------------------------------------------------------------------------------------
# Chromium


def chromium(url, *options):
    program = shutil.which("chromium")
    assert program, "The report is tested in Chromium, which is not there; install it: apt-get install chromium."
    command = [program, "--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", "--enable-logging=stderr"]
    done = subprocess.run([*command, *options, url], capture_output=True, text=True, errors="replace", timeout=120)
    return done.stdout, [line for line in done.stderr.splitlines() if ":CONSOLE" in line]


BOXES = """(selector => [...document.querySelectorAll(selector)].map(element => {
    const box = element.getBoundingClientRect(); return [box.left, box.right, box.width, box.height]}))"""
CARDS = """[...document.querySelectorAll('.card')].filter(card => card.getBoundingClientRect().height > 0)
    .map(card => [card.dataset.task, +card.dataset.reward, +card.dataset.gain])"""
LAYOUT = f"""[{BOXES}('.board'), {BOXES}('.plot svg'), {BOXES}('.board use:not([href^="#board"])'),
    {BOXES}('.plot .line, .plot .area'), innerWidth, document.documentElement.scrollWidth]"""
CLICK = f"""(document.querySelector('input[value=P]').click(), document.querySelector('input[value=gained]').click(),
    [{CARDS}, location.hash, document.querySelector('#count').value])"""
KEYS = """(() => {
    const plot = document.querySelector('.plot'), said = () => plot.querySelector('.legend b').textContent;
    const press = () => plot.dispatchEvent(new KeyboardEvent('keydown', {key: 'ArrowLeft'}));
    const before = said(); plot.focus(); const focused = document.activeElement === plot; press(); press();
    const at = said(), step = plot.querySelector('.step').textContent; plot.blur();
    return [focused, before, at, step, said()]; })()"""
REACHABLE = "[...document.querySelectorAll('.plot, summary, input')].every(element => element.tabIndex === 0)"
STRANGERS = "[document.title, document.querySelectorAll('img, main script, .card [onload], .card b b').length]"
SECTIONS = "[...document.querySelectorAll('section')].filter(s => s.offsetHeight).map(s => s.firstChild.textContent)"


@pytest.fixture(scope="module")
def answers_of_chromium(page, tmp_path_factory):
    """What these scripts say of the page in a browser that is started once, each in a frame of its own."""
    folder = tmp_path_factory.mktemp("probes")
    bare, other = folder / "bare", make_run(folder / "other")
    bare.mkdir()
    write_lines(bare / "metrics.jsonl", [next(make_metrics())])
    bare, both = report.write(bare), report.write(other, page.parent)
    frames, probes = "", {
        "wide": (page, LAYOUT, "", 1280), "phone": (page, LAYOUT, "", 390), "both": (both, LAYOUT, "", 390),
        "worst": (page, CARDS, "", 900), "best": (page, CARDS, "#task=A&sort=best", 900),
        "click": (page, CLICK, "", 900), "keys": (page, KEYS, "", 900), "reachable": (page, REACHABLE, "", 900),
        "strangers": (page, STRANGERS, "", 900), "bare": (bare, SECTIONS, "", 900),
        "paper": (page, "getComputedStyle(document.body).backgroundColor", "", 900),
    }  # fmt: skip
    for name, (path, script, fragment, width) in probes.items():
        text = re.sub("<meta http-equiv=.*?>", "", path.read_text())  # it would not let the script in
        answer = f"<script>parent.postMessage(['{name}', {script}], '*')</script>"
        (folder / f"{name}.html").write_text(text + answer)
        frames += f'<iframe width="{width}" height="800" style="border:0" src="{name}.html{fragment}"></iframe>'
    listen = "onmessage = ({data: [name, said]}) => { answers[name] = said; document.title = JSON.stringify(answers) }"
    (folder / "all.html").write_text(f"<title></title><script>const answers = {{}}; {listen}</script>{frames}")
    dom, console = chromium((folder / "all.html").as_uri(), "--dump-dom", "--virtual-time-budget=5000")
    answers = json.loads(unescape(re.search("<title>(.*?)</title>", dom, re.DOTALL)[1]))
    assert console == [] and set(answers) == set(probes)
    return answers


def test_the_page_renders_without_a_word_on_the_console(page):
    dom, console = chromium(page.as_uri(), "--dump-dom")
    assert console == []
    assert dom.count('class="card"') == 10 and "10 positions" in dom  # the script has counted them
    for told in ("two cores", "c0ffee1", "torch 2.13.0", "./train.sh LR=1", "28 green, 1 yellow, 1 red", "look &lt;"):
        assert told in dom
    assert dom.count("cut off at its limit") == 2  # one prompt, before and after
    assert not re.search(r'(src|href)="(?!#)|url\(|@import|https?://(?!www\.w3\.org)', page.read_text())  # no network


@pytest.mark.parametrize("name, width", [("wide", 1280), ("phone", 390), ("both", 390)])
def test_boards_and_plots_are_visible_and_fit_the_screen(answers_of_chromium, name, width):
    boards, plots, pieces, curves, inner, scroll = answers_of_chromium[name]
    assert inner == width and scroll <= width
    count = 5 * 4 + 5 * 6 if name == "both" else 5 * 2 + 5 * 4
    assert len(boards) == count and all(w == h > 100 and 0 <= x0 and x1 <= width for x0, x1, w, h in boards)
    assert len(plots) == 15 + 2 * (name == "both")
    assert all(w > 250 and h > 100 and 0 <= x0 and x1 <= width for x0, x1, w, h in plots)
    assert len(pieces) > 300 and all(w > 3 and h > 3 for _, _, w, h in pieces)
    assert len(curves) > 30 and all(w > 200 for _, _, w, _ in curves)


def test_filter_and_order_are_part_of_the_address_and_worked_by_the_form(answers_of_chromium):
    worst, best, (gained, fragment, count) = (answers_of_chromium[name] for name in ("worst", "best", "click"))
    rewards_of = {row["prompt"]: (row["task"], row["reward"]) for row in make_samples()}.values()  # after training
    assert [card[:2] for card in worst] == [list(row) for row in sorted(rewards_of, key=lambda row: row[1])]
    assert [card[:2] for card in best] == [["A", r] for r in sorted((r for t, r in rewards_of if t == "A"))[::-1]]
    assert [card[0] for card in gained] == ["P"] * 5 and gained == sorted(gained, key=lambda card: -card[2])
    assert gained[0][2] > 0 > gained[-1][2] and fragment == "#task=P&sort=gained" and count == "5 positions"


def test_a_plot_is_read_with_the_keyboard(answers_of_chromium):
    assert answers_of_chromium["keys"] == [True, "0.6", "0.58", "step 28", "0.6"]
    assert answers_of_chromium["reachable"] is True


def test_a_run_of_one_step_and_nothing_else_shows_what_there_is(answers_of_chromium):
    assert answers_of_chromium["bare"] == ["State", "Curves"]


def test_nothing_a_model_wrote_is_executed(page, answers_of_chromium):
    """Escaping protects without the page's policy, and the policy without escaping."""
    assert answers_of_chromium["strangers"] == [str(page.parent), 0]
    text = page.read_text()
    assert "&lt;script&gt;document.title = &#x27;owned&#x27;&lt;/script&gt;&lt;img src=x onerror=" in text
    assert "$hash ${title} ? &amp; &lt;b&gt;bold" in text
    attack = text.replace("<main>", "<main><script>document.title = 'owned'</script>")
    for name, content, title in (
        ("policy", attack, page.parent), ("naked", re.sub("<meta http-equiv=.*?>", "", attack), "owned")
    ):  # fmt: skip
        page.with_name(f"{name}.html").write_text(content)
        dom, console = chromium(page.with_name(f"{name}.html").as_uri(), "--dump-dom")
        assert f"<title>{title}</title>" in dom
        assert any("Content Security Policy" in line for line in console) == (name == "policy")


def test_light_and_dark(page, tmp_path, answers_of_chromium):
    picture = tmp_path / "dark.png"
    chromium(page.as_uri(), "--blink-settings=preferredColorScheme=0", f"--screenshot={picture}")
    assert sum(Image.open(picture).convert("RGB").getpixel((2, 2))) < 150
    assert answers_of_chromium["paper"] == "rgb(251, 250, 247)"


# ---------------------------------------------------------------------------------------------------------------------
# What is said


def test_moves_are_as_good_as_their_grades_say():
    seen = set()
    for sample in make_samples():
        _, answer = rewards.read_policy(sample["completion"])
        if sample["task"] == "P" and answer:
            good, parts = boards.quality(answer[2], sample), sample["parts"]
            assert [good != "illegal", good in ("best", "five"), good == "best"] == [
                parts[name] == 1 for name in ("legal", "top5", "best")
            ]
            seen.add(good)
            picture = boards.policy_figure("before", [sample])
            assert f'stroke="{boards.QUALITIES[good][0]}e8"' in picture
            assert f'<span class="{good}">{boards.QUALITIES[good][1]} {answer[2]}</span>' in picture
    assert seen == set(boards.QUALITIES)


def test_boards_are_those_of_python_chess():
    board, arrows = chess.Board(), [chess.svg.Arrow(chess.E2, chess.E4, color="#123456")]
    own = boards.board_svg(board, chess.BLACK, "told", arrows, [chess.A1])
    fill = {chess.A1: "#dc262699"}
    theirs = chess.svg.board(board, orientation=chess.BLACK, arrows=arrows, fill=fill, colors=boards.BOARD)
    pieces = r'<use href="(#[a-z]+-[a-z]+)"[^>]* (transform="[^"]*")'
    for element in (pieces, "<line [^>]*>", "<polygon [^>]*>", '<rect [^>]*fill="#dc2626"[^>]*>'):
        assert re.findall(element, own) == re.findall(element, theirs) != []
    shared = boards.shared_parts()[boards.shared_parts().index('<g id="board-False">') :]
    assert '<use href="#board-False"/>' in own
    for element in ('<rect [^>]*class="square[^>]*>', "<g transform=.*?</g>"):  # squares, coordinates
        assert not set(re.findall(element, theirs)) - set(re.findall(element, shared)) and re.findall(element, theirs)


def test_wrong_squares_of_a_next_board_are_counted_and_marked():
    marked = 0
    for sample in make_samples():
        if sample["task"] == "A" and sample["completion"] != HOSTILE:
            answer, true = rewards.read_environment(sample["completion"])[0], sample["labels"][0]
            try:
                said = chess.BaseBoard(answer.split(" ")[0])
            except ValueError:
                continue  # rows of other lengths: python-chess reads no board there
            different = sum(said.piece_at(s) != chess.Board(true).piece_at(s) for s in chess.SQUARES)
            page = boards.environment_figures(sample["prompt"], [("before", [sample])])
            assert page.count('fill="#dc2626" opacity') == different
            assert (f"{different} wrong squares" if different else "every square is right") in page
            marked += different
    assert marked > 0
    cut = boards.read_board("rnbqkbnr/pppppppppp/8 w - -")
    assert cut.board_fen() == "rnbqkbnr/pppppppp/8/8/8/8/8/8"


def test_values_that_are_not_finite_leave_a_gap_and_a_cross(run):
    text = report.write(run).read_text()
    figure = next(f for f in re.findall("<figure class=.plot.*?</figure>", text) if "<h3>Gradient norm" in f)
    assert re.search('class="raw"[^>]*d="([^"]*)"', figure)[1].count("M") == 2  # up to step 8, and from 10 on
    assert re.search('class="lost" d="([^"]+)"', figure) and "axis limit" in figure
    assert "null" in figure and "NaN" not in text
    rows = [{"step": 1, "x": math.inf}, {"step": 2}, {"step": 3, "x": 1}]
    assert plots.points_of(rows, "x") == [(1, math.inf), (3, 1)]


def test_long_runs_are_thinned_without_hiding_an_incident():
    rows = [{"step": i, "x": math.nan if i == 777 else i} for i in range(5000)]
    points = plots.points_of(rows, "x")
    assert len(points) <= plots.POINTS and sum(math.isnan(v) for _, v in points) == 1
    assert points[0] == (12, 6.0) and points[-1][0] == 4999


def test_explosions_are_drawn_on_a_logarithmic_scale():
    points = [(i, 0.5) for i in range(99)] + [(99, 54_648_652.0)]
    figure = plots.plot("norm", "", [("norm", 0, "", points)], 0, 99)
    line = [float(y) for y in re.findall(r"[ML][\d.]+ ([\d.]+)", re.search('class="raw"[^>]*d="([^"]*)"', figure)[1])]
    assert plots.TOP <= line[-1] < 40 and 130 < line[0] < plots.BOTTOM and "5.46e+07" in figure


def test_text_alternatives_tell_what_a_plot_shows(page):
    told = unescape(re.search('<h3>Reward</h3>.*?aria-label="(.*?)"', page.read_text())[1])
    assert told.startswith("Reward, steps 1 to 30: reward from 0.31 to 0.6, between 0.31 and 0.6;")
    assert page.read_text().count('role="img"') == 15 + 30 + 1 and 'aria-label=""' not in page.read_text()


def test_skill_changes_beyond_the_intervals_are_named_better_or_worse(run):
    text = report.write(run).read_text()
    assert '<span class="better">+0.100</span>' in text and '<span class="better">-1.000</span>' in text
    assert "0.800 ± 0.020" in text and "policy, greedy" in text


def test_two_runs_side_by_side(run, tmp_path):
    other = make_run(tmp_path / "other", lr=3e-4)
    path = report.write(run, other)
    text = path.read_text()
    assert path == run / "report.html" and not (other / "report.html").exists()
    assert '<dd class="differs">0.0001 | 0.0003</dd>' in text and '<dd class="differs">1.0' not in text
    for told in ("A is ", "B is ", "B after − A after", "Policy reward by part B", "A before", f"B step {STEPS}"):
        assert told in text
    assert text.count('class="card"') == 10 and "line dashed" in text


# ---------------------------------------------------------------------------------------------------------------------
# Runs that are not whole


@pytest.mark.parametrize("name", ["settings.json", "run.json", "skill.json", "samples.jsonl"])
def test_a_missing_file_is_said_and_the_rest_is_shown(run, name):
    (run / name).unlink()
    text = report.write(run).read_text()
    assert f"{name} is missing" in text and text.count('class="plot"') == 15
    assert ('class="card"' in text) == (name != "samples.jsonl")


@pytest.mark.parametrize("name", ["metrics.jsonl", "samples.jsonl"])
def test_a_last_line_cut_in_the_middle_is_left_out_and_said(run, name):
    (run / name).write_text((run / name).read_text()[:-40])
    text = report.write(run).read_text()
    assert f"The last line of {name} was cut in the middle" in text
    assert 'data-last="29"' in text if name == "metrics.jsonl" else text.count('class="card"') == 10


def tell(*arguments):
    command = [sys.executable, "-m", "tools.report", *map(str, arguments)]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60)


@pytest.mark.parametrize(
    "content, said",
    [
        (None, "holds no metrics.jsonl"),
        ("", "holds no step yet"),
        ('{"step": 1, "rew', "line 1: expected a JSON object"),
        ("step,reward\n1,0.5\n", "line 1: expected a JSON object"),
        ('{"step": 1}\n{"ste\n{"step": 3}\n', "line 2: expected a JSON object"),
        ("[1]\n", "line 1: expected a JSON object"),
        ("\x00\xff\n", "line 1: expected a JSON object"),
    ],
)
def test_what_is_no_run_is_refused_in_one_sentence(tmp_path, content, said):
    if content is not None:
        (tmp_path / "metrics.jsonl").write_text(content, encoding="latin-1")
    with pytest.raises(data.DataError, match=re.escape(said)) as error:
        report.write(tmp_path)
    assert "\n" not in str(error.value) and not (tmp_path / "report.html").exists()


def test_the_program(run, tmp_path):
    done = tell(run)
    assert done.returncode == 0 and done.stdout.strip() == str(run / "report.html")
    assert sorted(path.name for path in run.iterdir() if "report" in path.name) == ["report.html"]
    for arguments in ([tmp_path / "nowhere"], [run, tmp_path / "nowhere"]):
        done = tell(*arguments)
        assert done.returncode == 1 and re.fullmatch("error: .*nowhere is no folder; .*\n", done.stderr)
