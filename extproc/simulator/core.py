"""The engine core: vLLM V1 scheduling in iterations of `T = a + b*P + c*B + d*K` seconds.

The caller owns the clock: `begin` plans an iteration and says when it ends, `commit` makes it
happen at that time. Between the two the engine looks as it does from outside: the batch is
running, its new tokens are not there yet.

Each iteration, in this order: running decodes get one token each; unfinished prefills continue;
waiting jobs enter first come first served while token budget, `max_num_seqs`, KV blocks and
adapter slots allow (a job whose adapter finds no slot is passed over). A prompt's KV blocks are
taken on entry, so that an unfinished prefill never lacks one. A decode that finds no block preempts
the newest sequence, which is recomputed later. Blocks whose copies are in the memory of the host are
loaded on entry, behind those on the device, which lengthens the iteration for the whole batch.

While nothing can enter the batch, many iterations are planned as one, and no work is done per
generated token (`batch.Decoding`): a plan costs what happens in it, not the size of the batch.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterator

from extproc.simulator import batch, engine_request, kv, lora, profiles


class SimulatedEngine:
    """Simulated engine, driven by explicit times. Mutable; one owner.

    Args:
        profile: The machine; `profiles.check` must accept it.
    """

    def __init__(self, profile: profiles.EngineProfile) -> None:
        profiles.check(profile)
        self.profile = profile
        self.pool = kv.BlockPool(profile.blocks, profile.host_blocks)
        self.slots = lora.LoraSlots(profile.max_loras)
        self.preemptions = 0
        self.prefix_queries = 0
        self.prefix_hits = 0
        self.reloaded_tokens = 0
        self.reload_s = 0.0
        self.deferred = 0
        self._sequences: dict[str, batch.Sequence] = {}
        self._waiting: deque[batch.Sequence] = deque()
        self._running: dict[str, batch.Sequence] = {}  # in order of entry
        self._prefilling: dict[str, batch.Sequence] = {}
        self._decoding = batch.Decoding(profile.block_tokens)
        self._plan: batch.StepPlan | None = None
        self._full = False  # no waiting job can enter before something leaves
        self._barred = False  # nor could any new one

    # What it looks like from outside.

    @property
    def running(self) -> int:
        """Sequences in the batch (count)."""
        return len(self._running)

    @property
    def waiting(self) -> int:
        """Sequences waiting to enter the batch (count)."""
        return len(self._waiting)

    @property
    def kv_usage(self) -> float:
        """Share of KV blocks held by live sequences and resident adapters, 0..1."""
        return self.pool.used / self.pool.size

    @property
    def due(self) -> float | None:
        """When the iterations in progress end; None between `commit` and `begin`."""
        plan = self._plan
        return None if plan is None else plan.start + plan.until(plan.steps)

    def steps_under_way(self, now: float) -> tuple[int, int, float]:
        """Iterations in progress that have ended by now, the tokens they brought, and their seconds."""
        plan = self._plan
        if plan is None or plan.steps == 1 or now <= plan.start:
            return 0, 0, 0.0
        ended = min(plan.steps, plan.begun(now - plan.start)) - 1
        return ended, ended * plan.decoding, plan.until(ended)

    def generated(self, job_id: str) -> int:
        """Tokens a job in the engine has so far; 0 for a job that is not there."""
        seq = self._sequences.get(job_id)
        return 0 if seq is None else self._decoding.generated(seq)

    def outstanding(self) -> Iterator[engine_request.Outstanding]:
        """Remaining work of every request in the engine, in the order of entry."""
        for seq in self._sequences.values():
            generated = self._decoding.generated(seq)
            waiting = seq.state is batch.SequenceState.WAITING
            decoding = seq.state is batch.SequenceState.DECODING
            yield engine_request.Outstanding(
                seq.job.id,
                waiting,
                0 if decoding else seq.target - seq.computed,
                seq.job.output_tokens - generated,
                seq.job.prompt_tokens + generated,
                seq.job.adapter,
            )

    # What others do to it.

    def submit(
        self, new: engine_request.EngineRequest, now: float
    ) -> engine_request.EngineRejection | None:
        """Queue a request.

        Iterations in progress are cut short after the one that is under way at `now`, if the job
        may enter the next one: read `due` again.

        Args:
            new: The job; its id must not be in the engine.

        Returns:
            Why it was not taken; None if it was.
        """
        if new.prompt_tokens + new.output_tokens > self.profile.longest:
            return engine_request.EngineRejection.TOO_LONG
        if new.adapter and not self.profile.max_loras:
            return engine_request.EngineRejection.NO_LORA
        if self.profile.max_queued and len(self._sequences) >= self.profile.max_queued:
            return engine_request.EngineRejection.BUSY
        seq = batch.Sequence(new, now)
        self._sequences[new.id] = seq
        self._waiting.append(seq)
        if not self._barred:
            self._full = False
            self._cut(now)
        return None

    def cancel(self, job_id: str, now: float) -> bool:
        """Abort a request; its blocks and its adapter slot are free at once.

        Args:
            now: Monotonic seconds; iterations in progress are cut short as by `submit`.

        Returns:
            Whether it was still there.
        """
        seq = self._sequences.pop(job_id, None)
        if seq is None:
            return False
        if seq.state is batch.SequenceState.WAITING:
            self._waiting.remove(seq)
        else:
            self._leave(seq)
        seq.state = batch.SequenceState.GONE
        self._full = self._barred = False
        self._cut(now)
        return True

    # The iteration.

    def begin(self, now: float, *, horizon: float = math.inf) -> float | None:
        """Plan the next iterations.

        Args:
            now: When they begin, monotonic seconds.
            horizon: No iteration but the first begins at or after this time.

        Returns:
            When they end; None if there is nothing to do.
        """
        assert self._plan is None, "commit before you begin again"  # noqa: S101  a caller's bug
        plan = batch.StepPlan(now)
        self._make_room(plan)
        budget = self.profile.token_budget - self._decoding.count
        for seq in self._prefilling.values():
            budget -= self._prefill(plan, seq, budget)
        seconds = 0.0
        if not plan.preempted and not self._full:
            seconds = self._admit(plan, budget)
        profile, decoding = self.profile, self._decoding
        plan.decoding = decoding.count
        plan.growth_s = profile.context_s_per_token * decoding.count
        plan.first_s = (
            seconds
            + profile.base_s
            + profile.prefill_s_per_token * sum(chunk for _, chunk in plan.prefills)
            + profile.decode_s_per_seq * decoding.count
            + profile.context_s_per_token * decoding.context
        )
        if not plan.prefills:
            if not decoding.count:
                return None
            plan.steps = self._stretch(plan, horizon)
        self._plan = plan
        return now + plan.until(plan.steps)

    def commit(self, now: float) -> engine_request.StepResult:
        """Make the planned iterations happen.

        Args:
            now: When they ended; `due`, or later if the caller was held up.
        """
        plan = self._plan
        assert plan is not None, "begin before you commit"  # noqa: S101  a caller's bug
        self._plan = None
        decoding = self._decoding
        if plan.steps > 1:
            self.pool.allocate(decoding.growth(plan.steps - 1, skip=1))
        finished = [self._finish(seq, now) for seq in decoding.advance(plan.steps)]
        first_tokens: list[engine_request.FirstTokenProduced] = []
        resumed_s: list[float] = []
        tokens = plan.decoding * plan.steps
        for seq, chunk in plan.prefills:
            if seq.state is not batch.SequenceState.PREFILLING:
                continue  # cancelled meanwhile
            seq.computed += chunk
            if seq.computed < seq.target:
                continue
            if seq.generated:
                resumed_s.append(now - seq.stopped_at)
            else:
                seq.first_token_at = now
                computed = seq.job.prompt_tokens - seq.cached
                after_s = now - seq.submitted_at
                first_tokens.append(
                    engine_request.FirstTokenProduced(seq.job.id, after_s, computed)
                )
            seq.generated += 1
            tokens += 1
            if seq.generated == seq.job.output_tokens:
                finished.append(self._finish(seq, now))
            else:
                del self._prefilling[seq.job.id]
                decoding.join(seq)
        return engine_request.StepResult(
            plan.start,
            now - plan.start,
            plan.steps,
            plan.decoding,
            sum(chunk for _, chunk in plan.prefills),
            plan.started,
            tokens,
            first_tokens,
            resumed_s,
            finished,
            plan.preempted,
        )

    def step(self, now: float, *, horizon: float = math.inf) -> engine_request.StepResult | None:
        """Run `begin` and `commit` at once."""
        due = self.begin(now, horizon=horizon)
        return None if due is None else self.commit(due)

    # Planning.

    def _make_room(self, plan: batch.StepPlan) -> None:
        """Take the blocks this iteration's decodes need; preempt the newest while they lack."""
        pool, decoding = self.pool, self._decoding
        while decoding.growth(1) > pool.available:
            victim = next(reversed(self._running.values()))
            plan.preempted.append(victim.job.id)
            self._preempt(victim, plan.start)
        pool.allocate(decoding.growth(1))

    def _prefill(self, plan: batch.StepPlan, seq: batch.Sequence, budget: int) -> int:
        """Plan the next chunk of a prompt; returns its tokens."""
        chunk = min(seq.target - seq.computed, budget)
        if chunk > 0:
            plan.prefills.append((seq, chunk))
            # Registered when planned, as in vLLM: the same prompt entering in the same iteration
            # already shares these blocks.
            full = (seq.computed + chunk) // self.profile.block_tokens
            self.pool.register(seq.held, seq.hashes, full)
        return chunk

    def _admit(self, plan: batch.StepPlan, budget: int) -> float:
        """Admit waiting requests to the batch; returns the seconds of loading adapters and blocks."""
        seconds = 0.0
        passed: list[batch.Sequence] = []
        waiting = self._waiting
        while waiting and budget > 0:
            if len(self._running) >= self.profile.max_num_seqs:
                self._barred = True
                break
            seq = waiting[0]
            fit = self.slots.fit(seq.job.adapter) if seq.job.adapter else lora.SlotFit.RESIDENT
            if fit is lora.SlotFit.NONE:
                passed.append(waiting.popleft())
                continue
            if not self._take_prompt(seq, self._adapter_blocks(fit)):
                self._barred = True
                break
            waiting.popleft()
            if seq.reloaded:
                reload_s = seq.reloaded * self.profile.reload_s_per_token
                self.reloaded_tokens += seq.reloaded
                self.reload_s += reload_s
                seconds += reload_s
            if seq.job.adapter:
                seconds += 0.0 if fit is lora.SlotFit.RESIDENT else self.profile.lora_load_s
                self.slots.enter(seq.job.adapter)
            self._enter(seq, plan)
            budget -= self._prefill(plan, seq, budget)
        self._full = not plan.prefills
        self._barred = self._barred or (self._full and budget <= 0)
        self.deferred = len(passed)
        waiting.extendleft(reversed(passed))
        return seconds

    def _adapter_blocks(self, fit: lora.SlotFit) -> int:
        """KV blocks an adapter takes on entry: its own only where no other one makes room."""
        return self.profile.lora_blocks if fit is lora.SlotFit.EMPTY else 0

    def _take_prompt(self, seq: batch.Sequence, adapter_blocks: int) -> bool:
        """Hold the cached blocks of a prompt and take the others, if all of them are there."""
        size, pool = self.profile.block_tokens, self.pool
        # At least one token is computed, since its output is the next token.
        depth = pool.match(seq.hashes, (seq.target - 1) // size)
        fresh = -(-seq.target // size) - depth + adapter_blocks
        # All of the cached ones may be idle; only where that matters are they counted.
        room = pool.available - fresh
        if room < depth and room < pool.idle_among(seq.hashes, depth):
            return False
        end = depth
        if pool.host is not None:
            end += pool.host.match(seq.hashes, depth, (seq.target - 1) // size)
            pool.host.use(seq.hashes[depth:end])
        seq.held = list(seq.hashes[:depth])
        pool.pin(seq.held)
        pool.allocate(fresh)
        seq.reloaded = (end - depth) * size
        # A preempted request has lost what came from elsewhere.
        arrived = 0 if seq.preemptions else min(seq.job.received_tokens, seq.target - 1) // size
        seq.received = max(0, arrived - end) * size
        end = max(end, arrived)
        if end > depth:
            pool.register(seq.held, seq.hashes, end)
        seq.computed = end * size
        return True

    def _enter(self, seq: batch.Sequence, plan: batch.StepPlan) -> None:
        """Count a job that got its blocks as running."""
        seq.state = batch.SequenceState.PREFILLING
        self._running[seq.job.id] = seq
        self._prefilling[seq.job.id] = seq
        if seq.preemptions:
            return  # vLLM counts neither queries nor hits of a recomputed request
        seq.cached = seq.computed
        seq.started_at = plan.start
        self.prefix_queries += seq.job.prompt_tokens
        self.prefix_hits += seq.cached - seq.reloaded - seq.received
        plan.started.append(engine_request.RequestAdmitted(seq.job.id, seq.cached))

    def _stretch(self, plan: batch.StepPlan, horizon: float) -> int:
        """Number of decode-only iterations that fit in one plan: the batch stays the same."""
        if self._waiting and not self._full:
            return 1
        decoding = self._decoding
        steps = decoding.steps_to_end()
        if horizon < math.inf:
            steps = min(steps, plan.begun(horizon - plan.start))
        available = self.pool.available
        if -(-steps // self.profile.block_tokens) * decoding.count <= available:
            return steps
        while steps > 1 and decoding.growth(steps - 1, skip=1) > available:
            steps = (steps + 1) // 2
        return steps

    def _cut(self, now: float) -> None:
        """End the plan after the iteration under way at `now`."""
        plan = self._plan
        if plan is not None and plan.steps > 1:
            plan.steps = min(plan.steps, plan.begun(now - plan.start))

    # Sequences changing state.

    def _leave(self, seq: batch.Sequence) -> None:
        """Remove a sequence from the batch; its full blocks stay cached."""
        size = self.profile.block_tokens
        if seq.state is batch.SequenceState.DECODING:
            tokens = self._decoding.leave(seq)
            self.pool.register(seq.held, seq.hashes, tokens // size)
            # In mid-iteration the block for the token under way is taken already.
            taken = -(-(tokens + (self._plan is not None)) // size)
        else:
            del self._prefilling[seq.job.id]
            taken = -(-seq.target // size)
        self.pool.release(seq.held, taken - len(seq.held))
        del self._running[seq.job.id]
        if seq.job.adapter:
            self.slots.leave(seq.job.adapter)
        self._full = self._barred = False

    def _preempt(self, seq: batch.Sequence, now: float) -> None:
        """Preempt a sequence to the head of the queue; cached blocks are reused later."""
        if seq.state is batch.SequenceState.DECODING:
            seq.stopped_at = now
        self._leave(seq)
        seq.hashes = [*seq.held, *seq.hashes[len(seq.held) :]]
        seq.held = []
        seq.target = seq.job.prompt_tokens + seq.generated
        seq.computed = 0
        seq.state = batch.SequenceState.WAITING
        seq.preemptions += 1
        self.preemptions += 1
        self._waiting.appendleft(seq)

    def _finish(self, seq: batch.Sequence, now: float) -> engine_request.RequestFinished:
        """Remove a sequence that has all its tokens from the engine."""
        self._leave(seq)
        seq.state = batch.SequenceState.GONE
        del self._sequences[seq.job.id]
        return seq.finished(now)
