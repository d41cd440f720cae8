"""One simulated engine on the timeline."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from extproc.endpoint import EngineCounters, Load
from extproc.simulator import core, engine_request, kv, profiles
from extproc.simulator.fleet.event_queue import EventQueue
from extproc.simulator.fleet.sim_request import SimRequest

#: Called when a request's first token came, and when it ended.
OnFinished = Callable[[SimRequest], None]
#: Called with blocks that were stored and removed.
OnBlocks = Callable[[Sequence[kv.BlockChange]], None]
#: Called with seconds between tokens and how many tokens came so.
OnGaps = Callable[[float, int], None]


class EngineNode:
    """Engine with its requests and its metrics page. Mutable; owned by the simulation.

    Args:
        finished: Called with every request that ended, with or without failure.
        gaps: Called with the time between tokens.
        began: Called with a request at its first token if another engine computed its prompt.

    Attributes:
        up: Whether the process is there.
        refusing: Whether it answers 503 at once.
        has_metrics: Whether it has a metrics page.
    """

    def __init__(
        self,
        timeline: EventQueue,
        profile: profiles.EngineProfile,
        *,
        finished: OnFinished,
        gaps: OnGaps,
        has_metrics: bool = True,
        began: OnFinished = lambda _: None,
    ) -> None:
        self.profile = profile
        self.has_metrics = has_metrics
        self.up = False
        self.refusing = False
        self.preemptions = 0
        self._timeline = timeline
        self._finished = finished
        self._gaps = gaps
        self._began = began
        self.requests: dict[str, SimRequest] = {}
        self._block_listeners: list[OnBlocks] = []
        self.start()
        self.up = False

    @property
    def is_serving(self) -> bool:
        """True while the engine serves."""
        return self.up and not self.refusing and not self._hung

    def start(self) -> None:
        """A new process with an empty cache."""
        self.engine = core.SimulatedEngine(self.profile)
        self._log = self.engine.pool.log_changes() if self._block_listeners else None
        for listener in self._block_listeners:
            listener([(kv.ALL_BLOCKS, None, False, kv.DEVICE)])
        self.up = True
        self.refusing = self._hung = False
        self._steps = self._computed = self._generated = self._begun = self._ended = 0
        self._gap_count = self._prefilled = 0
        self._gaps_s = self._prefill_s = 0.0
        self._due: float | None = None
        # As of the last step: vLLM names none before its first one, and never with LoRA off.
        self._active: tuple[str, ...] | None = None

    def add_block_listener(self, listener: OnBlocks) -> None:
        """Call a listener with the changes of blocks after every step, of every process."""
        self._block_listeners.append(listener)
        self._log = self.engine.pool.log_changes()

    def hang(self) -> None:
        """Compute nothing more; requests are taken in all the same."""
        self._hung = True
        self._due = None

    def refuse(self) -> None:
        """Answer every request with 503, until `stop_refusing`."""
        self.refusing = True

    def set_speed(self, speed: float) -> None:
        """Compute at this share of its speed from the next iteration on, above 0."""
        self.engine.profile = self.profile if speed == 1.0 else self.profile.faster(speed)

    def stop_refusing(self) -> None:
        """Serve requests again."""
        self.refusing = False

    def shut_down(self) -> None:
        """The process ends; nothing runs on it."""
        self.up = False

    def stop(self) -> None:
        """The process dies, and with it everything it was working on."""
        self.up = False
        self._due = None
        lost = list(self.requests.values())
        self.requests.clear()
        self.preemptions += self.engine.preemptions
        self.engine.preemptions = 0
        for sim_request in lost:
            sim_request.failure = "engine died"
            self._finished(sim_request)

    def submit(self, sim_request: SimRequest) -> None:
        """Accept a request, or end it with a failure."""
        if not self.up:
            sim_request.failure = "connection refused"
        elif self.refusing:
            sim_request.failure = "answered 503"
        else:
            work = sim_request.work
            refusal = self.engine.submit(
                engine_request.EngineRequest(
                    sim_request.id,
                    work.prompt_tokens,
                    work.output_tokens,
                    work.keys,
                    work.adapter,
                    sim_request.received_tokens,
                ),
                self._timeline.now,
            )
            if refusal is not None:
                sim_request.failure = refusal.name.lower().replace("_", " ")
        if sim_request.failure:
            # Not at once: a client that sends again on failure would recurse.
            self._timeline.after(0.0, lambda: self._finished(sim_request))
            return
        self.requests[sim_request.id] = sim_request
        self._kick()

    def cancel(self, sim_request: SimRequest, why: str) -> None:
        """Abort the request of a client that disconnected."""
        if self.requests.pop(sim_request.id, None) is None:
            return
        self.engine.cancel(sim_request.id, self._timeline.now)
        sim_request.failure = why
        self._kick()
        self._finished(sim_request)

    def page(self, now: float) -> Load:
        """Its metrics page, as the scraper would have read it."""
        engine = self.engine
        running = None if self._active is None else frozenset(self._active)
        # Engines count after every iteration, and several in a row are one event here.
        steps, tokens, seconds = engine.steps_under_way(now)
        gaps, gaps_s = self._gap_count + tokens, self._gaps_s + tokens * seconds / max(1, steps)
        steps, tokens = steps + self._steps, tokens + self._generated
        return Load(
            at=now,
            engine="vllm",
            waiting=float(engine.waiting),
            running=float(engine.running),
            kv_usage=engine.kv_usage,
            kv_blocks=engine.profile.blocks,
            block_tokens=engine.profile.block_tokens,
            # vLLM fills both labels from one set (docs/spec/engines.md#lora-info).
            adapters=running,
            waiting_adapters=running,
            adapter_slots=None if self._active is None else self.profile.max_loras,
            prefix_queries=float(engine.prefix_queries),
            prefix_hits=float(engine.prefix_hits),
            counters=EngineCounters(
                steps=float(steps),
                step_tokens=float(self._computed + tokens),
                generated_tokens=float(tokens),
                finished=float(self._ended),
                reloaded_tokens=float(engine.reloaded_tokens),
                reload_s=engine.reload_s if engine.reloaded_tokens else None,
                gaps=float(gaps),
                gaps_s=gaps_s,
                prefill_s=self._prefill_s,
                prefill_tokens=float(self._prefilled),
                first_tokens=float(self._begun),
            ),
        )

    def _note_gap(self, seconds: float, count: int) -> None:
        self._gap_count += count
        self._gaps_s += seconds * count
        self._gaps(seconds, count)

    def _kick(self) -> None:
        """Plan the end of the iterations in progress, if that is not planned yet."""
        if self._hung:
            return
        engine, timeline = self.engine, self._timeline
        due = engine.due
        if due is None:
            due = engine.begin(timeline.now)
        if due is not None and due != self._due:
            self._due = due
            timeline.at(due, lambda: self._step(engine, due))

    def _step(self, engine: core.SimulatedEngine, due: float) -> None:
        if engine is not self.engine or self._due != due or engine.due != due:
            return  # another process, or the plan was cut short since
        self._due = None
        done = engine.commit(due)
        if self._log:
            for listener in self._block_listeners:
                listener(self._log)
            self._log.clear()
        if self.profile.max_loras:
            self._active = engine.slots.active
        self._steps += done.steps
        self._begun += len(done.first_tokens)
        self._computed += sum(first.computed_tokens for first in done.first_tokens)
        self._generated += done.tokens
        self._ended += len(done.finished)
        if done.decoding:
            self._note_gap(done.duration_s / done.steps, done.decoding * done.steps)
        for gap in done.resumed_s:
            self._note_gap(gap, 1)
        sim_requests = self.requests
        for first in done.first_tokens:
            sim_request = sim_requests[first.id]
            sim_request.first_s = due - sim_request.sent_at
            if sim_request.prefill_node >= 0:
                self._began(sim_request)
        for finished in done.finished:
            sim_request = sim_requests.pop(finished.job.id)
            sim_request.took_s = due - sim_request.sent_at
            sim_request.cached_tokens = finished.cached_tokens
            sim_request.preemptions = finished.preemptions
            self._prefill_s += finished.first_token_at - finished.started_at
            self._prefilled += finished.job.prompt_tokens - finished.cached_tokens
            self._finished(sim_request)
        self._kick()
