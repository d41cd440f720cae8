"""What signals mean to a server."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Callable


def listen(stop: asyncio.Event, hurry: asyncio.Event, again: Callable[[], None]) -> None:
    """Listen to signals from now on.

    Args:
        stop: SIGTERM and SIGINT.
        hurry: SIGINT, and SIGTERM a second time: stop without waiting.
        again: SIGHUP: read the configuration again.
    """
    loop = asyncio.get_running_loop()

    def terminate() -> None:
        if stop.is_set():
            hurry.set()
        stop.set()

    def interrupt() -> None:
        hurry.set()
        stop.set()

    loop.add_signal_handler(signal.SIGTERM, terminate)
    loop.add_signal_handler(signal.SIGINT, interrupt)
    loop.add_signal_handler(signal.SIGHUP, again)
