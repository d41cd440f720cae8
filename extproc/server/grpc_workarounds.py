"""Reads that end by themselves when the client of a stream leaves.

gRPC cancels a handler whose client is gone, and with it whatever the handler awaits. Of a read that
is cancelled 80 bytes stay behind for good (grpc/grpc#43360), scattered so that nothing around them
goes back to the system, and most data planes end most streams like that. The call is over by then,
so the read ends anyway: the handler is cancelled as soon as it did.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Generator
from typing import Any, Generic, TypeVar

MessageT = TypeVar("MessageT")


def _always() -> bool:
    return True


class UncancelledReads(Generic[MessageT]):
    """Awaitable that reads a message from a stream; awaited once per message, in sequence.

    While a read is under way its task waits for this in place of the future of the read, which the
    task therefore cannot cancel: it has what `asyncio.Task` asks of a future (`asyncio.isfuture`).
    The methods of the future are lent as they are, for a stream makes five reads.

    Args:
        read: Starts a read.
        breaks: Returns True while cancelling has to end a read, because the call goes on.
    """

    __slots__ = (
        "_asyncio_future_blocking",
        "_breaks",
        "_future",
        "_read",
        "add_done_callback",
        "get_loop",
    )

    def __init__(
        self, read: Callable[[], Coroutine[Any, Any, MessageT]], breaks: Callable[[], bool]
    ) -> None:
        self._asyncio_future_blocking = False
        self._future: asyncio.Future[Any] | None = None
        self._read = read
        self._breaks = breaks

    def give_up(self) -> None:
        """Let cancelling end the read from now on, whatever `breaks` says."""
        self._breaks = _always

    @property
    def given_up(self) -> bool:
        """True once `give_up` was called."""
        return self._breaks is _always

    @property
    def waits(self) -> bool:
        """True while a read is in progress, for which the task then waits."""
        return self._future is not None and not self._future.done()

    def cancel(self, msg: object = None) -> bool:
        """False: the task is cancelled once the read is done."""
        return self._breaks() and self._future is not None and self._future.cancel(msg)

    def __await__(self) -> Generator[Any, None, MessageT]:
        """Read the next message."""
        steps = self._read()
        cancelled: asyncio.CancelledError | None = None
        while True:
            try:
                future = steps.send(None)
            except StopIteration as end:
                if cancelled is not None:
                    raise cancelled from None
                message: MessageT = end.value
                return message
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
