"""Engines that come and go under an autoscaling policy, and requests that wait for them."""

from __future__ import annotations

import enum
import math
from collections.abc import Callable, Sequence

import msgspec

from extproc.autoscaling import demand_estimator, policies
from extproc.autoscaling.interface import Demand, PolicyRunner, ReplicaBounds, RunnerState
from extproc.autoscaling.scaling_history import HistoryRow, ScalingHistory
from extproc.config.settings import FlowControlSection
from extproc.decision import NO_ENDPOINTS_YET, Deferral, Rejection, all_busy
from extproc.endpoint import StepTimeModel
from extproc.flow_control import controller
from extproc.simulator.fleet import flow_control
from extproc.simulator.fleet.engine_node import EngineNode
from extproc.simulator.fleet.event_queue import EventQueue
from extproc.simulator.fleet.replica_lifetimes import ReplicaLifetimes, ScalingSummary
from extproc.simulator.fleet.scenario import HoldSpec, ScenarioAutoscaling
from extproc.simulator.fleet.sim_request import SimRequest

#: Longer than anything that is simulated (seconds).
_FOREVER_S = 1e9


class _ReplicaState(enum.Enum):
    """Life cycle phase of an engine."""

    DOWN = enum.auto()
    STARTING = enum.auto()
    UP = enum.auto()
    LEAVING = enum.auto()


class _Room(msgspec.Struct, frozen=True):
    """Capacity on some replica; the picker chooses the replica."""


class FleetCallbacks(msgspec.Struct, frozen=True):
    """Callbacks from the replicas to the simulation.

    Attributes:
        listed: Called with the nodes of the replicas that are up.
        go: Called with a request that may go to a node.
        over: Called with a request that went nowhere; its `failure` says why.
        rates: How fast engines are, as far as pickers know.
    """

    listed: Callable[[Sequence[int]], None]
    go: Callable[[SimRequest], None]
    over: Callable[[SimRequest], None]
    rates: Callable[[], StepTimeModel | None]


class AutoscaledFleet:
    """Replicas of one scale target. Mutable; owned by the simulation.

    Args:
        config: Section `autoscaling` of the scenario.
        nodes: The ranks of all engines there may be.
        engines: Nodes of each engine, which is a replica.
    """

    def __init__(
        self,
        config: ScenarioAutoscaling,
        nodes: Sequence[EngineNode],
        engines: Sequence[Sequence[int]],
        *,
        timeline: EventQueue,
        callbacks: FleetCallbacks,
    ) -> None:
        self._config = config
        self._nodes = nodes
        self._engines = engines
        self._replica_of = {node: n for n, engine in enumerate(engines) for node in engine}
        self._timeline = timeline
        self._callbacks = callbacks
        self._states = [_ReplicaState.DOWN] * len(engines)
        #: When each replica was asked for.
        self._born = [0.0] * len(engines)
        self._loads = [0] * len(engines)
        #: Prompts that each replica computes for requests that other replicas serve.
        self._num_prefills = [0] * len(engines)
        #: Replicas that discovery dropped, as their engines failed.
        self._failed: set[int] = set()
        flow_callbacks = controller.FlowCallbacks(
            decide=lambda sim_request, _: self._room(sim_request),
            on_waiting=lambda _, __: None,
            dispatch=self._go,
            reject=self._refuse,
        )
        self._flow_controller = flow_control.SimFlowController(
            _flow_control_section(config.hold), timeline=timeline, callbacks=flow_callbacks
        )
        self._spec = min(config.start, len(engines))
        self._counters = demand_estimator.PickerCounters()
        self._history = ScalingHistory(config.window_s)
        self._rows: list[HistoryRow] = []
        self._lifetimes = ReplicaLifetimes()
        self._fresh()

    def begin(self) -> None:
        """Start the initial replicas and evaluate the policy for the first time."""
        for n in range(self._spec):
            self._lifetimes.replica_requested(n, 0.0)
            self._serve(n)
        self._list()
        self._tick()
        for at in self._config.restarts_s:
            self._timeline.at(at, self._restart)

    @property
    def settled(self) -> bool:
        """True when no request waits and replicas are at their minimum."""
        here = sum(kind is not _ReplicaState.DOWN for kind in self._states)
        return not self._flow_controller.queue.count and here <= self._config.min

    def arrived(self, sim_request: SimRequest) -> None:
        """Admit, queue or reject a new request."""
        self._count(arrived=1, prompt_tokens=sim_request.work.prompt_tokens)
        room, flow_controller = self._room(sim_request), self._flow_controller
        refused = flow_controller.admit(sim_request, room)
        if refused is not None:
            self._refuse(sim_request, refused)
        elif not flow_controller.is_queued(sim_request):
            self._go(sim_request, _Room())
        elif not self._spec:
            self._look()

    def left(self, sim_request: SimRequest) -> bool:
        """Handle the disconnect of a client; returns True if its request was still queued."""
        return self._flow_controller.cancel(sim_request)

    def ended(self, sim_request: SimRequest) -> None:
        """Release the replica of a request that ended."""
        n = self._replica_of[sim_request.node]
        self._loads[n] -= 1
        tokens = 0 if sim_request.failure else sim_request.work.output_tokens
        self._count(in_flight=-1, answered=0 if sim_request.failure else 1, answer_tokens=tokens)
        self._end_if_drained(n)
        if not sim_request.failure:
            self._flow_controller.charge(sim_request)
        self._flow_controller.pump()

    def prefill_began(self, node: int) -> None:
        """Keep a replica that computes the prompt of a request that another one serves."""
        self._num_prefills[self._replica_of[node]] += 1

    def prefill_ended(self, node: int) -> None:
        """Release such a replica."""
        n = self._replica_of[node]
        self._num_prefills[n] -= 1
        self._end_if_drained(n)

    def fail(self, n: int) -> None:
        """Handle that discovery drops a replica, whose engine failed."""
        if self.is_wanted(n):
            self._failed.add(n)
            self._list()

    def recover(self, n: int) -> None:
        """Handle that the engine of a replica serves again."""
        self._failed.discard(n)
        self._list()
        self._flow_controller.pump()

    def is_wanted(self, n: int) -> bool:
        """True while a replica was not taken away: its engine is started again after it failed."""
        return self._states[n] is _ReplicaState.UP

    def close(self, over_at: float) -> ScalingSummary:
        """Summary of the run; the last request ended at `over_at`."""
        now = self._timeline.now
        self._record(
            requests=float(self._flow_controller.queue.count + sum(self._loads)),
            available=len(self._up),
        )
        return self._lifetimes.closed(now, self._rows, over_at=over_at)

    # Requests.

    def _room(self, _sim_request: SimRequest) -> _Room | Deferral:
        """Capacity on a replica, or the deferral."""
        most = self._config.hold.per_replica
        up = [self._loads[n] for n in self._up]
        if not up:
            return NO_ENDPOINTS_YET
        if most is None or min(up) < most:
            return _Room()
        return all_busy(math.inf)

    def _go(self, sim_request: SimRequest, _room: _Room) -> None:
        self._callbacks.go(sim_request)
        if sim_request.node >= 0:
            self._loads[self._replica_of[sim_request.node]] += 1
            self._count(in_flight=1)

    def _refuse(self, sim_request: SimRequest, why: Rejection) -> None:
        sim_request.refused(why, self._timeline.now)
        self._callbacks.over(sim_request)

    def _count(self, **more: float) -> None:
        counters = self._counters
        added = {name: getattr(counters, name) + value for name, value in more.items()}
        self._counters = msgspec.structs.replace(counters, **added)

    # The policy.

    def _fresh(self) -> None:
        config = self._config
        policy = policies.make_policy(config.policy, config.params, where="autoscaling")
        self._scaler = PolicyRunner(policy, ReplicaBounds(min=config.min, max=len(self._engines)))
        self._meter = demand_estimator.DemandEstimator(config.meter)

    def _restart(self) -> None:
        """Replace the policy by a new instance that restores the persisted state."""
        runner_state = msgspec.json.encode(self._scaler.state())
        learned = msgspec.json.encode(self._meter.state)
        self._fresh()
        self._scaler.restore(msgspec.json.decode(runner_state, type=RunnerState))
        self._meter.restore(msgspec.json.decode(learned, type=demand_estimator.EstimatorState))

    def _tick(self) -> None:
        self._look()
        self._timeline.after(self._scaler.policy.interval_s, self._tick)

    def _look(self) -> None:
        demand = self._demand()
        self._record(requests=demand.requests, available=demand.available)
        self._spec = self._scaler.step(demand).replicas
        self._match()

    def _record(self, *, requests: float, available: int) -> None:
        row = self._history.record(
            self._timeline.now,
            requests=requests,
            available=available,
            spec=self._spec,
            arrived={"picker": self._counters.arrived},
        )
        self._rows.append(row)

    def _demand(self) -> Demand:
        now = self._timeline.now
        up = self._up
        nodes = [self._nodes[node] for n in up for node in self._engines[n]]
        pages = [node.page(now) for node in nodes if node.up]
        observation = demand_estimator.TargetObservation(
            spec=self._spec,
            available=len(up),
            waiting=sum(page.waiting or 0.0 for page in pages),
            running=sum(page.running or 0.0 for page in pages),
            rates=self._callbacks.rates(),
            engines=max((len(self._engines[n]) for n in up), default=0),
        )
        counters = msgspec.structs.replace(self._counters, held=self._flow_controller.queue.count)
        return self._meter.read(now, {"picker": counters}, observation)

    # Replicas.

    @property
    def _up(self) -> list[int]:
        """Replicas that requests may go to."""
        return [
            n
            for n, kind in enumerate(self._states)
            if kind is _ReplicaState.UP and n not in self._failed
        ]

    def _list(self) -> None:
        self._callbacks.listed([node for n in self._up for node in self._engines[n]])

    def _match(self) -> None:
        """Start or drain replicas to match the spec; draining ones do not count."""
        here = [
            n
            for n, kind in enumerate(self._states)
            if kind in {_ReplicaState.STARTING, _ReplicaState.UP}
        ]
        # Not ready first, then the youngest, as a ReplicaSet does
        # (docs/spec/prior-systems.md#autoscaler).
        up = {*self._up}
        here.sort(key=lambda n: (n not in up, self._born[n]))
        for n in here[self._spec :]:
            self._leave(n)
        free = [n for n, kind in enumerate(self._states) if kind is _ReplicaState.DOWN]
        for n in free[: max(0, self._spec - len(here))]:
            self._start(n)

    def _start(self, n: int) -> None:
        now = self._timeline.now
        self._states[n] = _ReplicaState.STARTING
        self._born[n] = now
        self._lifetimes.replica_requested(n, now)
        self._timeline.after(self._config.cold_start_s, lambda: self._come_up(n, now))

    def _come_up(self, n: int, born: float) -> None:
        if self._states[n] is not _ReplicaState.STARTING or self._born[n] != born:
            return  # taken away meanwhile
        self._serve(n)
        self._list()
        self._flow_controller.pump()

    def _serve(self, n: int) -> None:
        self._states[n] = _ReplicaState.UP
        for node in self._engines[n]:
            self._nodes[node].start()
        self._lifetimes.up(n, self._timeline.now)

    def _leave(self, n: int) -> None:
        if self._states[n] is _ReplicaState.STARTING or self._is_idle(n):
            self._gone(n)
            return
        self._states[n] = _ReplicaState.LEAVING
        self._lifetimes.leaves(n, self._timeline.now)
        self._list()
        grace_s, born = self._config.grace_s, self._born[n]
        if grace_s is not None:
            self._timeline.after(grace_s, lambda: self._cut(n, born))

    def _is_idle(self, n: int) -> bool:
        return not self._loads[n] and not self._num_prefills[n]

    def _end_if_drained(self, n: int) -> None:
        if self._states[n] is _ReplicaState.LEAVING and self._is_idle(n):
            self._gone(n)

    def _cut(self, n: int, born: float) -> None:
        """Fail the requests that outlast the grace period of a draining replica."""
        if self._states[n] is _ReplicaState.LEAVING and self._born[n] == born:
            for node in self._engines[n]:
                self._nodes[node].stop()

    def _gone(self, n: int) -> None:
        before, self._states[n] = self._states[n], _ReplicaState.DOWN
        self._failed.discard(n)
        for node in self._engines[n]:
            self._nodes[node].shut_down()
        self._lifetimes.gone(n, self._timeline.now)
        if before is _ReplicaState.UP:
            self._list()
        elif before is _ReplicaState.LEAVING:
            self._match()  # one that is wanted may have found no room


def _flow_control_section(hold: HoldSpec) -> FlowControlSection:
    """Flow control configuration for requests that wait for a replica."""
    budget_s = _FOREVER_S if hold.budget_s is None else hold.budget_s
    return FlowControlSection(
        enabled=True,
        timeout_s=budget_s,
        empty_timeout_s=budget_s,
        max_timeout_s=budget_s,
        max_requests=hold.requests,
    )
