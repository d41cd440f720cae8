"""Metrics page to `Load`: reads only the metrics in use, some twenty lines of 50 kB.

A number out of its range reads as one that is not there: ranges are far beyond any engine, and so
small that sums and products of many endpoints stay exact integers and finite floats.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from typing import Final, TypedDict

import msgspec

from extproc.endpoint import NO_COUNTERS, NO_EXTRA, EngineCounters, Load
from extproc.scrape import engines
from extproc.scrape.metric_families import (
    DistinctFamilies,
    FamilyIndex,
    MetricFamilies,
    RankFamilies,
    Sample,
    is_joined,
    is_sample,
    parse_number,
    read_labels,
)

_HELP: Final = b"# HELP "
_ESCAPE = re.compile(rb"\\(.)")
_COMMENTS = re.compile(rb"(?:\n[ \t]*+(?:#[^\n]*+)?(?=\n|\Z))*+")

#: How far over 1 a mean of shares may come by rounding.
_ROUNDING = 1e-6

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
#: Bytes of comments at the start of a page, beyond which an unknown page is not looked into.
_COMMENT_BYTES = 65_536


#: Most data-parallel ranks of an engine that become endpoints; an engine that shows more is one.
MAX_RANKS: Final = 64
#: Highest number of a rank in its group.
MAX_RANK_NUMBER: Final = 4095


class RankedLoad(msgspec.Struct, frozen=True):
    """Loads of the data-parallel ranks of one engine.

    Attributes:
        numbers: Numbers of the ranks, ascending without a gap, at least two.
    """

    numbers: tuple[int, ...]
    loads: tuple[Load, ...]


class UnreadablePage(msgspec.Struct, frozen=True):
    """A page that is not in the Prometheus text format."""

    reason: str


#: Extra metrics by name: alternatives of each, the first one present wins.
ExtraMetrics = Mapping[str, tuple[engines.MetricSelector, ...]]


def read(
    page: bytes, now: float, *, engine_type: str = "", extra: ExtraMetrics | None = None
) -> Load | UnreadablePage:
    """Reads a single page; see `MetricsPageReader.read`."""
    return MetricsPageReader().read(page, now, engine_type=engine_type, extra=extra)


class MetricsPageReader:
    """Reads the pages of one endpoint, one after the other: what did not change is not parsed."""

    def __init__(self) -> None:
        self._families = FamilyIndex()
        #: Load of the last page of one engine, with what it was read for.
        self._last: tuple[engines.EngineSpec, ExtraMetrics | None, Load] | None = None

    def read(
        self, page: bytes, now: float, *, engine_type: str = "", extra: ExtraMetrics | None = None
    ) -> Load | UnreadablePage:
        """Reads the load of one engine from its metrics page.

        Counts of several series (data-parallel ranks, models) are summed, shares averaged; what
        workers of a rank repeat, and parts beside their total, count once. A series
        that is missing gives None for its field and leaves the others alone; so does a series of
        which any sample is no finite number in range, and a sum that is out of it.

        Args:
            page: The page in Prometheus text format; any bytes are safe.
            engine_type: Value of the endpoint's engine-type label. It is tried first; the names on
                the page have the last word, so that a wrong label does not hide the load.
            extra: Metrics for `Load.extra`, also of unknown engines; None for none.

        Returns:
            The load; for an unknown engine with an empty `engine` and every value None.
        """
        opened = self._open(page, now, engine_type, extra)
        return self._read_load(*opened, now, extra) if isinstance(opened, tuple) else opened

    def read_ranks(
        self, page: bytes, now: float, *, engine_type: str = "", extra: ExtraMetrics | None = None
    ) -> Load | RankedLoad | UnreadablePage:
        """Reads the load of each data-parallel rank where the page shows several.

        Args:
            page: As in `read`, and so are the others.

        Returns:
            As `read`, where the page is of one engine or names its ranks in a way we do not know.
        """
        opened = self._open(page, now, engine_type, extra)
        if not isinstance(opened, tuple):
            return opened
        families, engine = opened
        numbers = _rank_numbers(families, engine)
        if len(numbers) < 2:
            return self._read_load(families, engine, now, extra)
        shared = frozenset(
            {engines.STARTED, engine.adapters}
            | {selector.name for selector in (*engine.kv_blocks, *engine.block_tokens)}
        )
        loads = []
        for number in numbers:
            rank = engine.rank_label, str(number).encode()
            own_families = RankFamilies(families, rank, shared=shared)
            loads.append(_read_load(own_families, engine, now, extra))
        return RankedLoad(numbers, tuple(loads))

    def _read_load(
        self,
        families: MetricFamilies,
        engine: engines.EngineSpec,
        now: float,
        extra: ExtraMetrics | None,
    ) -> Load:
        """Reads the load of a page; that of the last page again if what it was read from is the same."""
        # Forgotten until it is read: what is read of a page that makes it raise is not this load.
        last, self._last = self._last, None
        if last is None or last[0] is not engine or last[1] is not extra:
            last = None
        if last is not None and self._families.is_unchanged:
            load = msgspec.structs.replace(last[2], at=now)
        else:
            load = _read_load(families, engine, now, extra)
        self._last = engine, extra, load
        return load

    def _open(
        self, page: bytes, now: float, engine_type: str, extra: ExtraMetrics | None
    ) -> tuple[MetricFamilies, engines.EngineSpec] | Load | UnreadablePage:
        """Families of a page and its engine; what it says where the engine is unknown."""
        # Names are looked for behind line feeds; a page that begins with help need not be copied for it.
        text = page if page.startswith(_HELP) else b"\n" + page
        engine = _recognize_engine(text, engine_type)
        if engine is None:
            return _unknown_engine_load(b"\n" + page, now, extra)
        families = self._families.cut(text) or MetricFamilies(
            text, joined=is_joined(text, engine.waiting[0].name)
        )
        return families, engine


def _rank_numbers(families: MetricFamilies, engine: engines.EngineSpec) -> tuple[int, ...]:
    """Numbers of the ranks on a page; empty unless every sample names its rank, without a gap."""
    if not engine.rank_label:
        return ()
    samples = families.samples(engine.running[0].name)
    if len(samples) < 2:
        return ()
    numbers = set()
    for text, _ in samples:
        number = read_labels(text).get(engine.rank_label, b"")
        if not number.isdigit() or len(number) > 4 or int(number) > MAX_RANK_NUMBER:
            return ()
        if str(int(number)).encode() != number:
            return ()
        numbers.add(int(number))
    ordered = sorted(numbers)
    if len(ordered) > MAX_RANKS or ordered[-1] - ordered[0] != len(ordered) - 1:
        return ()
    return tuple(ordered)


def _read_load(
    families: MetricFamilies, engine: engines.EngineSpec, now: float, extra: ExtraMetrics | None
) -> Load:
    all_families = families
    if engine.worker_labels:
        divided = frozenset(selector.name for selector in (*engine.running, *engine.waiting))
        families = DistinctFamilies(families, engine, divided=divided)
    # Asked for in the order of a vLLM page, in which searches are short.
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
        **_adapters(families.adapter_samples(engine.adapters)),
        kv_blocks=_bounded_int(_total(families.numbers(engine.kv_blocks)), most=MAX_KV_BLOCKS),
        block_tokens=_bounded_int(
            _common_number(families.numbers(engine.block_tokens)), most=MAX_BLOCK_TOKENS
        ),
        extra=_extra(all_families, extra) if extra else NO_EXTRA,
    )


def _extra(families: MetricFamilies, metrics: ExtraMetrics) -> Mapping[str, float]:
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


def _totals(families: MetricFamilies, engine: engines.EngineSpec) -> EngineCounters:
    """Sums the counters of an engine; None for a counter that it does not export."""
    if not engine.totals:
        return NO_COUNTERS
    totals: dict[str, float | None] = {}
    rank_steps: tuple[float, ...] = ()
    for name, series in engine.totals:
        # An absent family costs a walk over the page; a sum without its count is not searched.
        if name == "adapter_load_s" and totals["adapter_loads"] is None:
            continue
        if name == "reload_s" and not totals["reloaded_tokens"]:
            continue
        numbers = families.numbers(series)
        totals[name] = _total(numbers)
        if name == "steps" and len(numbers) > 1 and totals[name] is not None:
            rank_steps = tuple(numbers)
    return EngineCounters(**totals, rank_steps=rank_steps)


def _recognize_engine(text: bytes, engine_type: str) -> engines.EngineSpec | None:
    labelled = [engine for engine in engines.TABLE if engine.type_label == engine_type]
    for engine in (*labelled, *engines.TABLE):
        if b"\n" + engine.page_prefix in text:
            return engine
    return None


def _unknown_engine_load(
    text: bytes, now: float, extra: ExtraMetrics | None
) -> Load | UnreadablePage:
    """Distinguishes the page of an unknown engine from a page that is no metrics page."""
    comments = _COMMENTS.match(text, 0, _COMMENT_BYTES)
    at = comments.end() if comments else 0
    if at >= min(len(text), _COMMENT_BYTES):
        return UnreadablePage("no samples")
    if not is_sample(text, at):
        return UnreadablePage("not Prometheus text")
    if not extra:
        return Load(at=now)
    return Load(at=now, extra=_extra(MetricFamilies(text, joined=False), extra))


def _is_plain(value: bytes) -> bytes:
    if b"\\" not in value:
        return value
    return _ESCAPE.sub(lambda escape: b"\n" if escape[1] == b"n" else escape[1], value)


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


def _newest_sample(samples: Sequence[Sample]) -> float | None:
    return max((value for _, value in samples if 0 <= value <= MAX_STARTED_AT), default=None)


class _Adapters(TypedDict, total=False):
    adapters: frozenset[str] | None
    waiting_adapters: frozenset[str] | None
    adapter_slots: int | None


def _adapters(samples: Sequence[Sample]) -> _Adapters:
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
    labels = read_labels(newest)
    return {
        "adapters": _names(labels.get(b"running_lora_adapters")),
        "waiting_adapters": _names(labels.get(b"waiting_lora_adapters")),
        "adapter_slots": _bounded_int(
            _total([parse_number(labels.get(b"max_lora", b""))]), most=MAX_ADAPTER_SLOTS
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
