from __future__ import annotations

import json

import pytest

from extproc.autoscaling.demand_estimator import (
    DemandEstimator,
    EstimatorSettings,
    PickerCounters,
    TargetObservation,
)
from extproc.autoscaling.interface import PolicyRunner, ReplicaBounds
from extproc.autoscaling.policies import QueueDepthPolicy
from extproc.autoscaling.runtime import state_store
from extproc.autoscaling.runtime.control_loop import LoopState
from extproc.discovery.kubernetes import api_responses

#: State in the format that files have: it must stay readable.
SAVED = (
    '{"at":79229.712898674,"time":1795965931.634687,"pools":{"p":{"scaler":{"kind":"queue-depth",'
    '"at":79229.487327318,"since":79229.10892319,"memory":{"depths":{"begun":79229.10892319,'
    '"samples":[[79229.10892319,0.0],[79229.487327318,0.0]]},"spec":4,'
    '"changed_at":79229.10892319}},"learned":{"at":79229.487327318,'
    '"counters":{"picker_4abdf747":[79229.487327318,{"held":0,"in_flight":0,"arrived":0.0,'
    '"prompt_tokens":0.0,"answered":0.0,"answer_tokens":0.0}]},"rates":{"step_s":0.015,'
    '"prefill_s":0.0001,"decode_s":0.0001,"context_s":2e-7,"context_tokens":500.0,'
    '"adapter_load_s":0.5,"output_tokens":200.0,"evidence":0.0,"reload_s":null,'
    '"copied_ratio":0.0,"max_num_seqs":null},"answers":1.0,"answer_tokens":986.842105263158,'
    '"prompt_tokens":0.0,"done":0.0,"busy_s":0.0,"cold_start_s":60.0,"pressed":0,"available":1,'
    '"spec":4,"starting":[[79229.10892319,3]],"most_available":1},"requested":4}}}'
)


class Watched:
    """A loop's two halves after a minute."""

    def __init__(self, *, until=60):
        self.scaler = PolicyRunner(QueueDepthPolicy(), ReplicaBounds(max=3))
        self.meter = DemandEstimator(EstimatorSettings())
        for now in range(0, until + 1, 5):
            self.look(float(now))

    def look(self, now):
        counters = {"a": PickerCounters(in_flight=2, arrived=now, answered=now)}
        demand = self.meter.read(now, counters, TargetObservation(spec=2, available=2))
        return self.scaler.step(demand)

    @property
    def state(self):
        return LoopState(self.scaler.state(), self.meter.state)


def test_states_are_restored_on_another_clock():
    """Monotonic clocks differ; the time of day says by how much."""
    watched = Watched()
    text = state_store.encode_states({"p": watched.state}, 60.0, 1000.0)
    states, shift_s, _ = state_store.decode_states(text, 7.0, 1010.0)
    # 10 s later by the time of day: what was at 60 is at -3 on this clock.
    assert shift_s == -63.0
    other = Watched(until=-1)
    assert other.scaler.restore(states["p"].scaler, shift_s=shift_s)
    other.meter.restore(states["p"].learned, shift_s=shift_s)
    # It has watched for a whole window: the decision is the one that the first would take.
    assert other.look(7.0) == watched.look(70.0)


def test_a_clock_set_back_gives_no_future_times():
    """Recorded times then count as now."""
    text = state_store.encode_states({}, 60.0, 1000.0)
    assert state_store.decode_states(text, 7.0, 900.0) == ({}, -53.0, "")


def test_unreadable_states_are_skipped():
    """Of one pool or of all; another's state is still read."""
    assert state_store.decode_states("", 1.0, 1.0) == ({}, 0.0, "content")
    assert state_store.decode_states("{", 1.0, 1.0) == ({}, 0.0, "content")
    good = state_store.encode_states({"p": Watched().state}, 60.0, 1000.0)
    broken = good.replace('"pools":{', '"pools":{"q":{"scaler":1},')
    states, _, malformed = state_store.decode_states(broken, 60.0, 1000.0)
    assert (list(states), malformed) == (["p"], "state of 'q'")


@pytest.mark.parametrize(
    ("part", "field", "number"),
    [
        ("scaler", "at", 1e300),
        ("scaler", "since", -1e300),
        ("learned", "at", 1e300),
        ("learned", "cold_start_s", -5.0),
        ("learned", "busy_s", -10.0),
        ("learned", "answers", 1e300),
        ("learned", "spec", -3),
        ("learned", "starting", [[0.0, -1]]),
        ("", "requested", -7),
    ],
)
def test_numbers_out_of_range_are_malformed(part, field, number):
    """Time and replicas that no process saves must not reach a policy or a program."""
    stored = json.loads(state_store.encode_states({"p": Watched().state}, 60.0, 1000.0))
    pool = stored["pools"]["p"]
    (pool[part] if part else pool)[field] = number
    decoded = state_store.decode_states(json.dumps(stored), 60.0, 1000.0)
    assert decoded == ({}, 0.0, "state of 'p'")


def test_saved_states_stay_readable():
    """Another version of extproc wrote the file: its fields and numbers are in range."""
    states, _, malformed = state_store.decode_states(SAVED, 60.0, 1000.0)
    assert (states["p"].requested, states["p"].learned.spec, malformed) == (4, 4, "")
    assert Watched(until=-1).scaler.restore(states["p"].scaler)


class ConfigMapCluster:
    """An API server with one ConfigMap, or refusals."""

    def __init__(self, *refusals):
        self.data = None
        self.methods = []
        self._refusals = dict(refusals)

    async def send(self, method, path, body=None):
        self.methods.append(method)
        if method in self._refusals:
            return api_responses.ApiError(self._refusals[method], "no")
        if method == "GET":
            if self.data is None:
                return api_responses.ApiError(404, "not there")
            return state_store.msgspec.json.encode({"data": self.data})
        if method == "PATCH" and self.data is None:
            return api_responses.ApiError(404, "not there")
        self.data = {**(self.data or {}), **body["data"]}
        return b"{}"


def config_map_store(cluster):
    return state_store.ConfigMapStateStore(
        cluster, namespace="n", name="m", clock=lambda: 60.0, time=lambda: 1000.0
    )


async def test_a_missing_config_map_is_created():
    """First created, then patched, then read."""
    cluster = ConfigMapCluster()
    subject = config_map_store(cluster)
    assert await subject.load() == ({}, 0.0)
    await subject.save({"p": Watched().state})
    await subject.save({"p": Watched().state})
    assert cluster.methods == ["GET", "PATCH", "POST", "PATCH"]
    states, shift_s = await subject.load()
    assert (list(states), shift_s) == (["p"], 0.0)


async def test_missing_permissions_are_logged_once(caplog):
    """With what to grant."""
    subject = config_map_store(ConfigMapCluster(("PATCH", 403), ("GET", 403)))
    await subject.save({})
    await subject.save({})
    (message,) = caplog.messages
    assert 'resources: ["configmaps"], verbs: ["patch"]' in message
    assert await subject.load() is None


async def test_state_is_stored_in_a_file_without_a_cluster(tmp_path):
    """Written whole or not at all; nothing is there at first."""
    clock = [60.0, 1000.0]
    path = tmp_path / "state.json"
    subject = state_store.FileStateStore(path, clock=lambda: clock[0], time=lambda: clock[1])
    assert await subject.load() == ({}, 0.0)
    state = Watched().state
    await subject.save({"p": state})
    clock[:] = [7.0, 1010.0]
    states, shift_s = await subject.load()
    assert (states["p"].scaler.at, shift_s) == (state.scaler.at, -63.0)
    assert [entry.name for entry in tmp_path.iterdir()] == ["state.json"]


async def test_an_unwritable_file_is_logged_once(tmp_path, caplog):
    """Scaling goes on without it."""
    subject = state_store.FileStateStore(
        tmp_path / "none" / "state.json", clock=lambda: 0.0, time=lambda: 0.0
    )
    for _ in range(2):
        await subject.save({})
    assert caplog.text.count("cannot be written: No such file or directory") == 1
    subject = state_store.FileStateStore(tmp_path, clock=lambda: 0.0, time=lambda: 0.0)
    assert await subject.load() is None
    assert "cannot be read: Is a directory" in caplog.text


async def test_a_malformed_file_is_kept_beside_the_next_save(tmp_path, caplog):
    """A warning names the copy, or why there is none; the state is then saved as usual."""
    path = tmp_path / "state.json"
    subject = state_store.FileStateStore(path, clock=lambda: 0.0, time=lambda: 0.0)
    path.write_bytes(b"{garbage\xff")
    assert await subject.load() == ({}, 0.0)
    (message,) = caplog.messages
    assert f"{path}: expected what extproc saved, got malformed content" in message
    assert f"{path}.broken keeps it" in message
    await subject.save({})
    assert (tmp_path / "state.json.broken").read_bytes() == b"{garbage\xff"
    caplog.clear()
    assert await subject.load() == ({}, 0.0)
    assert not caplog.messages
    (tmp_path / "state.json.broken").unlink()
    (tmp_path / "state.json.broken").mkdir()
    path.write_text("{")
    assert await subject.load() == ({}, 0.0)
    assert "state.json.broken cannot be written: Is a directory" in caplog.text


async def test_an_empty_file_is_malformed(tmp_path, caplog):
    """A file without content is not what was saved; a disk that is full may leave it."""
    path = tmp_path / "state.json"
    path.touch()
    subject = state_store.FileStateStore(path, clock=lambda: 0.0, time=lambda: 0.0)
    assert await subject.load() == ({}, 0.0)
    assert "got malformed content" in caplog.text
    assert (tmp_path / "state.json.broken").exists()


async def test_a_malformed_config_map_is_logged(caplog):
    """The pool whose state is dropped is named."""
    cluster = ConfigMapCluster()
    subject = config_map_store(cluster)
    text = state_store.encode_states({"p": Watched().state}, 60.0, 1000.0)
    cluster.data = {"pools.json": text.replace('"pools":{', '"pools":{"q":{"scaler":1},')}
    states, _ = await subject.load()
    assert list(states) == ["p"]
    assert "ConfigMap n/m: expected what extproc saved, got malformed state of 'q'" in caplog.text
