"""Waits for what no event tells."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

#: Longest wait (seconds); machines may be busy.
_LIMIT_S = 300.0


async def until(holds: Callable[[], object]) -> None:
    """Wait until a condition holds; fails where it never does."""
    async with asyncio.timeout(_LIMIT_S):
        while not holds():
            await asyncio.sleep(0.002)
