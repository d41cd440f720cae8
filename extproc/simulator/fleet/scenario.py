"""Schema of scenario files."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Literal

import msgspec

from extproc.autoscaling import demand_estimator, policies
from extproc.errors import ConfigError
from extproc.simulator import profiles
from extproc.simulator.fleet.client import Client
from extproc.simulator.fleet.sim_request import KEY_TOKENS
from extproc.simulator.fleet.workloads import TIMED, Workload

Positive = Annotated[int, msgspec.Meta(ge=1)]
NotNegative = Annotated[int, msgspec.Meta(ge=0)]
Seconds = Annotated[float, msgspec.Meta(ge=0)]
Factor = Annotated[float, msgspec.Meta(gt=0)]

#: The strategy that sees what no picker can; see `clairvoyant`.
CLAIRVOYANT = "clairvoyant"


class EngineGroup(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Group of equal engines.

    Attributes:
        count: How many.
        ranks: Data-parallel ranks of each behind one port, every one with a machine of its own; 1
            is an engine without ranks.
        profile: A machine by name: demo, l4-8b-fp8, l4-8b-fp8-2k, a10-7b-fp16, a100-8b-bf16,
            a100-7b-fp16, h100-8b-bf16, 2xh100-70b-fp8, 4xh100-70b-bf16. The default is the one the
            published runs we compare with were made on.
        speed: Factor of its speed.
        ready_s: When they come up, virtual seconds. 0: they are there from the start.
        has_metrics: Whether they have a metrics page. False: scrapes find none (404).
        set: Numbers of the machine that differ, such as `kv_tokens: 4200`: base_s,
            prefill_s_per_token, decode_s_per_seq, context_s_per_token, kv_tokens, token_budget,
            max_num_seqs, max_model_len, max_queued, max_loras, lora_load_s, lora_kv_tokens, and of
            evicted blocks in the memory of the host host_kv_tokens, reload_s_per_token.
        labels: Labels of the endpoints, such as `llm-d.ai/role: prefill`.
    """

    count: Positive = 8
    ranks: Annotated[int, msgspec.Meta(ge=1, le=64)] = 1
    profile: str = "l4-8b-fp8"
    speed: Factor = 1.0
    ready_s: Seconds = 0.0
    has_metrics: bool = True
    set: Mapping[str, float] = {}
    labels: Mapping[str, str] = {}

    def resolved(self) -> profiles.EngineProfile:
        """Resolve the profile of the engines.

        Raises:
            ConfigError: There is no such profile or field, or the numbers do not go together.
        """
        base = profiles.find(self.profile)
        kinds = {field.name: field.type for field in msgspec.structs.fields(profiles.EngineProfile)}
        changed: dict[str, float] = {}
        for name, value in self.set.items():
            kind = kinds.get(name)
            if kind not in {"int", "float", int, float}:
                raise ConfigError(
                    f"fleet: set: {name}",
                    wanted=f"one of {', '.join(n for n in kinds if n != 'name')}",
                    got=name,
                    fix="name a number of the profile",
                )
            is_whole = kind in {"int", int}
            if is_whole and not float(value).is_integer():
                raise ConfigError(
                    f"fleet: set: {name}",
                    wanted="a whole number",
                    got=str(value),
                    fix="write it without a fraction",
                )
            changed[name] = int(value) if is_whole else float(value)
        profile = msgspec.structs.replace(base, **changed).faster(self.speed)
        profiles.check(profile)
        if profile.block_tokens != KEY_TOKENS:
            raise ConfigError(
                "fleet: set",
                wanted=f"block_tokens of {KEY_TOKENS}, as a block of a simulated prompt has",
                got=str(profile.block_tokens),
                fix="remove it",
            )
        return profile


class KvTransfer(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Transfer of the KV cache of a prompt from the engine that computed it to the one that decodes.

    Attributes:
        latency_s: Seconds without tokens.
        tokens_per_s: Tokens that are transferred per second; those that are cached already are not.
            200,000: 128 kB per token, as of an 8B model with 16-bit values, over 200 Gbit/s.
    """

    latency_s: Seconds = 0.005
    tokens_per_s: Factor = 200_000.0


class Outage(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """An engine that fails.

    Attributes:
        engine: Which one, counted from 0 in the order of the fleet; all its ranks fail.
        at_s: When, virtual seconds. An engine that is not up then has no outage.
        how: `dies`: the process is gone, and connections are refused. `errors`: it answers 503 at
            once to every new request, and goes on with the others. `hangs`: it takes requests in
            and computes nothing more, while its metrics page stays. `slows`: every iteration takes five
            times as long, as on a throttled device.
        noticed_s: Seconds until discovery drops it. 1: a Kubernetes watch tells of a dead
            container within about a second. None: never, as with a static list.
        back_s: Seconds until a new process with an empty cache is there, or `errors` and
            `slows` end. None: never.
    """

    engine: NotNegative
    at_s: Seconds
    how: Literal["dies", "errors", "hangs", "slows"] = "dies"
    noticed_s: Seconds | None = 1.0
    back_s: Seconds | None = None


class Picking(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The pickers.

    Attributes:
        replicas: Pickers; each request goes to one of them at random.
        share_delay_s: Seconds after which pickers have exchanged a request that was sent
            or ended. None: they do not talk.
        scrape_s: Seconds between scrapes of an endpoint, busy or idle. None: as the configuration
            says.
        delay_s: Seconds from the moment a page was true to the moment it is taken in. 5 ms is what
            vLLM takes for its page.
        with_max_tokens: Whether requests carry `max_tokens`, and with it the true length of their
            answers, as those of `vllm bench serve` do. False: people rarely know it.
        restarts_s: When all pickers are replaced by new ones, which know nothing yet; the old ones end
            what they have.
    """

    replicas: Positive = 1
    share_delay_s: Seconds | None = None
    scrape_s: Factor | None = None
    delay_s: Seconds = 0.005
    with_max_tokens: bool = False
    restarts_s: Sequence[Seconds] = ()


class HoldSpec(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Flow control of requests that wait for a replica, as in section `flow_control`.

    Attributes:
        per_replica: Requests a replica is given at once; further ones wait. None: all, so that
            they wait only while there is no replica.
        requests: Requests that may wait; further ones are refused with 429, and with 503 while there is
            no replica.
        budget_s: Seconds after which a request that waits is refused, with 503 where there is no
            replica and 429 where all are busy. None: never.
    """

    per_replica: Positive | None = None
    requests: Positive = 10_000
    budget_s: Seconds | None = None


class ScenarioAutoscaling(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Autoscaling of the fleet. `fleet` lists the engines available to it.

    Attributes:
        policy: Its name in the catalogue of policies.
        params: Its parameters.
        meter: How demand is measured.
        min: Replicas at least.
        start: Replicas in the beginning.
        cold_start_s: Seconds from asking for a replica to its first request. 60: weights of a small
            model from a local disk.
        grace_s: Seconds a replica that is taken away may finish what it has. None: until it has,
            as with a grace period longer than any answer.
        hold: How requests wait, in place of the pickers' own `flow_control`.
        restarts_s: When the picker is replaced by another one that goes on from its state.
        window_s: Seconds charts average the queue depth over.
    """

    policy: str = policies.DEFAULT
    params: dict[str, object] = {}
    meter: demand_estimator.EstimatorSettings = demand_estimator.EstimatorSettings()
    min: NotNegative = 0
    start: NotNegative = 0
    cold_start_s: Seconds = 60.0
    grace_s: Seconds | None = None
    hold: HoldSpec = HoldSpec()
    restarts_s: Sequence[float] = ()
    window_s: Seconds = 60.0


class Variant(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A strategy with a name of its own.

    Attributes:
        name: What the results call it.
        config: A configuration file, relative to the scenario. Empty: none.
        settings: Sections of a configuration, written here.
        strategy: One word, as in `scheduling.strategy`. Empty: as the configuration says.
        client: What is different in the client, for published runs in which clients were.
        autoscaling: In place of the scenario's.
    """

    name: str
    config: str = ""
    settings: Mapping[str, object] = {}
    strategy: str = ""
    client: Client | None = None
    autoscaling: ScenarioAutoscaling | None = None


class Scenario(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A fleet, a workload and the strategies to compare.

    Attributes:
        title: One line.
        fleet: The engines.
        workload: What is asked.
        client: How it is offered.
        picking: The pickers.
        outages: Engines that die.
        kv_transfer: Transfer of KV caches, where a configuration splits prefill and decode.
        autoscaling: How many engines of the fleet are up. None: all, always.
        strategies: Named strategies, `clairvoyant`, or variants.
        seeds: Seeds; every strategy runs with each. Five, so that an interval can be given.
        measure_from_s: Requests sent before are left out of the results.
        until_s: The simulation ends at this virtual time at the latest; requests that are open then
            count as failed. 86400: a day is a scenario that does not end.
    """

    title: str = ""
    fleet: Sequence[EngineGroup] = (EngineGroup(),)
    workload: Workload
    client: Client = Client()
    picking: Picking = Picking()
    outages: Sequence[Outage] = ()
    kv_transfer: KvTransfer = KvTransfer()
    autoscaling: ScenarioAutoscaling | None = None
    strategies: Sequence[str | Variant] = ("adaptive",)
    seeds: Annotated[Sequence[int], msgspec.Meta(min_length=1)] = (1, 2, 3, 4, 5)
    measure_from_s: Seconds = 0.0
    until_s: Factor = 86_400.0

    @property
    def variants(self) -> list[Variant]:
        """All strategies as variants."""
        return [
            Variant(name=strategy, strategy=strategy) if isinstance(strategy, str) else strategy
            for strategy in self.strategies
        ]


def check(scenario: Scenario, *, where: str) -> None:
    """Validate a scenario.

    Raises:
        ConfigError: Arrivals are missing or said twice, an engine is not there, or a profile is
            wrong.
    """
    for at, engines in enumerate(scenario.fleet):
        _check_engines(engines, where=f"{where}: fleet[{at}]")
    size = sum(engines.count for engines in scenario.fleet)
    for outage in scenario.outages:
        if outage.engine >= size:
            raise ConfigError(
                f"{where}: outages",
                wanted=f"an engine from 0 to {size - 1}",
                got=str(outage.engine),
                fix="count engines from 0 in the order of the fleet",
            )
    clients = [scenario.client, *(v.client for v in scenario.variants if v.client is not None)]
    for client in clients:
        _check_client(client, scenario.workload, where=where)
    for scaled in (scenario.autoscaling, *(v.autoscaling for v in scenario.variants)):
        if scaled is not None:
            policies.make_policy(scaled.policy, scaled.params, where=f"{where}: autoscaling")
    names = [variant.name for variant in scenario.variants]
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise ConfigError(
            f"{where}: strategies",
            wanted="names that differ",
            got=f"{twice[0]!r} more than once",
            fix="give each variant its own name",
        )


def _check_engines(engines: EngineGroup, *, where: str) -> None:
    try:
        engines.resolved()
    except ConfigError as error:
        # The same, with the place in the scenario.
        raise ConfigError(where, wanted=error.wanted, got=error.got, fix=error.fix) from None


def _check_client(client: Client, workload: Workload, *, where: str) -> None:
    ways = (client.users is not None) + (client.rate_per_s is not None)
    wanted = 0 if isinstance(workload, TIMED) else 1
    if ways != wanted:
        raise ConfigError(
            f"{where}: client",
            wanted="no users and no rate_per_s with a trace or groups, which have times of their own"
            if not wanted
            else "one of users (closed loop) and rate_per_s (Poisson arrivals)",
            got=f"{ways} of them",
            fix="say how requests are offered once",
        )
