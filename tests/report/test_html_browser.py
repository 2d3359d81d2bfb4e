"""The page in Chromium: drawn at every width, dark and light, with no request but the file itself."""

from pathlib import Path

import pytest

from report.browser import CHROMIUM, Page
from report.runfolders import HOSTILE_NAME, write_comparison, write_run
from tracefp4.report.html import report

pytestmark = pytest.mark.skipif(
    CHROMIUM is None, reason="no chromium, chromium-browser or google-chrome on PATH: the page is not looked at"
)

BOXES = """[...document.querySelectorAll("svg.plot")].map((svg) => {
  const box = svg.getBoundingClientRect();
  const lines = [...svg.querySelectorAll("path.line")].map((line) => line.getTotalLength());
  const marks = [...svg.querySelectorAll("path.mark")].map((mark) => mark.getBoundingClientRect().width);
  return { id: svg.parentElement.id, width: box.width, height: box.height, lines, marks };
})"""
SMALLEST_TEXT = """Math.min(...[...document.querySelectorAll("body *")].filter((e) =>
  [...e.childNodes].some((n) => n.nodeType === 3 && n.data.trim()) && e.getClientRects().length
    && !["TITLE", "DESC", "SCRIPT"].includes(e.tagName.toUpperCase())
).map((e) => {
  const size = parseFloat(getComputedStyle(e).fontSize);
  const svg = e.closest("svg.plot");
  return svg ? size * svg.getBoundingClientRect().width / svg.viewBox.baseVal.width : size;
}))"""
OUTSIDE = """[...document.querySelectorAll("main *, header *")].filter((e) => !e.closest(".scroll") &&
  (e.getBoundingClientRect().right > document.documentElement.clientWidth + 0.5 || e.getBoundingClientRect().x < -0.5)
).map((e) => e.outerHTML.slice(0, 120))"""

COLUMNS = "new Set([...document.querySelectorAll('figure')].map((f) => f.getBoundingClientRect().x)).size"


@pytest.fixture(scope="module")
def page_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = write_comparison(tmp_path_factory.mktemp("runs") / "cmp", steps=8)
    write_run(root / HOSTILE_NAME / "seed0", HOSTILE_NAME, steps=8)
    return report([root])[0]


@pytest.mark.parametrize(("width", "dark"), [(1280, False), (1280, True), (400, False), (360, True), (320, False)])
def test_every_plot_is_drawn(tab: Page, page_file: Path, width: int, dark: bool) -> None:
    tab.open(page_file, width, dark=dark)
    assert tab.requests == [page_file.resolve().as_uri()]
    assert tab.errors == []
    boxes = tab.evaluate(BOXES)
    assert len(boxes) == tab.evaluate("document.querySelectorAll('figure').length") > 20
    for box in boxes:
        assert box["width"] >= 280, box
        assert box["height"] >= 180, box
        assert box["lines"], box
        assert all(length > 0 for length in box["lines"]), box
        assert box["marks"], box
        assert all(size > 0 for size in box["marks"]), box
    assert tab.evaluate("document.documentElement.scrollWidth <= innerWidth")
    assert tab.evaluate(OUTSIDE) == []
    assert tab.evaluate(SMALLEST_TEXT) >= 14
    ground = tab.evaluate("getComputedStyle(document.body).backgroundColor")
    assert ground == ("rgb(21, 24, 28)" if dark else "rgb(255, 255, 255)")


def test_a_phone_has_one_column_and_tables_that_scroll(tab: Page, page_file: Path) -> None:
    tab.open(page_file, 360)
    lefts = tab.evaluate(
        "[...new Set([...document.querySelectorAll('figure')].map((f) => f.getBoundingClientRect().x))]"
    )
    assert len(lefts) == 1
    boxes = tab.evaluate("[...document.querySelectorAll('.scroll')].map((b) => [b.scrollWidth, b.clientWidth])")
    assert all(inner > outer for inner, outer in boxes)
    tab.open(page_file, 1280)
    lefts = tab.evaluate(
        "[...new Set([...document.querySelectorAll('figure')].map((f) => f.getBoundingClientRect().x))]"
    )
    assert len(lefts) == 3


def test_hover_keys_and_switches(tab: Page, page_file: Path) -> None:
    tab.open(page_file, 1280)
    tab.evaluate("document.querySelector('#plot-reward-mean').scrollIntoView({ block: 'center' })")
    x, y = tab.evaluate(
        """(() => { const mark = document.querySelector('#plot-reward-mean [data-group="1"] path.line');
        const b = mark.getBoundingClientRect(); return [b.left + 1, b.top + 1]; })()"""
    )
    tab.call("Input.dispatchMouseEvent", type="mouseMoved", x=x, y=y)
    tip = "document.querySelector('#plot-reward-mean .tip')"
    first = tab.evaluate(f"{tip}.innerText").splitlines()
    assert first[0] == "step 0"
    assert "bf16, mean of 2 seeds: 0.31" in first
    tab.evaluate("document.querySelector('#plot-reward-mean svg').focus()")
    for key in ("ArrowRight", "ArrowRight"):
        tab.call("Input.dispatchKeyEvent", type="keyDown", key=key)
    rows = tab.evaluate(f"{tip}.innerText").splitlines()
    assert rows[0] == "step 2"
    assert "qat, mean of 2 seeds: 0.33" in rows
    tab.call("Input.dispatchKeyEvent", type="keyDown", key="Escape")
    assert tab.evaluate(f"{tip}.hidden")
    shown = "document.querySelector('#plot-reward-mean [data-group=\"1\"] path.line').getClientRects().length"
    assert tab.evaluate(shown) == 1
    tab.evaluate("document.querySelector('[data-toggle=\"1\"]').click()")
    assert tab.evaluate(shown) == 0
    assert tab.errors == []


def test_without_javascript(tab: Page, page_file: Path, tmp_path: Path) -> None:
    tab.open(page_file, 1280, script=False)
    assert tab.errors == []
    tab.screenshot(tmp_path / "page.png")
    assert (tmp_path / "page.png").stat().st_size > 20_000
    # Scripts of the page are off; the debugger's own still run.
    assert tab.evaluate("document.querySelectorAll('svg.plot path.line').length") > 60
    assert tab.evaluate("document.documentElement.className") == ""
    assert tab.evaluate("getComputedStyle(document.querySelector('.legend input')).display") == "none"


def test_nothing_in_a_run_is_executed(tab: Page, page_file: Path) -> None:
    tab.open(page_file, 1280)
    assert tab.evaluate("typeof globalThis.hacked") == "undefined"
    assert tab.evaluate("document.body.innerText").count(HOSTILE_NAME) > 1
