"""Parses large bodies in a worker process, as parsing would block the event loop.

A single process, started with the first large body and ended when idle. Bodies are parsed in the
order of arrival; those that wait are bounded by their bytes. A thread writes bodies to the process,
with its system calls outside of the interpreter's lock.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Final

import msgspec

from extproc.decision import Rejection
from extproc.parsing import surfaces
from extproc.protocol.body_buffer import FREED_APART_BYTES
from extproc.request import HttpRequest, RequestBody
from extproc.server import parser_worker
from extproc.telemetry.counters import ProcessCounters

#: Largest body that is read on the event loop (bytes). At 30 ms for a MiB at worst that leaves time
#: for the rest of a turn.
INLINE_BYTES: Final = 1024 * 1024

#: Bodies that wait to be read (bytes): four of the largest by default, some seconds at worst. A body is
#: never refused where none waits.
MAX_WAITING_BYTES: Final = 128 * 1024 * 1024

#: Seconds for one body, after which its process is ended: it limits its CPU time by itself, so that only
#: a process that stands still takes as long.
_LIMIT_S: Final = 60.0

#: Seconds until the process is killed once more: the thread may have started it after the first time.
_KILL_AGAIN_S: Final = 0.5

#: Seconds without a large body after which the process is ended.
_IDLE_S: Final = 60.0

#: Seconds between two steps of freeing a body, in which other streams are served.
_FREE_S: Final = 0.01

#: References to a body that only `_free_part` has.
_OWN_REFERENCES: Final = 2

#: The process.
COMMAND: Final = (sys.executable, "-m", "extproc.server.parser_worker")

#: Lets glibc return what a body took once it is parsed, where it would otherwise keep up to three
#: times the largest body as free memory. What the environment says takes precedence.
_MALLOC_ENVIRONMENT: Final = {"MALLOC_MMAP_THRESHOLD_": str(1024 * 1024)}

_DECODER = msgspec.msgpack.Decoder(surfaces.ParseResult)
_encode = msgspec.msgpack.Encoder().encode

_CROWDED: Final = Rejection(
    429,
    "too many large request bodies wait to be read",
    reason="rejected-saturated",
    retry_after_s=1,
    cause="too-many-bodies",
)


class ParserDiedError(Exception):
    """Error of a parser process that ended before the body was parsed."""


class ParserProcess:
    """Parser process, started on demand. All calls block."""

    def __init__(self, command: Sequence[str] = COMMAND) -> None:
        self._command = command
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def pid(self) -> int | None:
        """Process id; None while no process runs."""
        return None if self._process is None else self._process.pid

    def read(self, job: parser_worker.ParseJob, body: RequestBody) -> surfaces.ParseResult:
        """Parse a body.

        Raises:
            ParserDiedError: The process ended before it was done. The next call starts another.
        """
        process = self._running()
        try:
            return _exchange(process, _encode(job), body)
        except (OSError, EOFError, msgspec.DecodeError) as error:
            self.end()
            raise ParserDiedError("the process that reads large bodies ended") from error

    def kill(self) -> None:
        """Kill the process at once, also while another thread waits for it."""
        process = self._process
        if process is not None:
            process.kill()

    def end(self) -> None:
        """Kill the process and wait for its end; idempotent."""
        process, self._process = self._process, None
        if process is None:
            return
        process.kill()
        process.wait()
        for pipe in (process.stdin, process.stdout):
            if pipe is not None:
                with contextlib.suppress(OSError):  # what it did not take is of no use
                    pipe.close()

    def _running(self) -> subprocess.Popen[bytes]:
        process = self._process
        if process is not None and process.poll() is None:
            return process
        self.end()
        try:
            process = subprocess.Popen(  # noqa: S603 - our own interpreter and module
                self._command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                start_new_session=True,
                env=_MALLOC_ENVIRONMENT | dict(os.environ),
            )
        except OSError as error:
            raise ParserDiedError("no process can be started to read large bodies") from error
        self._process = process
        return process


def _exchange(
    process: subprocess.Popen[bytes], job: bytes, body: RequestBody
) -> surfaces.ParseResult:
    """Send a job and its body, and receive the result.

    Raises:
        OSError: The process is gone.
        EOFError: It went away.
        msgspec.DecodeError: What it sent is no result.
    """
    jobs, results = process.stdin, process.stdout
    if jobs is None or results is None:
        raise RuntimeError("a parser process is started with pipes")
    jobs.write(parser_worker.JOB_HEAD.pack(len(job), len(body)))
    jobs.write(job)
    jobs.write(body)
    jobs.flush()
    head = results.read(parser_worker.RESULT_HEAD.size)
    if len(head) < parser_worker.RESULT_HEAD.size:
        raise EOFError
    (size,) = parser_worker.RESULT_HEAD.unpack(head)
    result = results.read(size)
    if len(result) < size:
        raise EOFError
    return _DECODER.decode(result)


def free_in_turns(body: bytearray) -> None:
    """Free a body once nothing else refers to it, by some half in each of several turns of the loop.

    At once, 64 MiB would hold the event loop for 7 to 17 ms of CPU. Until then it may still be read by
    a thread, or be on its way to the client.
    """
    asyncio.get_running_loop().call_later(_FREE_S, _free_part, [body])


def _free_part(holder: list[bytearray]) -> None:
    """Shrink the only item of a list, which alone refers to it, or wait for that."""
    if sys.getrefcount(holder[0]) <= _OWN_REFERENCES:
        # A bytearray returns memory only where it shrinks to less than half of what it took.
        del holder[0][len(holder[0]) * 7 // 16 :]
    if len(holder[0]) >= FREED_APART_BYTES:
        asyncio.get_running_loop().call_later(_FREE_S, _free_part, holder)


class LargeBodies:
    """Parses large bodies outside of the event loop.

    Args:
        process: Parses them; None creates one.

    Attributes:
        waiting_bytes: Bytes of bodies that are parsed or wait for it.
    """

    def __init__(
        self,
        counters: ProcessCounters,
        *,
        max_prompt_bytes: Callable[[], int],
        process: ParserProcess | None = None,
    ) -> None:
        self._counters = counters
        self._counts = counters.large_bodies
        self._max_prompt_bytes = max_prompt_bytes
        self._process = ParserProcess() if process is None else process
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="large-bodies")
        self._turn = asyncio.Lock()
        self.waiting_bytes = 0
        self._idle: asyncio.TimerHandle | None = None
        self._watchdog: asyncio.TimerHandle

    async def read(self, raw: HttpRequest) -> HttpRequest | Rejection:
        """Parse a request's body.

        Returns:
            The request with its parse result; 429 where too many bodies wait.

        Raises:
            ParserDiedError: Parsing it failed.
        """
        size = len(raw.body)
        if self.waiting_bytes and self.waiting_bytes + size > MAX_WAITING_BYTES:
            self._counts["refused"] += 1
            return _CROWDED
        self.waiting_bytes += size
        loop = asyncio.get_running_loop()
        begun = loop.time()
        try:
            async with self._turn:
                result = await self._read_now(raw)
        except ParserDiedError:
            self._counts["failed"] += 1
            raise
        finally:
            self.waiting_bytes -= size
        self._counts["read"] += 1
        self._counters.large_body_duration_s.add(loop.time() - begun)
        return surfaces.attach(raw, result)

    async def read_if_large(self, raw: HttpRequest) -> HttpRequest | Rejection:
        """Parse a request's body if it is large; see `read`."""
        return await self.read(raw) if len(raw.body) > INLINE_BYTES else raw

    async def _read_now(self, raw: HttpRequest) -> surfaces.ParseResult:
        loop = asyncio.get_running_loop()
        if self._idle is not None:
            self._idle.cancel()
        job = parser_worker.describe_job(raw, max_prompt_bytes=self._max_prompt_bytes())
        reading = loop.run_in_executor(self._thread, self._process.read, job, raw.body)
        self._watchdog = loop.call_later(_LIMIT_S, self._kill_process)
        try:
            return await asyncio.shield(reading)
        except asyncio.CancelledError:
            # The thread holds the body until the parse ends: its bytes are released only then.
            await asyncio.wait([reading])
            raise
        finally:
            self._watchdog.cancel()
            self._idle = loop.call_later(_IDLE_S, self._retire)

    def _kill_process(self) -> None:
        """Kill the process that reads too long, again and again until the read has failed."""
        self._process.kill()
        again = asyncio.get_running_loop().call_later(_KILL_AGAIN_S, self._kill_process)
        self._watchdog = again

    def _retire(self) -> None:
        """End the idle process after the current job; the next body starts another."""
        self._thread.submit(self._process.end)

    async def close(self) -> None:
        """End the process and the thread."""
        if self._idle is not None:
            self._idle.cancel()
        self._process.kill()
        await asyncio.get_running_loop().run_in_executor(self._thread, self._process.end)
        self._thread.shutdown()
