"""Metric families, and their text: Prometheus text format 0.0.4 and OpenMetrics 1.0.

A page of 500 endpoints has more than ten thousand lines, so a line costs one formatting.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from operator import itemgetter
from typing import Final, Literal

from extproc.telemetry.request_series import MetricHistogram

FamilyType = Literal["counter", "gauge", "histogram", "summary", "info"]

#: Label values of a sample, and its value.
Sample = tuple[Sequence[str], float]

#: What follows the name of a family in the names of its samples.
_SUFFIXES: Final[Mapping[FamilyType, str]] = {"counter": "_total", "info": "_info"}

#: Characters that are escaped in label values, and in help texts where a backslash is first.
_SPECIAL: Final = re.compile(r'[\\"\n]')
_ESCAPES: Final = str.maketrans({"\\": r"\\", '"': r"\"", "\n": r"\n"})

#: Histograms that are rendered at a time (count); each has some 25 lines.
_HISTOGRAMS_PER_PIECE: Final = 16


class MetricFamily:
    """Samples of one metric.

    Args:
        name: Name without suffix: `_total`, `_info` and those of histograms are appended.
        samples: The first samples, as for `add`.
    """

    def __init__(
        self,
        kind: FamilyType,
        name: str,
        text: str,
        labels: Sequence[str] = (),
        samples: Iterable[Sample] = (),
    ) -> None:
        self.type = kind
        self.name = name
        self.documentation = text
        self.labels = tuple(labels)
        self._label_format, self._in_order = _label_format(self.labels)
        self.samples = self._format_samples(samples)
        self.histograms: list[tuple[str, MetricHistogram]] = []
        self._columns: list[tuple[Sequence[str], Sequence[float | None]]] = []

    def format_labels(self, values: Sequence[str]) -> str:
        """The text of label values, in the order of `labels`: `{NAME="VALUE",...}`, or empty."""
        in_order = self._in_order(values)
        text = self._label_format % in_order
        if text.count('"') != 2 * len(in_order) or "\\" in text or "\n" in text:
            return self._label_format % tuple([value.translate(_ESCAPES) for value in in_order])
        return text

    def _format_samples(self, samples: Iterable[Sample]) -> list[tuple[str, float]]:
        """Samples with the text of their labels; what needs escapes is found in all at once."""
        label_format, in_order = self._label_format, self._in_order
        samples = list(samples)
        formatted = [(label_format % in_order(values), value) for values, value in samples]
        text = "".join([labels for labels, _ in formatted])
        num_quotes = 2 * len(self.labels) * len(formatted)
        if text.count('"') != num_quotes or "\\" in text or "\n" in text:
            return [(self.format_labels(values), value) for values, value in samples]
        return formatted

    def add(self, values: Sequence[str], value: float) -> None:
        """Adds a sample."""
        self.samples.append((self.format_labels(values), value))

    def add_column(self, labels: Sequence[str], values: Sequence[float | None]) -> None:
        """Adds a sample for each text of `format_labels`; a value that is None has none."""
        self._columns.append((labels, values))

    def add_histogram(self, values: Sequence[str], histogram: MetricHistogram | None) -> None:
        """Adds a histogram; None adds nothing."""
        if histogram is not None:
            self.histograms.append((self.format_labels(values), histogram))

    def renamed(self, name: str) -> MetricFamily:
        """The same samples under another name."""
        family = MetricFamily(self.type, name, self.documentation, self.labels)
        family.samples, family.histograms = self.samples, self.histograms
        return family

    @property
    def sample_names(self) -> Sequence[str]:
        """Names of its samples."""
        suffixes = {
            "histogram": ("_bucket", "_sum", "_count"),
            "summary": ("_sum", "_count"),
        }.get(self.type, (_SUFFIXES.get(self.type, ""),))
        return [self.name + suffix for suffix in suffixes]

    def render(self, *, is_openmetrics: bool) -> Iterator[str]:
        """Renders the family in pieces of limited length."""
        suffix, kind, text = _SUFFIXES.get(self.type, ""), str(self.type), self.documentation
        name = self.name if is_openmetrics else self.name + suffix
        if kind == "info" and not is_openmetrics:
            kind = "gauge"
        if _SPECIAL.search(text):
            text = text.replace("\\", r"\\").replace("\n", r"\n")
            text = text.replace('"', r"\"") if is_openmetrics else text
        yield f"# HELP {name} {text}\n# TYPE {name} {kind}\n"
        name = self.name + suffix
        if self.samples:
            yield "".join([f"{name}{labels} {float(value)}\n" for labels, value in self.samples])
        for texts, values in self._columns:
            lines = [
                f"{name}{labels} {value}\n"
                for labels, value in zip(texts, values, strict=True)
                if value is not None
            ]
            yield "".join(lines).replace(" inf\n", " +Inf\n")
        if self.type == "summary":
            lines = [
                f"{name}_count{labels} {histogram.count}.0\n{name}_sum{labels} {histogram.total}\n"
                for labels, histogram in self.histograms
            ]
            yield "".join(lines)
            return
        for start in range(0, len(self.histograms), _HISTOGRAMS_PER_PIECE):
            some = self.histograms[start : start + _HISTOGRAMS_PER_PIECE]
            yield "".join([_render(name, *pair, is_openmetrics=is_openmetrics) for pair in some])


@functools.cache
def _label_format(
    labels: tuple[str, ...],
) -> tuple[str, Callable[[Sequence[str]], tuple[str, ...]]]:
    """The format of label values sorted by name, and what brings values into that order."""
    order = sorted(range(len(labels)), key=labels.__getitem__)
    pairs = ",".join(f'{labels[at]}="%s"' for at in order)
    if len(order) < 2:
        return (f"{{{pairs}}}" if pairs else ""), tuple
    return f"{{{pairs}}}", itemgetter(*order)


@functools.cache
def _bound_labels(bounds: Sequence[float], *, is_openmetrics: bool) -> Sequence[str]:
    """The ends of bucket lines before their values; OpenMetrics writes bounds as floats."""
    texts = [str(float(bound) if is_openmetrics else bound) for bound in bounds]
    return tuple(f'le="{text}"}} ' for text in (*texts, "+Inf"))


def _render(name: str, labels: str, histogram: MetricHistogram, *, is_openmetrics: bool) -> str:
    head = f"{name}_bucket{labels[:-1]}," if labels else f"{name}_bucket{{"
    bounds = _bound_labels(histogram.bounds, is_openmetrics=is_openmetrics)
    counts = histogram.cumulative
    lines = [f"{head}{bound}{count}.0\n" for bound, count in zip(bounds, counts, strict=True)]
    if is_openmetrics and histogram.exemplars is not None:
        for bucket, (trace_id, value) in histogram.exemplars.items():
            lines[bucket] = f'{lines[bucket][:-1]} # {{trace_id="{trace_id}"}} {value}\n'
    lines.append(f"{name}_count{labels} {counts[-1]}.0\n{name}_sum{labels} {histogram.total}\n")
    return "".join(lines)
