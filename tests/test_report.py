import json
import math
import random
import re
import subprocess

import pytest

import rewards
from nanorook import report
from nanorook.statistics import figure
from nanorook.task import Question
from rook import board
from rook.positions import Position
from tools import chess_texts as texts
from tools import report as program

STEPS, METRICS = 30, ("policy/reward", "policy/legal", "policy/earned/legal")
BLACK = "rnbqkbnr/pppppppp/8/8/4P3/8/PPPP1PPP/RNBQKBNR b KQkq - 0 1"
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
        (rewards.first_question("moves", POSITION, "expanded"), ("a1a5 ", "e2e4 ")),
        (policy._replace(prompt=policy.prompt + " "), (HOSTILE, HOSTILE)),
    )
    for stage, step in enumerate((0, STEPS)):
        for question, said in answers:
            grade = rewards.grade(question, said[stage], False)
            row = {"step": step, "completion": said[stage], "reward": grade.reward}
            yield row | question._asdict() | grade._asdict()


def letter_samples():
    shared = {"kind": "letters", "prompt": "sort: ba", "truth": {"answer": "ab"}, "reward": 0.8}
    for step in (0, STEPS):
        pieces = [["form", 0.5], ["letter 0", 0.1 * bool(step), [0, 1]], ["letter 1", 0.2, [1, 2]]]
        yield shared | {"step": step, "completion": "<a" if step else "<c", "pieces": pieces, "metrics": {}}


def make_metrics(names):
    for step in range(1, STEPS + 1):
        state, advice = {7: ("yellow", "look <here>"), 9: ("red", "skipped")}.get(step, ("green", ""))
        row = dict.fromkeys(
            ("reward", "reward_max", "kl", "clip_low", "clip_high", "frac_zero_std", *names), step / 100
        )
        row |= {"step": step, "grad_norm": math.nan if step == 9 else 0.4, "tokens": 9800, "length": 9.8}
        row |= {"skipped": 0, "broken": False}
        yield row | {"seconds": {"sampling": 2.0, "update": 4.0}, "state": state, "advice": advice}


def make_run(
    folder, samples=chess_samples, names=METRICS, lr=1e-4, task="rewards.py", after=(1, 1, 1), questions=(1, 2, 3)
):
    folder.mkdir(parents=True)
    values = {"before": [0, 1, 0], "step 10": [0, 1, 1], "after": after}
    skill = {
        when: {"policy legal T=0": figure(said), "policy legal T=1": figure(said)} for when, said in values.items()
    }
    about = {"versions": {"torch": "2.13.0"}, "commit": "c0ffee1", "command": "./train.sh LR=1"}
    about["questions"] = {"policy": questions}
    settings = {"LR": lr, "STEPS": STEPS, "MAX_GRAD_NORM": 1.0, "TASK": task}
    return write(folder, make_metrics(names), samples(), skill=skill, settings=settings, run=about)


def write(folder, metrics, samples, **contents):
    for name, rows in (("metrics", metrics), ("samples", samples)):
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    for name, content in contents.items():
        (folder / f"{name}.json").write_text(json.dumps(content))
    return folder


@pytest.fixture
def run(tmp_path):
    return make_run(tmp_path / "run")


def drawn(kind):
    samples = (sample for sample in chess_samples() if sample["kind"] == kind)
    return [rewards.show(Question(kind, s["prompt"], s["truth"]), s["completion"]) for s in samples]


def chromium(url, *options):
    command = "chromium --headless --no-sandbox --disable-gpu --enable-logging=stderr --dump-dom".split()
    done = subprocess.run([*command, *options, url], capture_output=True, text=True, errors="replace", timeout=120)
    return done.stdout, [line for line in done.stderr.splitlines() if ":CONSOLE" in line]


@pytest.mark.needs("chromium")
def test_in_a_browser_the_page_is_whole_and_runs_nothing(run):
    page = report.write(run)
    dom, console = chromium(page.as_uri())
    assert console == [] and "<title>run</title>" in dom and dom.count('class="shown"') == 7
    assert dom.count("<figcaption>before and step 30</figcaption>") == 1  # equal answers are shown once
    assert not re.search("<(img|script|b><b|[^>&]* on(load|error|mouseover)=)", dom)
    page.write_text(page.read_text().replace("<main>", "<main><script>document.title = 'owned'</script>"))
    dom, console = chromium(page.as_uri())
    assert "<title>run</title>" in dom and any("Content Security Policy" in line for line in console)


@pytest.mark.slow
@pytest.mark.needs("chromium")
def test_on_a_telephone_only_tables_scroll_sideways(run, tmp_path):
    """In a frame of 390 pixels, as a window of chromium is never narrower than 500."""
    others = [make_run(tmp_path / f"another-seed-with-a-long-name-{i}", lr=10**-i) for i in range(2)]
    page = report.write(run, *others)
    measure = (
        "let d = this.contentDocument; document.title = [d.documentElement.scrollWidth, d.querySelector('.scroll')"
    )
    frame = f'<iframe width=390 height=800 src="{page.as_uri()}" onload="{measure}.scrollWidth > 390]"></iframe>'
    (tmp_path / "frame.html").write_text(frame)
    dom, console = chromium((tmp_path / "frame.html").as_uri(), "--allow-file-access-from-files")
    width, table_scrolls = re.search("<title>(.*?),(.*?)</title>", dom).groups()
    assert console == [] and int(width) <= 390 and table_scrolls == "true"
    assert (
        '<meta name="viewport" content="width=device-width' in page.read_text()
    )  # else a telephone pretends to be wide


def test_boards_have_coordinates_from_the_side_of_the_player():
    for svg, fen in ((drawn("policy")[0], START), (board.draw(Question("", f"P: {BLACK}", {}), "B: e7e5"), BLACK)):
        files, ranks = (re.findall(f">([{names}])</text>", svg) for names in ("a-h", "1-8"))
        assert "".join(files) == "abcdefgh"[:: 1 if " w " in fen else -1]
        assert "".join(ranks) == "87654321"[:: 1 if " w " in fen else -1]


def test_the_arrow_of_an_answer_that_is_one_move_is_not_faint_and_wrong_squares_are_red():
    for svg, colour in zip(drawn("moves"), (board.ILLEGAL, board.BEST), strict=True):
        assert f'stroke="{colour}"' in svg
    faint = [re.findall(r'<line [^>]*stroke="#\w{6}(\w*)"', svg) for svg in drawn("policy")[::2]]
    assert faint == [["59", "59", ""], ["", "59"]]  # all but the move after B:
    assert [svg.count(f'fill="{board.ILLEGAL}"') for svg in drawn("environment")] == [2, 0]


def test_a_task_may_show_text(tmp_path):
    module = "DEFAULTS, LIMITS = {}, {}\nload = make_questions = grade = start_model = lambda *_: None\n"
    module += "def show(question, text):\n    'Why <so>?'\n    return f'{question.truth} & {text}'"
    (tmp_path / "my_task.py").write_text(module)
    text = report.write(make_run(tmp_path / "run", letter_samples, task=str(tmp_path / "my_task.py"))).read_text()
    assert text.count("<pre>{&#x27;answer&#x27;: &#x27;ab&#x27;} &amp; &lt;a</pre></div>") == 1
    assert '<p class="soft">Why &lt;so&gt;?</p>' in text
    (tmp_path / "broken.py").write_text(module.replace("{text}", "{text[99]}"))
    with pytest.raises(SystemExit, match="show of the task .*broken.py failed for '.*': IndexError"):
        report.write(make_run(tmp_path / "other", letter_samples, task=str(tmp_path / "broken.py")))


def panels(text):
    """{title: (names of its lines, its SVG)}"""
    found = re.findall('<figure class="plot"><h4>(.*?)</h4>(.*?)</figure>', text, re.DOTALL)
    return {title: (re.findall("</i>(.*?)</li>", content), content) for title, content in found}


def test_the_page_begins_with_the_verdict(run, monkeypatch):
    monkeypatch.setattr(report, "verdict", {run: ["● red  It <fell>: a: b.", "Lower LR."]}.get)
    said = re.search('<h1>run</h1>(<p class="verdict">.*?)</header>', report.write(run).read_text())[1]
    assert re.sub("<.*?>", "", said) == "It &lt;fell&gt;: a: b.Lower LR." and '<i class="red"></i>' in said


def test_what_was_run_and_how_it_went(run):
    text = report.write(run).read_text()
    for told in ("30 steps, 30,000 answers", "c0ffee1", "2.13.0", "./train.sh LR=1"):
        assert told in text
    said = re.findall(r'<li><i class="(\w+)"></i>(.*?) <span class="soft">(.*?)</span>', text)
    assert said[1:] == [("yellow", "look &lt;here&gt;", "step 7"), ("red", "skipped", "step 9")]
    assert not re.search(r'(src|href)="(?!#)|url\(|@import|https?://(?!www\.w3\.org)|<script', text)  # needs no network


def test_held_out_skill_stands_beside_training_with_its_intervals(run):
    lines, svg = panels(report.write(run).read_text())["legal"]
    assert lines == ["training", "greedy", "T = 1"]  # what a line is, without a value
    assert re.findall("<title>(.*?)</title>", svg) == 2 * [
        "step 0: 0.333 ± 2.867", "step 10: 0.667 ± 2.867", "step 30: 1.000 ± 0.562"
    ]  # fmt: skip
    at = dict(zip(("step 0", "5", "10", "15", "20", "25", "30"), re.findall(r'<text x="([\d.]+)"', svg)))
    assert re.findall('cx="(.*?)"', svg) == 2 * [at["step 0"], at["10"], at["30"]] and svg.count('class="band') == 2


def test_metrics_have_the_names_that_the_task_gives_them(run):
    about = json.loads((run / "run.json").read_text())
    (run / "run.json").write_text(json.dumps(about | {"names": {"policy legal": "<legal> moves"}}))
    page = report.write(run).read_text()
    assert "&lt;legal&gt; moves" in panels(page) and "<th>&lt;legal&gt; moves <small>greedy" in page


def test_several_runs_are_told_apart_and_compared_question_by_question(run, tmp_path):
    alone = report.write(run).read_text()
    assert re.findall('<td class="(.*?)">(.*?)</td>', alone)[2] == ("", "+0.667 ± 2.867")  # no more than chance
    same = make_run(tmp_path / "same" / "run", lr=3e-4, after=[0, 0, 0])
    other = make_run(tmp_path / "other" / "run", after=[0, 0, 0], questions=[4, 5, 6])
    page = report.write(run, same, other)
    assert page == run / "report-with-run-run.html" and (run / "report.html").read_text() == alone
    text = page.read_text()
    assert re.findall("<th>(.*?)</th>", re.search("<thead>.*?</thead>", text)[0])[1:] == [
        "run, before", "run, after", "same/run, after", "other/run, after", "same/run − run", "other/run − run"
    ]  # fmt: skip
    table = re.search("<table>.*</table>", text, re.DOTALL)[0]
    found = re.findall('<td class="(.*?)">(.*?)</td>', table)[:6]
    assert found[2:] == [
        ("", "0.000 ± 0.562"), ("", "0.000 ± 0.562"), ("down", "−1.000 ± 0.562"), ("", "−1.000 ± 0.794")
    ]  # fmt: skip
    assert '<div class="differs"><dt>LR</dt><dd>0.0001 | 0.0003 | 0.0001</dd>' in text and text.count('"differs"') == 1
    lines, svg = panels(text)["Gradient norm"]
    assert lines == [] and [svg.count(f'class="line c{i}"') for i in range(4)] == [1, 1, 1, 0]
    assert "Clipped tokens: below" in panels(text) and "Clipped tokens" in panels(alone)


def test_a_run_that_was_evaluated_once_has_no_gain(run):
    (run / "skill.json").write_text(json.dumps({"before": {"policy legal T=0": figure([0, 1])}}))
    assert re.search("<thead>.*?</thead>", report.write(run).read_text())[0].count("<th>") == 2


def test_every_metric_of_any_task_is_shown(tmp_path):
    names = "letters/reward,letters/right,letters/earned/form,letters/earned/<b>,x_y/reward,x_y/ok".split(",")
    text = report.write(make_run(tmp_path / "run", letter_samples, names, task="examples/letters.py")).read_text()
    shown = panels(text)
    assert shown["Reward"][0] == ["all", "letters", "x_y"] and {"right", "ok"} <= {*shown}
    assert shown["Pieces of the letters reward"][0] == ["form", "&lt;b&gt;"]
    assert "<b>0.8</b> = 0.5 form + 0.3 letter</p>" in text and 'class="shown"' not in text
    marks = re.findall('<mark style="--share:(.*?)" title="letter .*?">(.*?)</mark>', text)
    assert marks == [("0%", "&lt;"), ("100%", "c"), ("100%", "&lt;"), ("100%", "a")]


@pytest.mark.parametrize(
    "values, ends, ticks",
    [
        ([0.42, 0.44], [], "0.415 0.420 0.425 0.430 0.435 0.440 0.445"),
        ([0.97, 1], [0.94, 1.03], "0.94 0.96 0.98 1.00"),  # a share
        ([12345, 15210], [], "12,000 13,000 14,000 15,000 16,000"),
        ([1e-5, 8e-5], [], "0 0.00002 0.00004 0.00006 0.00008"),
        ([1e-7, 9e-7], [], "0 2e-7 4e-7 6e-7 8e-7 1e-6"),
        ([-0.3, 0.8], [], "-0.4 -0.2 0 0.2 0.4 0.6 0.8"),
        ([1, 1], [], "0.975 0.980 0.985 0.990 0.995 1.000"),
        ([0], [], "0 0.1 0.2 0.3 0.4 0.5"),
        ([0.5, 0.4, 0.6, 5e7], [], "1e-2 1e0 1e2 1e4 1e6 1e8"),
    ],
)
def test_axes_are_fitted_to_the_data_with_round_ticks(values, ends, ticks):
    points = [(i, value) for i, value in enumerate(values, 1)]
    bands = [(i, sum(ends) / 2, (ends[1] - ends[0]) / 2) for i in range(1, 3)] if ends else []
    curves = [("", "c0", some) for some in (points, bands) if some]
    svg = report.plot("", "", curves, len(values))
    assert " ".join(re.findall('class="tick".*?>(.*?)</text>', svg)) == ticks


def test_values_that_are_not_finite_or_explode_are_seen_and_hide_nothing(run):
    _, svg = panels(report.write(run).read_text())["Gradient norm"]
    assert re.search('class="raw[^>]*d="([^"]*)"', svg)[1].count("M") == 2  # up to step 8, and from 10 on
    assert svg.count('class="broken"') == 1
    points = [(i, 5e7 if i == 50 else 0.5 + 0.4 * (i % 2)) for i in range(100)]
    svg = report.plot("", "", [("norm", "c0", points)], 99)
    assert len(set(re.findall(r" ([\d.]+)", re.search('class="raw[^>]*d="(.*?)h0', svg)[1]))) == 3


def test_hostile_text_is_escaped_wherever_it_stands(tmp_path):
    evil = HOSTILE[3:].replace("/", "|").replace(" ", "_")  # slashes and spaces separate the parts of names
    (run := tmp_path / "<b>bold").mkdir()
    rows = (row | {"state": evil, "advice": evil} for row in make_metrics((f"{evil}/{evil}", f"{evil}/earned/{evil}")))
    sample = {"step": 0, "reward": 0.5, "truth": [evil], "completion": HOSTILE, "kind": evil, "prompt": HOSTILE}
    samples = [sample | {"pieces": [[evil, 0.5, [0, 99]], [evil, -1, [-5, 3]], [evil, 0]]}]
    skill = {"before": {f"{evil} {evil} T={evil}": [1, 1, [1]]}}
    write(run, rows, samples, settings={evil: evil, "STEPS": 30}, run={"command": evil, "machine": evil}, skill=skill)
    text = report.write(run, run).read_text()
    assert not re.search(r"<(script|img|b>bold|svg.onload)|[^;]['\"].onmouseover", text)
    assert text.count("&lt;b&gt;bold") > 20 and text.count("$title_${plots}_?_&amp;") > 20


ALTERED = {"metrics.jsonl": ['{"step": "x"}', '{"step": 1, "seconds": 5}', '{"step": 1, "state": ["red"]}']}
ALTERED |= {"skill.json": ['{"before": 5}', '{"before": {"policy legal T=0": [0.5]}}'], "run.json": ['{"versions": 5}']}
ALTERED |= {"samples.jsonl": ['{"step": 0}', '{"step": "x", "kind": 1}']}


@pytest.mark.parametrize("name, content", [(name, text) for name, texts in ALTERED.items() for text in texts])
def test_files_that_were_altered_are_refused_in_one_sentence(run, monkeypatch, name, content):
    with open(run / name, "w" if name.endswith(".json") else "a") as file:
        file.write(content)
    monkeypatch.setattr("sys.argv", ["report", str(run)])
    with pytest.raises(SystemExit, match=f"^error: a JSON file in {run} was altered and cannot be shown: [A-Z]"):
        program.main()
    assert not (run / "report.html").exists()


def test_where_the_page_cannot_be_written_the_one_before_is_kept(run, monkeypatch):
    report.write(run)
    before = (run / "report.html").read_bytes()
    monkeypatch.setattr("sys.argv", ["report", str(run)])
    (run / ".report.html").symlink_to("/dev/full")
    with pytest.raises(SystemExit, match="^error: the page cannot be written: .*No space left on device"):
        program.main()
    assert (run / "report.html").read_bytes() == before


def test_what_a_killed_run_has_cut_or_not_written_hides_nothing_else(run):
    for file in list(run.iterdir()):
        content = file.read_bytes()
        file.write_bytes(content[: int(len(content) * 0.6)])
    text = report.write(run).read_text()
    assert "<h4>Reward" in text and 'class="card"' in text and text.rstrip().endswith("</html>")
    for name in ("settings.json", "run.json", "skill.json", "samples.jsonl"):
        (run / name).unlink()
    assert report.write(run).read_text().count('class="plot"') == 11
    for content in "", '{"step": 1, "rew', "[1]\n", "\x00\xff\n", "[" * 9999:
        (run / "metrics.jsonl").write_text(content, encoding="latin-1")
        with pytest.raises(SystemExit, match="error: .*contains no step"):
            report.write(run)
