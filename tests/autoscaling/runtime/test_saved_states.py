"""Saved states of autoscaling: what a replica keeps, and what another one continues from."""

from __future__ import annotations

import asyncio
import contextlib

import msgspec
import pytest

from extproc.autoscaling.runtime.control_loop import ControlLoop
from extproc.autoscaling.runtime.state_store import ConfigMapStateStore
from tests.autoscaling import demands
from tests.autoscaling.runtime.test_autoscaler import RULES, AutoscalerFixture


class StateCluster:
    """Keeps what is written to it."""

    async def open(self):
        pass


@pytest.fixture
def remembered(monkeypatch):
    """Content of the ConfigMap, and what is written to it."""
    state = {"load": ({}, 0.0), "saved": {}}

    async def loaded(_):
        return state["load"]

    async def saved(_, pools):
        state["saved"] = dict(pools)

    monkeypatch.setattr(ConfigMapStateStore, "load", loaded)
    monkeypatch.setattr(ConfigMapStateStore, "save", saved)
    return state


async def test_a_discovered_pool_continues_from_the_state_of_another_replica(remembered):
    """Also when it is found later, and until then nothing of it is forgotten."""
    other = AutoscalerFixture()
    other.bring("a/x")
    loop: ControlLoop = other.subject.loops["a/x"]
    loop.scaler.step(demands.demand(now=1.0, spec=1))
    remembered["load"] = ({"a/x": loop.state(), "a/none": loop.state()}, 0.0)
    fixture = AutoscalerFixture()
    fixture.subject._cluster = StateCluster()
    fixture.listed = False
    await fixture.subject.start()
    await fixture.subject._save(fixture.subject._state_store)
    assert sorted(remembered["saved"]) == ["a/none", "a/x"]
    fixture.bring("a/x")
    assert fixture.subject.loops["a/x"].state().scaler == loop.state().scaler
    fixture.listed = True
    await fixture.subject._save(fixture.subject._state_store)
    assert sorted(remembered["saved"]) == ["a/x"]


async def test_times_of_a_state_stay_right_over_a_process_that_finds_no_pool(remembered):
    """Each process has another clock; the one in between saves the state as it was."""
    other = AutoscalerFixture()
    other.bring("a/x")
    loop = other.subject.loops["a/x"]
    loop.scaler.step(demands.demand(now=1.0, spec=1))
    remembered["saved"] = {"a/x": loop.state()}
    for lead_s in (100.0, 20.0):
        remembered["load"] = remembered["saved"], lead_s
        fixture = AutoscalerFixture()
        fixture.subject._cluster = StateCluster()
        fixture.listed = False
        await fixture.subject.start()
        await fixture.subject._save(fixture.subject._state_store)
    fixture.bring("a/x")
    assert fixture.subject.loops["a/x"].state().scaler.at == loop.state().scaler.at + 120.0


async def test_the_state_of_a_pool_is_saved_while_its_annotation_is_invalid(remembered):
    """A process that starts once it is corrected goes on with it; a pool that is gone has none."""
    fixture = AutoscalerFixture()
    fixture.subject._cluster = StateCluster()
    await fixture.subject.start()
    fixture.bring("a/x", max="2")
    loop = fixture.subject.loops["a/x"]
    loop.scaler.step(demands.demand(now=1.0, spec=1))
    fixture.bring("a/x", max="thre")
    await fixture.subject.hand_over()
    assert remembered["saved"] == {"a/x": loop.state()}
    fixture.take_away("a/x")
    await fixture.subject.hand_over()
    assert remembered["saved"] == {}


def remember_pool(remembered):
    """Save the state of the pool a/x as of two minutes ago; returns it."""
    other = AutoscalerFixture()
    other.bring("a/x")
    loop = other.subject.loops["a/x"]
    loop.scaler.step(demands.demand(now=1.0, spec=1))
    state = loop.state()
    remembered["load"] = ({"a/x": state}, 120.0)
    return state


async def test_saved_state_outlasts_a_start_while_the_annotation_is_invalid(remembered, caplog):
    """It is kept without a warning while its pool exists; a later pool of its name is a new one."""
    state = remember_pool(remembered)
    fixture = AutoscalerFixture()
    fixture.subject._cluster = StateCluster()
    await fixture.subject.start()
    fixture.bring("a/x", max="thre")
    await fixture.subject.hand_over()
    assert remembered["saved"] == {"a/x": msgspec.structs.replace(state, shift_s=120.0)}
    assert not [record for record in caplog.records if record.levelname == "WARNING"]
    fixture.bring("a/x", max="3")
    assert fixture.subject.loops["a/x"].state().scaler.at == state.scaler.at + 120.0
    again = AutoscalerFixture()
    again.subject._cluster = StateCluster()
    await again.subject.start()
    again.bring("a/x", max="thre")
    again.take_away("a/x")
    again.bring("a/x", max="3")
    assert again.subject.loops["a/x"].state().scaler.at == 0.0


async def test_saved_state_without_a_pool_is_dropped_with_a_warning(tmp_path, caplog):
    """It is not counted as restored, and a copy of the file keeps it."""
    caplog.set_level("INFO", "extproc.server")
    path = tmp_path / "state.json"
    fixture = AutoscalerFixture(f"{RULES}, state_file: {path}")
    fixture.bring("a/x", "a/y")
    await fixture.subject.hand_over()
    text = path.read_text()
    assert '"a/y"' in text
    path.write_text(text.replace('"a/y"', '"a/old"'))
    again = AutoscalerFixture(f"{RULES}, state_file: {path}")
    again.bring("a/x", "a/y")
    await again.subject._restore_states()
    assert caplog.messages[-1] == "autoscaling: going on with what was kept of 1 pools"
    await again.subject.hand_over()
    await again.subject.hand_over()
    (message,) = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert "got also that of 1 others ('a/old')" in message
    assert message.endswith("state.json.broken keeps it")
    assert '"a/old"' in (tmp_path / "state.json.broken").read_text()
    assert '"a/old"' not in path.read_text()


async def test_a_standby_drops_saved_state_without_a_pool(remembered):
    """A later pool of its name is a new one there, too; a standby writes nothing."""
    remember_pool(remembered)
    fixture = AutoscalerFixture()
    fixture.leads = False
    fixture.subject._cluster = StateCluster()
    await fixture.subject.start()
    running = asyncio.ensure_future(fixture.subject.run())
    fixture.bring("a/y")
    fixture.take_away("a/y")
    for _ in range(20):
        await asyncio.sleep(0)
    fixture.bring("a/x")
    assert fixture.subject.loops["a/x"].state().scaler.at == 0.0
    assert remembered["saved"] == {}
    running.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await running


async def test_a_state_that_cannot_be_read_at_the_start_is_read_before_it_is_written(remembered):
    """A refused read costs nothing that was learned; the number requested meanwhile stays."""
    other = AutoscalerFixture()
    other.bring("a/x")
    loop = other.subject.loops["a/x"]
    loop.scaler.step(demands.demand(now=1.0, spec=1))
    remembered["load"] = None
    fixture = AutoscalerFixture()
    fixture.subject._cluster = StateCluster()
    await fixture.subject.start()
    fixture.bring("a/x")
    fixture.subject.loops["a/x"].actuator.restore(2)
    await fixture.subject.loops["a/x"].step()
    await fixture.subject._save(fixture.subject._state_store)
    assert remembered["saved"] == {}
    saved = msgspec.structs.replace(loop.state(), requested=0)
    remembered["load"] = ({"a/x": saved}, 0.0)
    await fixture.subject._save(fixture.subject._state_store)
    assert remembered["saved"]["a/x"].scaler == loop.state().scaler
    assert remembered["saved"]["a/x"].requested == 2


async def test_loops_run_and_end_with_their_pools(remembered):
    """A pool that comes is looked at, one that is gone is not."""
    looked = asyncio.Queue()
    fixture = AutoscalerFixture(
        "[{annotations: false}]", on_step=lambda loop: looked.put_nowait(loop.name)
    )
    running = asyncio.ensure_future(fixture.subject.run())
    fixture.bring("a/x")
    async with asyncio.timeout(300.0):
        assert await looked.get() == "a/x"
    tasks = {task.get_name() for task in asyncio.all_tasks()}
    assert {"autoscaling a/x", "autoscaling a/x, acting"} & tasks
    fixture.take_away("a/x")
    fixture.bring("a/y")
    async with asyncio.timeout(300.0):
        while await looked.get() != "a/y":
            pass
    assert not {task for task in asyncio.all_tasks() if "a/x" in task.get_name()}
    running.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await running
