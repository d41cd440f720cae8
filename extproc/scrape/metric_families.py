"""Families of a metrics page: finds the samples of metrics by name.

A page is cut at the declarations of its families (`# TYPE`), which the next page of the same engine
repeats: as long as it does, a wanted family is at a known place, and is parsed only if it changed.

A page that is not made of declared families alone is searched for names instead, without being
split. There, families may come in any order. All lines of a family form one group (Prometheus text
format), so a search ends with the group; a page on which a family is declared more than once
(several ranks' pages joined by a proxy) breaks that rule and is searched to the end.
"""

from __future__ import annotations

import functools
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Final

import msgspec

from extproc.scrape.engines import EngineSpec, MetricSelector

_LABELS = rb'\{(?:[^"}\n]++|"(?:[^"\\\n]++|\\.)*+")*+\}'
#: What follows a metric name: labels, value, and a time stamp or exemplar that is not read.
_SAMPLE = re.compile(
    rb"("
    + _LABELS
    + rb")?[ \t]*+([^\s#]++)(?:[ \t]++[-+.0-9eE]++)?[ \t]*+(?:#[^\n]*+)?\r?(?=\n|\Z)"
)
# The lookbehind keeps a long run of letters from being tried at each of them.
_PAIR = re.compile(rb'(?<![A-Za-z0-9_])([A-Za-z_][A-Za-z0-9_]*+)\s*+=\s*+"((?:[^"\\]++|\\.)*+)"')
_NUMBER = re.compile(rb"[-+.0-9a-zA-Z]++\Z")
_NAME = re.compile(rb"\s*+[A-Za-z_:][A-Za-z0-9_:]*+(?=[{ \t])")
_DECLARED = b"\n# TYPE "
_DECLARED_OR_HELP = (b"\n# HELP ", _DECLARED)
_AFTER_NAME = frozenset(b"{ \t")

#: Longest label text worth remembering; longer ones are read afresh each time.
_REMEMBERED_BYTES = 4096

#: Longest labels that are read (bytes): a thousand adapters with long names.
MAX_LABEL_BYTES: Final = 65_536
#: Lines of wanted names that are read of one page (count). A family that goes beyond it reads as
#: absent, so a page of 4 MiB takes a second of CPU at most, whatever it holds.
MAX_SAMPLES: Final = 16_384
#: The same of the combinations of adapters, all of which vLLM keeps on its page: some 4 MiB of them.
MAX_ADAPTER_SAMPLES: Final = 32_768
#: Longest rest of a line that is looked at (bytes): the labels, and a value with its exemplar.
_MAX_LINE_BYTES: Final = 2 * MAX_LABEL_BYTES

#: Largest page that is cut at its declarations (bytes), with most families and most lines of it
#: (count). They bound the work on a page whose declarations are new.
_MAX_CUT_BYTES: Final = 256 * 1024
_MAX_FAMILIES: Final = 1024
_MAX_LINES: Final = 8192

#: Longest family that is compared with that of the last page (bytes): a histogram of one series.
#: What is compared takes some 15 kB for each endpoint.
_MAX_KNOWN_BYTES: Final = 4096

#: What a sample has behind the name of its family, and what follows.
_SUFFIXES: Final = (b"", b"_bucket", b"_count", b"_sum", b"_total", b"_created", b"_info")
_SAMPLE_ENDS: Final = tuple(
    suffix + bytes((after,)) for suffix in _SUFFIXES for after in sorted(_AFTER_NAME, reverse=True)
)

#: Labels as they stand on the page, and the value; not a number when it is garbage.
Sample = tuple[bytes, float]


class _PageLayout(msgspec.Struct, frozen=True):
    """Declarations of a page.

    Attributes:
        heads: Name of each family in page order and a space; empty for what is before the first.
        positions: Number of the section by name of the family; empty for a page that is to be
            searched, because there is more on it than these families, or one of them twice.
    """

    heads: tuple[bytes, ...]
    positions: Mapping[bytes, int]

    def is_of(self, sections: Sequence[bytes]) -> bool:
        """Returns True if the sections of a page begin with these declarations."""
        heads = self.heads
        return len(sections) == len(heads) and all(map(bytes.startswith, sections, heads))


_NO_LAYOUT: Final = _PageLayout((), {})

#: Families of the last page by name of the sample, and their samples.
_KnownFamilies = dict[bytes, tuple[bytes, list[Sample]]]


def _read_layout(sections: Sequence[bytes]) -> _PageLayout:
    heads = (b"", *(section[: section.find(b" ") + 1] for section in sections[1:]))
    return _intern_layout(heads, is_regular=_is_regular(sections, heads))


@functools.lru_cache(maxsize=8)
def _intern_layout(heads: tuple[bytes, ...], *, is_regular: bool) -> _PageLayout:
    """Builds a layout, cached: replicas share theirs."""
    positions = {head[:-1]: position for position, head in enumerate(heads) if head}
    return _PageLayout(heads, positions if is_regular else {})


def _is_regular(sections: Sequence[bytes], heads: Sequence[bytes]) -> bool:
    """Returns True if every line is a comment or a sample of the family declared before it."""
    if len(sections) > _MAX_FAMILIES or len(set(heads)) < len(heads):
        return False
    if sum(section.count(b"\n") for section in sections) > _MAX_LINES:
        return False
    for section, head in zip(sections, heads, strict=True):
        starts = (b"#", *(head[:-1] + end for end in _SAMPLE_ENDS)) if head else (b"#",)
        first, *lines = section.split(b"\n")
        if not first.startswith(head) or not all(line.startswith(starts) for line in lines if line):
            return False
    return True


class MetricFamilies:
    """Metric families of one page, each searched for at most once.

    Args:
        text: The page behind a line feed.
        joined: Whether a family may be declared more than once.
    """

    def __init__(self, text: bytes, *, joined: bool) -> None:
        self._text = text
        self._joined = joined
        # Only declared families are sure to be one group of lines, on a page that is not joined.
        self._grouped = _DECLARED in text and not joined
        self._cursor = 0
        self._samples_by_name: dict[bytes, list[Sample]] = {}
        self._left = MAX_SAMPLES

    def samples(self, name: bytes) -> list[Sample]:
        """Returns all samples of one family in page order; empty when the page has none."""
        if not name:
            return []
        samples = self._samples_by_name.get(name)
        if samples is None:
            samples = self._samples_by_name[name] = self._find(name)
        return samples

    def adapter_samples(self, name: bytes) -> list[Sample]:
        """Returns all samples of a family with many, which take no lines from those read later."""
        left, self._left = self._left, MAX_ADAPTER_SAMPLES
        samples = self.samples(name)
        self._left = left
        return samples

    def numbers(self, alternatives: Iterable[MetricSelector]) -> list[float]:
        """Returns the values of the first alternative present; NaN for an unparsable sample."""
        for series in alternatives:
            samples = self.samples(series.name)
            if series.where:
                samples = [sample for sample in samples if _has_label(sample[0], series.where)]
            if not samples:
                continue
            if series.label:
                return [
                    parse_number(read_labels(sample[0]).get(series.label, b""))
                    for sample in samples
                ]
            return [sample[1] for sample in samples]
        return []

    def _find(self, name: bytes) -> list[Sample]:
        # Wanted names mostly come in page order: go on where the last one was.
        text = self._text
        samples = self._scan(text, name, self._cursor, len(text))
        if not samples and self._cursor:
            samples = self._scan(text, name, 0, self._cursor + len(name) + 1)
        return samples

    def _scan(self, text: bytes, name: bytes, begin: int, end: int) -> list[Sample]:
        needle = b"\n" + name
        size = len(text)
        samples: list[Sample] = []
        at = text.find(needle, begin, end)
        while at >= 0:
            after = at + len(needle)
            self._left -= 1
            if self._left < 0:
                return []
            if after < size and text[after] in _AFTER_NAME:
                if not samples and self._grouped:
                    self._cursor = at
                elif len(samples) == 1 and self._grouped:
                    # Of several series, samples of other names such as `_sum` may come before.
                    self._cursor = max(0, text.rfind(_DECLARED, 0, self._cursor))
                line_end = text.find(b"\n", after)
                line_end = line_end if line_end >= 0 else size
                samples.append(_sample(text[after:line_end]))
                if not self._joined:
                    if text.startswith(_DECLARED_OR_HELP, line_end):
                        break
                    if len(samples) == 1:
                        group_end = text.find(_DECLARED, line_end)
                        end = group_end if group_end >= 0 else size
                after = line_end
            at = text.find(needle, after, end)
        return samples


class _DeclaredFamilies(MetricFamilies):
    """Metric families of a page that was cut at its declarations; `known` and `read` are updated."""

    def __init__(
        self,
        sections: Sequence[bytes],
        layout: _PageLayout,
        known: _KnownFamilies,
        read: dict[int, bytes],
    ) -> None:
        super().__init__(b"", joined=False)
        self._sections = sections
        self._positions = layout.positions
        self._known = known
        self._read = read

    def _find(self, name: bytes) -> list[Sample]:
        for family in _families_of(name):
            position = self._positions.get(family)
            samples = [] if position is None else self._read_section(name, position)
            if samples:
                return samples
        return []

    def _read_section(self, name: bytes, position: int) -> list[Sample]:
        section = self._sections[position]
        known = self._known.get(name)
        if known is not None and known[0] == section:
            self._read[position] = section
            return known[1]
        samples = self._scan(section, name, 0, len(section))
        is_short = len(section) <= _MAX_KNOWN_BYTES
        # No section is empty: one that is too long to keep counts as changed on the next page.
        self._read[position] = section if is_short else b""
        if is_short:
            self._known[name] = section, samples
        return samples


class RankFamilies(MetricFamilies):
    """Metric families of one data-parallel rank: its samples, by label.

    What the engine shows once for all ranks, such as counters of its front end, is not theirs and
    left out, but for facts that hold for each of them.

    Args:
        where: Label and value that name the rank.
        shared: Names of families that are of every rank where no sample names one.
    """

    def __init__(
        self,
        families: MetricFamilies,
        where: tuple[bytes, bytes],
        *,
        shared: frozenset[bytes],
    ) -> None:
        super().__init__(b"", joined=False)
        self._families = families
        self._where = where
        self._shared = shared

    def adapter_samples(self, name: bytes) -> list[Sample]:
        """Returns those of the rank, of a family with many."""
        self._families.adapter_samples(name)
        return self.samples(name)

    def _find(self, name: bytes) -> list[Sample]:
        label, value = self._where
        samples, own, is_shared = self._families.samples(name), [], name in self._shared
        for sample in samples:
            known = read_labels(sample[0]).get(label)
            if known == value:
                own.append(sample)
            is_shared = is_shared and known is None
        return samples if is_shared else own


class DistinctFamilies(MetricFamilies):
    """Metric families of an engine whose page shows requests more than once, without the others.

    Args:
        divided: Names of families with a total beside its parts.
    """

    def __init__(
        self, families: MetricFamilies, engine: EngineSpec, *, divided: frozenset[bytes]
    ) -> None:
        super().__init__(b"", joined=False)
        self._families = families
        self._engine = engine
        self._divided = divided

    def adapter_samples(self, name: bytes) -> list[Sample]:
        """Returns all samples of a family with many."""
        return self._families.adapter_samples(name)

    def _find(self, name: bytes) -> list[Sample]:
        samples = self._families.samples(name)
        if len(samples) < 2:
            return samples
        if name in self._divided:
            part = self._engine.part_label
            samples = [s for s in samples if read_labels(s[0]).get(part) == b""] or samples
        lowest: dict[bytes, tuple[tuple[int, bytes], ...]] = {}
        workers = [(sample, *self._worker(sample)) for sample in samples]
        for _, rank, worker in workers:
            lowest[rank] = min(worker, lowest.get(rank, worker))
        return [sample for sample, rank, worker in workers if worker == lowest[rank]]

    def _worker(self, sample: Sample) -> tuple[bytes, tuple[tuple[int, bytes], ...]]:
        """Rank of a sample and its worker, in the order of numbers: shorter ones come first."""
        labels = read_labels(sample[0])
        numbers = [labels.get(label, b"") for label in self._engine.worker_labels]
        worker = tuple([(len(number), number) for number in numbers])
        return labels.get(self._engine.rank_label, b""), worker


class FamilyIndex:
    """Index of the families on the pages of one endpoint, one page after the other.

    It remembers the declarations of the last page, and what was read of its short families.

    Attributes:
        is_unchanged: Whether all families that were read of the last page have the same samples on
            this one, and those that were absent are absent. Others may have changed.
    """

    def __init__(self) -> None:
        self.is_unchanged = False
        self._layout = _NO_LAYOUT
        self._known: _KnownFamilies = {}
        self._read: dict[int, bytes] = {}  # by position

    def cut(self, text: bytes) -> MetricFamilies | None:
        """Cuts a page at its declarations; None for a page that is to be searched.

        Whether other lines are between the families is checked once for the same declarations.
        """
        self.is_unchanged = False
        if len(text) > _MAX_CUT_BYTES:
            # What was read of it is not known here, so the next page is not compared with another one.
            self._layout, self._known, self._read = _NO_LAYOUT, {}, {}
            return None
        sections = text.split(_DECLARED, _MAX_FAMILIES)
        layout, read = self._layout, self._read
        if not layout.is_of(sections):
            layout = self._layout = _read_layout(sections)
            self._known, read = {}, {}
        elif [sections[position] for position in read] != list(read.values()):
            read = {}
        self.is_unchanged = bool(read)
        self._read = read
        if not layout.positions:
            return None
        return _DeclaredFamilies(sections, layout, self._known, read)


@functools.lru_cache(maxsize=256)
def _families_of(name: bytes) -> tuple[bytes, ...]:
    """Returns the names of the families that may have samples of this name."""
    return tuple(name.removesuffix(suffix) for suffix in _SUFFIXES if name.endswith(suffix))


def _sample(rest: bytes) -> Sample:
    """Parses the rest of a sample line after the metric name."""
    if len(rest) > _MAX_LINE_BYTES:
        return b"", math.nan
    text, _, value = rest.rpartition(b" ")
    # The usual line needs no regex: no time stamp, no exemplar, no carriage return.
    if (not text or text[-1:] == b"}") and b"#" not in text:
        try:
            number = float(value)
        except ValueError:
            number = math.nan
        # Underscores are Python's only, and spaces around a number too.
        if not math.isnan(number) and b"_" not in value and value.strip() == value:
            return text, number
    sample = _SAMPLE.match(rest)
    return (sample[1] or b"", parse_number(sample[2])) if sample else (b"", math.nan)


def read_labels(text: bytes) -> dict[bytes, bytes]:
    """Splits the labels of one sample; values keep their escapes."""
    if len(text) <= _REMEMBERED_BYTES:
        return _intern_labels(text)
    return dict(_PAIR.findall(text)) if len(text) <= MAX_LABEL_BYTES else {}


@functools.lru_cache(maxsize=1024)
def _intern_labels(text: bytes) -> dict[bytes, bytes]:
    """Parses a label set, cached: label sets rarely change and replicas share theirs."""
    return dict(_PAIR.findall(text))


def _has_label(text: bytes, where: tuple[tuple[bytes, bytes], ...]) -> bool:
    labels = read_labels(text)
    return all(labels.get(name) == value for name, value in where)


def parse_number(text: bytes) -> float:
    """Parses a float; NaN for any other text, including Python-only forms such as `1_0`."""
    if not _NUMBER.match(text):
        return math.nan
    try:
        return float(text)
    except ValueError:
        return math.nan


def is_joined(text: bytes, name: bytes) -> bool:
    """Returns True if a family is declared twice, as on concatenated pages of several ranks."""
    return text.count(_DECLARED + name + b" ") > 1


def is_sample(text: bytes, at: int) -> bool:
    """Returns True if a sample, of whatever name, is at this offset."""
    name = _NAME.match(text, at)
    return name is not None and _SAMPLE.match(text, name.end()) is not None
