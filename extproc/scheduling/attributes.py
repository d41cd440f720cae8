"""Numbers of an endpoint that a configuration may name.

The upstream picker's names for what it scrapes, the names of the engine's own metrics, and ours.
`extra.NAME` is the metric NAME of `scrape.extra_metrics`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from difflib import get_close_matches

import msgspec

from extproc.endpoint import Candidate
from extproc.scheduling.framework import Signal


class Attribute(msgspec.Struct, frozen=True):
    """One number of a candidate.

    Attributes:
        signal: Signal that it is read from.
        read: The number; None when unknown.
        extra_metric: Name in `scrape.extra_metrics`; empty for a built-in number.
    """

    signal: Signal
    read: Callable[[Candidate], float | None]
    extra_metric: str = ""


_WAITING = Attribute(Signal.WAITING, lambda c: c.load.waiting)
_RUNNING = Attribute(Signal.RUNNING, lambda c: c.load.running)
_KV_USAGE = Attribute(Signal.KV_USAGE, lambda c: c.load.kv_usage)

ATTRIBUTES: Mapping[str, Attribute] = {
    "WaitingQueueSize": _WAITING,
    "num_requests_waiting": _WAITING,
    "waiting": _WAITING,
    "RunningRequestsSize": _RUNNING,
    "num_requests_running": _RUNNING,
    "running": _RUNNING,
    "KVCacheUsagePercent": _KV_USAGE,
    "kv_cache_usage_perc": _KV_USAGE,
    "kv_usage": _KV_USAGE,
    "in_flight": Attribute(Signal.IN_FLIGHT, lambda c: float(c.in_flight)),
    "requests": Attribute(Signal.IN_FLIGHT, lambda c: c.estimated_requests),
    "prompt_tokens": Attribute(Signal.IN_FLIGHT, lambda c: float(c.prompt_tokens)),
    "queued_tokens": Attribute(Signal.QUEUED, lambda c: c.queued_tokens),
    "matched_tokens": Attribute(Signal.PREFIX, lambda c: float(c.matched_tokens)),
}


#: Begins names of attributes that are extra metrics.
_EXTRA = "extra."


def find(name: str) -> Attribute:
    """The attribute of that name.

    Raises:
        ValueError: There is none; names the nearest one.
    """
    attribute = ATTRIBUTES.get(name)
    if attribute is None and name.startswith(_EXTRA):
        return _extra_attribute(name.removeprefix(_EXTRA))
    if attribute is None:
        if name.lower().startswith("gpu"):
            raise ValueError(
                f"expected an attribute of {', '.join(ATTRIBUTES)}, got {name}, which "
                "dcgm-data-source and dcgm-extractor would measure: GPU metrics are not scraped"
            )
        near = get_close_matches(name, ATTRIBUTES, n=1, cutoff=0.0)[0]
        raise ValueError(
            f"expected an attribute of {', '.join(ATTRIBUTES)} (nearest: {near}), or extra.NAME of "
            f"scrape.extra_metrics, got {name}"
        )
    return attribute


@functools.cache
def _extra_attribute(metric: str) -> Attribute:
    return Attribute(Signal.EXTRA, lambda c: c.load.extra.get(metric), metric)
