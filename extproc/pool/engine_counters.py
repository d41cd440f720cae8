"""Work counters of an engine: the ends of the windows from which step times are learned.

Adapters that an engine loaded onto its device.
"""

from __future__ import annotations

from collections.abc import Iterable

import msgspec

from extproc.endpoint import Load


class AdapterSlotTracker:
    """Adapters predicted on one device, from the adapters that ran there.

    An engine lists adapters with running requests; one that ran and is in no slot was loaded. Of
    idle ones the least recently used makes room, as in vLLM.

    Attributes:
        loads: Adapters that came onto the device since the first scrape (count).
    """

    __slots__ = ("_resident", "loads")

    def __init__(self) -> None:
        self.loads = 0
        self._resident: dict[str, None] | None = None  # least recently used first

    def update(self, load: Load, ran: Iterable[str]) -> None:
        """Take in a scrape; nothing happens while the engine names neither slots nor adapters.

        Args:
            ran: Adapters of requests that ended since the one before.
        """
        running, size = load.adapters, load.adapter_slots
        if running is None or size is None:
            return
        first = self._resident is None
        resident = self._resident or {}
        self._resident = resident
        # What still runs was used last.
        for name in (*sorted(set(ran) - running), *sorted(running)):
            if name in resident:
                del resident[name]
            elif not first:
                self.loads += 1
            resident[name] = None
        idle = [name for name in resident if name not in running]
        for name in idle[: max(0, len(resident) - size)]:
            del resident[name]


class WorkCounters(msgspec.Struct, frozen=True, gc=False):
    """Work counters of an engine at one end of a window.

    Attributes:
        at: Monotonic seconds.
        steps: Iterations.
        computed: Prompt tokens computed.
        generated: Tokens generated.
        context: Tokens of context that running requests have; None when unknown.
        loads: Adapters that were loaded onto the device (count).
        loading_s: Seconds of adapter loads where the engine tells them, else 0.
        idled: Times at which our account had no open request left (count).
    """

    at: float
    steps: float
    computed: float
    generated: float
    context: float | None
    loads: int
    loading_s: float
    idled: int


class CounterReader:
    """Reads the counts of one life of one engine."""

    __slots__ = ("_device", "_last", "_passes")

    def __init__(self) -> None:
        self._device = AdapterSlotTracker()
        self._last: Load | None = None
        self._passes = 0.0

    def read(
        self, load: Load, *, ran: Iterable[str], idled: int, shared: float
    ) -> WorkCounters | None:
        """Take in the next scrape.

        Args:
            ran: Adapters of requests that ended since the last one.
            idled: Times at which none of our requests was left on the engine (count, cumulative).
            shared: Tokens of context that the cache holds once for several running requests.

        Returns:
            Its counts; None where the engine does not have all of them.
        """
        last, self._last = self._last, load
        self._device.update(load, ran)
        work = self._work(last, load)
        if work is None:
            return None
        capacity, usage = load.kv_tokens, load.kv_usage
        adapter_load_s = load.counters.adapter_load_s
        return WorkCounters(
            load.at,
            *work,
            None if capacity is None or usage is None else capacity * usage + shared,
            self._device.loads if adapter_load_s is None else 0,
            adapter_load_s or 0.0,
            idled,
        )

    def _work(self, last: Load | None, load: Load) -> tuple[float, float, float] | None:
        """Iterations, prompt tokens computed, tokens generated.

        An engine that does not count iterations generates one token for each running request in
        each of them: in simulation within a tenth of the true count, scraped every 0.5 or 2 s.
        """
        totals = load.counters
        generated = totals.generated_tokens
        if totals.steps is not None and totals.step_tokens is not None and generated is not None:
            return totals.steps, totals.step_tokens - generated, generated
        computed, decoded = totals.computed_tokens, totals.decoded_tokens
        if computed is None or decoded is None:
            return None
        before = None if last is None else last.counters.decoded_tokens
        if last is not None and before is not None:
            batch = 0.5 * ((last.running or 0.0) + (load.running or 0.0))
            self._passes += max(0.0, decoded - before) / max(1.0, batch)
        return self._passes, computed, decoded
