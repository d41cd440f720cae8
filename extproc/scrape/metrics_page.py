"""Metrics page to `Load`: a scanner that searches only for the metrics in use.

A page is some 50 kB, of which ten lines matter, so the scanner searches for those names and never
splits the page. Families may come in any order. All lines of a family form one group (Prometheus
text format), so a search ends with the group; a page on which a family is declared more than once
(several ranks' pages joined by a proxy) breaks that rule and is searched to the end.

A number out of its range reads as one that is not there: ranges are far beyond any engine, and so
small that sums and products of many endpoints stay exact integers and finite floats.
"""

from __future__ import annotations

import functools
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Final, TypedDict

import msgspec

from extproc.endpoint import NO_COUNTERS, NO_EXTRA, EngineCounters, Load
from extproc.scrape import engines

_LABELS = rb'\{(?:[^"}\n]++|"(?:[^"\\\n]++|\\.)*+")*+\}'
#: What follows a metric name: labels, value, and a time stamp or exemplar that is not read.
_SAMPLE = re.compile(
    rb"("
    + _LABELS
    + rb")?[ \t]*+([^\s#]++)(?:[ \t]++[-+.0-9eE]++)?[ \t]*+(?:#[^\n]*+)?\r?(?=\n|\Z)"
)
# The lookbehind keeps a long run of letters from being tried at each of them.
_PAIR = re.compile(rb'(?<![A-Za-z0-9_])([A-Za-z_][A-Za-z0-9_]*+)\s*+=\s*+"((?:[^"\\]++|\\.)*+)"')
_ESCAPE = re.compile(rb"\\(.)")
_NUMBER = re.compile(rb"[-+.0-9a-zA-Z]++\Z")
_COMMENTS = re.compile(rb"(?:\n[ \t]*+(?:#[^\n]*+)?(?=\n|\Z))*+")
_NAME = re.compile(rb"\s*+[A-Za-z_:][A-Za-z0-9_:]*+(?=[{ \t])")
_DECLARED = b"\n# TYPE "
_DECLARED_OR_HELP = (b"\n# HELP ", _DECLARED)
_AFTER_NAME = frozenset(b"{ \t")

#: How far over 1 a mean of shares may come by rounding.
_ROUNDING = 1e-6

#: Longest label text worth remembering; longer ones are read afresh each time.
_REMEMBERED_BYTES = 4096

#: Largest number of requests in one engine (count). Engines batch hundreds and queue thousands.
MAX_REQUESTS: Final = 10_000_000.0
#: Largest counter and sum of seconds: beyond 2**53 a float no longer counts by one.
MAX_TOTAL: Final = 2.0**53
#: Most KV blocks of an engine, and tokens of one block: 2**30 blocks of one token are a terabyte.
MAX_KV_BLOCKS: Final = 2**30
MAX_BLOCK_TOKENS: Final = 2**20
#: Most LoRA adapters on a device.
MAX_ADAPTER_SLOTS: Final = 65_536
#: Largest magnitude of the value of an extra metric.
MAX_EXTRA: Final = MAX_TOTAL
#: Latest time an engine can have started: the end of the year 9999 (Unix seconds).
MAX_STARTED_AT: Final = 253_402_300_799.0
#: Longest adapter name, and names in one label; longer or further ones are left out.
MAX_NAME_BYTES: Final = 512
MAX_NAMES: Final = 4096
#: Longest labels that are read (bytes): a thousand adapters with long names.
MAX_LABEL_BYTES: Final = 65_536
#: Lines of wanted names that are read of one page (count). A family that goes beyond it reads as
#: absent, so a page of 4 MiB takes half a second of CPU at most, whatever it holds.
MAX_SAMPLES: Final = 16_384
#: Longest rest of a line that is looked at (bytes): the labels, and a value with its exemplar.
_MAX_LINE_BYTES: Final = 2 * MAX_LABEL_BYTES
#: Bytes of comments at the start of a page, beyond which an unknown page is not looked into.
_COMMENT_BYTES = 65_536

#: Labels as they stand on the page, and the value; not a number when it is garbage.
_Sample = tuple[bytes, float]


class UnreadablePage(msgspec.Struct, frozen=True):
    """A page that is not in the Prometheus text format.

    Attributes:
        reason: Kind of content, in a few words.
    """

    reason: str


#: Extra metrics by name: alternatives of each, the first one present wins.
ExtraMetrics = Mapping[str, tuple[engines.MetricSelector, ...]]


def read(
    page: bytes, now: float, *, engine_type: str = "", extra: ExtraMetrics | None = None
) -> Load | UnreadablePage:
    """Reads the load of one engine from its metrics page.

    Counts of several series (data-parallel ranks, models) are summed, shares averaged. A series
    that is missing gives None for its field and leaves the others alone; so does a series of which
    any sample is no finite number in range, and a sum that is out of it.

    Args:
        page: The page in Prometheus text format; any bytes are safe.
        now: Monotonic seconds at which it was received.
        engine_type: Value of the endpoint's engine-type label. It is tried first; the names on the
            page have the last word, so that a wrong label does not hide the load.
        extra: Metrics for `Load.extra`, also of unknown engines; None for none.

    Returns:
        The load; for an unknown engine with an empty `engine` and every value None.
    """
    text = b"\n" + page
    engine = _recognize_engine(text, engine_type)
    if engine is None:
        return _unknown_engine_load(text, now, extra)
    families = _Families(text, joined=_is_joined(text, engine))
    # Asked for in the order of a vLLM page, in which each search is short.
    return Load(
        at=now,
        engine=engine.kind,
        started_at=_newest_sample(families.samples(engines.STARTED)),
        running=_total(families.numbers(engine.running), most=MAX_REQUESTS),
        waiting=_total(families.numbers(engine.waiting), most=MAX_REQUESTS),
        kv_usage=_mean_share(families.numbers(engine.kv_usage)),
        prefix_queries=_total(families.numbers(engine.prefix_queries)),
        prefix_hits=_total(families.numbers(engine.prefix_hits)),
        counters=_totals(families, engine),
        **_adapters(families.samples(engine.adapters)),
        kv_blocks=_bounded_int(_total(families.numbers(engine.kv_blocks)), most=MAX_KV_BLOCKS),
        block_tokens=_bounded_int(
            _common_number(families.numbers(engine.block_tokens)), most=MAX_BLOCK_TOKENS
        ),
        extra=_extra(families, extra) if extra else NO_EXTRA,
    )


def _extra(families: _Families, metrics: ExtraMetrics) -> Mapping[str, float]:
    """Sums the samples of every extra metric; one that is absent or out of range is left out."""
    values = {}
    for name, alternatives in metrics.items():
        numbers = families.numbers(alternatives)
        # A comparison with NaN is false.
        if numbers and all(-MAX_EXTRA <= number <= MAX_EXTRA for number in numbers):
            total = sum(numbers)
            if -MAX_EXTRA <= total <= MAX_EXTRA:
                values[name] = total
    return values


def _totals(families: _Families, engine: engines.EngineSpec) -> EngineCounters:
    """Sums the counters of an engine; None for a counter that it does not export."""
    if not engine.totals:
        return NO_COUNTERS
    totals: dict[str, float | None] = {}
    for name, series in engine.totals:
        # An absent family costs a walk over the page; a sum without its count is not searched.
        if name == "adapter_load_s" and totals["adapter_loads"] is None:
            continue
        totals[name] = _total(families.numbers(series))
    return EngineCounters(**totals)


def _recognize_engine(text: bytes, engine_type: str) -> engines.EngineSpec | None:
    labelled = [engine for engine in engines.TABLE if engine.type_label == engine_type]
    for engine in (*labelled, *engines.TABLE):
        if b"\n" + engine.page_prefix in text:
            return engine
    return None


def _is_joined(text: bytes, engine: engines.EngineSpec) -> bool:
    """Returns True if a family is declared twice, as on concatenated pages of several ranks."""
    return text.count(_DECLARED + engine.waiting[0].name + b" ") > 1


def _unknown_engine_load(
    text: bytes, now: float, extra: ExtraMetrics | None
) -> Load | UnreadablePage:
    """Distinguishes the page of an unknown engine from a page that is no metrics page."""
    comments = _COMMENTS.match(text, 0, _COMMENT_BYTES)
    at = comments.end() if comments else 0
    if at >= min(len(text), _COMMENT_BYTES):
        return UnreadablePage("no samples")
    name = _NAME.match(text, at)
    if name is None or _SAMPLE.match(text, name.end()) is None:
        return UnreadablePage("not Prometheus text")
    if not extra:
        return Load(at=now)
    return Load(at=now, extra=_extra(_Families(text, joined=False), extra))


class _Families:
    """Metric families of one page, each searched for at most once."""

    def __init__(self, text: bytes, *, joined: bool) -> None:
        self._text = text
        self._joined = joined
        # Only declared families are sure to be one group of lines.
        self._grouped = _DECLARED in text
        self._cursor = 0
        self._samples_by_name: dict[bytes, list[_Sample]] = {}
        self._left = MAX_SAMPLES

    def samples(self, name: bytes) -> list[_Sample]:
        """Returns all samples of one family in page order; empty when the page has none."""
        if not name:
            return []
        samples = self._samples_by_name.get(name)
        if samples is None:
            # Wanted names mostly come in page order: go on where the last one was.
            samples = self._scan(name, self._cursor, len(self._text))
            if not samples and self._cursor:
                samples = self._scan(name, 0, self._cursor + len(name) + 1)
            self._samples_by_name[name] = samples
        return samples

    def numbers(self, alternatives: Iterable[engines.MetricSelector]) -> list[float]:
        """Returns the values of the first alternative present; NaN for an unparsable sample."""
        for series in alternatives:
            samples = self.samples(series.name)
            if series.where:
                samples = [sample for sample in samples if _has_label(sample[0], series.where)]
            if not samples:
                continue
            if series.label:
                return [_number(_labels(sample[0]).get(series.label, b"")) for sample in samples]
            return [sample[1] for sample in samples]
        return []

    def _scan(self, name: bytes, begin: int, end: int) -> list[_Sample]:
        text, needle = self._text, b"\n" + name
        size = len(text)
        samples: list[_Sample] = []
        at = text.find(needle, begin, end)
        while at >= 0:
            after = at + len(needle)
            self._left -= 1
            if self._left < 0:
                return []
            if after < size and text[after] in _AFTER_NAME:
                if not samples and self._grouped:
                    self._cursor = at
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


def _sample(rest: bytes) -> _Sample:
    """Parses the rest of a sample line after the metric name."""
    if len(rest) > _MAX_LINE_BYTES:
        return b"", math.nan
    text, _, value = rest.rpartition(b" ")
    # The usual line needs no regex: no time stamp, no exemplar, no carriage return.
    if (not text or text[-1:] == b"}") and b"#" not in text:
        number = _number(value)
        if not math.isnan(number):
            return text, number
    sample = _SAMPLE.match(rest)
    return (sample[1] or b"", _number(sample[2])) if sample else (b"", math.nan)


def _labels(text: bytes) -> dict[bytes, bytes]:
    """Splits the labels of one sample; values keep their escapes."""
    if len(text) <= _REMEMBERED_BYTES:
        return _intern_text(text)
    return dict(_PAIR.findall(text)) if len(text) <= MAX_LABEL_BYTES else {}


@functools.lru_cache(maxsize=1024)
def _intern_text(text: bytes) -> dict[bytes, bytes]:
    """Parses a label set, cached: label sets rarely change and replicas share theirs."""
    return dict(_PAIR.findall(text))


def _has_label(text: bytes, where: tuple[tuple[bytes, bytes], ...]) -> bool:
    labels = _labels(text)
    return all(labels.get(name) == value for name, value in where)


def _is_plain(value: bytes) -> bytes:
    if b"\\" not in value:
        return value
    return _ESCAPE.sub(lambda escape: b"\n" if escape[1] == b"n" else escape[1], value)


def _number(text: bytes) -> float:
    """Parses a float; NaN for any other text, including Python-only forms such as `1_0`."""
    if not _NUMBER.match(text):
        return math.nan
    try:
        return float(text)
    except ValueError:
        return math.nan


def _total(numbers: Sequence[float], *, most: float = MAX_TOTAL) -> float | None:
    """Sums values; None without values, or when a value or the sum is out of range."""
    total = 0.0
    for number in numbers:
        if not 0 <= number <= most:
            return None
        total += number
    return total if numbers and total <= most else None


def _mean_share(numbers: Sequence[float]) -> float | None:
    total = _total(numbers)
    if total is None or max(numbers) > 1 + _ROUNDING:
        return None
    return min(1.0, total / len(numbers))


def _common_number(numbers: Sequence[float]) -> float | None:
    """Returns the value that all samples share; None when they differ."""
    return numbers[0] if numbers and all(number == numbers[0] for number in numbers) else None


def _bounded_int(number: float | None, *, most: int) -> int | None:
    if number is None or not 0 <= number <= most or not number.is_integer():
        return None
    return int(number)


def _newest_sample(samples: Sequence[_Sample]) -> float | None:
    return max((value for _, value in samples if 0 <= value <= MAX_STARTED_AT), default=None)


class _Adapters(TypedDict, total=False):
    adapters: frozenset[str] | None
    waiting_adapters: frozenset[str] | None
    adapter_slots: int | None


def _adapters(samples: Sequence[_Sample]) -> _Adapters:
    """Reads LoRA adapters from the newest label set; empty without samples.

    A sample's value is the time its labels were true, and every combination ever seen stays on the
    page (measured on vLLM 0.32). Of two with one value the later line is taken.
    """
    newest, latest = b"", -math.inf
    for text, value in samples:
        if latest <= value < math.inf:
            newest, latest = text, value
    if not newest:
        return {}
    labels = _labels(newest)
    return {
        "adapters": _names(labels.get(b"running_lora_adapters")),
        "waiting_adapters": _names(labels.get(b"waiting_lora_adapters")),
        "adapter_slots": _bounded_int(
            _total([_number(labels.get(b"max_lora", b""))]), most=MAX_ADAPTER_SLOTS
        ),
    }


def _names(value: bytes | None) -> frozenset[str] | None:
    if value is None:
        return None
    names = _is_plain(value).split(b",", MAX_NAMES)[:MAX_NAMES]
    known = [
        name.decode("utf-8", "replace").strip() for name in names if len(name) <= MAX_NAME_BYTES
    ]
    return frozenset(name for name in known if name)
