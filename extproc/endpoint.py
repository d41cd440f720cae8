"""Endpoints and what is known of them: frozen values, no behavior beyond their own facts.

An endpoint is one `ip:port` of one engine, or one data-parallel rank behind it. Its load is what was
scraped from it, with the time of the scrape; its rates are what was learned of its speed. A candidate
is an endpoint that may serve the request of one scheduling turn.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from enum import IntEnum
from typing import Annotated, Literal

import msgspec

#: Labels of an endpoint without labels.
NO_LABELS: Mapping[str, str] = {}

#: Largest TCP port.
MAX_PORT = 65_535

#: Label that says an endpoint's metrics are on another port of the same address.
METRICS_PORT = "metrics-port"


class LabelExpression(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A condition on a label, as `matchExpressions` of Kubernetes have it.

    Attributes:
        key: The label.
        operator: `In`: it has one of the values. `NotIn`: it has none of them, or is not there.
            `Exists` and `DoesNotExist`: whether it is there.
        values: For the first two at least one, for the others none.
    """

    key: Annotated[str, msgspec.Meta(min_length=1)]
    operator: Literal["In", "NotIn", "Exists", "DoesNotExist"]
    values: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        """Refuse values where there can be none, and none where there must be some.

        Raises:
            ValueError: The number of values does not fit the operator.
        """
        if (self.operator in {"In", "NotIn"}) != bool(self.values):
            some = "no values" if self.values else "at least one value"
            raise ValueError(f"expected {some} for {self.operator}, got {len(self.values)}")

    def __str__(self) -> str:
        """The expression in the API's form."""
        if not self.values:
            return self.key if self.operator == "Exists" else f"!{self.key}"
        return f"{self.key} {self.operator.lower()} ({','.join(self.values)})"

    def is_met(self, labels: Mapping[str, str]) -> bool:
        """True if labels meet the condition."""
        if not self.values:
            return (self.key in labels) is (self.operator == "Exists")
        return (labels.get(self.key) in self.values) is (self.operator == "In")


class ServedModels(msgspec.Struct, frozen=True, gc=False):
    """The names one engine answers to, as it listed them.

    Attributes:
        bases: Names of its base model.
        adapters: Names of LoRA adapters it can serve, on the device or not.
        max_model_len: Longest context of its base model, in tokens; None where it lists none.
    """

    bases: frozenset[str]
    adapters: frozenset[str] = frozenset()
    max_model_len: int | None = None

    def __contains__(self, name: str) -> bool:
        """True if a request may use this name."""
        return name in self.bases or name in self.adapters


#: Between `ip:port` and the rank in the address of a rank.
_RANK_SIGN = "@"


class DataParallelRank(msgspec.Struct, frozen=True, gc=False):
    """One of several data-parallel ranks of an engine that share a port.

    Attributes:
        index: Position among the ranks behind the port, from 0: the value of `x-data-parallel-rank`.
        count: Ranks behind the port, at least 2.
        number: Number of the rank in its data-parallel group, as the metrics page labels it. Larger
            than `index` where a group spans several ports.
    """

    index: int
    count: int
    number: int


class Endpoint(msgspec.Struct, frozen=True, gc=False):
    """One `ip:port` of one engine, or one data-parallel rank behind it.

    Attributes:
        address: What tells it from others: `ip:port`, IPv6 in brackets, as EPP protocol 004 has it
            in the header; of a rank `ip:port@index`.
        name: Human-readable name; the address when there is none.
        labels: Free labels from discovery (hardware, zone, role).
        incarnation: Grows each time discovery brings an address back, so that accounts and
            predictions of an earlier incarnation are never charged to the new one.
        models: Names it answers to, where discovery knows; what the engine lists itself beats it.
        uid: Of what stands behind the address, where discovery knows: a pod that takes over the
            address of another is another engine. Empty: unknown.
        rank: The rank, where several share the port; None where the engine is one endpoint.
        engine: Incarnation of the engine, equal for its ranks and for as long as it is listed.
    """

    address: str
    name: str = ""
    labels: Mapping[str, str] = NO_LABELS
    incarnation: int = 0
    models: ServedModels | None = None
    uid: str = ""
    rank: DataParallelRank | None = None
    engine: int = 0

    @property
    def host_port(self) -> str:
        """`ip:port` that its engine listens on: the address without a rank."""
        return self.address if self.rank is None else self.address.rpartition(_RANK_SIGN)[0]

    @property
    def port(self) -> int:
        """The port of `host_port`."""
        return int(self.host_port.rpartition(":")[2])

    @property
    def ip(self) -> str:
        """The host part, without brackets."""
        return self.address.rpartition(":")[0].strip("[]")


def find_metrics_ports(endpoints: Iterable[Endpoint], default: int | None) -> Mapping[str, int]:
    """Ports of metrics pages, by `host_port`: that of a label, else `default`, else its own.

    Args:
        endpoints: All endpoints of a pool. Several engines at one IP address have pages of their own,
            so `default` is none of theirs.
        default: Port of every page (TCP); None for none.
    """
    engines = {endpoint.host_port: endpoint for endpoint in endpoints}
    num_by_ip = Counter([endpoint.ip for endpoint in engines.values()])
    return {
        address: parse_port(endpoint.labels.get(METRICS_PORT, ""))
        or (num_by_ip[endpoint.ip] == 1 and default)
        or endpoint.port
        for address, endpoint in engines.items()
    }


def join_host_port(host: str, port: int) -> str:
    """`host:port`, with an IPv6 address in brackets."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def parse_port(text: str) -> int:
    """A TCP port from 1 to 65535; 0 for any other text."""
    port = int(text) if text.isascii() and text.isdigit() and len(text) <= 5 else 0
    return port if port <= MAX_PORT else 0


def split_ranks(endpoint: Endpoint, numbers: Sequence[int]) -> tuple[Endpoint, ...]:
    """The endpoints of an engine's data-parallel ranks; the endpoint itself where it has one.

    Args:
        numbers: Numbers of its ranks, ascending; at most one for an engine that is one endpoint.
    """
    if len(numbers) < 2:
        return (endpoint,)
    return tuple(
        [
            msgspec.structs.replace(
                endpoint,
                address=rank_address(endpoint.address, index),
                name=f"{endpoint.name}-rank-{index}" if endpoint.name else "",
                rank=DataParallelRank(index=index, count=len(numbers), number=number),
            )
            for index, number in enumerate(numbers)
        ]
    )


def rank_address(host_port: str, index: int) -> str:
    """Address of a rank: `ip:port@index`."""
    return f"{host_port}{_RANK_SIGN}{index}"


class EngineCounters(msgspec.Struct, frozen=True, gc=False, kw_only=True):
    """Counters of one engine since its start; None is what the page did not carry.

    Attributes:
        steps: Engine iterations (count).
        step_tokens: Tokens processed by them, computed prompt tokens and generated ones.
        prompt_tokens: Prompt tokens of requests whose prefill ended, cached ones included.
        generated_tokens: Tokens generated, some engines counting them when a request is finished.
        computed_tokens: Prompt tokens computed so far, by engines that do not count iterations.
        decoded_tokens: Tokens generated so far, by the same.
        finished: Requests finished (count).
        finished_prompt_tokens: Their prompt tokens, cached ones included.
        preemptions: Sequences that lost their KV blocks (count).
        adapter_loads: Adapters brought onto the device (count).
        adapter_load_s: Seconds that took, summed.
        reloaded_tokens: Prompt tokens found in the memory of the host, or another tier below the device.
        reload_s: Seconds that loading them took, summed.
        gaps: Iterations in which sequences generated tokens after their first one, each sequence
            counted (count).
        gaps_s: Seconds from token to token of a sequence, summed over the same.
        prefill_s: Seconds in the batch until the first token, summed over finished requests.
        prefill_tokens: Prompt tokens that were computed in them.
        first_tokens: Requests that got their first token, by engines that count the prompt tokens of a
            request only then (count).
        rank_steps: Iterations of each data-parallel rank of which the others are sums, in the order of
            the page; empty for those of a single one.
    """

    steps: float | None = None
    step_tokens: float | None = None
    prompt_tokens: float | None = None
    generated_tokens: float | None = None
    computed_tokens: float | None = None
    decoded_tokens: float | None = None
    finished: float | None = None
    finished_prompt_tokens: float | None = None
    preemptions: float | None = None
    adapter_loads: float | None = None
    adapter_load_s: float | None = None
    reloaded_tokens: float | None = None
    reload_s: float | None = None
    gaps: float | None = None
    gaps_s: float | None = None
    prefill_s: float | None = None
    prefill_tokens: float | None = None
    first_tokens: float | None = None
    rank_steps: tuple[float, ...] = ()


#: No counter was ever read.
NO_COUNTERS = EngineCounters()

#: No extra metric was reported.
NO_EXTRA: Mapping[str, float] = {}


class Load(msgspec.Struct, frozen=True, gc=False):
    """Metrics of one scrape of one endpoint. A value that the page did not carry is None.

    Attributes:
        at: Monotonic seconds at which the page was received; minus infinity if never.
        engine: `vllm`, `sglang`, `trtllm`, `triton`; empty when not recognised.
        waiting: Requests queued in the engine (count).
        running: Requests in the running batch (count).
        kv_usage: Share of KV blocks held by live requests, 0..1. Says nothing about cached
            prefixes: an idle engine with a full prefix cache reads 0.
        adapters: LoRA adapters with requests in the batch; None when the engine did not say.
        waiting_adapters: LoRA adapters the engine lists as waiting.
        adapter_slots: Adapters that fit on the device (`max_lora`).
        kv_blocks: KV blocks of the engine (count).
        block_tokens: Tokens per KV block.
        prefix_queries: Prompt tokens looked up in the prefix cache since start (counter).
        prefix_hits: Prompt tokens found there since start (counter).
        started_at: Unix time the engine process started, to tell a restart.
        counters: Counters that speed is learned from.
        extra: Values of `scrape.extra_metrics` by name; a metric that the page lacks has none.
        kv_capacity: Tokens that the KV cache holds; None where the page does not show how many, or the
            share in use. Worked out, as is the next one: every candidate of every request needs them.
        kv_held: Of these, tokens in use.
    """

    at: float = -math.inf
    engine: str = ""
    waiting: float | None = None
    running: float | None = None
    kv_usage: float | None = None
    adapters: frozenset[str] | None = None
    waiting_adapters: frozenset[str] | None = None
    adapter_slots: int | None = None
    kv_blocks: int | None = None
    block_tokens: int | None = None
    prefix_queries: float | None = None
    prefix_hits: float | None = None
    started_at: float | None = None
    counters: EngineCounters = NO_COUNTERS
    extra: Mapping[str, float] = NO_EXTRA
    kv_capacity: float | None = None
    kv_held: float = 0.0

    def __post_init__(self) -> None:
        usage, tokens = self.kv_usage, self.kv_tokens
        capacity, held = None, 0.0
        if usage is not None and tokens:
            capacity = float(tokens)
            held = usage * capacity
        msgspec.structs.force_setattr(self, "kv_capacity", capacity)
        msgspec.structs.force_setattr(self, "kv_held", held)

    def __hash__(self) -> int:
        """Hash of the numbers that change with every page; mappings have none."""
        return hash((self.at, self.engine, self.waiting, self.running, self.kv_usage))

    @property
    def kv_tokens(self) -> int | None:
        """Tokens the KV cache holds; None when the engine does not say."""
        if self.kv_blocks is None or self.block_tokens is None:
            return None
        return self.kv_blocks * self.block_tokens

    @property
    def free_kv_tokens(self) -> float | None:
        """Tokens that the KV cache has room for; None when the engine does not say."""
        size = self.kv_tokens
        return None if size is None or self.kv_usage is None else (1.0 - self.kv_usage) * size


#: Nothing was ever scraped.
NO_LOAD = Load()


class StepTimeModel(msgspec.Struct, frozen=True, gc=False, kw_only=True):
    """Step time of one engine: `step_s + prefill_s * P + decode_s * B + context_s * K`, in s.

    P is the prompt tokens computed in an iteration, B the sequences that decode, K the tokens of
    context they have together (docs/spec/engines.md#iteration-time). The defaults lie between the
    machines of docs/spec/engines.md#machine-parameters (an A100 with an 8B model); they stand until
    the engine's own counters say otherwise.

    Attributes:
        step_s: Seconds every iteration takes, mostly reading the weights.
        prefill_s: Seconds per uncached prompt token.
        decode_s: Seconds per decoding sequence and iteration, its context apart.
        context_s: Seconds per token of context and iteration.
        context_tokens: Tokens of context of a sequence on it, mean of those running.
        adapter_load_s: Seconds until an adapter that is not resident is.
        output_tokens: Tokens generated per request, mean.
        evidence: Engine iterations it was learned from (count, fading); 0 for the defaults.
        reload_s: Seconds per prompt token that is loaded from the memory of the host; None while the
            engine has not shown it.
        copied_ratio: Share of evicted tokens that the memory of the host is taken to hold, 0..1.
        max_num_seqs: Requests that it runs at a time (count); None while the engine has not shown it.
    """

    step_s: float = 0.015
    prefill_s: float = 100e-6
    decode_s: float = 0.1e-3
    context_s: float = 0.2e-6
    context_tokens: float = 500.0
    adapter_load_s: float = 0.5
    output_tokens: float = 200.0
    evidence: float = 0.0
    reload_s: float | None = None
    copied_ratio: float = 0.0
    max_num_seqs: float | None = None

    @property
    def reload_saving(self) -> float | None:
        """Share of computing a token that is saved by loading it, 0..1; None while unknown."""
        if self.reload_s is None or not self.evidence or self.prefill_s <= 0.0:
            return None
        return max(0.0, 1.0 - self.reload_s / self.prefill_s)

    @property
    def evicted_s(self) -> float:
        """Seconds per prompt token that was evicted and is wanted again: to load it or compute it."""
        return self.prefill_s * (1.0 - self.copied_ratio * (self.reload_saving or 0.0))

    def iteration_s(self, sequences: float) -> float:
        """Seconds between two tokens of an answer when so many sequences of usual context decode."""
        return self.step_s + (self.decode_s + self.context_s * self.context_tokens) * sequences


#: Nothing was learned yet.
DEFAULT_STEP_TIMES = StepTimeModel()


class AdapterResidency(IntEnum):
    """Residency of the requested adapter on an endpoint's device; higher is better.

    From our own account, because an engine's labels show neither queued nor idle adapters
    (docs/spec/engines.md#lora-info).
    """

    #: Every slot is in use by adapters with open requests, or one is and the slots are unknown.
    FULL = 0
    #: Every slot is taken, and an idle adapter can make room.
    EVICTABLE = 1
    #: The slots are unknown, and no other adapter has open requests.
    UNKNOWN = 2
    #: A slot is free.
    ROOM = 3
    #: Predicted as loaded, with no open request.
    IDLE = 4
    #: Loaded and in use, or nothing to load: the request asks for the base model.
    RESIDENT = 5


#: Shares of an adapter's load time by residency, in the order of `AdapterResidency`: loading is due
#: unless it is there; half where that is unknown.
ADAPTER_LOAD_SHARES = (1.0, 1.0, 0.5, 1.0, 0.0, 0.0)


class Candidate(msgspec.Struct, frozen=True, gc=False):
    """An endpoint in one scheduling turn, with everything a plugin may look at.

    Attributes:
        endpoint: The endpoint.
        load: Its last scrape. Where there is none, or it is stale, it has the means of the other
            candidates; `NO_LOAD` while nothing is known of any.
        age_s: Seconds since the last scrape, stale or not; infinity if never.
        in_flight: Requests that this picker, and others that share theirs, have open there.
        estimated_requests: Dead-reckoned requests on the engine: own now + max(0, scraped - own at scrape),
            where scraped = running + waiting. Equals `in_flight` while no load is known.
        prompt_tokens: Estimated prompt tokens of the requests this picker has open there.
        matched_tokens: Estimated leading prompt tokens of this request predicted as cached there.
        queued_tokens: Uncached prompt tokens sent there and estimated as not yet computed, others'
            requests included as far as scrapes show them.
        unscraped_tokens: KV tokens that requests sent since the last scrape will take.
        rates: Its step times.
        residency: Whether the adapter of this request is on its device.
        active_context_tokens: Prompt tokens of the requests this picker has open there, what several begin
            with counted once, and what young conversations among them will grow by.
        conversation_local: Whether the prompt this one goes on from went there, or where other pickers serve
            as well, all of them expect it there.
        page: Its own page where `load` is filled in from those of others, `NO_LOAD` where that is void;
            None where `load` is its own.
    """

    endpoint: Endpoint
    load: Load = NO_LOAD
    age_s: float = math.inf
    in_flight: int = 0
    estimated_requests: float = 0.0
    prompt_tokens: int = 0
    matched_tokens: int = 0
    queued_tokens: float = 0.0
    unscraped_tokens: float = 0.0
    rates: StepTimeModel = DEFAULT_STEP_TIMES
    residency: AdapterResidency = AdapterResidency.RESIDENT
    active_context_tokens: float = 0.0
    conversation_local: bool = False
    page: Load | None = None

    @property
    def is_imputed(self) -> bool:
        """True if a part of `load` is the mean of other candidates."""
        return self.page is not None
