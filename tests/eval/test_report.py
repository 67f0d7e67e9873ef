"""Reports: everything escaped, and the page as a browser sees it (headless Chromium, where one is installed)."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

from eval.charts import Point, line_chart, nice_ticks
from eval.episode import Sample, TurnRecord
from eval.report import html_report, markdown_report, run_objectives, script_json
from eval.store import Run

EVIL = '</script><script>document.title="owned"</script><img src=x onerror=alert(1)>'
CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)


def turn(text: str, information: str = "", invalid: str | None = None) -> TurnRecord:
    return TurnRecord(text, None, None, information, invalid, "stop", 100, 20, 5, 30, 0.25, 0.125)


def episode(i: int, golds: int = 2) -> Sample:
    right = ("; ".join(["yes"] * golds), None)
    answer, error = [right, ("no", None), (None, "EpisodeError: away")][i % 3]
    search = turn(f"<mem>memory {i} {EVIL}</mem><think>hm</think><search>q {i}</search>", f"Doc 1 {EVIL}")
    end = turn(f"<mem>end</mem><answer>{answer}</answer>")
    turns = () if error else (search, turn("no action at all", invalid="no action"), end)
    questions = tuple(f"question {i}.{k} {EVIL}" for k in range(golds))
    return Sample(f"t{i}", 0, questions, (("yes", EVIL),) * golds, answer, "answer", turns, error=error)


def make_run(path: Path, episodes: int = 1000) -> Run:
    samples = {f"world-{k}": tuple(episode(i, k) for i in range(episodes // 2)) for k in (2, 4)}
    config = {"player": {"name": f"model {EVIL}"}, "seed": 0, "memory": "keep", "benchmarks": {}}
    return Run(path, config, {"code": None}, samples)


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("page")
    run = make_run(folder)
    (folder / "report.html").write_text(html_report(run, run.summaries()), encoding="utf-8")
    return folder / "report.html"


def test_nothing_a_model_wrote_is_markup(page: Path) -> None:
    html = page.read_text()
    assert "<script>document" not in html and "<img" not in html
    assert html.count("</script>") == 2
    data = json.loads(re.search(r'id="data">(.*?)</script>', html, re.DOTALL).group(1))  # type: ignore[union-attr]
    assert len(data) == 1000
    assert data[0]["q"][0] == f"question 0.0 {EVIL}"
    assert data[0]["t"][0]["m"] == f"memory 0 {EVIL}"
    assert "http://" not in html.replace("http://www.w3.org", "") and "https://" not in html


def test_markdown_cells_cannot_break_the_table() -> None:
    run = make_run(Path(), 6)
    text = markdown_report(run, {"a|b\n<script>": run.summaries()["world-2"]})
    assert "<script>" not in text
    rows = [line for line in text.splitlines() if line.startswith("| a")]
    assert len(rows) == 2 and all("a\\|b &lt;script>" in row for row in rows)


def test_script_json_is_still_json() -> None:
    value = ["</script>", "<!--", "\u2028", "&amp;"]
    text = str(script_json(value))
    assert "<" not in text and json.loads(text) == value


def test_charts() -> None:
    assert nice_ticks(0.93) == [0, 0.2, 0.4, 0.6, 0.8, 1.0]
    assert nice_ticks(1870) == [0, 500, 1000, 1500, 2000]
    svg = line_chart("t", {"a<b": [Point(2, 0.5, 0.4, 0.6), Point(4, 0.25)]}, "x", "y")
    assert svg.count("<circle") == 2 and "a&lt;b: 0.5 at 2" in svg and "a<b" not in svg
    assert line_chart("t", {}, "x", "y") == ""
    # y runs from 0 at the bottom (HEIGHT - 40) to the top tick 0.6 at 14: 0.5 lies a sixth below the top.
    heights = [float(value) for value in re.findall(r'cy="([\d.]+)"', svg)]
    assert heights == pytest.approx([14 + 206 / 6, 14 + 206 * 7 / 12], abs=0.06)
    assert run_objectives(make_run(Path(), 6)) == {"world-2": 2, "world-4": 4}


PROBE = """
<script>
window.problems = [];
window.addEventListener("error", (event) => window.problems.push(String(event.message)));
const consoleError = console.error;
console.error = (...words) => { window.problems.push(words.join(" ")); consoleError(...words); };
</script>
"""

DRIVE = """
<script>
const found = {};
const where = () => document.getElementById("where").textContent;
const shown = () => document.querySelectorAll(".episode").length;
const press = (filter) => document.querySelector(`[data-filter="${filter}"]`).click();
found.all = [where(), shown()];
const badges = () => [...new Set([...document.querySelectorAll(".badge")].map((node) => node.textContent))];
const first = () => document.querySelector(".episode summary").textContent;
// Contrast of a text with the nearest background behind it, as WCAG defines it.
const numbers = (colour) => colour.match(/[\\d.]+/g).map(Number);
const light = (colour) => {
  const [r, g, b] = numbers(colour).slice(0, 3).map((value) => value / 255)
    .map((value) => (value <= 0.04045 ? value / 12.92 : ((value + 0.055) / 1.055) ** 2.4));
  return 0.2126 * r + 0.7152 * g + 0.0722 * b;
};
const contrast = (node) => {
  let behind = node;
  while (behind && /, 0\\)$|transparent/.test(getComputedStyle(behind).backgroundColor)) behind = behind.parentElement;
  const pair = [light(getComputedStyle(node).color), light(getComputedStyle(behind).backgroundColor)];
  return (Math.max(...pair) + 0.05) / (Math.min(...pair) + 0.05);
};
found.contrast = {};
for (const filter of ["right", "wrong", "error"]) {
  press(filter);
  found[filter] = [where(), badges(), document.querySelectorAll('[aria-pressed="true"]').length];
  found.contrast[filter] = contrast(document.querySelector(".badge"));
}
press("");
found.pages = [first()];
document.getElementById("next").click();
found.pages.push(first());
document.getElementById("previous").click();
found.pages.push(first());
for (let i = 0; i < 49; i++) document.getElementById("next").click();
found.last = [where(), document.getElementById("next").disabled];
document.getElementById("previous").click();
found.back = where();
const select = document.getElementById("benchmark");
select.value = "world-4"; select.dispatchEvent(new Event("change"));
found.benchmark = where();
const search = document.getElementById("search");
search.value = "QUESTION 499.0"; search.dispatchEvent(new Event("input"));
found.search = where();
search.value = "question 3.1"; search.dispatchEvent(new Event("input"));
const opened = document.querySelector(".episode");
opened.open = true;
setTimeout(() => {
  found.text = opened.textContent;
  for (const part of [".memory", ".information", ".action", ".turn h4", "p", "th", "button", "figcaption span"]) {
    found.contrast[part] = contrast(document.querySelector(part));
  }
  // What reaches over the page's edge, apart from tables, which scroll in their own box.
  found.wide = [...document.querySelectorAll("main *")]
    .filter((node) => !node.closest(".scroll > *") && node.getBoundingClientRect().right > window.innerWidth + 1)
    .map((node) => node.tagName);
  found.size = parseFloat(getComputedStyle(document.querySelector(".memory")).fontSize);
  found.memory = opened.querySelector(".memory").textContent;
  found.injected = document.querySelectorAll("img").length;
  found.title = document.title;
  found.width = [document.documentElement.scrollWidth, window.innerWidth];
  const style = getComputedStyle(document.body);
  found.colours = [style.backgroundColor, style.color];
  found.charts = document.querySelectorAll("svg.chart polyline").length;
  found.problems = window.problems;
  const result = document.createElement("pre");
  result.id = "found";
  result.textContent = "FOUND" + JSON.stringify(found).replaceAll("<", "\\\\u003c") + "END";
  document.body.append(result);
}, 50);
</script>
"""


def browse(page: Path, folder: Path, width: int, dark: bool) -> dict[str, Any]:
    """What the page says of itself after a person's clicks, in a frame as wide as a screen."""
    html = page.read_text().replace("<main>", PROBE + "<main>", 1).replace("</body>", DRIVE + "</body>")
    (folder / "driven.html").write_text(html, encoding="utf-8")
    frame = (
        f'<iframe id="f" src="driven.html" style="width:{width}px;height:800px;border:0"></iframe>'
        "<script>const timer = setInterval(() => { const node = "
        'document.getElementById("f").contentDocument.getElementById("found"); if (node) {'
        " document.body.append(node.cloneNode(true)); clearInterval(timer); } }, 20);</script>"
    )
    (folder / "frame.html").write_text(f"<!doctype html><html><body>{frame}</body></html>", encoding="utf-8")
    command = [
        str(CHROMIUM),
        "--headless",
        "--enable-logging=stderr",
        "--no-sandbox",
        "--disable-gpu",
        "--allow-file-access-from-files",
    ]
    command += [f"--user-data-dir={folder / 'profile'}", "--virtual-time-budget=3000", "--dump-dom"]
    command += (
        ["--blink-settings=preferredColorScheme=0"] if dark else ["--blink-settings=preferredColorScheme=1"]
    )
    done = subprocess.run(
        [*command, (folder / "frame.html").as_uri()], capture_output=True, text=True, timeout=120, check=True
    )
    match = re.search(r"FOUND(.*?)END", done.stdout, re.DOTALL)
    assert match, f"the page's own script did not finish: {done.stderr[-500:]}"
    assert "CONSOLE" not in done.stderr, done.stderr
    result: dict[str, Any] = json.loads(
        match.group(1).replace("&amp;", "&").replace("&gt;", ">").replace("&lt;", "<")
    )
    return result


@pytest.fixture(scope="module")
def needs_browser() -> None:
    if CHROMIUM is None:
        message = "no chromium on PATH (Debian: apt-get install chromium); the page itself was not looked at"
        if os.environ.get("CI"):
            pytest.fail(message)
        pytest.skip(message)


@pytest.mark.parametrize(("width", "dark"), [(375, False), (375, True), (1280, True)])
def test_in_a_browser(page: Path, tmp_path: Path, width: int, dark: bool, needs_browser: None) -> None:
    found = browse(page, tmp_path, width, dark)
    assert found["problems"] == []
    assert found["all"] == ["1 to 20 of 1000", 20]
    # Of 500 episodes a benchmark every third is right, wrong, failed: 167, 167, 166.
    assert {key: found[key] for key in ("right", "wrong", "error")} == {
        "right": ["1 to 20 of 334", ["right"], 1],
        "wrong": ["1 to 20 of 334", ["wrong"], 1],
        "error": ["1 to 20 of 332", ["error"], 1],
    }
    assert [re.search(r"question (\d+)\.0", text).group(1) for text in found["pages"]] == ["0", "20", "0"]  # type: ignore[union-attr]
    assert found["last"] == ["981 to 1000 of 1000", True]
    assert found["back"] == "961 to 980 of 1000"
    assert found["benchmark"] == "1 to 20 of 500"
    assert found["search"] == "1 to 1 of 1"
    assert EVIL in found["memory"] and "Doc 1 " + EVIL in found["text"] and "P_mem 0.250" in found["text"]
    assert (found["injected"], "owned" in found["title"].split("model ")[0]) == (0, False)
    assert found["width"][0] <= found["width"][1] == width and found["wide"] == []
    assert found["size"] >= 14 and min(found["contrast"].values()) >= 4.5, found["contrast"]
    assert found["charts"] == 3
    background, ink = (sum(map(int, re.findall(r"\d+", colour)[:3])) for colour in found["colours"])
    assert (background < ink) == dark
    assert abs(background - ink) > 450
