"""Metrics pages of counters and pools without a process around them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from extproc.pool.snapshot import Pool
from extproc.telemetry.counters import ProcessCounters
from extproc.telemetry.exposition import Exposition
from extproc.telemetry.pool_state import PoolView, PrefixCacheStats

_EMPTY = PrefixCacheStats(0.0, 0.0, None)


def build_view(pool: Pool, cache: PrefixCacheStats = _EMPTY, **facts: Any) -> PoolView:
    """The state of a pool whose endpoints have the same prefix cache."""
    return PoolView(pool, lambda _: cache, **facts)


def build_exposition(
    counters: ProcessCounters, views: Mapping[str, PoolView] = {}, *, now: float = 1.0
) -> Exposition:
    """The page of these counters, and of pools by name."""
    return Exposition(counters, lambda: views, clock=lambda: now, gauges={}, about=dict)
