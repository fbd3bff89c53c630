"""Draws the plots of experiments: one look for all, from data alone.

A system has the same colour in every figure of every experiment; variants of it (two routings, with
and without prefetch) share the colour and differ in dashes, marker and hatch. The colours are apart
for the usual forms of colour blindness (after Okabe and Ito), and markers tell lines apart in grey,
too. Series that are sizes (``16 MB``, ``32 MB``) take their colours from a
ramp, in their order. The legend stands
outside the axes, never on the data.

``svg_inline`` is for a page: text and axes take the colour of the text around them, so that a plot
is legible on a light and on a dark ground.

Units: those of the plots' labels; sizes of figures in inches.
"""

from __future__ import annotations

import io
import math
import re
import textwrap
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cxlbench.harness.experiment_record import PlotRecord, Series

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

SYSTEMS: tuple[tuple[str, str], ...] = (
    ("recompute", "#8c8c8c"),
    ("nvme-of", "#a0703c"),
    ("nvmeof", "#a0703c"),
    ("lmcache + redis", "#a050b4"),
    ("lmcache+redis", "#a050b4"),
    ("redis", "#b8657f"),
    ("hymcache", "#1f77c4"),
    ("tract", "#009e73"),
    ("lmcache", "#e69f00"),
    ("mooncake", "#cc5f9e"),
    ("nixl", "#d55e00"),
    ("cmm-h", "#56b4e9"),
    ("cxl-hm", "#1f77c4"),
    ("gpu", "#010203"),
)
"""What a series' name holds (the first that fits), and the colour of it."""

OTHERS = ("#1f77c4", "#e69f00", "#009e73", "#cc5f9e", "#d55e00", "#56b4e9", "#a050b4", "#8c8c8c")
INK = "#010203"
"""Text and axes; on a page it becomes the colour of the text around the plot."""
GROUND = "#fdfeff"
"""Behind everything; on a page there is nothing there."""

MARKERS = "osD^vPX<>*"
DASHES: tuple[Any, ...] = ("-", (0, (5, 2)), (0, (1.5, 1.5)), (0, (5, 2, 1, 2)))
HATCHES = ("", "///", "...", "xxx")
SIZE = re.compile(r"(\d+(?:\.\d+)?)(\D*)")

WIDTH, HEIGHT = 6.2, 3.9
MAX_NAMED_BARS = 24
"""Beyond that many bars, values on top of them would run into each other."""
WIDE_RANGE = 50.0
"""Positive values that differ by more than this factor are shown on a logarithmic axis."""


@dataclass(frozen=True, slots=True)
class Look:
    """How one series is drawn; ``variant`` counts the series of the same colour before it."""

    color: str
    marker: str
    variant: int

    @property
    def dashes(self) -> Any:
        """Of its line."""
        return DASHES[self.variant % len(DASHES)]

    @property
    def hatch(self) -> str:
        """Of its bars."""
        return HATCHES[self.variant % len(HATCHES)]


def looks(names: Sequence[str]) -> list[Look]:
    """Return how the series of a plot are drawn, by their names in order."""
    ramp = _ramp(names)
    if ramp is not None:
        return [Look(color, MARKERS[i % len(MARKERS)], 0) for i, color in enumerate(ramp)]
    found: list[Look] = []
    known = [_system(name) for name in names]
    free = [color for color in OTHERS if color not in known] or list(OTHERS)
    for place, color in enumerate(known):
        if color is None:
            color = free[sum(known[i] is None for i in range(place)) % len(free)]
        variant = sum(look.color == color for look in found)
        found.append(Look(color, MARKERS[place % len(MARKERS)], variant))
    return found


def save_plot(plot: PlotRecord, folder: Path) -> list[Path]:
    """Draw a plot into ``folder`` as PNG and as SVG, and return both paths."""
    paths = [folder / f"{plot.name}.png", folder / f"{plot.name}.svg"]
    with _drawn(plot, titled=True) as figure:
        figure.savefig(paths[0], dpi=170, metadata={"Software": None})
        figure.savefig(paths[1], metadata={"Date": None, "Creator": None})
    return paths


def svg_inline(plot: PlotRecord, *, prefix: str) -> str:
    """Return a plot as an ``<svg>`` element for a page, without title; its ids have ``prefix``."""
    text = io.StringIO()
    with _drawn(plot, titled=False) as figure:
        figure.savefig(text, format="svg", metadata={"Date": None, "Creator": None})
    svg = text.getvalue()
    svg = svg[svg.index("<svg") :]
    svg = re.sub(r"<metadata>.*?</metadata>", "", svg, flags=re.DOTALL)
    svg = re.sub(r'\sid="', f' id="{prefix}-', svg)
    svg = re.sub(r'(xlink:href="#|url\(#)', rf"\g<1>{prefix}-", svg)
    svg = svg.replace(INK, "currentColor").replace(f"fill: {GROUND}", "fill: none")
    svg = svg.replace(GROUND, "var(--card, #fff)")
    svg = re.sub(r'\s(width|height)="[\d.]+pt"', "", svg, count=2)
    label = f"{plot.title}: {plot.y_label} by {plot.x_label}"
    for char, entity in (("&", "&amp;"), ("<", "&lt;"), (">", "&gt;"), ('"', "&quot;")):
        label = label.replace(char, entity)
    return svg.replace("<svg ", f'<svg role="img" aria-label="{label}" ', 1).strip()


@contextmanager
def _drawn(plot: PlotRecord, *, titled: bool) -> Iterator[Figure]:
    import matplotlib as mpl
    from matplotlib.figure import Figure

    style: dict[Any, Any] = {
        "font.size": 10,
        "axes.edgecolor": INK,
        "axes.facecolor": GROUND,
        "axes.labelcolor": INK,
        "axes.spines.right": False,
        "axes.spines.top": False,
        "figure.facecolor": GROUND,
        "grid.alpha": 0.18,
        "grid.color": INK,
        "hatch.linewidth": 0.6,
        "savefig.facecolor": GROUND,
        "svg.fonttype": "path",
        "svg.hashsalt": plot.name,
        "text.color": INK,
        "xtick.color": INK,
        "ytick.color": INK,
    }
    with mpl.rc_context(style):
        figure = Figure(figsize=(WIDTH, HEIGHT), layout="constrained")
        axes = figure.add_subplot()
        {"bar": _bars, "cdf": _distributions, "line": _lines}[plot.kind](axes, plot)
        axes.set_xlabel(plot.x_label + (" (log)" if axes.get_xscale() == "log" else ""))
        axes.set_ylabel(plot.y_label + (" (log)" if axes.get_yscale() == "log" else ""))
        if plot.kind == "cdf":
            axes.set_ylabel(f"{plot.y_label}\n(marks: p50, p90, p99)")
        axes.grid(visible=True, axis="y" if plot.kind == "bar" else "both")
        axes.set_axisbelow(True)
        _legend(figure, axes, textwrap.fill(plot.title, 80) if titled else "")
        yield figure


def _legend(figure: Figure, axes: Axes, title: str) -> None:
    """Put title and legend above the axes; as one, so that neither can lie on the other."""
    handles, names = axes.get_legend_handles_labels()
    longest = max(map(len, names), default=0)
    # One column is as wide as the longest name; at 9 pt a letter takes about 0.075 inches.
    columns = max(1, min(len(names), int(WIDTH / (longest * 0.075 + 0.6))))
    figure.legend(
        handles if longest else [],
        names if longest else [],
        loc="outside upper left",
        ncols=columns,
        title=title or None,
        title_fontsize=11,
        alignment="left",
        frameon=False,
        fontsize=9,
        handlelength=2.6,
        borderaxespad=0.2,
    )


def _lines(axes: Axes, plot: PlotRecord) -> None:
    words = _names_of_x(plot.series)
    below = len(plot.series) if _some_equal(plot.series) else 1
    for series, look in zip(plot.series, looks([s.name for s in plot.series]), strict=True):
        below = max(0, below - 1)  # wider, so that it shows beside equal lines drawn later
        xs = [words.index(str(x)) if words else float(x) for x in series.x]
        few = len(xs) <= 40
        axes.plot(
            xs,
            [float("nan") if y is None else y for y in series.y],
            color=look.color,
            linestyle=look.dashes,
            marker=look.marker if few else "",
            markersize=4.5 + min(4.0, 0.9 * below),
            linewidth=1.6 + min(3.0, 0.7 * below),
            label=series.name,
            clip_on=not few,
            zorder=3,
        )
    ys = [y for series in plot.series for y in series.y if y is not None]
    if _spread_wide(ys):
        _logarithmic(axes, "y")
    else:
        _from_zero(axes, ys)
    if words:
        axes.set_xticks(range(len(words)), [_wrapped(word, len(words)) for word in words])
        return
    places = sorted({float(x) for series in plot.series for x in series.x})
    if _spread_wide(places):
        _logarithmic(axes, "x")
    if 1 < len(places) <= 10 and not _crowded(places, log=axes.get_xscale() == "log"):
        axes.set_xticks(places, [f"{place:g}" for place in places])
        axes.minorticks_off()


def _bars(axes: Axes, plot: PlotRecord) -> None:
    words = _names_of_x(plot.series, always=True)
    count = max(1, len(plot.series))
    width = 0.8 / count
    bars = sum(y is not None for series in plot.series for y in series.y)
    for place, (series, look) in enumerate(
        zip(plot.series, looks([s.name for s in plot.series]), strict=True)
    ):
        given = [(x, y) for x, y in zip(series.x, series.y, strict=True) if y is not None]
        drawn = axes.bar(
            [words.index(_word(x)) + (place - (count - 1) / 2) * width for x, _ in given],
            [y for _, y in given],
            width * 0.92,
            color=look.color,
            edgecolor=GROUND,
            linewidth=0.5,
            hatch=look.hatch,
            label=series.name,
            zorder=3,
        )
        if bars <= MAX_NAMED_BARS:
            axes.bar_label(drawn, labels=[_short(y) for _, y in given], fontsize=8, padding=2)
    axes.set_xticks(range(len(words)), [_wrapped(word, len(words)) for word in words])
    axes.set_xlim(-0.6, len(words) - 0.4)
    axes.tick_params(axis="x", length=0)
    _from_zero(axes, [y for series in plot.series for y in series.y if y is not None])


def _distributions(axes: Axes, plot: PlotRecord) -> None:
    for series, look in zip(plot.series, looks([s.name for s in plot.series]), strict=True):
        samples = sorted(float(x) for x in series.x)
        count = len(samples)
        marked = sorted({round(share * (count - 1)) + 1 for share in (0.5, 0.9, 0.99)})
        axes.plot(
            [*samples[:1], *samples],
            [*[0.0][:count], *((i + 1) / count for i in range(count))],
            drawstyle="steps-post",
            color=look.color,
            linestyle=look.dashes,
            linewidth=1.8,
            marker=look.marker,
            markersize=5,
            markevery=marked if count else None,
            label=series.name,
            zorder=3,
        )
    axes.set_ylim(0, 1.02)
    values = [float(x) for series in plot.series for x in series.x]
    if _spread_wide(values):
        _logarithmic(axes, "x")
    elif values and min(values) >= 0:
        axes.set_xlim(left=0)


def _some_equal(series: Sequence[Series]) -> bool:
    """Return whether one line lies on another at two places or more."""
    ys = [y for one in series for y in one.y if y is not None]
    near = (max(ys) - min(ys)) / 100 if ys else 0.0
    known = [dict(zip(one.x, one.y, strict=True)) for one in series]
    for place, one in enumerate(known):
        for other in known[:place]:
            pairs = [(y, other.get(x)) for x, y in one.items()]
            on = [1 for a, b in pairs if a is not None and b is not None and abs(a - b) <= near]
            if len(on) >= 2:
                return True
    return False


def _from_zero(axes: Axes, values: Sequence[float]) -> None:
    if not values:
        return
    if 10_000 <= max(map(abs, values)) < 1_000_000:
        axes.yaxis.set_major_formatter("{x:,g}")
    if min(values) >= 0:
        axes.set_ylim(0, (max(values) or 1) * 1.08)
    elif max(values) <= 0:
        axes.set_ylim(min(values) * 1.08, 0)
    else:
        axes.axhline(0, color=INK, linewidth=0.8, zorder=2)
        axes.margins(y=0.1)


def _logarithmic(axes: Axes, which: str) -> None:
    from matplotlib.ticker import LogLocator, NullFormatter, StrMethodFormatter

    axis = axes.xaxis if which == "x" else axes.yaxis
    (axes.set_xscale if which == "x" else axes.set_yscale)("log")
    axis.set_major_locator(LogLocator(subs=(1, 2, 5) if _decades(axes, which) < 3 else (1,)))
    axis.set_major_formatter(StrMethodFormatter("{x:g}"))
    axis.set_minor_formatter(NullFormatter())


def _decades(axes: Axes, which: str) -> float:
    low, high = axes.get_xlim() if which == "x" else axes.get_ylim()
    return math.log10(high / low)


def _spread_wide(values: Sequence[float]) -> bool:
    return bool(values) and min(values) > 0 and max(values) / min(values) > WIDE_RANGE


def _crowded(places: Sequence[float], *, log: bool) -> bool:
    """Return whether labels at ``places`` would run into each other."""
    at = [math.log(place) if log else place for place in places]
    whole = at[-1] - at[0]
    return any((b - a) / whole < 0.05 for a, b in pairwise(at))


def _names_of_x(series: Sequence[Series], *, always: bool = False) -> list[str]:
    """Return the names along the x axis in order of appearance; none where all x are numbers."""
    values = [x for one in series for x in one.x]
    if not always and not any(isinstance(x, str) for x in values):
        return []
    return list(dict.fromkeys(map(_word, values)))


def _word(x: float | str) -> str:
    return x if isinstance(x, str) else f"{x:g}"


def _wrapped(word: str, count: int) -> str:
    return textwrap.fill(word, max(8, 66 // max(1, count)), break_long_words=False)


def _short(value: float) -> str:
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"


def _system(name: str) -> str | None:
    lowered = name.lower()
    return next((color for key, color in SYSTEMS if key in lowered), None)


def _ramp(names: Sequence[str]) -> list[str] | None:
    """Return colours in order of size where all names are numbers with the same unit."""
    found = [SIZE.fullmatch(name) for name in names]
    sizes = [match for match in found if match is not None]
    if len(names) < 2 or len(sizes) < len(names) or len({match[2] for match in sizes}) > 1:
        return None
    import matplotlib as mpl
    from matplotlib.colors import to_hex

    order = sorted(range(len(names)), key=lambda i: float(sizes[i][1]))
    shades = mpl.colormaps["viridis"]
    place = {index: rank for rank, index in enumerate(order)}
    return [to_hex(shades(0.28 + 0.47 * place[i] / (len(names) - 1))) for i in range(len(names))]
