"""Adapters that an engine loaded onto its device."""

from __future__ import annotations

from collections.abc import Iterable

from extproc.endpoint import Load


class AdapterSlotTracker:
    """Adapters believed on one device, from the adapters that ran there.

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
            load: The scrape.
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
