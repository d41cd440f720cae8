"""Workload kinds of a scenario: distributions of lengths, and the sessions they generate.

Every kind yields sessions and ends by itself (`sessions`). A session of one request is how
independent requests look.
"""

from __future__ import annotations

import heapq
import math
import random
from collections.abc import Iterable, Iterator, Sequence
from typing import Annotated, Literal

import msgspec

from extproc.simulator.fleet import traces
from extproc.simulator.fleet.sim_request import RequestSpec, SimSession, Streams

Positive = Annotated[int, msgspec.Meta(ge=1)]
NotNegative = Annotated[int, msgspec.Meta(ge=0)]
Share = Annotated[float, msgspec.Meta(ge=0, le=1)]
Length = Annotated[float, msgspec.Meta(ge=0)]


class Lengths(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A distribution of lengths.

    Attributes:
        mean: Mean before values are cut to the bounds. No default: it says what the length is.
        deviation: Standard deviation; 0 always gives the mean. For `exponential` it is the mean
            above `lowest`, whatever is said here.
        shape: `normal`, `lognormal` (long tail, as real prompts have) or `exponential`. Normal,
            because load generators (llmperf) draw from it.
        lowest: Smallest value; smaller draws become it. 1: empty prompts do not exist.
        highest: Largest value; larger draws become it. None: no bound.
    """

    mean: Length
    deviation: Length = 0.0
    shape: Literal["normal", "lognormal", "exponential"] = "normal"
    lowest: Length = 1.0
    highest: Length | None = None

    def draw(self, rng: random.Random) -> float:
        """One value."""
        if self.shape == "exponential":
            value = self.lowest + rng.expovariate(1.0) * max(0.0, self.mean - self.lowest)
        elif not self.deviation or not self.mean:
            value = self.mean
        elif self.shape == "normal":
            value = rng.gauss(self.mean, self.deviation)
        else:
            spread = math.log1p((self.deviation / self.mean) ** 2)
            value = rng.lognormvariate(math.log(self.mean) - spread / 2, math.sqrt(spread))
        value = max(value, self.lowest)
        return value if self.highest is None else min(value, self.highest)

    def integer(self, rng: random.Random) -> int:
        """One value, rounded; at least 1."""
        return max(1, round(self.draw(rng)))


class _Kind(
    msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True, tag_field="kind"
):
    """Base of all workload kinds, without fields of its own."""


class Independent(_Kind, frozen=True, kw_only=True, tag="independent"):
    """Prompts that share nothing.

    Attributes:
        requests: How many.
        prompt: Tokens of a prompt.
        output: Tokens of an answer.
        adapters: LoRA adapters; the n-th session (that of the n-th user where users are) asks for
            adapter n modulo this. 0: the base model.
    """

    requests: Positive
    prompt: Lengths
    output: Lengths
    adapters: NotNegative = 0

    def source(self, rng: random.Random) -> Iterator[SimSession]:
        """Sessions of the workload."""
        salt = rng.getrandbits(32)  # other seeds, other texts: hashes of them fall elsewhere
        streams = Streams()
        for n in range(self.requests):
            tokens = self.prompt.integer(rng)
            keys = streams.keys(n, tokens)
            output = self.output.integer(rng)
            yield SimSession((RequestSpec(tokens, output, keys, opening=f"{salt} prompt {n}"),))


class SharedPrefix(_Kind, frozen=True, kw_only=True, tag="shared-prefixes"):
    """Prompts that begin with one of a few long texts.

    Attributes:
        requests: How many.
        groups: How many texts there are.
        prefix: Tokens of such a text.
        prompt: Tokens each prompt adds.
        output: Tokens of an answer.
        hot_share: Share of requests that begin with the first text; the others are spread evenly.
            0: all evenly.
        adapters: As with `independent`.
    """

    requests: Positive
    groups: Positive
    prefix: Lengths
    prompt: Lengths
    output: Lengths
    hot_share: Share = 0.0
    adapters: NotNegative = 0

    def source(self, rng: random.Random) -> Iterator[SimSession]:
        """Sessions of the workload."""
        salt = rng.getrandbits(32)  # other seeds, other texts: hashes of them fall elsewhere
        streams = Streams()
        prefixes = [self.prefix.integer(rng) for _ in range(self.groups)]
        for n in range(self.requests):
            group = 0 if rng.random() < self.hot_share else rng.randrange(self.groups)
            first = prefixes[group]
            tokens = first + self.prompt.integer(rng)
            keys = streams.joined(("group", group), n, first=first, tokens=tokens)
            output = self.output.integer(rng)
            yield SimSession((RequestSpec(tokens, output, keys, opening=f"{salt} group {group}"),))


class ConversationWorkload(_Kind, frozen=True, kw_only=True, tag="conversations"):
    """Conversations: every turn repeats the previous ones as its prefix.

    Attributes:
        conversations: How many.
        turns: Turns of a conversation.
        prompt: Tokens each turn adds.
        output: Tokens of an answer; they are part of the next turn's prompt.
        think_s: Seconds between an answer and the next turn.
        system: Tokens of the system prompt every conversation begins with.
        systems: How many different system prompts there are.
        longest_tokens: A conversation ends before a prompt and its answer exceed this.
        adapters: As with `independent`.
    """

    conversations: Positive
    turns: Lengths
    prompt: Lengths
    output: Lengths
    think_s: Lengths = Lengths(mean=0.0, lowest=0.0)
    system: Lengths = Lengths(mean=0.0, lowest=0.0)
    systems: Positive = 1
    longest_tokens: Positive = 8192
    adapters: NotNegative = 0

    def source(self, rng: random.Random) -> Iterator[SimSession]:
        """Sessions of the workload."""
        salt = rng.getrandbits(32)  # other seeds, other texts: hashes of them fall elsewhere
        streams = Streams()
        openings = [round(self.system.draw(rng)) for _ in range(self.systems)]
        for n in range(self.conversations):
            kind = rng.randrange(self.systems)
            works: list[RequestSpec] = []
            tokens = openings[kind]
            for _ in range(self.turns.integer(rng)):
                tokens += self.prompt.integer(rng)
                output = self.output.integer(rng)
                if works and tokens + output > self.longest_tokens:
                    break
                keys = streams.joined(
                    ("system", kind), n, first=openings[kind], tokens=tokens + output
                )
                works.append(
                    RequestSpec(
                        tokens, output, keys, session=str(n), opening=f"{salt} conversation {n}"
                    )
                )
                tokens += output
            yield SimSession(works, [self.think_s.draw(rng) for _ in works[1:]])


class Repeated(_Kind, frozen=True, kw_only=True, tag="repeated-prompts"):
    """KubeAI's chat-py client: prompts of messages 1, 1 to 3, 1 to 5, ..., shuffled and cycled.

    Attributes:
        requests: How many.
        conversations: How many conversations the prompts come from.
        turns: Prompts of each conversation.
        prompt: Tokens each message adds, before scaling.
        mean_prompt_tokens: Mean prompt that all messages are scaled to.
        output: Tokens of an answer; answers are not repeated.
    """

    requests: Positive
    conversations: Positive
    turns: Positive
    prompt: Lengths
    mean_prompt_tokens: Positive
    output: Lengths

    def source(self, rng: random.Random) -> Iterator[SimSession]:
        """Sessions of the workload."""
        salt = rng.getrandbits(32)  # other seeds, other texts: hashes of them fall elsewhere
        lengths: list[tuple[int, float]] = []
        for n in range(self.conversations):
            tokens = 0.0
            for _ in range(self.turns):
                tokens += self.prompt.draw(rng)
                lengths.append((n, tokens))
        scale = self.mean_prompt_tokens * len(lengths) / sum(tokens for _, tokens in lengths)
        prompts = [(n, max(4, round(tokens * scale))) for n, tokens in lengths]
        rng.shuffle(prompts)
        streams = Streams()
        for k in range(self.requests):
            n, tokens = prompts[k % len(prompts)]
            output = self.output.integer(rng)
            keys = streams.keys(n, tokens)
            yield SimSession(
                (
                    RequestSpec(
                        tokens, output, keys, session=str(n), opening=f"{salt} conversation {n}"
                    ),
                )
            )


class TraceWorkload(_Kind, frozen=True, kw_only=True, tag="trace"):
    """Recorded requests.

    Attributes:
        format: `mooncake` (JSON lines: timestamp in ms, input_length, output_length, hash_ids of
            512-token blocks), `azure` (CSV: TIMESTAMP, ContextTokens, GeneratedTokens) or
            `burstgpt` (CSV: Timestamp in seconds, Request tokens, Response tokens; rows without an
            answer failed, and are left out).
        file: The trace. `$NAME` in it is the environment's.
        rate_scale: How much faster than recorded; the same requests in less time.
        first: How many rows are skipped.
        requests: How many are sent; None for all.
        longest_tokens: Requests longer than this (prompt and answer) are left out: the engine
            would refuse them. None: none are.
        spread_s: Rows recorded at one moment are spread evenly over so many seconds, in their
            order. 0: all at once, as recorded.
    """

    format: traces.Format
    file: str
    rate_scale: Annotated[float, msgspec.Meta(gt=0)] = 1.0
    first: NotNegative = 0
    requests: Positive | None = None
    longest_tokens: Positive | None = None
    spread_s: Annotated[float, msgspec.Meta(ge=0)] = 0.0

    def replay(self, rows: Iterable[str]) -> Iterator[SimSession]:
        """Sessions of the workload, at their recorded times.

        Raises:
            errors.ConfigError: A line is not what the format says.
        """
        sent = 0
        begin: float | None = None
        for at, work in traces.read(self.format, rows, where=self.file, spread_s=self.spread_s):
            if (
                self.longest_tokens
                and work.prompt_tokens + work.output_tokens > self.longest_tokens
            ):
                continue
            sent += 1
            if sent <= self.first:
                continue
            if self.requests is not None and sent > self.first + self.requests:
                return
            begin = at if begin is None else begin
            yield SimSession((work,), at=(at - begin) / self.rate_scale)


class Group(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Group of clients with equal requests.

    Attributes:
        tenant: Name of the group, where tenants take turns in a queue.
        priority: Priority of the requests, as an objective would give it.
        rate_per_s: Rate at which sessions begin, as a Poisson process.
        from_s: When they begin, virtual seconds.
        until_s: When no more of their sessions begin. None: when the workload is over.
        workload: What they ask. Adapters of the same number are the same in all groups.
    """

    tenant: str
    priority: int = 0
    rate_per_s: Annotated[float, msgspec.Meta(gt=0)]
    from_s: Annotated[float, msgspec.Meta(ge=0)] = 0.0
    until_s: Annotated[float, msgspec.Meta(gt=0)] | None = None
    workload: Independent | SharedPrefix | ConversationWorkload | Repeated

    def source(self, rng: random.Random, number: int) -> Iterator[SimSession]:
        """Sessions of the group, with their times.

        Args:
            rng: Chance of its own, so that its requests do not depend on other groups.
            number: Which of the groups it is; they share no blocks.
        """
        salt = (number + 1) << 54
        at = self.from_s
        num_adapters = adapters(self.workload)
        source = self.workload.source(random.Random(rng.getrandbits(64)))
        for n, session in enumerate(source):
            at += rng.expovariate(self.rate_per_s)
            if self.until_s is not None and at >= self.until_s:
                return
            specs = session.specs
            if num_adapters:
                specs = adapted(specs, n % num_adapters)
            works = [
                msgspec.structs.replace(
                    work,
                    keys=[key + salt for key in work.keys],
                    tenant=self.tenant,
                    priority=self.priority,
                )
                for work in specs
            ]
            yield SimSession(works, session.think_s, at)


class Groups(_Kind, frozen=True, kw_only=True, tag="groups"):
    """Several groups at once, at their own rates.

    Attributes:
        groups: The groups. Requests and times of each do not depend on the others.
    """

    groups: Annotated[Sequence[Group], msgspec.Meta(min_length=1)]

    def source(self, rng: random.Random) -> Iterator[SimSession]:
        """Sessions of the workload."""
        base = rng.getrandbits(64)
        sources = [
            group.source(random.Random(f"{base} {group.tenant} {group.priority}"), number)
            for number, group in enumerate(self.groups)
        ]
        return heapq.merge(*sources, key=lambda session: session.at or 0.0)


class FixedWorkload(msgspec.Struct, frozen=True):
    """Sessions that are known beforehand; not for scenario files.

    Attributes:
        sessions: The sessions, each with its time, in the order of these.
        adapter_names: LoRA adapters that their requests name.
        adapters: None to spread users over, as requests name theirs.
    """

    sessions: Sequence[SimSession]
    adapter_names: frozenset[str] = frozenset()
    adapters: int = 0

    def source(self, rng: random.Random) -> Iterator[SimSession]:
        """Sessions of the workload."""
        del rng
        return iter(self.sessions)


Workload = Independent | SharedPrefix | ConversationWorkload | Repeated | TraceWorkload | Groups

#: Kinds that say themselves when sessions begin.
TIMED = (TraceWorkload, Groups)


def sessions(
    workload: Workload, rng: random.Random, rows: Iterable[str] = ()
) -> Iterator[SimSession]:
    """The sessions of a workload.

    Args:
        rng: Chance; a trace leaves nothing to it.
        rows: Lines of the trace, where the workload is one.

    Raises:
        errors.ConfigError: A line of the trace is not what its format says.
    """
    return workload.replay(rows) if isinstance(workload, TraceWorkload) else workload.source(rng)


def adapters(workload: Workload) -> int:
    """Number of LoRA adapters that clients ask for in turns; 0 where requests name theirs, or none."""
    return 0 if isinstance(workload, TraceWorkload | Repeated | Groups) else workload.adapters


def named(workload: Workload | FixedWorkload) -> frozenset[str]:
    """Names of those adapters."""
    if isinstance(workload, FixedWorkload):
        return workload.adapter_names
    parts = [group.workload for group in workload.groups] if isinstance(workload, Groups) else []
    highest = max((adapters(part) for part in [workload, *parts]), default=0)
    return frozenset(_name(number) for number in range(highest))


def base_models(workload: Workload | FixedWorkload) -> frozenset[str]:
    """Base models that requests name; none where all are for the same one."""
    if not isinstance(workload, FixedWorkload):
        return frozenset()
    specs = [spec for session in workload.sessions for spec in session.specs]
    return frozenset(spec.model for spec in specs if spec.model not in {"", spec.adapter})


def adapted(works: Sequence[RequestSpec], number: int) -> list[RequestSpec]:
    """The same requests for the adapter of that number; adapters share no blocks."""
    salt = (number + 1) << 44
    name = _name(number)
    return [
        msgspec.structs.replace(work, adapter=name, keys=[key + salt for key in work.keys])
        for work in works
    ]


def _name(number: int) -> str:
    return f"adapter-{number}"
