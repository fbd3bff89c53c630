"""One look for all plots: a system keeps its colour, and nothing lies on the data."""

from __future__ import annotations

import itertools
import xml.etree.ElementTree as ET

import pytest

from cxlbench.harness.experiment_plot import GROUND, INK, SYSTEMS, _drawn, looks, svg_inline
from cxlbench.harness.experiment_record import PlotRecord, Series

NAMES = ("Recompute", "GPU prefix cache", "LMCache, local", "Mooncake 1 TB", "HyMCache", "TraCT")


def plot(kind="line", series=None, **options):
    drawn = series or {name: (range(1, 6), [i * n for i in range(1, 6)]) for n, name in numbered()}
    lines = tuple(
        Series(name=name, x=tuple(x), y=tuple(map(float, y))) for name, (x, y) in drawn.items()
    )
    named = {"name": "p", "title": "A <title> & more", "x_label": "turn", "y_label": "s"}
    return PlotRecord(**(named | options), kind=kind, series=lines)


def numbered():
    return enumerate(NAMES, 1)


def test_a_system_has_the_same_colour_whoever_stands_beside_it():
    alone = {name: looks([name])[0].color for name in NAMES}
    together = dict(zip(NAMES, (look.color for look in looks(NAMES)), strict=True))
    assert alone == together
    assert len(set(together.values())) == len(NAMES)


def test_variants_of_a_system_share_its_colour_and_differ_otherwise():
    first, second = looks(["HyMCache, prefetch", "HyMCache without"])
    assert first.color == second.color
    assert first.dashes != second.dashes
    assert first.hatch != second.hatch
    assert first.marker != second.marker


def test_unknown_series_take_no_colour_of_a_known_one_beside_them():
    colors = [look.color for look in looks(["HyMCache", "mine", "yours"])]
    assert len(set(colors)) == 3


def test_sizes_are_coloured_in_their_order_however_they_are_listed():
    up = [look.color for look in looks(["16 MB", "32 MB", "168 MB"])]
    down = [look.color for look in looks(["168 MB", "32 MB", "16 MB"])]
    assert up == down[::-1]


def luminance(color):
    parts = [int(color[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    linear = [p / 12.92 if p <= 0.04045 else ((p + 0.055) / 1.055) ** 2.4 for p in parts]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


@pytest.mark.parametrize(("name", "color"), SYSTEMS)
def test_every_colour_is_seen_on_a_light_and_on_a_dark_ground(name, color):
    if color == INK:  # takes the colour of the text
        return
    light = 1.05 / (luminance(color) + 0.05)
    dark = (luminance(color) + 0.05) / (luminance("#1b1f24") + 0.05)
    assert min(light, dark) >= 2.0, name


@pytest.mark.parametrize("kind", ["line", "bar", "cdf"])
def test_the_legend_is_outside_of_the_axes(kind):
    series = {name: ([1.0, 2.0, 3.0], [n, n, n] if kind != "cdf" else []) for n, name in numbered()}
    with _drawn(plot(kind, series), titled=True) as figure:
        figure.draw_without_rendering()
        (axes,), (legend,) = figure.axes, figure.legends
        box, inside = legend.get_window_extent(), axes.get_window_extent()
        assert box.y0 >= inside.y1
        assert box.x1 <= figure.bbox.x1
        assert box.y1 <= figure.bbox.y1


def test_the_labels_of_an_axis_do_not_overlap():
    words = [f"a system with a long name {n}" for n in range(6)]
    series = {"HyMCache": (words, [1.0] * 6)}
    with _drawn(plot("bar", series), titled=True) as figure:
        figure.draw_without_rendering()
        boxes = [text.get_window_extent() for text in figure.axes[0].get_xticklabels()]
        assert all(a.x1 < b.x0 for a, b in itertools.pairwise(boxes))


@pytest.mark.parametrize(
    ("top", "scale"), [(40.0, "linear"), (4000.0, "log")], ids=["narrow", "wide"]
)
def test_a_wide_range_is_logarithmic_and_says_so(top, scale):
    with _drawn(plot(series={"a": ([1, 2], [1.0, top])}), titled=True) as figure:
        axes = figure.axes[0]
        assert axes.get_yscale() == scale
        assert axes.get_ylabel().endswith("(log)") is (scale == "log")


def test_a_linear_axis_begins_at_zero():
    with _drawn(plot(series={"a": ([1, 2], [5.0, 6.0])}), titled=True) as figure:
        assert figure.axes[0].get_ylim()[0] == 0


@pytest.mark.parametrize("kind", ["line", "bar", "cdf"])
@pytest.mark.parametrize("series", [{}, {"a": ([], [])}, {"a": ([1.0], [2.0])}])
def test_little_or_nothing_to_draw_is_no_error(kind, series):
    lines = {name: (x, [] if kind == "cdf" else y) for name, (x, y) in series.items()}
    made = PlotRecord(
        name="p",
        title="t",
        x_label="x",
        y_label="y",
        kind=kind,
        series=tuple(Series(name=n, x=tuple(x), y=tuple(y)) for n, (x, y) in lines.items()),
    )
    assert "<svg" in svg_inline(made, prefix="a")


def test_inline_it_is_well_formed_takes_the_pages_colours_and_has_ids_of_its_own():
    text = svg_inline(plot(), prefix="one")
    root = ET.fromstring(text)
    assert root.get("aria-label") == "A <title> & more: s by turn"
    assert INK not in text
    assert GROUND not in text
    assert "currentColor" in text
    ids = {element.get("id") for element in root.iter() if element.get("id")}
    assert ids
    assert all(name.startswith("one-") for name in ids)
    used = [
        value.removeprefix("#")
        for element in root.iter()
        for key, value in element.items()
        if key.endswith("href")
    ]
    assert used
    assert set(used) <= ids
