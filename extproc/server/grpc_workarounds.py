"""Workarounds for the memory of gRPC and of its streams.

gRPC cancels a handler whose client is gone, and with it the read or write that the handler awaits.
Each cancelled operation leaks 80 bytes, the first write 160 (grpc/grpc#43360), scattered so that the
pages around them stay in use, and most data planes end most streams in this way. The call is over by
then and the operation ends by itself: `UncancelledOperations` cancels the handler only after that.
Delete it once the issue is closed.

After a peak of streams, freed memory does not return to the system: the C library keeps pages, and
Python keeps arenas of 1 MiB in which a single object is left, some in lists of free objects that only
a full collection empties. A picker that queued ten thousand requests for a minute would look as if it
still did, to an autoscaler and to a memory limit. So what arrives while many requests are queued is
not allocated in arenas.
"""

from __future__ import annotations

import asyncio
import ctypes
import gc
import sysconfig
from collections.abc import Awaitable, Callable, Coroutine, Generator, Mapping
from typing import Any, Final, TypeVar

ResultT = TypeVar("ResultT")


def _always() -> bool:
    return True


class UncancelledOperations:
    """Runs reads or writes of a stream, one at a time, so that cancelling the task cancels none.

    While an operation is under way its task waits for this in place of the future of the operation,
    which the task therefore cannot cancel: it has what `asyncio.Task` asks of a future
    (`asyncio.isfuture`). The methods of the future are lent as they are, because a stream makes some
    ten operations.

    Args:
        breaks: Returns True while cancelling has to end an operation, because the call goes on.
    """

    __slots__ = (
        "_asyncio_future_blocking",
        "_breaks",
        "_future",
        "_operation",
        "add_done_callback",
        "get_loop",
    )

    def __init__(self, breaks: Callable[[], bool]) -> None:
        self._asyncio_future_blocking = False
        self._future: asyncio.Future[Any] | None = None
        self._operation: Coroutine[Any, Any, Any]
        self._breaks = breaks

    def run(self, operation: Coroutine[Any, Any, ResultT]) -> Awaitable[ResultT]:
        """Return an awaitable of an operation, to be awaited at once.

        Args:
            operation: Coroutine that waits for futures of this loop only.
        """
        self._operation = operation
        return self

    def give_up(self) -> None:
        """Let cancelling end the operation from now on, whatever `breaks` says."""
        self._breaks = _always

    @property
    def given_up(self) -> bool:
        """True once `give_up` was called."""
        return self._breaks is _always

    @property
    def waits(self) -> bool:
        """True while an operation is in progress, for which the task then waits."""
        return self._future is not None and not self._future.done()

    def cancel(self, msg: object = None) -> bool:
        """False: the task is cancelled once the operation is done."""
        return self._breaks() and self._future is not None and self._future.cancel(msg)

    def __await__(self) -> Generator[Any, None, Any]:
        """Wait for the operation."""
        steps = self._operation
        cancelled: asyncio.CancelledError | None = None
        while True:
            try:
                future = steps.send(None)
            except StopIteration as end:
                if cancelled is not None:
                    raise cancelled from None
                return end.value
            future._asyncio_future_blocking = False  # noqa: SLF001 - as a task would
            self._future = future
            self.add_done_callback = future.add_done_callback
            self.get_loop = future.get_loop
            self._asyncio_future_blocking = True
            try:
                yield self
            except asyncio.CancelledError as error:
                if not future.done() or future.cancelled():
                    steps.close()
                    raise
                cancelled = error


async def let_reset_arrive() -> None:
    """Give gRPC two turns of the event loop to cancel a handler whose client reset the stream.

    Envoy ends most streams by END_STREAM and RST_STREAM in one piece. A handler that returns between
    the two makes gRPC send a status to a client that left, of which 80 bytes stay behind as of other
    cancelled operations. The call from gRPC's own thread takes the first turn, and the task that it
    wakes the second.
    """
    await asyncio.sleep(0)
    await asyncio.sleep(0)


#: Streams that make a peak (count): some 30 MB.
_CROWD = 1000

#: Share of the peak that may be left when memory is returned.
_LEFT = 0.1

#: Seconds after the end of a peak: its last objects are freed a moment later, and what gRPC keeps for
#: connections goes with them.
_PAUSES_S = (1.0, 10.0)


#: Options of glibc's `mallopt` and their values: bytes at the top of the heap that stay with the process
#: when they are free, and size from which an allocation is mapped, and returned, on its own.
_MALLOC_OPTIONS = ((-1, 4 * 1024 * 1024), (-3, 1024 * 1024))

#: Environment variables by which an operator sets them.
_MALLOC_VARIABLES = ("MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_", "GLIBC_TUNABLES")


def configure_malloc(environment: Mapping[str, str]) -> bool:
    """Let the C library keep some megabytes between requests; True if it does from now on.

    By itself glibc returns what a large body took at its end and takes it again, page by page, for
    the next one; the kernel's work for that exceeds that of all copies of the body.

    Args:
        environment: Variables of the process; what they say of malloc stands.
    """
    if any(name in environment for name in _MALLOC_VARIABLES):
        return False
    try:
        mallopt: Callable[[int, int], int] = ctypes.CDLL(None).mallopt
    except (AttributeError, OSError):
        return False  # another C library
    return all(mallopt(option, value) for option, value in _MALLOC_OPTIONS)


def trimmer() -> Callable[[], None]:
    """Build the function that returns freed memory: some 40 ms after ten thousand streams."""
    try:
        trim: Callable[[int], int] = ctypes.CDLL(None).malloc_trim
    except (AttributeError, OSError):
        trim = _keep  # another C library: Python's arenas go back all the same

    def both() -> None:
        gc.collect()
        trim(0)

    return both


def _keep(_: int) -> int:
    return 0


class IdleMemoryTrimmer:
    """Trims memory once most streams of a peak have ended."""

    def __init__(self, trim: Callable[[], None]) -> None:
        self._trim = trim
        self._most = 0

    def count(self, streams: int) -> None:
        """Record the number of open streams."""
        if streams > self._most:
            self._most = streams
        elif self._most >= _CROWD and streams <= self._most * _LEFT:
            self._most = streams
            loop = asyncio.get_running_loop()
            for pause_s in _PAUSES_S:
                loop.call_later(pause_s, self._trim)


class _Allocator(ctypes.Structure):
    """`PyMemAllocatorEx` of CPython."""

    _fields_ = tuple(
        (name, ctypes.c_void_p) for name in ("context", "malloc", "calloc", "realloc", "free")
    )


#: Domains of `PyMem_SetAllocator`: the C library, and those that share Python's arenas.
_RAW_DOMAIN = 0
_ARENA_DOMAINS = (1, 2)

#: Waiting requests from which further ones are allocated apart (count): some 4 MB.
APART_STREAMS: Final = 1000


class ApartAllocator:
    """Allocates what requests hold while they wait from the C library instead of Python's arenas.

    An arena of 1 MiB goes back to the system once nothing is left in it, and after a burst some object
    that outlives it is left in nearly all: counters, blocks of the index, the decisions of the log.
    The C library returns every free page. It takes a tenth longer than an arena, so it serves only
    turns of the event loop in which requests arrive while many wait. Memory is freed by Python's own
    functions, which know whose it is.

    Delete this once Python returns parts of arenas.

    Args:
        arenas: Allocators of the domains that have arenas.
        library: Allocator that calls the C library.
    """

    def __init__(self, arenas: Mapping[int, _Allocator], library: _Allocator) -> None:
        self._is_apart = False
        self._arenas = arenas
        self._apart = {
            domain: _Allocator(None, library.malloc, library.calloc, arena.realloc, arena.free)
            for domain, arena in arenas.items()
        }

    def begin_turn(self, waiting: int) -> None:
        """Allocate apart until the next turn of the event loop, where many requests wait (count)."""
        if waiting >= APART_STREAMS and not self._is_apart:
            self._is_apart = True
            asyncio.get_running_loop().call_soon(self._end_turn)
            self._use(self._apart)

    def _end_turn(self) -> None:
        self._use(self._arenas)
        self._is_apart = False

    def _use(self, allocators: Mapping[int, _Allocator]) -> None:
        for domain, allocator in allocators.items():
            ctypes.pythonapi.PyMem_SetAllocator(domain, ctypes.byref(allocator))


def build_apart_allocator() -> ApartAllocator | None:
    """Build the allocator; None where the C library keeps its pages, or Python has no arenas.

    An allocator with a context is another one's hook, such as that of `tracemalloc`. Python without a
    GIL allocates from the heaps of mimalloc, and requires that objects lie in them.
    """
    if sysconfig.get_config_var("Py_GIL_DISABLED"):
        return None
    try:
        library, *arenas = map(_read_allocator, (_RAW_DOMAIN, *_ARENA_DOMAINS))
        trims = hasattr(ctypes.CDLL(None), "malloc_trim")
    except (AttributeError, OSError):
        return None  # another interpreter, or another C library
    if not trims or any(allocator.context for allocator in (library, *arenas)):
        return None
    if any(arena.malloc == library.malloc for arena in arenas):
        return None
    return ApartAllocator(dict(zip(_ARENA_DOMAINS, arenas, strict=True)), library)


def _read_allocator(domain: int) -> _Allocator:
    allocator = _Allocator()
    ctypes.pythonapi.PyMem_GetAllocator(domain, ctypes.byref(allocator))
    return allocator
