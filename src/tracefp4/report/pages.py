"""The HTML pages of all commands: each is one file that needs nothing but itself, on a screen, a phone and paper."""

from __future__ import annotations

from importlib import resources
from typing import Any

from jinja2 import ChoiceLoader, Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from tracefp4 import __version__
from tracefp4.report.style import COLOURS

_SHARED = ("tracefp4.report", "page")


def render_page(template: str, folder: tuple[str, str], style: str = "", script: str = "", **values: Any) -> str:
    """The page of a template that extends `base.html`; every value is escaped unless it is Markup.

    folder: package and folder of the template. style, script: names of files in it and in `report/page`, to be put
    into the page after `base.css`. values: `title` and what else the template names; one that is missing raises.
    """
    environment = Environment(
        loader=ChoiceLoader([PackageLoader(*folder), PackageLoader(*_SHARED)]),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    sheets = [_text(_SHARED, "base.css"), colour_rules(), *([_text(folder, style)] if style else [])]
    return environment.get_template(template).render(
        version=__version__,
        style=Markup("".join(sheets)),
        script=Markup(_text(_SHARED, script)) if script else "",
        **values,
    )


def colour_rules() -> str:
    """.c0 to .c7, light and dark: the strokes of curves and the areas of their bands."""
    light, dark = (
        "".join(
            f".c{index} {{ stroke: {pair[theme]}; }} path.band.c{index} {{ fill: {pair[theme]}; stroke: none; }}\n"
            for index, pair in enumerate(COLOURS)
        )
        for theme in (0, 1)
    )
    return f"{light}@media screen and (prefers-color-scheme: dark) {{\n{dark}}}\n"


def _text(folder: tuple[str, str], name: str) -> str:
    package, inside = folder
    return resources.files(package).joinpath(inside, name).read_text(encoding="utf-8")
