"""The ext_proc servicer: one coroutine per stream, one turn per event."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator

import grpc

from extproc.errors import ProtocolError
from extproc.protocol.events import Event
from extproc.server import memory, reading
from extproc.server.stream import Shared, Stream, opened
from extproc.wire import codec

_log = logging.getLogger("extproc.server")

Context = grpc.aio.ServicerContext[Event, bytes]


class Servicer:
    """Translates streams to turns.

    Args:
        shared: What all streams have in common.
    """

    def __init__(self, shared: Shared) -> None:
        self.shared = shared
        self._crowds = memory.Crowds(memory.trimmer())
        self._streams: dict[asyncio.Task[None], Stream] = {}
        #: Those whose client is gone.
        self._left: set[asyncio.Task[None]] = set()

    def _ends(self) -> bool:
        """Whether streams are ended by us, and not by their clients."""
        return self.shared.closing

    async def process(self, _: AsyncIterator[Event], context: Context) -> None:
        """Serve one stream to its end, in a task of its own.

        When the client leaves, gRPC cancels this one. Cancelling what reads would leave 80 bytes of
        the read behind for good (grpc/grpc#43360), and most data planes end most streams like that.
        Left alone, the read ends by itself, because the call is over.
        """
        serving = asyncio.ensure_future(self._serve(context))
        try:
            await asyncio.shield(serving)
        except asyncio.CancelledError:
            if not serving.done():
                self._leave(serving)
                await asyncio.wait((serving,))
            raise

    def _leave(self, serving: asyncio.Task[None]) -> None:
        """The client of a stream is gone: what waits for capacity waits for nobody."""
        self._left.add(serving)
        stream = self._streams.get(serving)
        if stream is not None and stream.held is not None:
            stream.held.answer.cancel()

    async def _serve(self, context: Context) -> None:
        task = asyncio.current_task()
        if task is None:
            raise RuntimeError("process runs inside a task of the gRPC server")
        tallies = self.shared.tallies
        tallies.streams_open += 1
        self._crowds.count(tallies.streams_open)
        stream = self._streams[task] = opened(self.shared)
        turn = (
            stream.turn
            if tallies.streams_open <= self.shared.settings.max_streams
            else stream.turn_away
        )
        end = "error"
        try:
            while not stream.over:
                event = await reading.Unbroken(context.read(), self._ends)
                if not isinstance(event, Event):
                    break
                # No await beyond this point, until the answers are written.
                for reply in turn(event):
                    await context.write(codec.encode(reply))
                if stream.held is not None:
                    await _resume(stream, context)
            end = "ok"
        except asyncio.CancelledError:
            # The client left, or we are closing: then the stream ends with OK, and the data
            # plane goes on without us instead of cutting the answer.
            end = "cancelled"
            if not self.shared.closing:
                raise
            task.uncancel()
        except ProtocolError as error:
            end = "protocol"
            _log.warning("stream ended: %s", error)
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, str(error))
        except grpc.aio.BaseError:
            # A write after the peer left; the end arrives as an error instead of a cancellation.
            end = "cancelled"
        finally:
            self._finish(task, stream, end)

    def _finish(self, task: asyncio.Task[None], stream: Stream, end: str) -> None:
        """Give back everything, however the stream ended."""
        tallies = self.shared.tallies
        if task in self._left:
            self._left.discard(task)
            end = "cancelled" if end == "ok" else end
        del self._streams[task]
        tallies.streams_open -= 1
        self._crowds.count(tallies.streams_open)
        tallies.streams[end] += 1
        stream.finish()

    async def release(self, within_s: float) -> None:
        """End every open stream with OK: Envoy goes on without the processor.

        A stream whose request is not decided yet ends as soon as it is: without an answer Envoy
        would go on without an endpoint.

        Args:
            within_s: Seconds that requests have to become complete.
        """
        self.shared.closing = True
        for task, stream in list(self._streams.items()):
            if stream.picked:
                task.cancel()
        if self._streams:
            await asyncio.wait(self._streams, timeout=within_s)


async def _resume(stream: Stream, context: Context) -> None:
    """Wait with a request that is held, and answer it."""
    held = stream.held
    if held is None:
        return
    for reply in stream.resume(await held.answer):
        await context.write(codec.encode(reply))


def register(server: grpc.aio.Server, servicer: Servicer) -> None:
    """Serve ext_proc on a server. The codec functions are the (de)serialisers."""
    handler: grpc.RpcMethodHandler[Event, bytes] = grpc.stream_stream_rpc_method_handler(
        servicer.process, request_deserializer=codec.decode, response_serializer=None
    )
    server.add_generic_rpc_handlers(
        (grpc.method_handlers_generic_handler(codec.SERVICE, {codec.METHOD: handler}),)
    )
