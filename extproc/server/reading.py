"""Reads that end by themselves when the client of a stream leaves.

gRPC cancels a handler whose client is gone, and with it whatever the handler awaits. Of a read that
is cancelled 80 bytes stay behind for good (grpc/grpc#43360), scattered so that nothing around them
goes back to the system, and most data planes end most streams like that. The call is over by then,
so the read ends anyway: the handler is cancelled as soon as it did.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Generator
from contextvars import Context
from typing import Any, Generic, TypeVar

Said = TypeVar("Said")


class _Unbroken:
    """What a task waits for in place of a future, which it cannot cancel.

    It has what `asyncio.Task` asks of a future it is given (see `asyncio.isfuture`).
    """

    __slots__ = ("_asyncio_future_blocking", "_breaks", "_future")

    def __init__(self, future: asyncio.Future[Any], breaks: Callable[[], bool]) -> None:
        self._asyncio_future_blocking = True
        self._future = future
        self._breaks = breaks

    def get_loop(self) -> asyncio.AbstractEventLoop:
        return self._future.get_loop()

    def add_done_callback(
        self, done: Callable[[asyncio.Future[Any]], object], *, context: Context | None = None
    ) -> None:
        self._future.add_done_callback(done, context=context)

    def cancel(self, msg: object = None) -> bool:
        """False: the task is cancelled once the future is done."""
        return self._breaks() and self._future.cancel(msg)


class Unbroken(Generic[Said]):
    """Awaits a read to its end, also where the task is cancelled meanwhile.

    Args:
        read: The read.
        breaks: Whether cancelling ends it all the same, as it has to where the call goes on.
    """

    __slots__ = ("_breaks", "_read")

    def __init__(self, read: Awaitable[Said], breaks: Callable[[], bool]) -> None:
        self._read = read
        self._breaks = breaks

    def __await__(self) -> Generator[Any, None, Said]:
        """What was read."""
        steps = self._read.__await__()
        cancelled: asyncio.CancelledError | None = None
        while True:
            try:
                future = steps.send(None)
            except StopIteration as end:
                if cancelled is not None:
                    raise cancelled from None
                said: Said = end.value
                return said
            future._asyncio_future_blocking = False  # noqa: SLF001 - as a task would
            try:
                yield _Unbroken(future, self._breaks)
            except asyncio.CancelledError as error:
                if not future.done() or future.cancelled():
                    steps.close()
                    raise
                cancelled = error
