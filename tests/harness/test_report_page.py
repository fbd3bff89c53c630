"""The report: everything is in the page, the page needs nothing else, and a browser shows it."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
from html.parser import HTMLParser
from pathlib import Path

import pytest

from cxlbench.harness.experiment_folder import best_records, read_record
from cxlbench.harness.experiment_record import make_record
from cxlbench.harness.experiment_run import make_contexts
from cxlbench.harness.report_html import prose
from cxlbench.harness.report_page import report_page
from tests.harness.front_end_toys import EXPERIMENT, OTHER

BROWSERS = ("chromium", "chromium-browser", "google-chrome", "chrome")
GRIDS = {"toy": {"faster": (24, 32), "more": (0, 32)}}
VOID = {"meta", "link", "br", "img", "hr", "input"}


@pytest.fixture(scope="module")
def records():
    """A full run whose check fails, and a quick and partial one."""
    full, quick = make_contexts([EXPERIMENT, OTHER], overrides={"lossless": "false"})
    quick.quick, quick.overrides = True, {}
    found = [make_record(one, one.experiment.run(one), duration_s=61.5) for one in (full, quick)]
    object.__setattr__(found[1], "partial", True)
    return found


@pytest.fixture(scope="module")
def page(records):
    return report_page(records, GRIDS)


class Reader(HTMLParser):
    """Collects elements, ids and text, and refuses tags that do not fit."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.ids: list[str] = []
        self.links: list[str] = []
        self.urls: list[str] = []
        self.cells: list[str] = []
        self.feed(page)
        assert self.open == []

    def handle_starttag(self, tag, attrs):
        given = dict(attrs)
        if tag not in VOID:
            self.open.append(tag)
        if tag in ("td", "th"):
            self.cells.append("")
        self.ids += [given["id"]] if "id" in given else []
        self.links += [given["href"]] if tag == "a" else []
        for name in ("src", "href", "xlink:href", "action", "data", "poster", "srcset"):
            self.urls += [given[name]] if name in given else []

    def handle_startendtag(self, tag, attrs):
        self.handle_starttag(tag, attrs)
        if tag not in VOID:
            self.handle_endtag(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        if "td" in self.open or "th" in self.open:
            self.cells[-1] += data


@pytest.fixture(scope="module")
def read(page):
    return Reader(page)


def test_it_is_well_formed_and_every_id_is_one_elements(read):
    assert len(read.ids) == len(set(read.ids))


def test_every_link_leads_to_a_part_of_the_page(read):
    assert read.links
    assert {link.removeprefix("#") for link in read.links} <= set(read.ids)


def test_nothing_is_loaded_from_anywhere(page, read):
    assert all(url.startswith(("#", "data:")) for url in read.urls)
    assert not re.search(r"@import|url\(\s*['\"]?(?!#|data:)", page)
    assert re.findall(r"(?:https?:)?//[a-z][\w.-]+\.[a-z]+", _without_namespaces(page)) == []
    assert "default-src 'none'" in page


def _without_namespaces(page: str) -> str:
    return re.sub(r'xmlns(:\w+)?="[^"]*"', "", page)


def test_the_claims_come_first_with_verdicts_in_words_and_shares(page, read, records):
    assert page.index('id="claims"') < page.index('id="runs"') < page.index('id="experiment-toy"')
    for record in records:
        for claim in record.claims:
            assert any(cell.startswith(claim.statement) for cell in read.cells)
            assert any(cell.endswith(claim.verdict.value) for cell in read.cells)
    assert "24 of 32" in read.cells
    assert "0 of 32" in read.cells
    assert "no sweep" in read.cells


def test_what_an_experiment_says_is_text_and_no_markup(page):
    assert "HyMCache &lt;reads&gt; faster than Recompute &amp; co" in page
    assert "<reads>" not in page


def test_prose_has_code_and_stress_and_leaves_products_alone():
    assert prose("`a*b*c` *may be* 2 * 3 * 4 <*x*>") == (
        "<code>a*b*c</code> <em>may be</em> 2 * 3 * 4 &lt;<em>x</em>&gt;"
    )


def test_each_section_has_command_setup_assumptions_checks_notes_and_numbers(page, read):
    section = page[page.index('id="experiment-toy"') : page.index('id="experiment-toy2"')]
    assert "cxlbench run toy --seed 0 --set lossless=false" in section
    for name in ("turns", "rate", "pm1743-class.read_bandwidth"):
        assert f"<code>{name}</code>" in section
    for text in ("given by --set", "assumption", "a sweep tries", "a toy", "took 1 min 02 s"):
        assert text in section
    assert section.count("<svg") == 3
    assert section.count("<summary>Numbers") == 3
    assert "round-robin | prefix-aware" in read.cells
    assert any(re.fullmatch(r"1\.0\d* to 1\.9\d*", cell) for cell in read.cells)


def test_what_one_must_know_is_said_at_the_top(page):
    top = page[page.index("<header") : page.index("</header")]
    for words in ("with checks that FAILED", "partial, stopped", "in the quick form", "changed"):
        assert words in top
    assert "Check failed: nothing lost" in page


def test_the_command_writes_the_page_and_says_where(cli, tmp_path):
    assert cli("run", "tests.harness.front_end_toys:EXPERIMENT", "--quick").code == 0
    ran = cli("report", "-o", "deep/page.html")
    assert ran.code == 0
    assert "deep/page.html" in ran.out
    assert Path("deep/page.html").read_text().startswith("<!DOCTYPE html>")
    assert cli("report", "--json").document["claims"]["toy"]["holds"] == 1


def test_of_an_experiment_the_whole_and_full_run_is_shown(cli):
    for words in ((), ("--quick",)):
        cli("run", "tests.harness.front_end_toys:EXPERIMENT", *words)
    assert [one.quick for one in best_records(Path("results"))] == [False]
    path = Path("results/toy/result.json")
    result = json.loads(path.read_text())
    result["figures"]["partial"] = True
    path.write_text(json.dumps(result))
    assert read_record(Path("results/toy")).partial
    assert [one.quick for one in best_records(Path("results"))] == [True]


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["--results", "nowhere"], "there is no folder nowhere"),
        (["--results", "."], "holds no run of an experiment"),
    ],
)
def test_without_a_run_there_is_no_page(cli, words, says):
    ran = cli("report", *words)
    assert (ran.code, ran.out) == (2, "")
    assert says in ran.err
    assert not Path("report.html").exists()


def test_a_page_that_cannot_be_written_is_told(cli):
    cli("run", "tests.harness.front_end_toys:EXPERIMENT", "--quick")
    Path("file").touch()
    ran = cli("report", "-o", "file/page.html")
    assert ran.code == 2
    assert "choose another file (-o)" in ran.err


# -- in a real browser -----------------------------------------------------------------------------


PROBE = """<script>
const shown = (one) => one.getClientRects().length > 0;
const claims = [...document.querySelectorAll("#claims tbody tr")];
const head = document.querySelectorAll("#claims th button")[4];
head.click();
const up = [...document.querySelectorAll("#claims tbody tr")].map((row) => row.dataset.verdict);
head.click();
const down = [...document.querySelectorAll("#claims tbody tr")].map((row) => row.dataset.verdict);
document.querySelector(".bar .fails").click();
const left = claims.filter(shown).map((row) => row.dataset.verdict);
document.querySelector(".bar .fails").click();
const before = getComputedStyle(document.body).backgroundColor;
document.getElementById("theme").click();
const after = getComputedStyle(document.body).backgroundColor;
document.querySelectorAll("details").forEach((one) => { one.open = true; });
const found = {
  claims: claims.filter(shown).length,
  up, down, left, before, after,
  sorted: document.querySelectorAll("#claims th")[4].getAttribute("aria-sort"),
  plots: [...document.querySelectorAll("figure svg")].map((svg) => {
    const box = svg.getBoundingClientRect(), drawn = svg.getBBox();
    return [box.width, box.height, drawn.width, drawn.height];
  }),
  images: [...document.images].map((one) => one.complete && one.naturalWidth > 0),
  loaded: performance.getEntriesByType("resource").map((one) => one.name),
  wide: document.documentElement.scrollWidth - document.documentElement.clientWidth,
};
const out = document.createElement("pre");
out.id = "found";
out.textContent = JSON.stringify(found);
document.body.append(out);
</script></body>"""


@pytest.fixture(scope="module")
def browse(page, tmp_path_factory):
    """Return what a browser makes of the page, at a width: its DOM, and its log."""
    named = os.environ.get("CXLBENCH_BROWSER")
    browser = named or next(filter(None, map(shutil.which, BROWSERS)), None)
    if browser is None:
        pytest.skip("no browser is here: install chromium, or set CXLBENCH_BROWSER to one")
    folder = tmp_path_factory.mktemp("browser")
    path = folder / "report.html"
    path.write_text(page.replace("</body>", PROBE))

    def run(width: int) -> tuple[dict, str]:
        done = subprocess.run(
            [
                browser,
                "--headless",
                "--no-sandbox",
                "--disable-gpu",
                "--disable-dev-shm-usage",
                "--disable-background-networking",
                "--host-resolver-rules=MAP * ~NOTFOUND",
                "--enable-logging=stderr",
                f"--user-data-dir={folder / 'profile'}",
                f"--window-size={width},900",
                "--dump-dom",
                path.as_uri(),
            ],
            capture_output=True,
            text=True,
            timeout=120,
            check=True,
        )
        text = re.search(r'<pre id="found">(.*?)</pre>', done.stdout, re.DOTALL)
        assert text is not None, done.stderr
        found = text[1].replace("&lt;", "<").replace("&gt;", ">").replace("&amp;", "&")
        return json.loads(found), done.stderr

    return run


def test_a_browser_shows_all_claims_and_plots_without_an_error(browse, records):
    found, log = browse(1280)
    assert [line for line in log.splitlines() if "CONSOLE" in line] == []
    assert found["claims"] == sum(len(record.claims) for record in records)
    assert len(found["plots"]) == sum(len(record.plots) for record in records)
    for size in found["plots"]:
        assert min(size) > 100
    assert all(found["images"])
    assert found["loaded"] == []


def test_a_browser_sorts_filters_and_changes_the_theme(browse):
    found, _ = browse(1280)
    order = ["holds", "direction", "fails", "open"]
    assert found["up"] == sorted(found["up"], key=order.index)
    assert found["down"] == found["up"][::-1]
    assert found["sorted"] == "descending"
    assert found["left"] == ["fails"] * 2
    assert found["before"] != found["after"]


@pytest.mark.parametrize("width", [500, 1280])
def test_the_page_is_as_wide_as_the_window(browse, width):
    found, _ = browse(width)
    assert found["wide"] == 0
