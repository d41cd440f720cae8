"""Endpoint picker in a simulation: the production parts, driven by virtual time."""

from __future__ import annotations

import bisect
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Protocol, assert_never

import msgspec

from extproc.config import factory
from extproc.config.settings import Settings
from extproc.decision import Decision, Deferral, Outcome, Rejection
from extproc.endpoint import Endpoint, Load, ServedModels, StepTimeModel, split_ranks
from extproc.flow_control import controller
from extproc.flow_control.eviction import (
    EVICTED,
    EvictableRequest,
    EvictionCallbacks,
    Evictor,
)
from extproc.flow_control.flow_queue import EndpointBits
from extproc.parsing.surfaces import OPAQUE
from extproc.pool import conversations
from extproc.pool.inflight import Reservation
from extproc.pool.observed_page import ScrapeToken
from extproc.request import BYTES_PER_TOKEN, InferenceRequest
from extproc.routing import admission
from extproc.scheduling.framework import Signal
from extproc.scrape import schedule
from extproc.simulator.fleet import flow_control
from extproc.simulator.fleet.engine_node import EngineNode
from extproc.simulator.fleet.event_queue import EventQueue
from extproc.simulator.fleet.kv_events import SimKvEvents
from extproc.simulator.fleet.sim_request import KEY_TOKENS, RequestSpec, SimRequest

#: Failures that a data plane, or the engine itself, answers with 503.
_LOST = frozenset({"connection refused", "engine died", "answered 503"})

#: What the base model is called.
MODEL = "base"

_NO_HEADERS: Mapping[str, str] = {}


def engine_address(n: int) -> str:
    """Address of the engine with the index `n`."""
    return f"10.{n >> 16}.{n >> 8 & 255}.{n & 255}:8000"


class SimPicker(Protocol):
    """Endpoint picker as the simulation calls it."""

    def listed(self, up: Sequence[int]) -> None:
        """Replace the discovered endpoints (indices of engines)."""

    def pick(self, sim_request: SimRequest) -> int:
        """Index of the chosen engine; -1 if queued, -1 and `failure` set if rejected.

        The outcome of a queued request is reported later through `on_dequeued`.
        """

    def cancel(self, sim_request: SimRequest) -> bool:
        """Handle the disconnect of a client; returns True if its request was still queued."""

    def began(self, sim_request: SimRequest) -> None:
        """Handle the first token of a request whose prompt another engine computed."""

    def ended(self, sim_request: SimRequest) -> None:
        """Handle the end of a routed request."""

    def rates(self) -> StepTimeModel | None:
        """Learned step-time model of the engines; None before any measurement."""


class ExtprocPicker:
    """Picker with the production director, scraping on the virtual timeline.

    Args:
        settings: As from a configuration file.
        nodes: All engines there will ever be.
        delay_s: Seconds from the moment a page was true to the moment it is taken in.
        labels: Labels of each engine, in the same order. None: none has any.
        ranks: Data-parallel ranks of each engine (counts), in the order of `nodes`, of which each
            is a rank. None: each is an engine.
        models: What every engine lists, where the settings ask for it.
        knows_max_tokens: Whether requests carry the length of their answers.
        on_dequeued: Called with a request that waited and goes to its `node`, or is refused with a
            `failure`; None where no request waits, whatever the settings say.

    Attributes:
        cuts: Tokens after which prompts are cut into blocks; ascending.
    """

    def __init__(  # noqa: PLR0913 - each is a part of a scenario
        self,
        settings: Settings,
        nodes: Sequence[EngineNode],
        *,
        timeline: EventQueue,
        delay_s: float,
        models: ServedModels,
        ranks: Sequence[int] | None = None,
        labels: Sequence[Mapping[str, str]] | None = None,
        knows_max_tokens: bool = False,
        on_dequeued: Callable[[SimRequest], None] | None = None,
    ) -> None:
        if on_dequeued is None:
            settings = _without_flow_control(settings)
        self.parts = factory.build(settings, where="scenario")
        self._nodes = nodes
        exact = self.parts.exact
        self._kv_events = None if exact is None else SimKvEvents(exact, nodes)
        self._timeline = timeline
        self._delay_s = delay_s
        self._models = models if settings.scrape.models else None
        self._knows_max_tokens = knows_max_tokens
        scrape = settings.scrape
        self._scraping = scrape.enabled
        self._pace = self.parts.scraping.schedule
        self._needs = self.parts.director.routing.needs
        self._parses_bodies = settings.parse_bodies
        self.cuts = [tokens for tokens in settings.prefix.schedule.tokens if tokens]
        self._reservations: dict[str, Reservation] = {}
        self._pending: dict[str, conversations.PendingShare] = {}
        counts = [1] * len(nodes) if ranks is None else ranks
        named = labels or [{}] * len(counts)
        engines = [
            Endpoint(engine_address(n), name=f"engine-{n}", labels=named[n])
            for n in range(len(counts))
        ]
        self._engine_of = [n for n, count in enumerate(counts) for _ in range(count)]
        self._engines = engines
        self._endpoints = [
            endpoint
            for engine, count in zip(engines, counts, strict=True)
            for endpoint in split_ranks(engine, range(count))
        ]
        self._nodes_of = {endpoint.address: n for n, endpoint in enumerate(self._endpoints)}
        self._watched: set[int] = set()
        self._failures = [0] * len(nodes)
        self._watches = [0] * len(nodes)
        self._busy: dict[int, int] = {}
        self._counts = schedule.EndpointCounts()
        #: Start of the last scrape of endpoints whose next one was set while the picker was at rest.
        self._resting: dict[int, float] = {}
        self._touched: set[int] = set()
        self._bits: EndpointBits | None = None
        self._evictor: Evictor[SimRequest] = Evictor(
            EvictionCallbacks(
                evict=self._evict,
                shortens_wait=self._shortens_wait,
                has_shown=lambda address, ended_at: admission.has_shown(
                    self.parts.store.pool, address, ended_at
                ),
            )
        )
        self._evictable: dict[str, EvictableRequest[SimRequest]] = {}
        self.flow_controller: flow_control.SimFlowController[Decision] | None = None
        if on_dequeued is not None and settings.flow_control.enabled:
            self.flow_controller = flow_control.SimFlowController(
                settings.flow_control,
                timeline=timeline,
                callbacks=self._flow_callbacks(on_dequeued),
                evictor=self._evictor,
            )

    def _flow_callbacks(
        self, on_dequeued: Callable[[SimRequest], None]
    ) -> controller.FlowCallbacks[SimRequest, Decision]:
        return controller.FlowCallbacks(
            decide=self._decide_again,
            on_waiting=self._add_pending,
            dispatch=lambda sim_request, outcome: self._grant(sim_request, outcome, on_dequeued),
            reject=lambda sim_request, rejection: self._refuse(sim_request, rejection, on_dequeued),
            endpoint_bits=self._endpoint_bits,
        )

    def listed(self, up: Sequence[int]) -> None:
        """See `SimPicker`."""
        store, now = self.parts.store, self._timeline.now
        engines = dict.fromkeys(self._engine_of[n] for n in up)
        store.set_endpoints([self._engines[n] for n in engines], now)
        for n in up:
            rank = self._endpoints[n].rank
            if rank is not None and not rank.index:  # as the first page shows them
                (engine, *_) = store.pool.ranks_at(self._endpoints[n].host_port)
                store.set_ranks(engine.endpoint, range(rank.count), now)
        if self._kv_events is not None:
            for n in up:
                self._kv_events.follow(n, self._endpoint(n))
        self._changed()
        fresh = set(up) - self._watched
        self._counts.change_all(len(set(up)) - len(self._watched), self._timeline.now)
        self._watched = set(up)
        if not self._scraping:
            return
        for n in sorted(fresh):
            # A new endpoint is asked at once, like the real scraper does, but not all together.
            spread = self._pace.fast_s * self.parts.rng.random()
            self._set_failures(n, 0)
            self._watch(n, spread)

    def pick(self, sim_request: SimRequest) -> int:
        """See `SimPicker`."""
        outcome, flow_controller = self._decide(sim_request), self.flow_controller
        if flow_controller is not None:
            preferred = outcome.endpoints[0].address if isinstance(outcome, Decision) else ""
            refused = flow_controller.admit(sim_request, outcome, preferred_endpoint=preferred)
            if flow_controller.is_queued(sim_request):
                return -1
            outcome = refused or outcome
        match outcome:
            case Decision():
                return self.commit(sim_request, outcome)
            case Deferral():
                sim_request.refused(outcome.rejection, self._timeline.now)
            case Rejection():
                sim_request.refused(outcome, self._timeline.now)
            case _:
                assert_never(outcome)
        return -1

    def cancel(self, sim_request: SimRequest) -> bool:
        """See `SimPicker`."""
        self._remove_pending(sim_request)
        return self.flow_controller is not None and self.flow_controller.cancel(sim_request)

    def _decide_again(self, sim_request: SimRequest, may_defer: bool) -> Outcome:  # noqa: FBT001 - as `FlowCallbacks` has it
        self._remove_pending(sim_request)  # a request must not wait behind its own pending load
        return self._decide(sim_request, may_defer=may_defer)

    def _endpoint_bits(self) -> EndpointBits:
        """Endpoint sets in the form of flow control; targets are model, adapter and profile."""
        serving = self.parts.director.serving_bits
        by_header = self.parts.director.routing.by_header
        named = () if by_header is None else by_header.profiles
        if self._bits is None or self._bits.version is not serving:
            self._bits = EndpointBits(
                for_target=lambda target: serving.bits_for(target[1] or target[0] or MODEL),
                for_addresses=serving.bits_of_addresses,
                version=serving,
                adapter_of=lambda target: target[1],
                profile_of=lambda target: target[2] if target[2] in named else "",
            )
        return self._bits

    def _add_pending(self, sim_request: SimRequest, address: str) -> None:
        pending = self.parts.director.pending_load.add(
            address, self._chain(sim_request.work), prompt_tokens=sim_request.work.prompt_tokens
        )
        if pending is not None:
            self._pending[sim_request.id] = pending

    def _remove_pending(self, sim_request: SimRequest) -> None:
        conversations.remove_pending(self._pending.pop(sim_request.id, None))

    def _decide(self, sim_request: SimRequest, *, may_defer: bool = True) -> Outcome:
        work = sim_request.work
        return self.parts.director.scheduler.schedule(
            self._request(work),
            self._timeline.now,
            chain=self._chain(work),
            headers=self._headers_of(work),
            may_defer=may_defer,
        )

    def _headers_of(self, work: RequestSpec) -> Mapping[str, str]:
        by_header = self.parts.director.routing.by_header
        if by_header is None or work.profile not in by_header.profiles:
            return _NO_HEADERS
        return {by_header.header: work.profile}

    def _request(self, work: RequestSpec) -> InferenceRequest:
        subset = None if work.node < 0 else (self._endpoints[work.node].address,)
        if not self._parses_bodies:
            return InferenceRequest(
                OPAQUE.api, session=work.session, priority=work.priority, subset=subset
            )
        text_tokens = work.prompt_tokens - sum([span.tokens for span in work.media])
        return InferenceRequest(
            api="completions",
            model=work.model or work.adapter or MODEL,
            adapter=work.adapter if work.model and work.model != work.adapter else "",
            prompt=work.opening.encode(),
            prompt_tokens=work.prompt_tokens,
            prompt_bytes=BYTES_PER_TOKEN * text_tokens if work.media else 0,
            media=work.media,
            max_tokens=work.output_tokens if self._knows_max_tokens else None,
            session=work.session,
            priority=work.priority,
            subset=subset,
        )

    def _grant(
        self, sim_request: SimRequest, outcome: Decision, on_dequeued: Callable[[SimRequest], None]
    ) -> None:
        sim_request.node = self.commit(sim_request, outcome)
        on_dequeued(sim_request)

    def _refuse(
        self,
        sim_request: SimRequest,
        rejection: Rejection,
        on_dequeued: Callable[[SimRequest], None],
    ) -> None:
        self._remove_pending(sim_request)
        sim_request.refused(rejection, self._timeline.now)
        on_dequeued(sim_request)

    def commit(self, sim_request: SimRequest, outcome: Decision) -> int:
        """Charge a decision; returns the node."""
        work = sim_request.work
        self._reservations[sim_request.id] = self.parts.director.reserve(
            outcome, self._timeline.now
        )
        if self._kv_events is not None:
            self._kv_events.map_prompt(work, outcome.block_hashes)
        sim_request.predicted_tokens = min(outcome.matched_tokens, work.prompt_tokens)
        address = outcome.endpoints[0].address
        self._track(sim_request, address)
        n = self._nodes_of[address]
        self._mark_busy(n)
        stages = outcome.disaggregation
        if stages is not None and stages.prefill is not None:
            sim_request.prefill_node = self._nodes_of[stages.prefill.endpoints[0].address]
            self._mark_busy(sim_request.prefill_node)
        if self._resting:
            self._end_rest()
        return n

    def _track(self, sim_request: SimRequest, address: str) -> None:
        """Track a request that was sent to an endpoint, where it may be evicted."""
        if (
            self.flow_controller is None
            or self.flow_controller.queue.settings.evict_after_s is None
        ):
            return
        priority = sim_request.work.priority
        evictable = self._evictor.track(sim_request, priority=priority, address=address)
        if evictable is not None:
            self._evictable[sim_request.id] = evictable

    def _evict(self, sim_request: SimRequest) -> bool:
        """End a request on its engine; not while another one computes its prompt."""
        node = self._nodes[sim_request.node]
        if sim_request.id not in node.requests:
            return False
        sim_request.refused(EVICTED, self._timeline.now)
        node.cancel(sim_request, sim_request.failure)
        return True

    def _shortens_wait(self, sim_request: SimRequest, priority: int) -> bool:
        pool, now = self.parts.store.pool, self._timeline.now
        reservation = self._reservations[sim_request.id]
        return admission.shortens_wait(pool, reservation, priority=priority, now=now)

    def _mark_busy(self, n: int) -> None:
        if n not in self._busy:
            self._busy[n] = 0
            self._counts.change_busy(1, self._timeline.now)
        self._busy[n] += 1
        self._touched.add(n)

    def _unmark_busy(self, n: int) -> None:
        left = self._busy[n] - 1
        if left:
            self._busy[n] = left
        else:
            del self._busy[n]
            self._counts.change_busy(-1, self._timeline.now)

    def _end_rest(self) -> None:
        """Bring the next scrapes forward, as the real scraper does."""
        resting, self._resting = self._resting, {}
        for n, began in resting.items():
            if n in self._watched:
                soonest_s = self._pace.fast_s * self.parts.rng.random()
                wait_s = self._wait_s(n, busy=n in self._busy) - (self._timeline.now - began)
                self._watch(n, max(soonest_s, wait_s))

    def _watch(self, n: int, wait_s: float) -> None:
        """Scrape an endpoint after so many seconds, and again and again; drops its earlier loop."""
        self._watches[n] += 1
        watch = self._watches[n]
        self._timeline.after(wait_s, lambda: self._scrape(n, watch))

    def _chain(self, work: RequestSpec) -> Sequence[int]:
        """The prompt's block hashes; like a real picker, none where they are not read."""
        if Signal.PREFIX not in self._needs or not self._parses_bodies:
            return ()
        cuts, keys = self.cuts, work.keys
        full = bisect.bisect_right(cuts, min(work.prompt_tokens, len(keys) * KEY_TOKENS))
        return [keys[tokens // KEY_TOKENS - 1] for tokens in cuts[:full]]

    def began(self, sim_request: SimRequest) -> None:
        """See `SimPicker`."""
        reservation = self._reservations[sim_request.id]
        self.parts.director.on_response_headers(reservation, "200", self._timeline.now)

    def ended(self, sim_request: SimRequest) -> None:
        """See `SimPicker`."""
        reservation = self._reservations.pop(sim_request.id)
        director, now = self.parts.director, self._timeline.now
        status, evictable = _status(sim_request), self._evictable.pop(sim_request.id, None)
        if evictable is not None:
            self._evictor.untrack(evictable, now)
        if status and reservation.prefilled_at is None:
            director.on_response_headers(reservation, status, now)
        evicted = not math.isnan(sim_request.refused_s)
        director.release(reservation, now, answered=bool(status), evicted=evicted)
        if self.flow_controller is not None and not sim_request.failure:
            self.flow_controller.charge(sim_request)
        self._changed()
        self._unmark_busy(sim_request.node)
        if sim_request.prefill_node >= 0:
            self._unmark_busy(sim_request.prefill_node)

    def rates(self) -> StepTimeModel | None:
        """See `SimPicker`."""
        rates = [m.rates for m in self.parts.store.pool.members if m.rates.evidence]
        return max(rates, key=lambda r: r.evidence, default=None)

    def _scrape(self, n: int, watch: int) -> None:
        if n not in self._watched or self._watches[n] != watch:
            return  # dropped since; when it was listed again, that began a watch of its own
        timeline, fleet = self._timeline, self.parts.store
        self._resting.pop(n, None)
        began, mark = timeline.now, fleet.begin_scrape(self._endpoint(n))
        node = self._nodes[n]
        page = node.page(timeline.now) if node.up and node.has_metrics else None
        reason = "status 404" if node.up else "refused"
        busy = n in self._busy or n in self._touched
        self._touched.discard(n)

        def taken() -> None:
            self._taken(n, mark, page, reason)
            resting = not busy and self._counts.is_resting(timeline.now)
            if resting and not self._failures[n]:
                self._resting[n] = began
            # From the start of the scrape to the start of the next one.
            wait = self._wait_s(n, busy=busy, resting=resting) - self._delay_s
            timeline.after(max(wait, 0.0), lambda: self._scrape(n, watch))

        timeline.after(self._delay_s, taken)

    def _taken(self, n: int, mark: ScrapeToken, page: Load | None, reason: str) -> None:
        """Take in a scrape; the reason says why there is no page."""
        fleet, now = self.parts.store, self._timeline.now
        self._set_failures(n, 0 if page is not None else self._failures[n] + 1)
        if page is None:
            fleet.scrape_failed(mark, reason, now)
        else:
            fleet.observe(mark, page, now)
            member = fleet.pool.find(self._endpoints[n].address)
            # As the real scraper does: once an engine's page could be read.
            if self._models is not None and member is not None and member.models is None:
                fleet.observe_models(member.endpoint, self._models)
            if self._kv_events is not None and member is not None:
                self._kv_events.note_page(n, member)
            self._changed()

    def _changed(self) -> None:
        """Notify flow control of a change that may be capacity."""
        if self.flow_controller is not None:
            self.flow_controller.notify_capacity()

    def _set_failures(self, n: int, failures: int) -> None:
        self._counts.change_failing(bool(failures) - bool(self._failures[n]))
        self._failures[n] = failures

    def _wait_s(self, n: int, *, busy: bool, resting: bool = False) -> float:
        return schedule.wait_s(
            self._pace,
            busy=busy,
            counts=self._counts,
            failures=self._failures[n],
            resting=resting,
            refused=bool(self._failures[n]) and self._nodes[n].has_metrics,
            rng=self.parts.rng,
        )

    def _endpoint(self, n: int) -> Endpoint:
        member = self.parts.store.pool.find(self._endpoints[n].address)
        return self._endpoints[n] if member is None else member.endpoint


def _without_flow_control(settings: Settings) -> Settings:
    off = msgspec.structs.replace(settings.flow_control, enabled=False)
    return msgspec.structs.replace(settings, flow_control=off)


def _status(sim_request: SimRequest) -> str:
    """HTTP status a proxy would have returned; empty if the client left before it."""
    if not sim_request.failure or not math.isnan(sim_request.first_s):
        return "200"
    if sim_request.failure == "timeout" or not math.isnan(sim_request.refused_s):
        return ""
    return "503" if sim_request.failure in _LOST else "400"
