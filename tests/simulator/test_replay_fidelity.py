import math

import msgspec
import pytest

from extproc.simulator import profiles, replay, replay_command
from extproc.simulator.fleet import client, scenario
from tests.simulator.fleet import builders
from tests.simulator.test_replay import A_SUMMARY, talks, write


@pytest.mark.parametrize("shows_usage", [True, False])
@pytest.mark.parametrize("strategy", ["adaptive", "round-robin"])
def test_estimates_are_near_what_was_measured(tmp_path, strategy, shows_usage):
    """The mean time to the first token is within 15 %, also where no usage was shown."""
    path, measured_s = write(
        tmp_path, strategy, talks(), client=client.Client(users=12), shows_usage=shows_usage
    )
    loaded = replay.load(path, strategies=(), configs=())
    definition = replay.scenario_of(loaded, [1])
    estimated_s = replay.simulate(definition, loaded.columns[0], seed=1).summary.ttft_s.mean
    assert estimated_s == pytest.approx(measured_s, rel=0.15)


@pytest.mark.parametrize("strategy", ["adaptive", "round-robin"])
def test_errors_of_estimates_are_those_of_the_learned_numbers(tmp_path, strategy):
    """With the numbers of the engines in place of learned ones, little is left of the error."""
    path, measured_s = write(tmp_path, strategy, talks(), client=client.Client(users=12))
    engine = profiles.PROFILES["l4-8b-fp8"]
    names = ("base_s", "prefill_s_per_token", "decode_s_per_seq", "context_s_per_token")
    limits = {name: getattr(engine, name) for name in (*names, "token_budget", "lora_load_s")}
    loaded = replay.load(path, strategies=(), configs=(), limits=limits)
    as_recorded = replay.simulate_as_recorded(loaded, replay.scenario_of(loaded, [1]))
    assert as_recorded.summary.ttft_s.mean == pytest.approx(measured_s, rel=0.02)


def test_estimates_hold_for_prompts_longer_than_the_time_between_scrapes(tmp_path):
    """Engines count the tokens of a prompt when it is finished, not as they compute them."""
    workload = builders.conversations(
        40, prompt=builders.spread_out(1500), output=builders.spread_out(150)
    )
    fleet = [scenario.EngineGroup(count=3, profile="a100-8b-bf16")]
    path, measured_s = write(
        tmp_path, "round-robin", workload, fleet=fleet, client=client.Client(users=24)
    )
    loaded = replay.load(path, strategies=(), configs=())
    as_recorded = replay.simulate_as_recorded(loaded, replay.scenario_of(loaded, [1]))
    assert as_recorded.summary.ttft_s.mean == pytest.approx(measured_s, rel=0.1)


def test_fidelity_compares_means_of_the_same_requests(tmp_path):
    """Estimates of long prompts do not count if only answers to short ones were shown."""
    path, _ = write(tmp_path, "adaptive", talks(), client=client.Client(users=12))
    loaded = replay.load(path, strategies=(), configs=())
    requests = [
        msgspec.structs.replace(r, ttft_s=r.ttft_s if r.spec.prompt_tokens < 900 else None)
        for r in loaded.traffic.requests
    ]
    traffic = msgspec.structs.replace(loaded.traffic, requests=requests)
    loaded = msgspec.structs.replace(loaded, traffic=traffic, since_s=0.1 * traffic.duration_s)
    as_recorded = replay.simulate_as_recorded(loaded, replay.scenario_of(loaded, [1]))
    pairs = [
        (request.ttft_s, estimated_s)
        for request, estimated_s in zip(requests, as_recorded.ttft_s, strict=True)
        if request.ttft_s is not None and request.at >= loaded.since_s
    ]
    assert 10 < len(pairs) < len(requests) / 2
    fidelity = replay.measure_fidelity(loaded, as_recorded, [as_recorded])
    means = [sum(column) / len(pairs) for column in zip(*pairs, strict=True)]
    assert [fidelity.measured_s, fidelity.estimated_s] == pytest.approx(means)
    assert fidelity.estimated_s == pytest.approx(fidelity.measured_s, rel=0.2)
    assert as_recorded.summary.ttft_s.mean > 1.1 * fidelity.estimated_s


def test_fidelity_is_unknown_without_a_measured_time(tmp_path):
    """Nothing is compared then."""
    path, _ = write(tmp_path, "adaptive", talks(5), client=client.Client(users=2))
    loaded = replay.load(path, strategies=(), configs=())
    as_recorded = replay.simulate_as_recorded(loaded, replay.scenario_of(loaded, [1]))
    requests = [msgspec.structs.replace(r, ttft_s=None) for r in loaded.traffic.requests]
    traffic = msgspec.structs.replace(loaded.traffic, requests=requests)
    loaded = msgspec.structs.replace(loaded, traffic=traffic)
    fidelity = replay.measure_fidelity(loaded, as_recorded, [as_recorded])
    assert "unknown" in replay_command.fidelity_line(fidelity)


def test_fidelity_is_unknown_without_an_answer(tmp_path):
    """It is not said that nothing was measured."""
    path, _ = write(tmp_path, "adaptive", talks(5), client=client.Client(users=2))
    loaded = replay.load(path, strategies=(), configs=())
    as_recorded = replay.simulate_as_recorded(loaded, replay.scenario_of(loaded, [1]))
    silent = replay.ReplayRun(A_SUMMARY, [math.nan] * len(as_recorded.ttft_s), unanswered=1.0)
    fidelity = replay.measure_fidelity(loaded, as_recorded, [silent])
    assert fidelity.measured_s > 0.0
    line = replay_command.fidelity_line(fidelity)
    assert "Fidelity: unknown, no request" in line
    assert "stream_sample_ratio" not in line
