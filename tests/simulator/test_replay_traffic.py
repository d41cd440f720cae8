"""Requests and engines of recordings, as the simulator takes them."""

import msgspec

from extproc.cli import main
from extproc.simulator import replay
from extproc.simulator.fleet import scenario, simulation, workloads
from extproc.simulator.fleet.sim_request import RequestSpec, SimSession
from tests.recording.test_recorder import a_candidate, a_decision, add
from tests.routing import test_header_profiles
from tests.simulator.fleet import builders
from tests.simulator.test_replay_refusals import changed_example
from tests.support import recordings

CONFIG = """apiVersion: extproc/v1alpha1
kind: ExtProcConfig
scheduling:
  profile:
    name: gpu
    filters: [{kind: label-selector-filter, params: {matchLabels: {tier: gpu}}}]
    scorers: [{kind: topology-affinity-scorer, weight: 1.0}]
"""


def test_estimates_follow_the_rules_of_a_model(tmp_path):
    """Decisions of a model with a strategy of its own are estimated as those of that strategy."""

    def name_model(row):
        if row["kind"] == "recording":
            own = {"llama": {"strategy": "round-robin"}}
            row["settings"]["scheduling"] = {"strategy": "adaptive", "models": own}
        if row["kind"] == "decision":
            row["model"] = "llama"

    path = changed_example(tmp_path, name_model)
    loaded = replay.load(path, strategies=["round-robin"], configs=())
    definition = replay.scenario_of(loaded, [1])
    recorded, other = (replay.simulate(definition, c, seed=1) for c in loaded.columns)
    assert recorded.ttft_s == other.ttft_s
    assert loaded.agreements[0].ratio == 1.0


def test_a_usage_that_cannot_be_fills_no_memory(tmp_path):
    """A request of two billion tokens is far shorter in a simulation, and still refused."""

    def exaggerate(row):
        if row["kind"] == "end" and row["n"] == 7:
            row |= {"prompt_tokens": 2**31 - 1, "output_tokens": 2**31 - 1}

    loaded = replay.load(changed_example(tmp_path, exaggerate), strategies=(), configs=())
    spec = max((r.spec for r in loaded.traffic.requests), key=lambda spec: spec.prompt_tokens)
    assert (spec.prompt_tokens, spec.output_tokens) == (10_000_000, 10_000_000)
    assert len(spec.keys) <= 20_000_000 // 16


def test_simulated_requests_take_the_profile_that_a_header_names():
    """An unknown one, as of another strategy, is as good as none."""
    roles = [{"llm-d.ai/role": role} for role in ("prefill", "decode")]
    definition = builders.a_scenario(
        workloads.FixedWorkload(
            [
                SimSession([RequestSpec(64, 2, [], profile=name)], at=float(at))
                for at, name in enumerate(("prefill", "prefill", "", "decode", "adaptive"))
            ]
        ),
        fleet=[scenario.EngineGroup(count=1, profile="demo", labels=labels) for labels in roles],
    )
    settings = test_header_profiles.settings()
    metrics = simulation.Simulation(definition, settings, seed=1).run()
    assert [endpoint.requests for endpoint in metrics.summary().endpoints] == [2, 3]


def recorded(tmp_path, *decisions):
    """A recording of decisions: time, model and candidates of each, the first of which is chosen."""
    active = recordings.recordings()
    recording = active.start()
    for now, model, numbers, has_candidates in decisions:
        decision = a_decision([a_candidate(n) for n in numbers])
        request = msgspec.structs.replace(decision.request, model=model)
        decision = msgspec.structs.replace(decision, request=request)
        if not has_candidates:
            decision = msgspec.structs.replace(decision, candidates=())
        add(active, decision, now=now)
    path = tmp_path / "decisions.jsonl"
    path.write_bytes(recording.take(1000))
    return path


def test_engines_stay_while_no_request_needs_them(tmp_path):
    """Those that left are missing among later candidates for the same model."""
    path = recorded(
        tmp_path,
        (10.0, "llama", (1, 2, 9), True),
        (11.0, "qwen", (3, 4), True),
        (12.0, "math", (5,), False),
        (13.0, "llama", (2, 1), True),
        (100.0, "llama", (1, 2), True),
    )
    loaded = replay.load(path, strategies=(), configs=())
    assert len(loaded.fleet) == 5
    assert [request.node >= 0 for request in loaded.traffic.requests] == [True] * 5


def test_engines_have_the_labels_of_the_recording(tmp_path, capsys):
    """A strategy that filters by them finds its engines; it is noted which of its plugins have no effect."""

    def label(row):
        if row["kind"] == "endpoint":
            row["labels"] = {"tier": "gpu"}

    path = changed_example(tmp_path, label)
    config = tmp_path / "gpu.yaml"
    config.write_text(CONFIG)
    flags = ["--seeds", "1", "--jobs", "1"]
    assert main.main(["replay", str(path), "--config", str(config), *flags]) == 0
    out, err = capsys.readouterr()
    assert "112 requests that both answered" in out
    assert "warning: gpu: plugins that read headers have no effect" in err
