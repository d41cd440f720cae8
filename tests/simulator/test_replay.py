import json
import math

import msgspec
import pytest

from extproc.cli import main
from extproc.endpoint import Load, StepTimeModel
from extproc.errors import ConfigError
from extproc.simulator import replay, ttft_comparison
from extproc.simulator.fleet import client, run_metrics, scenario, sim_request, workloads
from extproc.simulator.traffic import SessionBuilder, TrafficRequest
from tests.recording.test_recorder import a_candidate, a_decision, add
from tests.simulator.fleet import builders
from tests.support import recordings

A_SUMMARY = run_metrics.RunMetrics().summary()
FLEET = [scenario.EngineGroup(count=3, profile="l4-8b-fp8")]


def write(tmp_path, strategy, workload, *, fleet=FLEET, shows_usage=True, **facts):
    """A recording of a simulated run, and the mean time to its first tokens."""
    definition = builders.a_scenario(workload, fleet=fleet, **facts)
    lines, metrics = recordings.record(
        definition, builders.settings(strategy), shows_usage=shows_usage
    )
    path = tmp_path / "decisions.jsonl"
    path.write_bytes(lines)
    return path, metrics.summary().ttft_s.mean


def talks(count=60):
    """Conversations whose turns find each other's prefixes."""
    return builders.conversations(
        count, prompt=builders.spread_out(400), output=builders.spread_out(60)
    )


@pytest.mark.parametrize(
    "strategy", ["adaptive", "balanced", "round-robin", "least-load", "random"]
)
def test_the_recorded_strategy_decides_alike(tmp_path, strategy):
    """A decision made again on the recorded state has the recorded endpoint."""
    path, _ = write(tmp_path, strategy, talks(), client=client.Client(users=12))
    (agreement,) = replay.load(path, strategies=(), configs=()).agreements
    assert agreement.decisions == 240
    assert agreement.ratio >= 0.99
    if strategy in {"adaptive", "round-robin"}:
        assert agreement.by_chance <= 2


@pytest.mark.slow
def test_ties_among_many_endpoints_are_decided_alike(tmp_path):
    """Chance among twenty equal endpoints takes more draws than among two."""
    fleet = [scenario.EngineGroup(count=20, profile="l4-8b-fp8")]
    path, _ = write(tmp_path, "least-request", talks(), fleet=fleet, client=client.Client(users=2))
    (agreement,) = replay.load(path, strategies=(), configs=()).agreements
    assert agreement.ratio >= 0.99
    assert agreement.by_chance > agreement.decisions / 2


def test_another_strategy_decides_otherwise(tmp_path):
    """Agreement is no matter of course."""
    path, _ = write(tmp_path, "adaptive", talks(), client=client.Client(users=12))
    loaded = replay.load(path, strategies=["round-robin"], configs=())
    assert loaded.agreements[1].ratio < 0.7


@pytest.mark.parametrize("strategy", ["random", "round-robin"])
def test_recorded_decisions_can_be_simulated_as_they_are(tmp_path, strategy):
    """Requests go to the engines of the recording, also where chance had chosen them."""
    path, measured_s = write(tmp_path, strategy, talks(), client=client.Client(users=12))
    loaded = replay.load(path, strategies=(), configs=())
    off = msgspec.structs.replace(loaded.settings.scheduling, respect_subset=False)
    loaded = msgspec.structs.replace(
        loaded, settings=msgspec.structs.replace(loaded.settings, scheduling=off)
    )
    definition = replay.scenario_of(loaded, [1])
    as_recorded = replay.simulate_as_recorded(loaded, definition)
    assert as_recorded.summary.ttft_s.mean == pytest.approx(measured_s, rel=0.1)
    nodes = [request.node for request in loaded.traffic.requests]
    sent = [endpoint.requests for endpoint in as_recorded.summary.endpoints]
    assert sent == [nodes.count(n) for n in range(len(loaded.fleet))]


@pytest.mark.parametrize(
    ("shows_usage", "unshown"),
    [(True, ""), (False, "estimated: the length of 14 answers, whose usage was not shown")],
)
def test_answers_without_a_recorded_end_are_counted_apart(tmp_path, capsys, shows_usage, unshown):
    """More of the streams shown to extproc would not make their length known."""
    facts = {"shows_usage": shows_usage, "client": client.Client(users=2)}
    path, _ = write(tmp_path, "round-robin", talks(4), **facts)
    lines = path.read_bytes().splitlines(keepends=True)
    ends = [n for n, line in enumerate(lines) if line.startswith(b'{"kind":"end"')]
    path.write_bytes(b"".join(line for n, line in enumerate(lines) if n not in ends[-2:]))
    assert main.main(["replay", str(path), "--jobs", "1", "--seeds", "1"]) == 0
    out = capsys.readouterr().out
    assert "estimated: the length of 2 answers without a recorded end\n" in out
    assert unshown in out
    assert ("usage was not shown" in out) == bool(unshown)


def test_a_rotation_starts_where_it_did(tmp_path):
    """New decisions of a recorded rotation visit the same engines in the same order, by any seed."""
    fleet = [scenario.EngineGroup(count=12, profile="l4-8b-fp8")]
    workload = workloads.Independent(
        requests=5, prompt=builders.spread_out(400), output=builders.spread_out(4), adapters=0
    )
    definition = builders.a_scenario(workload, fleet=fleet, client=client.Client(rate_per_s=1.0))
    lines, _ = recordings.record(definition, builders.settings("round-robin"))
    path = tmp_path / "decisions.jsonl"
    path.write_bytes(lines)
    loaded = replay.load(path, strategies=["round-robin"], configs=())
    again = replay.scenario_of(loaded, [1, 2, 3])
    results = replay.simulate_all(
        again,
        loaded.columns,
        recorded=replay.with_recorded_start(loaded, again),
        places=loaded.traffic.places,
        jobs=1,
        on_run=lambda _: None,
    )
    nodes = [request.node for request in loaded.traffic.requests]
    recorded = [nodes.count(n) for n in range(12)]
    by_seed, fresh = results.values()
    for run in by_seed.values():
        assert [endpoint.requests for endpoint in run.summary.endpoints] == recorded
    starts = {
        tuple(endpoint.requests for endpoint in run.summary.endpoints) for run in fresh.values()
    }
    assert starts != {tuple(recorded)}


def test_a_turn_repeats_the_answer_before_it(tmp_path):
    """The simulated engine finds prompt and answer of the turn before, as the real one did."""
    path, _ = write(tmp_path, "adaptive", talks(8), client=client.Client(users=2))
    traffic = replay.load(path, strategies=(), configs=()).traffic
    assert len(traffic.sessions) == 8
    for session in traffic.sessions:
        for before, after in zip(session.specs, session.specs[1:], strict=False):
            held = (before.prompt_tokens + before.output_tokens) // 16
            assert list(after.keys[:held]) == list(before.keys[:held])
            assert len(after.keys) > held


def test_a_scaled_recording_has_shorter_pauses_and_no_fidelity(tmp_path, capsys):
    """Users of twice the load arrive, and go on, twice as fast; nothing was measured of that."""
    path, _ = write(tmp_path, "round-robin", talks(), client=client.Client(users=12))
    loaded = replay.load(path, strategies=(), configs=())
    scaled = loaded.scaled(2.0)
    for before, after in zip(loaded.traffic.sessions, scaled.traffic.sessions, strict=True):
        assert after.at == before.at / 2.0
        assert after.think_s == [seconds / 2.0 for seconds in before.think_s]
    assert scaled.traffic.duration_s == loaded.traffic.duration_s / 2.0
    assert scaled.since_s == loaded.since_s / 2.0
    flags = ["--rate-scale", "2", "--jobs", "1", "--seeds", "1"]
    assert main.main(["replay", str(path), *flags]) == 0
    out = capsys.readouterr().out
    assert f"{path} at 2 times its rate" in out
    assert "Agreement" in out
    assert "Fidelity" not in out


@pytest.mark.parametrize(("ended_s", "sessions"), [(0.9, 1), (1.05, 1), (1.5, 2)])
def test_a_turn_may_come_before_the_picker_sees_the_end(ended_s, sessions):
    """A client goes on with the last byte; what comes earlier is asked beside the first."""
    builder = SessionBuilder()
    for at in (0.0, 1.0):
        spec = sim_request.RequestSpec(prompt_tokens=16, output_tokens=1, keys=[1])
        request = TrafficRequest(at, spec, answer_ended_s=at + ended_s)
        builder.add(request, conversation=7, chain=[1])
    built = builder.sessions()
    assert len(built) == sessions
    assert all(seconds >= 0.0 for session in built for seconds in session.think_s)


@pytest.mark.parametrize(
    ("node", "cached_tokens", "num_repeated"),
    [
        (0, 160, 10),  # reasoning: the answer is not repeated
        (0, 240, 15),
        (0, 1000, 20),
        (0, 144, 10),  # another tag opens the answer
        (0, 0, 20),  # evicted, which does not show what is repeated
        (0, None, 20),
        (1, 160, 20),  # another engine never had the answer
        (-1, 160, 20),
    ],
)
def test_a_turn_repeats_as_much_of_the_answer_as_its_engine_found(
    node, cached_tokens, num_repeated
):
    """Simulated engines find nothing where the next prompt has something else."""
    builder = SessionBuilder()
    first = sim_request.RequestSpec(prompt_tokens=160, output_tokens=160, keys=list(range(10)))
    second = sim_request.RequestSpec(
        prompt_tokens=480, output_tokens=1, keys=[*range(10), *range(100, 120)]
    )
    turns = [
        TrafficRequest(0.0, first, answer_ended_s=1.0, node=min(node, 0)),
        TrafficRequest(2.0, second, node=node, cached_tokens=cached_tokens),
    ]
    builder.add(turns[0], conversation=7, chain=[1])
    builder.add(turns[1], conversation=7, chain=[1, 2])
    answer, prompt = (turn.spec.keys for turn in turns)
    assert len(answer) == num_repeated
    assert prompt == [*answer, *second.keys[num_repeated:]]


def test_cached_tokens_of_a_recording_show_what_turns_repeat(tmp_path):
    """An engine that found no more than the prompt of the turn before had another answer behind it."""
    workload, fleet = talks(1), [scenario.EngineGroup(count=1, profile="l4-8b-fp8")]
    path, _ = write(tmp_path, "adaptive", workload, fleet=fleet, client=client.Client(users=1))
    recorded = [*map(json.loads, path.read_bytes().splitlines())]
    decisions, ends = ([row for row in recorded if row["kind"] == k] for k in ("decision", "end"))
    for before, after in zip(decisions, ends[1:], strict=False):
        after["cached_tokens"] = before["prompt_tokens"]
    path.write_text("\n".join(map(json.dumps, recorded)))
    (session,) = replay.load(path, strategies=(), configs=()).traffic.sessions
    assert len(session.specs) == 4
    for spec in session.specs:
        assert len(spec.keys) == spec.prompt_tokens // 16


def test_failed_requests_are_left_out_and_noted(tmp_path):
    """A refused request costs an engine nothing."""
    outage = scenario.Outage(engine=0, at_s=1.0, how="errors", back_s=3.0)
    path, _ = write(
        tmp_path, "round-robin", talks(), client=client.Client(users=12), outages=[outage]
    )
    traffic = replay.load(path, strategies=(), configs=()).traffic
    assert traffic.num_failed > 0
    assert len(traffic.requests) + traffic.num_failed == 240


def test_the_command_shows_agreement_estimates_and_a_verdict(tmp_path, capsys):
    """Round robin loses the prefixes that adaptive keeps, and the verdict says so."""
    path, _ = write(tmp_path, "round-robin", talks(), client=client.Client(users=12))
    result = tmp_path / "result.json"
    argv = ["replay", str(path), "--strategy", "adaptive", "--jobs", "1", "--seeds", "1"]
    assert main.main([*argv, "--json", str(result)]) == 0
    out = capsys.readouterr().out
    assert "240 requests in" in out
    assert "recorded (round-robin): 240 of 240 (100.0%)" in out
    assert "Fidelity: mean TTFT" in out
    assert "Verdict: adaptive would be better: mean TTFT -" in out
    everything = json.loads(result.read_text())
    strategies = ["recorded (round-robin)", "adaptive"]
    assert [column["strategy"] for column in everything["columns"]] == strategies
    assert [row["strategy"] for row in everything["agreements"]] == strategies
    assert everything["agreements"][0]["agreed"] == 240
    assert everything["fidelity"]["measured_s"] > 0.0
    assert [row["high"] < 1.0 for row in everything["comparisons"]] == [True]
    assert everything["verdicts"][0] in out


@pytest.mark.slow
def test_equal_strategies_differ_by_noise(tmp_path):
    """No verdict comes of a difference that chance explains."""
    path, _ = write(tmp_path, "least-load", talks(), client=client.Client(users=12))
    loaded = replay.load(path, strategies=["least-load"], configs=())
    definition = replay.scenario_of(loaded, [1, 2])
    results = replay.simulate_all(
        definition, loaded.columns, places=loaded.traffic.places, jobs=1, on_run=lambda _: None
    )
    assert replay.compare(results, "least-load", loaded.columns[0].name).is_noise


def test_a_strategy_that_answers_fewer_requests_is_not_better():
    """Requests that it left unanswered are in no mean, and may be the slow ones."""
    runs = {
        "all": replay.ReplayRun(A_SUMMARY, [0.1] * 100 + [1.0] * 100),
        "half": replay.ReplayRun(A_SUMMARY, [0.09] * 100 + [math.nan] * 100, unanswered=0.5),
    }
    results = {name: {1: run} for name, run in runs.items()}
    comparison = replay.compare(results, "half", "all")
    assert comparison.ratio == pytest.approx(0.9)
    assert not comparison.is_better
    line = ttft_comparison.verdict_line(comparison)
    assert "would leave 50.0% of the requests unanswered, all 0.0%" in line
    assert "of the 100 requests that both answered" in line
    assert "better:" not in line
    assert "would be worse" in ttft_comparison.verdict_line(replay.compare(results, "all", "half"))


@pytest.mark.parametrize(
    ("ours", "theirs", "reason"),
    [
        ([math.nan] * 2, [0.1] * 2, "ours answered nothing"),
        ([0.1] * 2, [math.nan] * 2, "theirs answered nothing"),
        ([math.nan] * 2, [math.nan] * 2, "ours and theirs answered nothing"),
        ([0.1, math.nan], [math.nan, 0.1], "no request was answered by both ours and theirs"),
    ],
)
def test_the_strategy_without_answers_is_named(ours, theirs, reason):
    """There is no verdict then."""
    runs = {
        name: {1: replay.ReplayRun(A_SUMMARY, ttft_s, sum(map(math.isnan, ttft_s)) / 2)}
        for name, ttft_s in (("ours", ours), ("theirs", theirs))
    }
    line = ttft_comparison.verdict_line(replay.compare(runs, "ours", "theirs"))
    assert line == f"Verdict: none, as {reason}"


def test_numbers_of_the_engines_can_be_set(tmp_path):
    """An operator knows what metrics do not show."""
    path, _ = write(tmp_path, "least-load", talks(4), client=client.Client(users=2))
    loaded = replay.load(path, strategies=(), configs=(), limits={"max_num_seqs": 7.0})
    assert {engines.resolved().max_num_seqs for engines in loaded.fleet} == {7}


@pytest.mark.parametrize(
    ("facts", "words"),
    [
        ({"strategies": ["nonsense"]}, "nonsense"),
        ({"strategies": ["adaptive", "adaptive"]}, "names that differ"),
        ({"pool": "other"}, "no name of a pool, as .* got 'other'"),
    ],
)
def test_what_cannot_be_replayed_is_refused(tmp_path, facts, words):
    """Errors say what was expected."""
    path, _ = write(tmp_path, "least-load", talks(4), client=client.Client(users=2))
    with pytest.raises(ConfigError, match=words):
        replay.load(path, **({"strategies": (), "configs": ()} | facts))


def test_a_pool_is_replayed_with_its_own_strategy(tmp_path):
    """The header names what a pool has for itself."""
    path, _ = write(tmp_path, "round-robin", talks(4), client=client.Client(users=2))
    header, *lines = map(json.loads, path.read_bytes().splitlines())
    header["pools"] = {"b": {"scheduling": header["settings"]["scheduling"]}}
    header["settings"] = {"scheduling": {"strategy": "adaptive"}}
    for line in lines:
        if line["kind"] == "decision":
            line["pool"] = "b"
    path.write_text("".join(f"{json.dumps(line)}\n" for line in (header, *lines)))
    loaded = replay.load(path, strategies=(), configs=())
    assert [column.name for column in loaded.columns] == ["recorded (round-robin)"]
    assert loaded.agreements[0].ratio == 1.0


@pytest.mark.parametrize(("pool", "step_s"), [("a", 0.01), ("b", 0.5)])
def test_pools_that_share_addresses_are_replayed_apart(tmp_path, pool, step_s):
    """Each has its own engines and adapters."""
    active = recordings.recordings()
    recording = active.start()
    for now in (10.0, 11.0):
        for name, learned_s in (("a", 0.01), ("b", 0.5)):
            load = Load(at=9.0, running=1.0, adapters=frozenset({f"adapter of {name}"}))
            rates = StepTimeModel(step_s=learned_s, evidence=100.0)
            decision = a_decision([a_candidate(1, load=load, rates=rates)])
            add(active, msgspec.structs.replace(decision, pool=name), now=now)
    path = tmp_path / "decisions.jsonl"
    path.write_bytes(recording.take(1000))
    loaded = replay.load(path, strategies=(), configs=(), pool=pool)
    assert [engines.set["base_s"] for engines in loaded.fleet] == [step_s]
    assert loaded.traffic.adapter_names == {f"adapter of {pool}"}


def test_strategies_without_a_goal_are_compared_with_one_that_has_it(tmp_path):
    """The recorded goal is that of adaptive, and of no other strategy."""
    path, _ = write(tmp_path, "adaptive", talks(4), client=client.Client(users=2))
    header, _, rest = path.read_bytes().partition(b"\n")
    recorded = json.loads(header)
    recorded["settings"]["scheduling"]["goal"] = "throughput"
    path.write_bytes(json.dumps(recorded).encode() + b"\n" + rest)
    loaded = replay.load(path, strategies=["adaptive", "least-load"], configs=())
    goals = [c.settings.scheduling.goal for c in loaded.columns if c.settings is not None]
    assert goals == ["throughput", "throughput", "balanced"]


@pytest.mark.slow
def test_settings_may_change_while_it_is_recorded(tmp_path, capsys):
    """Each part agrees with the strategy that was in force; estimates are of the last one."""
    parts = []
    for number, strategy in enumerate(("round-robin", "adaptive")):
        path, _ = write(tmp_path, strategy, talks(4), client=client.Client(users=2))
        header, _, rest = path.read_bytes().partition(b"\n")
        later = json.loads(header)
        later["unix_s"] += 3600 * number
        parts.append(json.dumps(later).encode() + b"\n" + rest)
    path.write_bytes(b"".join(parts))
    loaded = replay.load(path, strategies=["least-load"], configs=())
    assert [(row.strategy, row.decisions) for row in loaded.agreements] == [
        ("recorded (round-robin)", 16),
        ("least-load", 32),
        ("recorded (adaptive)", 16),
    ]
    assert loaded.agreements[0].ratio == 1.0
    assert loaded.agreements[2].ratio >= 0.9
    assert [column.name for column in loaded.columns] == ["recorded (adaptive)", "least-load"]
    assert main.main(["replay", str(path), "--jobs", "1", "--seeds", "1"]) == 0
    assert "reconfigured: settings changed meanwhile" in capsys.readouterr().out


def test_an_empty_file_is_refused(tmp_path):
    """There is nothing to replay."""
    path = tmp_path / "empty"
    path.write_bytes(b"")
    with pytest.raises(ConfigError, match="a recording"):
        replay.load(path, strategies=(), configs=())


def test_endpoints_are_known_behind_a_reload_without_a_request(tmp_path):
    """A header at the end of a recording forgets none of them."""
    path, _ = write(tmp_path, "adaptive", talks(4), client=client.Client(users=2))
    fleet = replay.load(path, strategies=(), configs=()).fleet
    path.write_bytes(path.read_bytes() + path.read_bytes().partition(b"\n")[0] + b"\n")
    assert len(fleet) == 3
    assert replay.load(path, strategies=(), configs=()).fleet == fleet


def test_the_first_requests_have_the_endpoints_of_their_time(tmp_path):
    """Those that came with a later roll-out took none of them."""
    path, _ = write(tmp_path, "adaptive", talks(4), client=client.Client(users=2))
    lines = path.read_bytes()
    fleet = replay.load(path, strategies=(), configs=()).fleet
    later = lines.replace(b'"unix_s":1000000.0', b'"unix_s":1000600.0')
    path.write_bytes(lines + later.replace(b"10.0.0.", b"10.0.9."))
    assert replay.load(path, strategies=(), configs=(), max_requests=16).fleet == fleet


def test_recorded_requests_have_a_bound(tmp_path):
    """Only the first requests are taken."""
    path, _ = write(tmp_path, "least-load", talks(), client=client.Client(users=12))
    loaded = replay.load(path, strategies=(), configs=(), max_requests=50)
    assert len(loaded.traffic.requests) == 50
    assert any(request.ttft_s for request in loaded.traffic.requests)
