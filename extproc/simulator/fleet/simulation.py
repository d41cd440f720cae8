"""A fleet, its pickers and its clients, run to the end."""

from __future__ import annotations

import math
import random
from collections.abc import Iterable, Sequence

import msgspec

from extproc.config.settings import Settings
from extproc.endpoint import ServedModels, StepTimeModel
from extproc.routing import peer_sync
from extproc.routing.director import Director
from extproc.simulator.core import SimulatedEngine
from extproc.simulator.fleet import workloads
from extproc.simulator.fleet.autoscaled_fleet import AutoscaledFleet, FleetCallbacks
from extproc.simulator.fleet.client import Client, Sender
from extproc.simulator.fleet.engine_node import EngineNode
from extproc.simulator.fleet.event_queue import EventQueue
from extproc.simulator.fleet.oracle_picker import OraclePicker
from extproc.simulator.fleet.picker import MODEL, ExtprocPicker, SimPicker
from extproc.simulator.fleet.run_metrics import UNFINISHED, RunMetrics, RunSummary
from extproc.simulator.fleet.scenario import Outage, Scenario, ScenarioAutoscaling
from extproc.simulator.fleet.sim_request import KEY_TOKENS, RequestSpec, SimRequest

#: Speed of an engine that `slows`, as a share of its own.
_SLOWED = 0.2


class Simulation:
    """One run of one strategy. Mutable; run it once.

    Args:
        scenario: What is simulated; `scenario.check` must accept it.
        settings: Configuration of the pickers; None for the clairvoyant one.
        seed: Of all chance. Arrivals and lengths do not depend on the strategy.
        rows: Lines of the trace, for workloads that are one.
        client: How requests are offered; None for the scenario's own.
        autoscaling: How many engines are up; None for the scenario's own.
    """

    def __init__(
        self,
        scenario: Scenario,
        settings: Settings | None,
        *,
        seed: int,
        rows: Iterable[str] = (),
        client: Client | None = None,
        autoscaling: ScenarioAutoscaling | None = None,
    ) -> None:
        self.timeline = EventQueue()
        self.metrics = RunMetrics(scenario.measure_from_s)
        self._scenario = scenario
        self._chance = random.Random(seed)
        self.num_served = 0
        self._open: dict[str, SimRequest] = {}
        self.nodes: list[EngineNode] = []
        self._listed: list[bool] = []
        #: Nodes of each engine: its ranks.
        self._engines: list[range] = []
        self._picker_of: dict[str, SimPicker] = {}
        self._client = client or scenario.client
        scaled = autoscaling or scenario.autoscaling
        #: Requests for prefill alone, by id, to the requests they are for.
        self._prefills: dict[str, SimRequest] = {}
        #: Requests their clients left, and engines go on with.
        self._left: set[str] = set()
        for engines in scenario.fleet:
            profile = engines.resolved()
            for _ in range(engines.count):
                first = len(self.nodes)
                self._engines.append(range(first, first + engines.ranks))
                for _ in range(engines.ranks):
                    node = EngineNode(
                        self.timeline,
                        profile,
                        finished=self._ended,
                        gaps=self.metrics.gaps,
                        has_metrics=engines.has_metrics,
                        began=self._began,
                    )
                    self._add_node(node, engines.ready_s if scaled is None else None)
        self._settings, self._waits = settings, scaled is None
        self._seed, self._started = seed, 0
        self.pickers: list[SimPicker] = []
        self._start_pickers()
        self._replicas = None if scaled is None else self._scaled(scaled)
        self._sender = Sender(
            self._client,
            workloads.sessions(scenario.workload, random.Random(seed * 2 + 1), rows),
            adapters=workloads.adapters(scenario.workload),
            timeline=self.timeline,
            rng=random.Random(seed * 2 + 2),
            send=self._send,
        )

    @property
    def is_complete(self) -> bool:
        """True once every request was sent and has ended."""
        return self._sender.is_done

    def run(self) -> RunMetrics:
        """Run to the end; requests that are open then failed.

        Returns:
            What came of it.
        """
        timeline, sender, until = self.timeline, self._sender, self._scenario.until_s
        for outage in self._scenario.outages:
            timeline.at(outage.at_s, lambda outage=outage: self._fail(outage))  # type: ignore[misc]
        for at in self._scenario.picking.restarts_s:
            timeline.at(at, self._restart_pickers)
        if self._scenario.measure_from_s:
            timeline.at(self._scenario.measure_from_s, self.metrics.forget_gaps)
        replicas = self._replicas
        if replicas is None:
            self._list()
        else:
            replicas.begin()
        sender.start()
        while not sender.is_done and timeline.now < until and timeline.step():
            pass
        over_at = timeline.now
        while replicas and not replicas.settled and timeline.now < until and timeline.step():
            pass
        for sim_request in self._open.values():
            sim_request.failure = UNFINISHED
            self.metrics.add(sim_request)
        self.metrics.close(self.nodes, replicas.close(over_at) if replicas else None)
        return self.metrics

    def _add_node(self, node: EngineNode, ready_s: float | None) -> None:
        """Add a rank of an engine; `ready_s` of None leaves its start to the autoscaling policy."""
        n = len(self.nodes)
        self.nodes.append(node)
        self._listed.append(ready_s == 0)
        if ready_s is None:
            return
        if ready_s:
            self.timeline.at(ready_s, lambda: self._start_node(n))
        else:
            node.start()

    def _start_pickers(self) -> None:
        """Start pickers that know nothing yet, in place of those there are."""
        picking, first = self._scenario.picking, self._seed * 1000 + self._started
        self._started += picking.replicas
        self.pickers = [
            self._picker(self._settings, seed=first + n, waits=self._waits)
            for n in range(picking.replicas)
        ]
        if picking.share_delay_s is not None:
            directors = [
                picker.parts.director
                for picker in self.pickers
                if isinstance(picker, ExtprocPicker)
            ]
            PeerSyncBus(directors, timeline=self.timeline, delay_s=picking.share_delay_s)

    def _restart_pickers(self) -> None:
        self._start_pickers()
        self._list()

    def _picker(self, settings: Settings | None, *, seed: int, waits: bool) -> SimPicker:
        """Build a picker; requests queue in it, or in the autoscaled fleet."""
        if settings is None:
            return OraclePicker(self.nodes)
        workload = self._scenario.workload
        return ExtprocPicker(
            adjusted(settings, self._scenario, seed=seed),
            self.nodes,
            timeline=self.timeline,
            delay_s=self._scenario.picking.delay_s,
            models=ServedModels(
                workloads.base_models(workload) | {MODEL}, workloads.named(workload)
            ),
            ranks=[engines.ranks for engines in self._scenario.fleet for _ in range(engines.count)],
            labels=[group.labels for group in self._scenario.fleet for _ in range(group.count)],
            knows_max_tokens=self._scenario.picking.with_max_tokens,
            on_dequeued=self._on_dequeued if waits else None,
        )

    def _scaled(self, config: ScenarioAutoscaling) -> AutoscaledFleet:
        def listed(up: Sequence[int]) -> None:
            self._listed = [n in up for n in range(len(self.nodes))]
            self._list()

        def rates() -> StepTimeModel | None:
            return self.pickers[0].rates()

        callbacks = FleetCallbacks(listed=listed, go=self._go, over=self._over, rates=rates)
        return AutoscaledFleet(
            config, self.nodes, self._engines, timeline=self.timeline, callbacks=callbacks
        )

    def _list(self) -> None:
        up = [n for n, listed in enumerate(self._listed) if listed]
        for picker in self.pickers:
            picker.listed(up)

    def _start_node(self, n: int) -> None:
        self.nodes[n].start()
        self._listed[n] = True
        self._list()

    def _set_listed(self, engine: int, *, listed: bool) -> None:
        """List an engine in discovery, or drop it."""
        replicas = self._replicas
        if replicas is not None:
            (replicas.recover if listed else replicas.fail)(engine)
            return
        for n in self._engines[engine]:
            self._listed[n] = listed
        self._list()

    def _fail(self, outage: Outage) -> None:
        """Begin an outage of the processes of an engine, if it has any."""
        nodes = [self.nodes[n] for n in self._engines[outage.engine] if self.nodes[n].up]
        if not nodes:
            return
        processes = [node.engine for node in nodes]
        for node in nodes:
            match outage.how:
                case "dies":
                    node.stop()
                case "hangs":
                    node.hang()
                case "errors":
                    node.refuse()
                case "slows":
                    node.set_speed(_SLOWED)
        if outage.noticed_s is not None:
            self.timeline.after(outage.noticed_s, lambda: self._drop(outage, processes))
        if outage.back_s is not None:
            self.timeline.after(outage.back_s, lambda: self._end(outage, processes))

    def _nodes_of(self, engine: int, processes: Sequence[SimulatedEngine]) -> list[EngineNode]:
        """Nodes of an engine that still have the processes of an outage; others are new since."""
        nodes = [self.nodes[n] for n in self._engines[engine]]
        return [node for node in nodes if any(node.engine is process for process in processes)]

    def _drop(self, outage: Outage, processes: Sequence[SimulatedEngine]) -> None:
        nodes = self._nodes_of(outage.engine, processes)
        if nodes and not any(node.is_serving for node in nodes):
            self._set_listed(outage.engine, listed=False)

    def _end(self, outage: Outage, processes: Sequence[SimulatedEngine]) -> None:
        """End an outage; others of the same processes go on."""
        nodes = self._nodes_of(outage.engine, processes)
        for node in nodes:
            match outage.how:
                case "dies":
                    self._restart(outage.engine, node)
                case "hangs":
                    if node.up:  # or it died since
                        node.stop()
                        self._restart(outage.engine, node)
                case "errors":
                    node.stop_refusing()
                case "slows":
                    node.set_speed(1.0)
        if nodes and all(node.is_serving for node in nodes):
            self._set_listed(outage.engine, listed=True)

    def _restart(self, engine: int, node: EngineNode) -> None:
        """Start the process of a node again, unless its replica was taken away meanwhile."""
        if self._replicas is None or self._replicas.is_wanted(engine):
            node.start()

    def _send(self, work: RequestSpec) -> SimRequest:
        self.num_served += 1
        sim_request = SimRequest(f"r{self.num_served}", work, self.timeline.now)
        self._open[sim_request.id] = sim_request
        replicas = self._replicas
        if replicas is None:
            self._go(sim_request)
        else:
            # On the next event: the sender must know the request before it can end.
            self.timeline.after(0.0, lambda: replicas.arrived(sim_request))
        if self._client.timeout_s is not None and not sim_request.failure:
            self.timeline.after(self._client.timeout_s, lambda: self._give_up(sim_request))
        return sim_request

    def _go(self, sim_request: SimRequest) -> None:
        """Send a request to the endpoint of its picker."""
        pickers = self.pickers
        picker = pickers[0] if len(pickers) == 1 else self._chance.choice(pickers)
        self._picker_of[sim_request.id] = picker
        sim_request.node = picker.pick(sim_request)
        if sim_request.node >= 0 or sim_request.failure:
            self._on_dequeued(sim_request)

    def _on_dequeued(self, sim_request: SimRequest) -> None:
        """Handle the late decision of a picker for a queued request."""
        if sim_request.prefill_node >= 0:
            self._prefill(sim_request)
            return
        if sim_request.node >= 0:
            self.nodes[sim_request.node].submit(sim_request)
            return
        del self._picker_of[sim_request.id]
        # On the next event, as above.
        self.timeline.after(0.0, lambda: self._over(sim_request))

    def _prefill(self, sim_request: SimRequest) -> None:
        """Send a request for the first token alone to the engine that computes the prompt."""
        work = msgspec.structs.replace(sim_request.work, output_tokens=1)
        part = SimRequest(f"{sim_request.id}/prefill", work, self.timeline.now)
        self._prefills[part.id] = sim_request
        if self._replicas:
            self._replicas.prefill_began(sim_request.prefill_node)
        self.nodes[sim_request.prefill_node].submit(part)

    def _prefilled(self, part: SimRequest) -> None:
        """Send a request on to the engine that decodes, after the transfer of its KV cache.

        Where prefill failed, that engine computes the prompt, as behind llm-d's sidecar.
        """
        sim_request = self._prefills.pop(part.id)
        if self._replicas:
            self._replicas.prefill_ended(sim_request.prefill_node)
        node, work = self.nodes[sim_request.node], sim_request.work
        transfer_s = 0.0
        if not part.failure:
            cached = (
                node.engine.pool.match(work.keys, work.prompt_tokens // KEY_TOKENS) * KEY_TOKENS
            )
            transfer = self._scenario.kv_transfer
            transfer_s = transfer.latency_s + (work.prompt_tokens - cached) / transfer.tokens_per_s
            sim_request.received_tokens = work.prompt_tokens

        def decode() -> None:
            if sim_request.failure:
                self._ended(sim_request)
            else:
                node.submit(sim_request)

        self.timeline.after(transfer_s, decode)

    def _began(self, sim_request: SimRequest) -> None:
        self._picker_of[sim_request.id].began(sim_request)

    def _give_up(self, sim_request: SimRequest) -> None:
        """Handle the timeout of a client."""
        if sim_request.node < 0:
            picker = self._picker_of.get(sim_request.id)
            if picker is not None and picker.cancel(sim_request):
                del self._picker_of[sim_request.id]
                sim_request.failure = "timeout"
                self._over(sim_request)
            elif self._replicas and self._replicas.left(sim_request):
                sim_request.failure = "timeout"
                self._over(sim_request)
        elif not self._client.abandons:
            node = self.nodes[sim_request.node]
            if sim_request.id in self._picker_of and sim_request.id not in node.requests:
                # Its prompt is computed elsewhere: it ends before it is sent on.
                sim_request.failure = sim_request.failure or "timeout"
            node.cancel(sim_request, "timeout")
        elif sim_request.id in self._picker_of:
            self._left.add(sim_request.id)
            sim_request.failure = "timeout"
            self._over(sim_request)

    def _ended(self, sim_request: SimRequest) -> None:
        if sim_request.id in self._prefills:
            self._prefilled(sim_request)
            return
        self._picker_of.pop(sim_request.id).ended(sim_request)
        if self._replicas:
            self._replicas.ended(sim_request)
        if sim_request.id in self._left:
            self._left.remove(sim_request.id)
        else:
            self._over(sim_request)

    def _over(self, sim_request: SimRequest) -> None:
        del self._open[sim_request.id]
        self.metrics.add(sim_request)
        self._sender.finished(sim_request)


def run(
    scenario: Scenario,
    settings: Settings | None,
    *,
    seed: int,
    rows: Iterable[str] = (),
    client: Client | None = None,
    autoscaling: ScenarioAutoscaling | None = None,
) -> RunSummary:
    """Simulate once, from the first request to the last answer; arguments as in `Simulation`."""
    simulation = Simulation(
        scenario, settings, seed=seed, rows=rows, client=client, autoscaling=autoscaling
    )
    return simulation.run().summary()


def adjusted(settings: Settings, scenario: Scenario, *, seed: int) -> Settings:
    """A configuration with the scenario's seed and scrape interval."""
    scrape_s = scenario.picking.scrape_s
    scrape = settings.scrape
    if scrape_s is not None:
        scrape = msgspec.structs.replace(
            scrape,
            busy_interval_s=scrape_s,
            idle_interval_s=scrape_s,
            stale_after_s=max(scrape.stale_after_s, 3 * scrape_s),
            max_scrapes_per_s=1e9,
        )
    return msgspec.structs.replace(settings, seed=seed, scrape=scrape)


class PeerSyncBus:
    """Delivers the events of every picker to all others, without loss.

    Args:
        directors: The director of every picker.
        delay_s: Seconds from the first fact that waits to its being taken in with those after it.
    """

    def __init__(
        self, directors: Sequence[Director], *, timeline: EventQueue, delay_s: float
    ) -> None:
        self._timeline = timeline
        self._replicas: list[peer_sync.PeerReplica] = []
        for n, director in enumerate(directors):
            self._join(str(n), director, delay_s)

    def _join(self, name: str, director: Director, delay_s: float) -> None:
        def deliver() -> None:
            while (message := event_log.take()) is not None:
                for replica in self._replicas:
                    replica.apply_message(message, self._timeline.now)

        event_log = peer_sync.PeerEventLog(name, lambda: self._timeline.after(delay_s, deliver))
        peer_sync.connect([("", director)], event_log)
        # No replica ever leaves: an outage of a picker is not simulated.
        self._replicas.append(peer_sync.PeerReplica(name, lambda _: director, silent_s=math.inf))
