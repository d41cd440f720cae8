"""The ext_proc servicer: one coroutine per stream, one turn per event."""

from __future__ import annotations

import asyncio
import logging
import random
import traceback
import uuid
from collections.abc import AsyncIterator, Callable, Iterable

import grpc

from extproc.decision import Decision, Rejection
from extproc.dispatch.dispatcher import Dispatcher
from extproc.errors import ProtocolError
from extproc.parsing import usage
from extproc.pool.accounts import Ticket
from extproc.protocol.events import Event
from extproc.protocol.exchange import Exchange
from extproc.protocol.gathering import Budget
from extproc.protocol.replies import Reply
from extproc.protocol.settings import ExchangeSettings
from extproc.telemetry.tallies import Tallies
from extproc.wire import codec

_log = logging.getLogger("extproc.server")

Context = grpc.aio.ServicerContext[Event, bytes]


class Stream:
    """One HTTP exchange from first event to end: the exchange, its ticket and its times.

    Args:
        servicer: Holds what all streams share.
    """

    __slots__ = ("_picked_s", "_servicer", "_started_s", "_ticket", "address", "exchange", "over")

    def __init__(self, servicer: Servicer) -> None:
        self._servicer = servicer
        self._started_s = servicer.clock()
        self._picked_s = 0.0
        self._ticket: Ticket | None = None
        self.address = ""
        self.over = False
        watched = servicer.stream_share and servicer.rng.random() < servicer.stream_share
        self.exchange = Exchange(
            servicer.exchange_settings, servicer.budget, watch_stream=bool(watched)
        )

    def turn(self, event: Event) -> Iterable[Reply]:
        """One event in, answers out. Synchronous: a turn sees one pool from start to end."""
        exchange = self.exchange
        answered = exchange.status
        replies = exchange.receive(event)
        if exchange.pending is not None:
            return self._decide(exchange)
        if self._ticket is not None and exchange.status is not answered:
            self._servicer.tallies.headers_s.add(self._servicer.clock() - self._picked_s)
        elif exchange.rejection is not None and not self.over:
            self._servicer.tallies.rejected(exchange.rejection)
            self.over = True
        return replies

    def _decide(self, exchange: Exchange) -> Iterable[Reply]:
        servicer = self._servicer
        raw = exchange.pending
        if raw is None:
            return ()
        now = servicer.clock()
        try:
            outcome = servicer.dispatcher.route(raw, now)
        except Exception as error:  # noqa: BLE001  see below
            # One request's failure never touches another, and this one still gets an answer.
            # The message may quote the request; type and place do not.
            _log.error("decision failed: %s\n%s", type(error).__name__, _places(error))
            outcome = servicer.dispatcher.rescue(raw, now, why=type(error).__name__)
        if isinstance(outcome, Rejection):
            servicer.tallies.rejected(outcome)
            self.over = True
            return exchange.resolve(outcome)
        self._commit(outcome, now)
        named = "x-request-id" in raw.headers
        return exchange.resolve(outcome, request_id="" if named else str(uuid.uuid4()))

    def _commit(self, decision: Decision, now: float) -> None:
        servicer = self._servicer
        self._ticket = servicer.dispatcher.commit(decision, now)
        self.address = decision.endpoints[0].address
        self._picked_s = servicer.clock()
        servicer.tallies.routed(decision, self._picked_s - now)
        # Nothing of the answer is needed: the stream ends and Envoy goes on without us.
        self.over = servicer.dispatcher.response_unwatched(decision)

    def finish(self) -> None:
        """Give back everything, however the stream ended. Called once."""
        exchange = self.exchange
        exchange.close()
        if self._ticket is None:
            return
        tallies = self._servicer.tallies
        self._servicer.dispatcher.complete(self._ticket, self._servicer.clock())
        tallies.finished(self.address, exchange.status, self._servicer.clock() - self._started_s)
        if exchange.tail is not None:
            for kind, tokens in usage.read(exchange.tail.joined()).items():
                tallies.usage[kind] += tokens


class Servicer:
    """Translates streams to turns.

    Args:
        dispatcher: Decides.
        exchange_settings: What all exchanges have in common.
        budget: Bytes all exchanges may gather.
        tallies: Where facts go.
        clock: Monotonic seconds.
        rng: For sampling streamed answers.
        max_streams: Open streams above which requests are refused.
        stream_share: Share of streamed answers watched for usage, 0..1.
    """

    def __init__(
        self,
        *,
        dispatcher: Dispatcher,
        exchange_settings: ExchangeSettings,
        budget: Budget,
        tallies: Tallies,
        clock: Callable[[], float],
        rng: random.Random,
        max_streams: int,
        stream_share: float,
    ) -> None:
        self.dispatcher = dispatcher
        self.exchange_settings = exchange_settings
        self.budget = budget
        self.tallies = tallies
        self.clock = clock
        self.rng = rng
        self.stream_share = stream_share
        self._max_streams = max_streams
        self._tasks: set[asyncio.Task[None]] = set()
        self._closing = False

    async def process(self, _: AsyncIterator[Event], context: Context) -> None:
        """Serve one stream to its end."""
        task = asyncio.current_task()
        if task is None:
            raise RuntimeError("process runs inside a task of the gRPC server")
        stream = Stream(self)
        self.tallies.streams_open += 1
        self._tasks.add(task)
        end = "error"
        try:
            await self._converse(stream, context)
            end = "ok"
        except asyncio.CancelledError:
            # The client left, or we are closing: then the stream ends with OK, and the data
            # plane goes on without us instead of cutting the answer.
            end = "cancelled"
            if not self._closing:
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
            self._tasks.discard(task)
            self.tallies.streams_open -= 1
            self.tallies.streams[end] += 1
            stream.finish()

    async def _converse(self, stream: Stream, context: Context) -> None:
        crowded = self.tallies.streams_open > self._max_streams
        while True:
            event = await context.read()
            if not isinstance(event, Event):
                return
            # No await beyond this point, until the answers are written.
            replies = (self._turn_away(stream),) if crowded else stream.turn(event)
            for reply in replies:
                await context.write(codec.encode(reply))
            if stream.over:
                return

    def _turn_away(self, stream: Stream) -> Reply:
        rejection = Rejection(
            429,
            f"more than {self._max_streams} requests are in progress",
            reason="rejected-saturated",
            retry_after_s=1,
        )
        self.tallies.rejected(rejection)
        stream.over = True
        return stream.exchange.refuse(rejection)

    async def release(self) -> None:
        """End every open stream with OK: Envoy goes on without the processor."""
        self._closing = True
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)


def _places(error: BaseException) -> str:
    frames = traceback.extract_tb(error.__traceback__)
    return "\n".join(f"  {frame.filename}:{frame.lineno} in {frame.name}" for frame in frames)


def register(server: grpc.aio.Server, servicer: Servicer) -> None:
    """Serve ext_proc on a server. The codec functions are the (de)serialisers."""
    handler: grpc.RpcMethodHandler[Event, bytes] = grpc.stream_stream_rpc_method_handler(
        servicer.process, request_deserializer=codec.decode, response_serializer=None
    )
    server.add_generic_rpc_handlers(
        (grpc.method_handlers_generic_handler(codec.SERVICE, {codec.METHOD: handler}),)
    )
