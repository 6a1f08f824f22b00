import json
import math
import random
import re
import subprocess
from pathlib import Path

import pytest

import rewards
from nanorook import report
from nanorook.statistics import figure
from nanorook.task import Question
from rook import board
from rook.positions import Position
from tools import chess_texts as texts

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
        row = dict.fromkeys(("reward", "kl", "clip_low", "frac_zero_std", *names), step / 100)
        row |= {"step": step, "grad_norm": math.nan if step == 9 else 0.4, "tokens": 9800, "length": 9.8}
        yield row | {"skipped": 0, "seconds": {"update": 4.0}, "state": state, "advice": advice}


def make_run(folder, samples=chess_samples, names=METRICS, lr=1e-4, task="rewards.py"):
    folder.mkdir(parents=True)
    values = {"before": [0, 1, 0], "step 10": [0, 1, 1], "after": [1, 1, 1]}
    skill = {
        when: {"policy legal T=0": figure(said), "policy legal T=1": figure(said)} for when, said in values.items()
    }
    about = {"versions": {"torch": "2.13.0"}, "commit": "c0ffee1", "command": "./train.sh LR=1"}
    about |= {"names": {"policy legal": "<legal> moves"}, "changes": [[5, "LR", 2, lr]]}
    settings = {"LR": lr, "STEPS": STEPS, "TASK": task}
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
    page.write_text(page.read_text().replace("<main>", "<main><script>document.title = 'owned'</script>"))
    dom, console = chromium(page.as_uri())
    assert "<title>run</title>" in dom and dom.count('class="shown"') == 8
    assert len(console) == 1 and "Content Security Policy" in console[0]  # of the script above
    assert dom.count("<script") == 1 and not re.search("<(img|b><b|[^>&]* on(load|error|mouseover)=)", dom)


@pytest.mark.slow
@pytest.mark.needs("chromium")
def test_on_a_telephone_only_tables_scroll_sideways(run, tmp_path):
    """In a frame of 390 pixels, as a window of chromium is never narrower than 500."""
    page = report.write(run, make_run(tmp_path / "another-seed-with-a-long-name", lr=1))
    measure = (
        "let d = this.contentDocument; document.title = [d.documentElement.scrollWidth, d.querySelector('.scroll')"
    )
    frame = f'<iframe width=390 height=800 src="{page.as_uri()}" onload="{measure}.scrollWidth > 390]"></iframe>'
    (tmp_path / "frame.html").write_text(frame)
    dom, console = chromium((tmp_path / "frame.html").as_uri(), "--allow-file-access-from-files")
    width, table_scrolls = re.search("<title>(.*?),(.*?)</title>", dom).groups()
    assert console == [] and int(width) <= 390 and table_scrolls == "true"
    assert '<meta name="viewport" content="width=device-width' in page.read_text()  # else a telephone pretends


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


def test_any_task_is_shown_with_its_metrics_the_parts_of_answers_and_what_it_shows_itself(tmp_path):
    module = "DEFAULTS, LIMITS = {}, {}\nload = make_questions = grade = start_model = lambda *_: None\n"
    module += "def show(question, text):\n    'Why <so>?'\n    return f'{question.truth} & {text}'"
    (tmp_path / "my_task.py").write_text(module)
    names = "letters/reward,letters/right,letters/earned/<b>,letters/kl,x_y/reward,x_y/ok".split(",")
    run = make_run(tmp_path / "run", letter_samples, names, task=str(tmp_path / "my_task.py"))
    text = report.write(run).read_text()
    assert text.count("<pre>{&#x27;answer&#x27;: &#x27;ab&#x27;} &amp; &lt;a</pre></div>") == 1
    assert '<p class="soft">Why &lt;so&gt;?</p>' in text
    assert [*panels(text)][:5] == ["reward", "right", "reward for &lt;b&gt;", "ok", "Reward"]
    assert "<b>0.8</b> = 0.5 form + 0.3 letter</p>" in text
    marks = re.findall('<mark class="(.*?)" title="letter .*?">(.*?)</mark>', text)
    assert marks == [("missed", "&lt;"), ("earned", "c"), ("earned", "&lt;"), ("earned", "a")]


def test_each_span_of_a_component_is_coloured():
    sample = {"completion": "ab cd ef", "pieces": [["fences", -0.1, [0, 2], [6, 8]], ["word", 1.0, [3, 5]]]}
    marks = re.findall('<mark class="(.*?)" title="(.*?) .*?">(.*?)</mark>', report.marked(sample))
    assert marks == [("missed", "fences", "ab"), ("earned", "word", "cd"), ("missed", "fences", "ef")]


def panels(text):
    """{title: (names of its lines, its SVG)}; the last one of a title."""
    found = re.findall('<figure class="plot"><h4>(.*?)</h4>(.*?)</figure>', text, re.DOTALL)
    return {title: (re.findall("</i>(.*?)</li>", content), content) for title, content in found}


def test_what_was_run_and_how_it_went(run, monkeypatch):
    monkeypatch.setattr(report, "verdict", {run: ["● red  It <fell>: a.", "Lower LR."]}.get)
    text = report.write(run).read_text()
    said = re.search('<h1>run</h1>(<p class="verdict">.*?)</header>', text)[1]
    assert re.sub("<.*?>", "", said) == "It &lt;fell&gt;: a.Lower LR." and '<i class="red"></i>' in said
    for told in ("c0ffee1", "2.13.0", "./train.sh LR=1", "LR from 2 to 0.0001 after step 5"):
        assert told in text
    said = re.findall(r'<li><i class="(\w+)"></i>(.*?) <span class="soft">(.*?)</span>', text)
    assert said[1:] == [("yellow", "look &lt;here&gt;", "step 7"), ("red", "skipped", "step 9")]
    assert not re.search(r'(src|href)="(?!#)|url\(|@import|https?://(?!www\.w3\.org)|<script', text)  # needs no network


def test_an_axis_holds_negative_values_large_ones_and_a_question_without_an_interval():
    curves = {"reward": {"training": [(1, -1.0, 0), (2, -1.0, 0)]}, "speed": {"training": [(1, 15210.0, 0)]}}
    curves["skill"] = {"T=0": [(0, 0.5, math.inf)]}
    one = report.Run(Path("a"), "a", [{"step": 2}], [], {}, {}, {}, curves)
    shown = {metric: report.plot([one], metric, metric) for metric in curves}
    assert ">-1<" in shown["reward"] and ">15,210<" in shown["speed"] and "<circle" in shown["skill"]


def test_held_out_skill_stands_beside_training_with_its_intervals(run):
    text = report.write(run).read_text()
    line = re.search('class="line .*? d="(.*?)"', panels(text)["Gradient norm"][1])[1]
    assert line.count("L") == STEPS - 2  # between points, of which step 9 has none, as its value is not finite
    lines, svg = panels(text)["&lt;legal&gt; moves"]
    assert lines == ["training", "greedy", "T=1"]
    assert re.findall("<title>(.*?)</title>", svg) == 2 * [
        "step 0: 0.333 ± 2.867", "step 10: 0.667 ± 2.867", "step 30: 1.000 ± 0.562"
    ]  # fmt: skip
    left, middle, right = re.findall(r'<text x="([\d.]+)"', svg)
    third = f"{float(left) + (float(right) - float(left)) / 3:.1f}"  # step 10 of 30
    assert re.findall('cx="(.*?)"', svg) == 2 * [left, third, right] and svg.count('class="band') == 2
    assert re.findall('class="tick".*?>(.*?)</text>', svg) == ["0", "1"]  # a share, whatever its interval is
    row = re.search("<th>&lt;legal&gt; moves, greedy</th>(.*?)</tr>", text)[1]
    assert re.findall("<td>(.*?)</td>", row) == ["0.333 ± 2.867", "1.000 ± 0.562", "+0.667 ± 2.867  "]


def test_several_runs_are_told_apart(run, tmp_path):
    same = make_run(tmp_path / "same" / "run", lr=3e-4)
    page = report.write(run, same)
    text = page.read_text()
    assert page == run / "report-with-same-run.html"
    assert '<div class="differs"><dt>LR</dt><dd>0.0001 | 0.0003</dd>' in text and text.count('"differs"') == 2
    lines, svg = panels(text)["Gradient norm"]
    assert lines == [] and [svg.count(f'class="line c{i}"') for i in range(3)] == [1, 1, 0]
    assert re.findall('<ul class="legend"><li><i class="(c.)"></i>(.*?)</li></ul>', text)[:2] == [
        ("c0", str(run)), ("c1", str(same))
    ]  # fmt: skip


def test_hostile_text_is_escaped_wherever_it_stands(tmp_path):
    evil = HOSTILE[3:].replace("/", "|").replace(" ", "_")  # slashes and spaces separate the parts of names
    (run := tmp_path / "<b>bold").mkdir()
    rows = (row | {"state": evil, "advice": evil} for row in make_metrics((f"{evil}/reward", f"{evil}/earned/{evil}")))
    sample = {"step": 0, "reward": 0.5, "truth": [evil], "completion": HOSTILE, "kind": evil, "prompt": HOSTILE}
    samples = [sample | {"pieces": [[evil, 0.5, [0, 99]], [evil, -1, [5, 30]], [evil, 0]]}]
    skill = {"before": {f"{evil} {evil} T={evil}": [1, 1, [1]]}}
    write(run, rows, samples, settings={evil: evil, "STEPS": 30}, run={"command": evil, "machine": evil}, skill=skill)
    for folders in [run], [run, run]:
        text = report.write(*folders).read_text()
        assert not re.search(r"<(script|img|b>bold|svg.onload)|[^;]['\"].onmouseover", text)
        assert text.count("&lt;b&gt;bold") > 10 and text.count("$title_${plots}_?_&amp;") > 10


def test_what_a_killed_run_has_cut_or_not_written_hides_nothing_else(run):
    for file in list(run.iterdir()):
        content = file.read_bytes()
        file.write_bytes(content[: int(len(content) * 0.6)])
    text = report.write(run).read_text()
    assert "<h4>Reward" in text and 'class="card"' in text and text.rstrip().endswith("</html>")
    for name in ("settings.json", "run.json", "skill.json", "samples.jsonl"):
        (run / name).unlink()
    assert report.write(run).read_text().count('class="plot"') == 9
    for content in "", '{"step": 1, "rew', "[1]\n", "\x00\xff\n", "[" * 9999:
        (run / "metrics.jsonl").write_text(content, encoding="latin-1")
        with pytest.raises(SystemExit, match="error: .*contains no step"):
            report.write(run)
