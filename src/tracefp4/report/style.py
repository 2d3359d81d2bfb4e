"""How curves look: hues of Okabe and Ito, each with a dash and a marker of its own, so that hue is never alone.

The palette was made for areas; pale hues are darkened on white and black is lightened on a dark ground, so that each
has a contrast of 3:1 (WCAG 1.4.11) and all stay apart under the three colour deficiencies. Both are tested.
"""

from __future__ import annotations

from dataclasses import dataclass

GROUND = ("#ffffff", "#15181c")
"""Background, light and dark."""

# black, blue, vermillion, green, purple, orange, sky blue, yellow: (on white, on dark)
COLOURS = (
    ("#000000", "#f2f2f2"),
    ("#0072b2", "#3f9bd8"),
    ("#9c4300", "#e06c10"),
    ("#009068", "#009e73"),
    ("#98597c", "#cc79a7"),
    ("#a16e00", "#e69f00"),
    ("#4898c6", "#8ccbf0"),
    ("#9e9528", "#f0e442"),
)

DASHES = ("", "7 3", "2 3", "9 3 2 3", "4 4", "12 4", "9 3 2 3 2 3")
"""stroke-dasharray of a mean line."""

MARKERS = ("circle", "square", "triangle", "diamond", "cross", "plus", "down", "bar", "star")
_MATPLOTLIB = {
    "circle": "o",
    "square": "s",
    "triangle": "^",
    "diamond": "D",
    "cross": "x",
    "plus": "+",
    "down": "v",
    "bar": "|",
    "star": "*",
}


@dataclass(frozen=True)
class Look:
    """colour: an index of COLOURS; dash: of SVG, "" is solid; marker: a name of MARKERS."""

    colour: int
    dash: str
    marker: str

    @property
    def matplotlib(self) -> dict[str, object]:
        """The same for `Axes.plot`, on white."""
        dashes: object = (0, tuple(float(part) / 1.6 for part in self.dash.split())) if self.dash else "-"
        return {"color": COLOURS[self.colour][0], "linestyle": dashes, "marker": _MATPLOTLIB[self.marker]}


def look(index: int) -> Look:
    """Looks repeat after 504 groups, colours after 8."""
    return Look(index % len(COLOURS), DASHES[index % len(DASHES)], MARKERS[index % len(MARKERS)])
