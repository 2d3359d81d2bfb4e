"""Curves can be told apart: contrast on both grounds, distance under colour deficiencies, dash and marker besides."""

import itertools

import numpy as np
import pytest

from tracefp4.report.style import COLOURS, GROUND, look

# G. M. Machado et al. 2009, severity 1; on linear RGB.
VISION = {
    "full": np.eye(3),
    "deuteranopia": [[0.367322, 0.860646, -0.227968], [0.280085, 0.672501, 0.047413], [-0.011820, 0.042940, 0.968881]],
    "protanopia": [[0.152286, 1.052583, -0.204868], [0.114503, 0.786281, 0.099216], [-0.003882, -0.048116, 1.051998]],
    "tritanopia": [[1.255528, -0.076749, -0.178779], [-0.078411, 0.930809, 0.147602], [0.004733, 0.691367, 0.303900]],
}
TO_XYZ = np.array([[0.4124, 0.3576, 0.1805], [0.2126, 0.7152, 0.0722], [0.0193, 0.1192, 0.9505]])
WHITE = np.array([0.9505, 1.0, 1.0890])


def linear(colour: str) -> np.ndarray:
    rgb = np.array([int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)])
    return np.where(rgb <= 0.04045, rgb / 12.92, ((rgb + 0.055) / 1.055) ** 2.4)


def contrast(one: str, other: str) -> float:
    low, high = sorted(float(TO_XYZ[1] @ linear(colour)) for colour in (one, other))
    return (high + 0.05) / (low + 0.05)


def lab(colour: str, vision: str) -> np.ndarray:
    xyz = TO_XYZ @ np.clip(np.array(VISION[vision]) @ linear(colour), 0, 1) / WHITE
    f = np.where(xyz > 0.008856, np.cbrt(xyz), 7.787 * xyz + 16 / 116)
    return np.array([116 * f[1] - 16, 500 * (f[0] - f[1]), 200 * (f[1] - f[2])])


@pytest.mark.parametrize("theme", [0, 1])
def test_lines_stand_out_from_the_ground(theme: int) -> None:
    assert all(contrast(pair[theme], GROUND[theme]) >= 3 for pair in COLOURS)


@pytest.mark.parametrize("theme", [0, 1])
@pytest.mark.parametrize("vision", VISION)
def test_colours_stay_apart(theme: int, vision: str) -> None:
    """CIE76 distance; about 2.3 is just noticeable."""
    pairs = itertools.combinations([lab(pair[theme], vision) for pair in COLOURS], 2)
    assert min(float(np.linalg.norm(a - b)) for a, b in pairs) > 7


def test_dash_and_marker_tell_apart_what_colour_does_not() -> None:
    looks = [look(index) for index in range(60)]
    assert len({(one.dash, one.marker) for one in looks}) == 60
    assert len(set(looks[:8])) == len({one.colour for one in looks[:8]}) == 8
