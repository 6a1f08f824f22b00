"""The report: what it shows of any task's run, of one that was killed, of two; and that nothing a model wrote runs."""

import json
import math
import random
import re
import subprocess
from html import unescape

import pytest

import rewards
from nanorook.positions import Position
from tools import report, texts
from toy import user_runs

STEPS = 30
START = "rnbqkbnr/pppppppp/8/8/8/8/PPPPPPPP/RNBQKBNR w KQkq - 0 1"
POSITION = Position(START, (), (("e2e4", 40), ("d2d4", 38), ("g1f3", 30), ("c2c4", 25), ("e2e3", 10)))
HOSTILE = (
    "M: e2e4 </pre></title></svg><script>document.title = 'owned'</script><img src=x onerror=\"document.title=1\">'\""
    " onmouseover='document.title=1' <svg onload=\"document.title='owned'\"> $title ${plots} \ud800 & <b>bold</b>"
)


def chess_samples():
    policy = rewards.policy_question(POSITION, "expanded")
    environment = rewards.environment_question(POSITION._replace(asked="e2e4"), random.Random(0), "expanded")
    right = texts.environment_completion(*environment.truth, "expanded")
    answers = (
        (policy, ("M: e2e4 h2h4 a1a5 E: 0.4 0.1 0.2 B: a1a5", "M: e2e4 d2d4 E: 0.4 0.3 B: e2e4")),
        (environment, (right.replace("PPPP.PPP", "PPPPPPPQ"), right)),
        (policy._replace(prompt=policy.prompt + " "), (HOSTILE, HOSTILE)),
        (rewards.first_question("moves", POSITION, "expanded"), ("h2h4 ", "e2e4 ")),
    )
    for stage, step in enumerate((0, STEPS)):
        for question, said in answers:
            grade = rewards.grade(question, said[stage], False)
            row = {"step": step, "completion": said[stage], "reward": grade.reward}
            yield row | question._asdict() | grade._asdict()


def letter_samples():
    shared = {"completion": "<a", "kind": "letters", "prompt": "sort: ba", "truth": {"answer": "ab"}, "reward": 0.8}
    for step in (0, STEPS):
        pieces = [["form", 0.5], ["letter 0", 0.1 * bool(step), [0, 1]], ["letter 1", 0.2, [1, 2]]]
        yield shared | {"step": step, "pieces": pieces, "metrics": {}}


def make_metrics(names):
    names = ("reward", "reward_max", "kl", "clip_low", "clip_high", "frac_zero_std", *names)
    for step in range(1, STEPS + 1):
        state, advice = {7: ("yellow", "look <here>"), 9: ("red", "skipped")}.get(step, ("green", ""))
        row = {name: step / 100 for name in names} | {"step": step, "grad_norm": math.nan if step == 9 else 0.4}
        row |= {"seconds": {"sampling": 2.0, "update": 4.0}, "tokens": 9800, "broken": False}
        yield row | {"state": state, "advice": advice}


def write_lines(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def make_run(folder, samples=chess_samples, names=("policy/reward", "policy/legal", "policy/earned/legal"), lr=1e-4):
    folder.mkdir(parents=True)
    write_lines(folder / "metrics.jsonl", make_metrics(names))
    write_lines(folder / "samples.jsonl", samples())
    skill = {"before": {"policy legal T=0": [0.8, 0.02], "policy loss T=1": [2.0, 0.1]}}
    skill["after"] = {"policy legal T=0": [0.9, 0.02], "policy loss T=1": [1.0, 0.1]}
    about = {"versions": {"torch": "2.13.0"}, "commit": "c0ffee1", "command": "./train.sh LR=1"}
    for name, content in (("skill", skill), ("settings", {"LR": lr, "MAX_GRAD_NORM": 1.0}), ("run", about)):
        (folder / f"{name}.json").write_text(json.dumps(content))
    return folder


@pytest.fixture
def run(tmp_path):
    return make_run(tmp_path / "run")


def chromium(url, *options):
    command = ["chromium", "--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars"]
    command += ["--enable-logging=stderr", *options, "--dump-dom", url]
    done = subprocess.run(command, capture_output=True, text=True, errors="replace", timeout=120)
    return done.stdout, [line for line in done.stderr.splitlines() if ":CONSOLE" in line]


LOOK = """<script>
const boxes = selector => [...document.querySelectorAll(selector)].map(element => element.getBoundingClientRect());
document.title = JSON.stringify({
    inside: boxes('.board svg, .plot svg, .card').every(b => b.left >= 0 && b.right <= innerWidth && b.width > 100),
    boards: boxes('.board').length, overflow: document.documentElement.scrollWidth > innerWidth,
    strangers: boxes('img, script:not(:last-child), [onload], [onmouseover], b b, figure > pre svg').length,
});</script>"""


@pytest.mark.needs("chromium")
def test_in_a_browser_the_page_is_whole_and_runs_nothing(run):
    page = report.write(run)
    dom, console = chromium(page.as_uri())
    assert console == [] and f"<title>{run}</title>" in dom

    text = page.read_text()  # with a script of ours, which the page's policy would not let in
    page.write_text(re.sub("<meta http-equiv=.*?>", "", text).replace("</html>", LOOK))
    for width in (1200, 500):
        title = re.search("<title>(.*?)</title>", chromium(page.as_uri(), f"--window-size={width},900")[0])[1]
        assert json.loads(unescape(title)) == {"inside": True, "overflow": False, "strangers": 0, "boards": 8}

    page.write_text(text.replace("<main>", "<main><script>document.title = 'owned'</script>"))
    dom, console = chromium(page.as_uri())
    assert f"<title>{run}</title>" in dom and any("Content Security Policy" in line for line in console)


def panels(text):
    """{title of a plot: [name in its legend, ...]}"""
    figures = re.findall('<figure class="plot"><h3>(.*?)</h3>(.*?)</figure>', text, re.DOTALL)
    return {title: re.findall("</i>(.*?) <b>", figure) for title, figure in figures}


def test_what_was_run_and_how_it_went(run):
    text = report.write(run).read_text()
    for told in ("30 steps", "294,000 completion tokens", "3.0 min", "c0ffee1", "torch 2.13.0", "./train.sh LR=1"):
        assert told in text
    said = re.findall(r'<li><i class="(\w+)"></i>(.*?) <span class="soft">(.*?)</span>', text)
    assert said[0] == ("green", "green", "28 steps, 1 to 30")
    assert said[1:] == [("yellow", "look &lt;here&gt;", "step 7"), ("red", "skipped", "step 9")]
    strip = re.findall(r'<i class="(\w+)" style="flex:(\d+)"', text)
    assert strip[1:4] == [("yellow", "1"), ("green", "1"), ("red", "1")]
    assert '<td class="up">▲ 0.900 ± 0.020</td>' in text and '<td class="down">▼ 1.000 ± 0.100</td>' in text
    assert not re.search(r'(src|href)="(?!#)|url\(|@import|https?://(?!www\.w3\.org)|<script', text)  # needs no network


def test_every_metric_of_any_task_is_shown(tmp_path):
    names = [f"letters/{name}" for name in ("reward", "right", "earned/form", "earned/<b>")] + ["x y/reward", "x y/ok"]
    text = report.write(make_run(tmp_path / "run", letter_samples, names)).read_text()
    shown = panels(text)
    assert shown["Reward"] == ["reward", "reward_max", "letters", "x y"]
    assert shown["letters: pieces of the reward"] == ["form", "&lt;b&gt;"]
    assert shown["letters: metrics"] == ["right"] and shown["x y: metrics"] == ["ok"]
    assert "sort: ba" in text and 'class="board"' not in text
    assert "<b>0.8</b> = 0.5 form + 0.3 letter</p>" in text
    marks = re.findall('<mark style="--share:(.*?)" title="letter .*?">(.*?)</mark>', text)
    assert marks == [("0%", "&lt;"), ("100%", "a"), ("100%", "&lt;"), ("100%", "a")]


def test_boards_show_how_good_a_move_is_and_what_is_wrong():
    before, environment, _, first, after, right, _, taught = chess_samples()

    def arrows(sample):
        return re.findall('<line [^>]*stroke="(.*?)"[^>]*class="arrow"', report.board(sample))

    faint = "59"
    assert arrows(before) == [report.BEST + faint, report.LEGAL + faint, report.ILLEGAL]
    assert arrows(after) == [report.BEST, report.FIVE + faint]
    assert arrows(first) == [report.LEGAL + faint] and arrows(taught) == [report.BEST + faint]
    assert arrows(environment) == arrows(right) == [report.LEGAL]
    assert [len(re.findall("<rect[^>]*#dc2626", report.board(one))) for one in (environment, right)] == [2, 0]
    other_tasks = [{"prompt": p, "truth": None} for p in ("P: ", f"A: {START}", f"P: {START}", f"A: {START}+e9")]
    for sample in (environment | {"completion": "no board"}, next(letter_samples()), *other_tasks):
        assert report.board({"completion": START} | sample) == ""


def test_values_that_are_not_finite_or_explode_are_seen_and_hide_nothing(run):
    figure = re.search("<h3>Gradient norm.*?</figure>", report.write(run).read_text(), re.DOTALL)[0]
    assert re.search('class="raw[^>]*d="([^"]*)"', figure)[1].count("M") == 2  # up to step 8, and from 10 on
    assert figure.count('class="broken"') == 1 and figure.count('class="limit"') == 1
    points = [(i, 5e7 if i == 50 else 0.5 + 0.4 * (i % 2)) for i in range(100)]
    figure = report.plot("", "", [("norm", "c0", points)], 0, 99)
    assert len(set(re.findall(r" ([\d.]+)", re.search('class="raw[^>]*d="(.*?)h0', figure)[1]))) == 3
    for low, high in ((-0.18, 0.02), (0, 0), (-3, -2), (0, 1e-9), (5, 5)):
        assert report.plot("", "", [("x", "c0", [(0, low), (1, high)])], 0, 1).count('class="axis"') == 3
    points = [(i, {0: 7.0, 2999: 9.0}.get(i, 0.0)) for i in range(3000)]  # a legend has the points, not their means
    assert "<b>7 → 9</b>" in report.plot("", "", [("length", "c0", points)], 0, 2999)


def test_two_runs_side_by_side(run, tmp_path):
    own = report.write(run)
    before, page = own.read_bytes(), report.write(run, make_run(tmp_path / "other", lr=3e-4))
    assert page == run / "report-beside-other.html" and own.read_bytes() == before
    text = page.read_text()
    assert '<div class="values2"><dt>LR</dt><dd>0.0001 | 0.0003</dd>' in text and text.count('"values2"') == 1
    assert panels(text)["Gradient norm"] == ["A grad_norm", "B grad_norm"]
    assert text.count('class="card"') == 4 and text.count("<figcaption>A before</figcaption>") == 4


def test_hostile_text_is_escaped_wherever_it_stands(tmp_path):
    evil = HOSTILE[3:].replace("/", "|").replace(" ", "_")  # slashes and spaces separate the parts of names
    run = make_run(tmp_path / "<b>bold")
    rows = make_metrics((f"{evil}/{evil}", f"{evil}/earned/{evil}"))
    write_lines(run / "metrics.jsonl", [row | {"state": evil, "advice": evil} for row in rows])
    sample = {"step": 0, "reward": 0.5, "truth": [evil], "completion": HOSTILE, "kind": evil, "prompt": HOSTILE}
    pieces = [[evil, 0.5, [0, 99]], [evil, -1, [-5, 3]], [evil, 0]]
    write_lines(run / "samples.jsonl", [sample | {"pieces": pieces}])
    with open(run / "samples.jsonl", "a") as file:
        file.write('{"completion": "<script>document')
    contents = {"settings": {evil: evil}, "run": {"command": evil, "machine": evil}}
    for name, content in (contents | {"skill": {evil: {f"{evil} {evil} T={evil}": [1, 1]}}}).items():
        (run / f"{name}.json").write_text(json.dumps(content))
    text = report.write(run, run).read_text()
    assert not re.search(r"<(script|img|b>bold|svg.onload)|[^;]['\"].onmouseover", text)
    assert text.count("&lt;b&gt;bold") > 20 and text.count("$title_${plots}_?_&amp;") > 20


@pytest.mark.parametrize("name", ["settings.json", "run.json", "skill.json", "samples.jsonl", "metrics.jsonl"])
def test_without_a_file_or_with_a_cut_one_the_rest_is_shown(run, name):
    content = (run / name).read_bytes()
    (run / name).write_bytes(content[: int(len(content) * 0.6)])
    text = report.write(run).read_text()
    assert "<h3>Reward" in text and 'class="card"' in text and text.rstrip().endswith("</html>")
    (run / name).unlink()
    if name == "metrics.jsonl":
        with pytest.raises(SystemExit, match="error: .*holds no step"):
            report.write(run)
    else:
        assert report.write(run).read_text().count('class="plot"') == 8


@pytest.mark.parametrize("content", ["", '{"step": 1, "rew', "[1]\n", "\x00\xff\n", "[" * 9999])
def test_what_is_no_run_is_refused_in_one_sentence(tmp_path, content):
    (tmp_path / "metrics.jsonl").write_text(content, encoding="latin-1")
    done = user_runs("-m", "tools.report", tmp_path)
    assert done.returncode == 1 and done.stderr.startswith("error: ") and "holds no step" in done.stderr
    assert not (tmp_path / "report.html").exists()
