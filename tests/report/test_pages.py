"""What all pages share: the policy, escaping, the macros."""

import re

import pytest
from jinja2 import UndefinedError
from markupsafe import Markup

from tracefp4.meter.page import Section
from tracefp4.report.overview import Table
from tracefp4.report.pages import render_page

FOLDER = ("tracefp4.meter", "template")
TABLE = Table("", ["mode", "<b>"], [["<i>", Markup("<svg></svg>")]])
FIGURE = {"title": "t", "unit": "u", "svg": Markup("<svg></svg>")}
SECTION = Section("k", "t", points=["<a>"], figures=[FIGURE], tables=[TABLE])
VALUES = {"title": "<script>", "passed": True, "verdict": "v", "links": [("k", "<u>")], "sections": [SECTION]}


def test_values_are_escaped_and_pictures_are_not() -> None:
    page = render_page("meter.html", FOLDER, **VALUES)
    body = page[page.index("<body>") :]
    assert {tag for tag in ("script", "b", "i", "a", "u") if f"<{tag}>" in body} == set()
    assert body.count("<svg></svg>") == 2
    assert '<div class="scroll" role="region" aria-labelledby="k" tabindex="0">' in body
    assert "figcaption" not in body
    assert 'class="note"' not in body  # no caption
    assert re.search(r"<footer><p>Written by tracefp4 [0-9.]+\.</p></footer>", body)


@pytest.mark.parametrize("script", ["", "plots.js"])
def test_a_page_without_a_script_forbids_scripts(script: str) -> None:
    page = render_page("meter.html", FOLDER, script=script, **VALUES)
    [policy] = re.findall(r'Content-Security-Policy" content="([^"]*)"', page)
    assert ("script-src" in policy) == ("<script>" in page) == bool(script)
    assert policy.startswith("default-src 'none'; ")


def test_a_value_that_is_missing_is_an_error() -> None:
    with pytest.raises(UndefinedError, match="verdict"):
        render_page("meter.html", FOLDER, **{k: v for k, v in VALUES.items() if k != "verdict"})
