"""The HTML report: one well-formed file that needs nothing else, and that works in a browser where there is one."""

import copy
import html
import json
import re
import shutil
import subprocess
from html.parser import HTMLParser

import pytest

from kvplus_eval.html import render_page, write_page
from kvplus_eval.html.scale import Scale, pareto_front
from kvplus_eval.metrics import column_units
from kvplus_eval.results import SCHEMA

VOID = {"meta"}
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
FLAGS = ["--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-sync"]
FLAGS += ["--disable-background-networking", "--disable-component-update", "--enable-logging=stderr"]


def row(strategy, bits, kl, **changes):
    figures = dict.fromkeys(column_units())
    figures |= {"stored_bits_per_element": bits, "kl_mean_nats": kl, "kl_p99_nats": 9 * kl, "perplexity": 20 + kl}
    figures |= {"cache_bytes": int(1e6 * bits), "perplexity_change_percent": kl, "top1_agreement": 1 - kl}
    figures |= {"share_of_full_cache": bits / 32, "decode_ms_per_token": 30 + bits, "prefill_ms": 900.0}
    return {
        "schema": SCHEMA,
        "kind": "eval",
        "run": "r",
        "date": "2026-01-01T00:00:00+00:00",
        "strategy": strategy,
        "status": "ok",
        "reason": None,
        "metrics": figures,
        "units": column_units(),
        "curve": [[tokens, int(1e3 * bits * tokens)] for tokens in (64, 128, 256)],
        "contexts": [{"context_tokens": tokens, "decode_ms_per_token": bits + tokens / 64} for tokens in (64, 256)],
        "tasks": [
            {"task": "needle", "length_tokens": 256, "depth": depth, "sample": 0, "exact": float(kl < 0.1), "nats": kl}
            for depth in (0.1, 0.9)
        ],
        "layers": [{"layer": layer, "key_error": kl, "value_error": kl} for layer in range(4)],
        "findings": [],
        "model": {"name": "m", "how": "h", "revision": "1", "dtype": "float32", "parameters": 9, "attention": "sdpa"},
        "text": {"name": "t", "sha256": "ab" * 32, "file_sha256": None, "characters": 9},
        "suite": "quick",
        "protocol": {"windows": 1, "window_tokens": 256, "chunk_tokens": 64},
        "versions": {"torch": "2"},
        "device": {"type": "cpu", "name": "d", "threads": 2},
        "git_commit": None,
        **changes,
    }


ROWS = [row("dynamic", 32, 0.0), row("fp", 33, 1e-15), row("int8", 9, 1e-5), row("int4", 5.8, 1e-3)]
ROWS += [row("hf-hqq4", 6.0, 1e-2), row("int2", 3.9, 0.2), row("window:64,sinks=4", 8.0, 0.5)]


class Checker(HTMLParser):
    """Checks that every element is closed in order, and collects what would be fetched."""

    def __init__(self):
        super().__init__()
        self.open, self.fetched = [], []

    def handle_startendtag(self, tag, attributes):
        self.note(attributes)

    def handle_starttag(self, tag, attributes):
        if tag not in VOID:
            self.open.append(tag)
        self.note(attributes)

    def note(self, attributes):
        for name, value in attributes:
            if name in ("src", "href", "xlink:href", "srcset", "data", "action"):
                self.fetched.append(value)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag, (tag, self.getpos())


def check(page):
    checker = Checker()
    checker.feed(page)
    checker.close()
    assert checker.open == []
    return checker


def test_the_page_is_well_formed_and_needs_nothing_else():
    page = render_page(ROWS)
    assert check(page).fetched == []
    assert not re.search(r"https?://|@import|url\(|<link|fetch\(", page)
    assert page.startswith("<!DOCTYPE html>")


def test_every_row_and_every_figure_is_there():
    page = render_page(ROWS)
    for one in ROWS:
        assert f'<th scope="row" data-value="{one["strategy"]}">' in page
        assert page.count(f'data-strategy="{one["strategy"]}"') >= 5
    for name in column_units():
        assert f"{name} (" in page
    assert page.count('<svg class="wide"') == page.count('<svg class="narrow"') == 4


def test_the_pareto_front_is_named():
    page = render_page(ROWS)
    front = re.search(r"Pareto front, fewest bits first: (.*?)\. No other", page)[1]
    assert re.findall(r"<b>(.*?)</b>", front) == ["int2", "int4", "int8", "fp"]


def test_what_rows_hold_is_escaped():
    rows = copy.deepcopy(ROWS[:2])
    rows[1]["strategy"] = 'a<script>alert("x")</script>&'
    rows[0]["model"]["name"] = rows[1]["model"]["name"] = "<img src=x>"
    rows.append(
        {**copy.deepcopy(rows[0]), "strategy": "int4", "status": "failed", "reason": "<b>no</b>", "metrics": {}}
    )
    page = render_page(rows)
    assert check(page).fetched == []
    assert page.count("<script>") == 1
    assert "&lt;b&gt;no&lt;/b&gt;" in page


def test_rows_of_the_first_version_still_make_a_page():
    older = copy.deepcopy(ROWS)
    for one in older:
        for key in ("contexts", "tasks", "layers", "findings", "suite"):
            del one[key]
        del one["metrics"]["kl_worst_nats"]
    page = render_page(older)
    check(page)
    assert page.count('<svg class="wide"') == 2
    assert "Planted facts" not in page


def test_a_page_without_figures_tells_why():
    failed = {**copy.deepcopy(ROWS[0]), "status": "refused", "reason": "the cache is never read", "metrics": {}}
    page = render_page([failed])
    check(page)
    assert "the cache is never read" in page
    assert "<svg" not in page


def test_a_task_beyond_the_model_is_told():
    rows = copy.deepcopy(ROWS)
    assert "Beyond this model" not in render_page(rows)
    for answer in rows[0]["tasks"]:
        answer["exact"] = 0.0
    assert "Beyond this model" in render_page(rows)


def test_a_line_that_ends_early_isnt_drawn_on_to_its_name():
    rows = copy.deepcopy(ROWS)
    assert "leader far" not in render_page(rows)
    rows[4]["contexts"].pop()
    assert render_page(rows).count('class="leader far"') == 2


def test_sensitivity_by_layer_is_drawn_where_rows_have_it():
    rows = copy.deepcopy(ROWS)
    rows[3]["layer_sensitivity"] = [{"layer": layer, "kl_nats": 0.01 * layer} for layer in range(4)]
    assert "Sensitivity by layer" in render_page(rows)
    assert "Sensitivity by layer" not in render_page(ROWS)


@pytest.mark.parametrize(
    ("low", "high", "log", "ticks"),
    [
        (0, 10, False, [0, 2, 4, 6, 8, 10]),
        (0, 0.06, False, [0, 0.02, 0.04, 0.06]),
        (3, 40, True, [4, 8, 16, 32]),
        (1e-7, 1, True, [1e-6, 1e-4, 1e-2, 1]),
    ],
)
def test_axes_are_marked_at_round_values(low, high, log, ticks):
    scale = Scale(low, high, 0, 100, log)
    assert scale.ticks() == pytest.approx(ticks)
    assert (scale.place(low), scale.place(high)) == pytest.approx((0, 100))


def test_the_front_holds_what_nothing_beats():
    assert pareto_front([(3, 3), (1, 5), (2, 4), (2, 6), (4, 3), (5, 1)]) == [1, 2, 0, 5]


PROBE = """<script>
addEventListener("load", () => {
  const table = document.querySelector("table");
  const names = () => [...table.tBodies[0].rows].map((row) => row.cells[0].textContent);
  const head = [...table.querySelectorAll("th button")].find((button) => button.textContent === "KL mean");
  head.click();
  const up = names();
  head.click();
  document.querySelector('.chips [data-strategy="int4"]').click();
  const drawn = [...document.querySelectorAll('svg [data-strategy="int4"]')];
  const gone = drawn.every((element) => getComputedStyle(element).display === "none");
  const root = document.documentElement;
  const wide = getComputedStyle(document.querySelector("svg.wide")).display;
  const overflows = root.scrollWidth > root.clientWidth;
  parent.postMessage(JSON.stringify([up, names(), gone, overflows, wide, innerWidth]), "*");
});
</script>"""
# A window is at least 500 pixels wide, however few it is asked for; a frame is as wide as it is told
FRAME = """<title></title><iframe src="report.html" width="WIDTH" height="2000" style="border: 0"></iframe>
<script>addEventListener("message", (told) => { document.title = told.data; });</script>"""


@pytest.mark.skipif(CHROMIUM is None, reason="Chromium isn't installed")
@pytest.mark.parametrize(("width", "wide"), [(1280, "block"), (420, "none")])
def test_tables_sort_and_nothing_complains_in_a_browser(tmp_path, width, wide):
    path = write_page(ROWS, tmp_path / "report.html")
    path.write_text(path.read_text().replace("</body>", PROBE + "</body>"))
    (tmp_path / "frame.html").write_text(FRAME.replace("WIDTH", str(width)))
    flags = [*FLAGS, f"--user-data-dir={tmp_path / 'profile'}", "--virtual-time-budget=3000", "--dump-dom"]
    page = (tmp_path / "frame.html").as_uri()
    done = subprocess.run([CHROMIUM, *flags, page], capture_output=True, text=True, check=True, timeout=60)
    title = html.unescape(re.search(r"<title>(.*?)</title>", done.stdout)[1])
    up, down, gone, overflows, shown, had = json.loads(title)
    assert had == width
    assert up == ["dynamic", "fp", "int8", "int4", "hf-hqq4", "int2", "window:64,sinks=4"]
    assert down == up[::-1]
    assert gone
    assert not overflows
    assert shown == wide
    assert "CONSOLE" not in done.stderr
