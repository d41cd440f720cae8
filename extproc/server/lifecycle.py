"""Life of the process: logging, signals, the supervised loops and the drain."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import logging
import os
import signal
import sys
import threading
from collections.abc import Callable
from typing import Final

import uvloop

from extproc.config.settings import Settings
from extproc.server import grpc_workarounds, health, reload
from extproc.server.app import EndpointPickerProcess
from extproc.supervision import Loop, LoopName
from extproc.telemetry import log_format

#: Seconds between two looks whether a picker is ready for the first time.
_LOOK_S = 0.1

#: Seconds that threads have to end once nothing is served any more.
_THREADS_END_S: Final = 3.0

_log = logging.getLogger("extproc.server")


def run(settings: Settings, source: reload.ConfigSource) -> int:
    """Serve until SIGTERM or SIGINT; returns the exit status.

    Raises:
        ConfigError: A port is taken, a certificate or an endpoint file cannot be read.
    """
    handler = log_format.LogHandler(sys.stderr)
    handler.setFormatter(log_format.build_formatter(settings.log.format))
    logging.basicConfig(handlers=[handler])
    # Ours only: gRPC and aiohttp have debug lines of their own.
    logging.getLogger("extproc").setLevel(settings.log.level.upper())
    grpc_workarounds.configure_malloc(os.environ)
    ended = threading.Event()
    try:
        uvloop.run(_serve_and_end(settings, source, ended))
    finally:
        ended.set()
    return 0


async def _serve_and_end(
    settings: Settings, source: reload.ConfigSource, ended: threading.Event
) -> None:
    status = 1
    try:
        await serve(settings, source, announce=_write_line)
        status = 0
    finally:
        # The event loop waits for its threads without end, and one may read a file of a mount that
        # stalls.
        threading.Thread(target=_abandon_threads, args=(ended, status), daemon=True).start()


def _write_line(line: str) -> None:
    """Write a line to standard output; one that is closed or full must not end the process."""
    try:
        sys.stdout.write(f"{line}\n")
        sys.stdout.flush()
    except OSError as error:
        _log.warning("standard output cannot be written and gets no more lines: %s", error.strerror)
        # Python would write the line once more when it exits, and fail again.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _abandon_threads(ended: threading.Event, status: int) -> None:
    """End the process where threads of the event loop do not."""
    if not ended.wait(_THREADS_END_S):
        _log.warning("the process ends without a thread that hangs, as in the read of a file")
        sys.stdout.flush()
        os._exit(status)


async def serve(
    settings: Settings, source: reload.ConfigSource, *, announce: Callable[[str], None]
) -> None:
    """Serve until a signal arrives.

    SIGTERM drains: readiness turns false at once, streams are served while a data plane
    can open them, for `drain_timeout_s` at most, then those still open end with OK, which leaves
    their answers running. SIGINT, a second signal, or one before the first sync is over, does not
    wait.

    Args:
        source: Source of the configuration, reloaded on SIGHUP and when files change.
        announce: Called with a line for supervisors and people: once everything listens, and once
            this picker wants traffic for the first time.
    """
    stop: asyncio.Event = asyncio.Event()
    hurry: asyncio.Event = asyncio.Event()
    picker = EndpointPickerProcess(settings)
    reloader = reload.Reloader(
        source, settings, apply_settings=picker.apply_settings, on_reload=picker.reloads.add
    )
    install_signal_handlers(stop, hurry, reloader.request_reload)
    supervisor = picker.counters.supervisor
    asyncio.get_running_loop().set_exception_handler(supervisor.handle)
    try:
        addresses = await picker.start()
        # What lives now lives to the end: keep the collector from walking it again and again. Not the
        # pools and endpoints that discovery brings, which it could not free when they are removed.
        gc.collect()
        gc.freeze()
        gc.set_threshold(20_000, 20, 50)
        if not await _sync(picker, stop):
            hurry.set()  # it was never ready: a data plane need not find out that it ends
            await supervisor.attempt("drain", picker.drain(hurry))
            return
        async with asyncio.TaskGroup() as tasks:
            running: dict[LoopName, Loop] = {**picker.loops(), "reload": reloader.run}
            loops = [
                tasks.create_task(supervisor.keep(name, run), name=name)
                for name, run in running.items()
            ]
            announce(f"extproc is listening: {addresses.ready_message}")
            await supervisor.keep("readiness", lambda: _ready(picker.readiness, stop))
            if picker.readiness.ready:
                announce(f"extproc is ready: {addresses.ready_message}")
            await stop.wait()
            await supervisor.attempt("drain", picker.drain(hurry))
            for loop in loops:
                loop.cancel()
    finally:
        await picker.stop()


def install_signal_handlers(
    stop: asyncio.Event, hurry: asyncio.Event, again: Callable[[], None]
) -> None:
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


async def _sync(picker: EndpointPickerProcess, stop: asyncio.Event) -> bool:
    """Wait for `picker.sync`; returns False, and cancels it, if the process has to stop before."""
    syncing = asyncio.ensure_future(picker.sync())
    stopping = asyncio.ensure_future(stop.wait())
    try:
        await asyncio.wait({syncing, stopping}, return_when=asyncio.FIRST_COMPLETED)
        if not syncing.done():
            return False
        syncing.result()  # raises what it raised
        return True
    finally:
        syncing.cancel()
        stopping.cancel()
        await asyncio.wait({syncing, stopping})


async def _ready(readiness: health.Readiness, stop: asyncio.Event) -> None:
    """Wait until the process is ready for the first time, or has to stop."""
    while not (readiness.ready or stop.is_set()):
        # Nothing tells when all that readiness depends on holds.
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_LOOK_S):
                await stop.wait()
