"""Signal handlers of the server."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Callable


def listen(stop: asyncio.Event, hurry: asyncio.Event, again: Callable[[], None]) -> None:
    """Install the signal handlers on the running event loop.

    Args:
        stop: Set by SIGTERM and SIGINT.
        hurry: Set by SIGINT, and by a second SIGTERM: stop without waiting.
        again: Called on SIGHUP to reload the configuration.
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
