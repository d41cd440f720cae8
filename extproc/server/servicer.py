"""The ext_proc servicer: one coroutine per stream, one turn per event."""

from __future__ import annotations

import asyncio
import logging
import random
import traceback
import uuid
from collections.abc import AsyncIterator, Callable, Iterable, Mapping

import grpc
import msgspec

from extproc.decision import Answer, Decision, Rejection
from extproc.dispatch import costing
from extproc.dispatch.dispatcher import Dispatcher
from extproc.dispatch.switchboard import Routed, Switchboard
from extproc.errors import ProtocolError
from extproc.parsing import usage
from extproc.pool.accounts import Ticket
from extproc.protocol.events import Event, Kind
from extproc.protocol.exchange import Exchange
from extproc.protocol.gathering import Budget
from extproc.protocol.replies import Reply
from extproc.protocol.settings import ExchangeSettings
from extproc.request import RawRequest
from extproc.telemetry import explanation
from extproc.telemetry.ring import Recorded, Ring
from extproc.telemetry.tallies import Tallies
from extproc.wire import codec

_RESPONSE_HEADERS = Kind.RESPONSE_HEADERS

_log = logging.getLogger("extproc.server")

Context = grpc.aio.ServicerContext[Event, bytes]


class StreamSettings(msgspec.Struct, frozen=True):
    """What all streams have in common.

    Attributes:
        max_streams: Open streams above which requests are refused.
        stream_share: Share of streamed answers watched for usage, 0..1.
        explain_header: Put the short form of the decision on answers.
        request_cost: Weight of a token by kind, see `dispatch.costing`; empty tells no cost.
    """

    max_streams: int
    stream_share: float = 0.0
    explain_header: bool = False
    request_cost: Mapping[usage.Kind, float] = {}


class Stream:
    """One HTTP exchange from first event to end: the exchange, its ticket and its times.

    Args:
        servicer: Holds what all streams share.
    """

    __slots__ = (
        "_dispatcher",
        "_picked_s",
        "_recorded",
        "_servicer",
        "_started_s",
        "_tallies",
        "_ticket",
        "address",
        "exchange",
        "over",
    )

    def __init__(self, servicer: Servicer) -> None:
        self._servicer = servicer
        self._started_s = servicer.clock()
        self._picked_s = 0.0
        self._dispatcher: Dispatcher | None = None
        self._tallies = servicer.tallies.of(servicer.switchboard.usual)
        self._ticket: Ticket | None = None
        self._recorded: Recorded | None = None
        self.address = ""
        self.over = False
        watched = (
            servicer.settings.stream_share
            and servicer.rng.random() < servicer.settings.stream_share
        )
        self.exchange = Exchange(
            servicer.exchange_settings, servicer.budget, watch_stream=bool(watched)
        )

    @property
    def picked(self) -> bool:
        """Whether Envoy was told where to go, and can go on without us."""
        return self._ticket is not None

    def turn(self, event: Event) -> Iterable[Reply]:
        """One event in, answers out. Synchronous: a turn sees one pool from start to end."""
        exchange = self.exchange
        replies = exchange.receive(event)
        if exchange.pending is not None:
            return self._decide(exchange, exchange.pending)
        if event.kind is _RESPONSE_HEADERS:
            if self._ticket is not None:
                servicer = self._servicer
                now = servicer.clock()
                servicer.tallies.headers_s.add(now - self._picked_s)
                self._tell(event, now)
        elif exchange.rejection is not None and not self.over:
            self._tallies.rejected(exchange.rejection)
            self.over = True
        elif self._servicer.settings.request_cost and exchange.tail and costing.ends(event):
            weights = self._servicer.settings.request_cost
            return costing.told(replies, exchange.tail.joined(), weights)
        return replies

    def turn_away(self, _: Event) -> Iterable[Reply]:
        """Refuse, because too many streams are open."""
        return (self._reject(self._servicer.crowded),)

    def _reject(self, rejection: Rejection) -> Reply:
        self._tallies.rejected(rejection)
        self.over = True
        return self.exchange.refuse(rejection)

    def _decide(self, exchange: Exchange, raw: RawRequest) -> Iterable[Reply]:
        servicer = self._servicer
        now = servicer.clock()
        try:
            routed = servicer.switchboard.route(raw, now)
        except Exception as error:  # noqa: BLE001  see below
            # One request's failure never touches another, and this one still gets an answer.
            # The message may quote the request; type and place do not.
            _log.error("decision failed: %s\n%s", type(error).__name__, _places(error))
            routed = servicer.switchboard.rescue(raw, now, why=type(error).__name__)
        outcome = routed.outcome
        if isinstance(outcome, Answer):
            servicer.tallies.answers += 1
            self.over = True
            return (exchange.answer(outcome),)
        if routed.pool:
            self._tallies = servicer.tallies.of(routed.pool)
        if isinstance(outcome, Rejection):
            return (self._reject(outcome),)
        named = raw.headers.get("x-request-id", "")
        new = "" if named else str(uuid.uuid4())
        if servicer.settings.explain_header:
            told = ("x-extproc-decision", explanation.short(outcome))
            outcome = msgspec.structs.replace(
                outcome, answer_headers=(*outcome.answer_headers, told)
            )
        self._commit(routed, outcome, now, named or new)
        replies = exchange.resolve(outcome, request_id=new)
        if outcome.model_rewrite:
            self._tallies.rewritten(edited=exchange.edited)
        return replies

    def _commit(self, routed: Routed, decision: Decision, now: float, request_id: str) -> None:
        servicer, dispatcher = self._servicer, routed.dispatcher
        if dispatcher is None:
            raise RuntimeError("a decision without the dispatcher that took it")
        self._dispatcher = dispatcher
        self._recorded = servicer.ring.add(request_id, decision, now)
        self._ticket = dispatcher.commit(decision, now)
        self.address = decision.endpoints[0].address
        self._picked_s = servicer.clock()
        servicer.tallies.route_s.add(self._picked_s - now)
        self._tallies.routed(decision)
        # Nothing of the answer is needed: the stream ends and Envoy goes on without us.
        self.over = servicer.closing or dispatcher.response_unwatched(decision)

    def _tell(self, event: Event, now: float) -> None:
        """What response headers say of the endpoint."""
        if self._ticket is not None and self._dispatcher is not None:
            served = "" if event.hints is None else event.hints.served
            self._dispatcher.told(self._ticket, self.exchange.status, now, served=served)
            self.address = self._ticket.endpoint.address

    def finish(self) -> None:
        """Give back everything, however the stream ended. Called once."""
        exchange = self.exchange
        exchange.close()
        dispatcher = self._dispatcher
        if self._ticket is None or dispatcher is None:
            return
        servicer, tallies = self._servicer, self._tallies
        now = servicer.clock()
        dispatcher.complete(self._ticket, now, answered=bool(exchange.status))
        tallies.finished(self.address, exchange.status)
        servicer.tallies.exchange_s.add(now - self._started_s)
        recorded = self._recorded
        if recorded is not None:
            recorded.status, recorded.seconds = exchange.status, now - self._started_s
        if exchange.tail is not None:
            used = usage.read(exchange.tail.joined())
            for kind, tokens in used.items():
                tallies.usage[kind] += tokens
            if recorded is not None:
                recorded.usage = used
                dispatcher.learn(recorded.decision, used)


class Servicer:
    """Translates streams to turns.

    Args:
        switchboard: Decides.
        exchange_settings: What all exchanges have in common.
        budget: Bytes all exchanges may gather.
        tallies: Where facts go.
        clock: Monotonic seconds.
        rng: For sampling streamed answers.
        ring: Where decisions are kept.
        settings: What all streams have in common.
    """

    def __init__(
        self,
        *,
        switchboard: Switchboard,
        exchange_settings: ExchangeSettings,
        budget: Budget,
        tallies: Tallies,
        clock: Callable[[], float],
        rng: random.Random,
        ring: Ring,
        settings: StreamSettings,
    ) -> None:
        self.switchboard = switchboard
        self.exchange_settings = exchange_settings
        self.budget = budget
        self.tallies = tallies
        self.clock = clock
        self.rng = rng
        self.ring = ring
        self.settings = settings
        self.crowded = Rejection(
            429,
            f"more than {settings.max_streams} requests are in progress",
            reason="rejected-saturated",
            retry_after_s=1,
        )
        self._streams: dict[asyncio.Task[None], Stream] = {}
        self.closing = False

    async def process(self, _: AsyncIterator[Event], context: Context) -> None:
        """Serve one stream to its end."""
        task = asyncio.current_task()
        if task is None:
            raise RuntimeError("process runs inside a task of the gRPC server")
        tallies = self.tallies
        tallies.streams_open += 1
        stream = self._streams[task] = Stream(self)
        turn = (
            stream.turn if tallies.streams_open <= self.settings.max_streams else stream.turn_away
        )
        end = "error"
        try:
            while not stream.over:
                event = await context.read()
                if not isinstance(event, Event):
                    break
                # No await beyond this point, until the answers are written.
                for reply in turn(event):
                    await context.write(codec.encode(reply))
            end = "ok"
        except asyncio.CancelledError:
            # The client left, or we are closing: then the stream ends with OK, and the data
            # plane goes on without us instead of cutting the answer.
            end = "cancelled"
            if not self.closing:
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
            del self._streams[task]
            tallies.streams_open -= 1
            tallies.streams[end] += 1
            stream.finish()

    async def release(self, within_s: float) -> None:
        """End every open stream with OK: Envoy goes on without the processor.

        A stream whose request is not decided yet ends as soon as it is: without an answer Envoy
        would go on without an endpoint.

        Args:
            within_s: Seconds that requests have to become complete.
        """
        self.closing = True
        for task, stream in list(self._streams.items()):
            if stream.picked:
                task.cancel()
        if self._streams:
            await asyncio.wait(self._streams, timeout=within_s)


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
