"""Style of every plot: the default strategy in color, others grey, the reference dashed.

Reports of `extproc simulate`, the scaling demo and the pictures of the documentation share it.
matplotlib is the extra `plots`, and is imported where something is drawn. Equal input gives equal
files: they hold no date, no version and no random ids.
"""

from __future__ import annotations

import contextlib
import importlib.util
import io
import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

import msgspec

from extproc.simulator.fleet import scenario

#: The default strategy, which has the color, and the one that knows too much to compete.
OWN: Final = "adaptive"
REFERENCE: Final = scenario.CLAIRVOYANT

COLOR: Final = "#0b6e99"
GREY: Final = "#9aa5ad"
INK: Final = "#24313a"

#: Grey lines differ by shade and mark.
_SHADES: Final = ("#5b6870", "#8a969e", "#b3bcc2")
_MARKS: Final = ("s", "^", "v", "x", "+", "D", ".")

#: Height of a row of `draw_values`, in inches.
ROW_IN: Final = 0.185

#: Digits of round numbers on a logarithmic axis, most first.
_DIGITS: Final = ((1, 1.5, 2, 3, 4, 5, 7), (1, 2, 3, 5, 7), (1, 2, 5), (1, 3), (2, 7), (1,))

#: Steps on an axis that is too narrow for round numbers, times a power of ten, best first.
_STEP_DIGITS: Final = (1, 2, 5, 10, 20, 3, 4, 2.5)

#: Parts of a panel's width that are left for numbers beside the marks.
_NUMBER_SHARE: Final = 0.24

_RULES: Final[Mapping[str, Any]] = {
    # Glyphs as shapes: the same picture wherever it is shown.
    "svg.fonttype": "path",
    # Names of files and strategies are no formulas.
    "text.parse_math": False,
    "font.size": 8,
    "text.color": INK,
    "axes.edgecolor": GREY,
    "axes.labelcolor": INK,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.axisbelow": True,
    "grid.color": "#e3e7ea",
    "xtick.color": INK,
    "ytick.color": INK,
    "legend.frameon": False,
}


class ValueRow(msgspec.Struct, frozen=True, kw_only=True):
    """Value of one strategy in a panel.

    Attributes:
        strategy: Its name.
        mean: In the unit of the panel; NaN draws nothing.
        half: Half of the 95 % interval; 0 or NaN for none.
        percentile: Drawn as a hollow mark; None for none.
    """

    strategy: str
    mean: float
    half: float = 0.0
    percentile: float | None = None


def is_available() -> bool:
    """True where matplotlib is installed."""
    return importlib.util.find_spec("matplotlib") is not None


@contextlib.contextmanager
def new_figure(width_in: float, height_in: float, *, salt: str = "extproc") -> Iterator[Any]:
    """A white figure in this style; draw and encode it inside the context.

    Args:
        width_in: 96 pixels of an SVG to the inch.
        salt: Makes ids differ from those of another SVG on the same page.
    """
    import matplotlib as mpl
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    rules: dict[Any, Any] = {**_RULES, "svg.hashsalt": salt}
    with mpl.rc_context(rules):
        figure = Figure(figsize=(width_in, height_in), facecolor="white")
        FigureCanvasAgg(figure)
        yield figure


def encode(figure: Any, form: str, *, source: str | None = None, is_tight: bool = False) -> bytes:
    """The file of a figure.

    Args:
        figure: From `new_figure`.
        form: `svg` or `png`.
        source: Written into the metadata of an SVG.
        is_tight: Fit the page to what is drawn, so that no long name is cut.
    """
    # A date or a version would make equal plots differ.
    facts = (
        {"Date": None, "Creator": None, "Source": source} if form == "svg" else {"Software": None}
    )
    file = io.BytesIO()
    page = "tight" if is_tight else None
    figure.savefig(file, format=form, dpi=120, metadata=facts, bbox_inches=page)
    return file.getvalue()


def ordered(strategies: Sequence[str]) -> list[str]:
    """Strategies from top to bottom: the default, the others as they come, the reference."""
    others = [name for name in strategies if name not in {OWN, REFERENCE}]
    return [name for name in (OWN, *others, REFERENCE) if name in strategies]


def line_style(strategy: str, strategies: Sequence[str]) -> dict[str, Any]:
    """Keywords of a line in a plot of these strategies; without the default, the first has color."""
    style: dict[str, Any] = {"label": strategy, "linewidth": 1.2, "markersize": 4, "zorder": 2.0}
    if strategy == (OWN if OWN in strategies else strategies[0]):
        return style | {"color": COLOR, "linewidth": 2.2, "zorder": 3.0}
    if strategy == REFERENCE:
        return style | {"color": INK, "linestyle": "--"}
    place = [name for name in strategies if name not in {OWN, REFERENCE}].index(strategy)
    shade, mark = _SHADES[place % len(_SHADES)], _MARKS[place % len(_MARKS)]
    return style | {"color": shade, "marker": mark, "markevery": 0.09}


def draw_values(
    axes: Any, rows: Sequence[ValueRow], *, label: str, is_log: bool, is_bar: bool = False
) -> None:
    """A row for each strategy, with its number: bars from zero, or dots.

    Args:
        axes: Where to; its y axis gets the names.
        rows: From top to bottom.
        label: Of the x axis, with the unit.
        is_log: The x axis is logarithmic; not for bars.
        is_bar: The x axis begins at zero.
    """
    for place, row in enumerate(rows):
        if not math.isnan(row.mean):
            _draw_row(axes, place, row, is_bar=is_bar)
    values = [row for row in rows if not math.isnan(row.mean)]
    _set_range(axes, values, is_log=is_log, is_bar=is_bar)
    for row in values:
        if row.strategy == REFERENCE:
            axes.axvline(row.mean, color=INK, linewidth=0.8, linestyle="--", zorder=0.9)
    axes.set_ylim(len(rows) - 0.4, -0.6)
    axes.set_yticks(range(len(rows)), [row.strategy for row in rows])
    for tick, row in zip(axes.get_yticklabels(), rows, strict=True):
        if row.strategy == OWN:
            tick.set(color=COLOR, fontweight="bold")
    axes.tick_params(axis="y", length=0)
    axes.spines["left"].set_visible(False)
    axes.set_xlabel(label)
    axes.grid(visible=True, axis="x")


def set_log_axis(axis: Any, low: float, high: float, *, most: int = 3) -> None:
    """Make an axis logarithmic, with at most so many round numbers on it.

    Args:
        axis: `axes.xaxis` or `axes.yaxis`.
        low: Its least value.
        high: Its greatest.
        most: Labels (count).
    """
    from matplotlib import ticker

    name = axis.axis_name
    getattr(axis.axes, f"set_{name}scale")("log")
    getattr(axis.axes, f"set_{name}lim")(low, high)
    axis.set_major_locator(ticker.FixedLocator(log_ticks(low, high, most=most)))
    axis.set_major_formatter(ticker.FuncFormatter(lambda value, _: f"{value:,.12g}"))
    axis.set_minor_locator(ticker.NullLocator())


def log_ticks(low: float, high: float, *, most: int) -> list[float]:
    """Round numbers from `low` to `high`, at most so many, and none too near another."""
    decades = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    apart = (high / low) ** (0.75 / most)
    best: list[float] = []
    for digits in _DIGITS:
        ticks = [digit * 10.0**power for power in decades for digit in digits]
        within = [tick for tick in ticks if low <= tick <= high]
        gaps = [later / tick for tick, later in itertools.pairwise(within)]
        if len(best) < len(within) <= most and min(gaps, default=apart) >= apart:
            best = within
    if len(best) < 2 <= most and len(within) <= 1:
        return _even_ticks(low, high, most=most)
    return best or within[:: -(-len(within) // most) or 1]


def _even_ticks(low: float, high: float, *, most: int) -> list[float]:
    """Multiples of a round step from `low` to `high`: two at least, and at most so many."""
    power = 10.0 ** math.floor(math.log10((high - low) / most))
    for step in (digit * power for digit in _STEP_DIGITS):
        ticks = [step * at for at in range(math.ceil(low / step), math.floor(high / step) + 1)]
        if 2 <= len(ticks) <= most:
            return ticks
    return []


def as_number(value: float) -> str:
    """Three digits, and no fewer than stand before the point."""
    return f"{value:,.0f}" if not value or abs(value) >= 100 else f"{value:#.3g}"


def _draw_row(axes: Any, place: int, row: ValueRow, *, is_bar: bool) -> None:
    """A bar or a dot with its interval, the hollow mark, and their numbers."""
    is_own, is_reference = row.strategy == OWN, row.strategy == REFERENCE
    color = COLOR if is_own else INK if is_reference else GREY
    face = "white" if is_reference else color
    if is_bar:
        dashes = {"linestyle": "--", "linewidth": 0.9} if is_reference else {"linewidth": 0.0}
        axes.barh(place, row.mean, height=0.62, color=face, edgecolor=color, **dashes)
    if row.percentile is not None:
        axes.plot([row.mean, row.percentile], [place, place], color=color, linewidth=0.8)
        axes.plot([row.percentile], [place], "o", color=color, markersize=4.5, mfc="white")
    if not is_bar:
        axes.plot([row.mean], [place], "o", color=color, markersize=5, mfc=face)
    low, high = _interval(row)
    if low < high:
        axes.plot([low, high], [place, place], color=INK, linewidth=0.8)
    text: dict[str, Any] = {
        "textcoords": "offset points",
        "va": "center_baseline",
        "color": COLOR if is_own else INK,
        "fontweight": "bold" if is_own else "normal",
        "fontsize": 7,
        "bbox": {"facecolor": "white", "edgecolor": "none", "pad": 0.8},
    }
    right, left = {"xytext": (5, 0), "ha": "left"}, {"xytext": (-5, 0), "ha": "right"}
    if row.percentile is None:
        axes.annotate(as_number(row.mean), (high, place), **text, **right)
    else:
        axes.annotate(as_number(row.mean), (low, place), **text, **left)
        axes.annotate(as_number(row.percentile), (row.percentile, place), **text, **right)


def _interval(row: ValueRow) -> tuple[float, float]:
    """Ends of the drawn interval: at most from half of the mean to twice, so that rows stay apart."""
    half = 0.0 if math.isnan(row.half) else row.half
    return row.mean - min(half, row.mean / 2), row.mean + min(half, row.mean)


def _set_range(axes: Any, rows: Sequence[ValueRow], *, is_log: bool, is_bar: bool) -> None:
    """Room for the numbers beside the marks."""
    ends = [end for row in rows for end in (*_interval(row), row.percentile) if end is not None]
    low, high = min(ends, default=0.0), max(ends, default=0.0)
    if is_bar:
        axes.set_xlim(0, (high or 1.0) / (1 - _NUMBER_SHARE))
        axes.locator_params(axis="x", nbins=4)
        return
    has_left = any(row.percentile is not None for row in rows)
    before = _NUMBER_SHARE if has_left else _NUMBER_SHARE / 4
    inner = 1 - before - _NUMBER_SHARE
    if is_log and low > 0:
        span = max(math.log(high / low), 0.2) / inner
        set_log_axis(
            axes.xaxis,
            low / math.exp(span * before),
            high * math.exp(span * _NUMBER_SHARE),
        )
        return
    span = ((high - low) or 1.0) / inner
    axes.set_xlim(low - span * before, high + span * _NUMBER_SHARE)
    axes.locator_params(axis="x", nbins=4)
