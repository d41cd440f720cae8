"""Reading the configuration again while requests are routed."""

from __future__ import annotations

import argparse
import asyncio
import threading

import pytest

from extproc.cli import flags
from extproc.config import loader, reloading
from extproc.config.pool_sections import PoolSource, SchedulingSection
from extproc.config.settings import LimitsSection, ScrapeSection, ServerSection, Settings
from extproc.decision import Decision
from extproc.endpoint import Endpoint
from extproc.request import HttpRequest
from extproc.server import app, reload
from tests.support.config_text import HEAD
from tests.support.seeded import examples

RAW = HttpRequest({":method": "POST", ":path": "/v1/completions"}, b'{"model": "m", "prompt": "x"}')

#: Reloads between which requests are routed.
TURNS = examples(60)


class ReloadScene:
    """An endpoint picker that follows its configuration file; `on_read` is called after a read."""

    def __init__(self, path):
        self.path = path
        self.on_read = lambda: None
        settings = self.read()
        self.picker = app.EndpointPickerProcess(settings, clock=lambda: 1.0)
        self.parts = self.picker.pool_registry.by_name[""].parts
        self.parts.store.set_endpoints([Endpoint("10.0.0.1:8000"), Endpoint("10.0.0.2:8000")], 0.0)
        source = reload.ConfigSource(
            lambda _: [str(path)], lambda: reload.ReadConfiguration(self.read())
        )
        self.reloader = reload.Reloader(
            source,
            settings,
            apply_settings=self.picker.apply_settings,
            on_reload=self.picker.reloads.add,
        )

    def read(self):
        settings = loader.settings(loader.read(self.path))
        self.on_read()
        return settings

    def routed(self):
        outcome = self.parts.director.route(RAW, 1.0)
        assert isinstance(outcome, Decision)
        return outcome.profile


@pytest.fixture
def scene(tmp_path):
    path = tmp_path / "config.yaml"
    path.write_text(HEAD + "scheduling: {strategy: random}\n")
    return ReloadScene(path)


def test_a_changed_file_routes_the_next_request(scene):
    """The new strategy is in force at once; pool and accounts stay."""
    assert scene.routed() == "random"
    decision = scene.parts.director.route(RAW, 1.0)
    reservation = scene.parts.director.reserve(decision, 1.0)
    scene.path.write_text(HEAD + "scheduling: {strategy: round-robin}\ndecisions: {header: true}\n")
    asyncio.run(scene.reloader.step())
    assert scene.routed() == "round-robin"
    assert scene.picker.servicer.shared.settings.format_decision is not None
    assert sum(m.account.in_flight for m in scene.parts.store.pool.members) == 1
    scene.parts.director.release(reservation, 2.0)
    assert scene.picker.counters.reloads == {"ok": 1}


def test_an_unchanged_file_is_not_read(scene):
    """Looking costs a stat."""
    asyncio.run(scene.reloader.step())
    assert not scene.picker.counters.reloads


def test_sighup_reloads_an_unchanged_file(scene):
    """Asked for, it is read though nothing changed."""
    scene.reloader.request_reload()
    asyncio.run(scene.reloader.step())
    assert scene.picker.counters.reloads == {"ok": 1}


@pytest.mark.parametrize(
    "text",
    ["scheduling: {strategy: no-such}\n", "scheduling: {\n", "scheduling: {nonsense: 1}\n"],
)
def test_an_invalid_file_keeps_the_old_configuration(scene, caplog, text):
    """The old strategy stays, the error is logged and counted, and a repaired file heals it."""
    scene.path.write_text(HEAD + text)
    asyncio.run(scene.reloader.step())
    assert scene.routed() == "random"
    assert scene.picker.counters.reload_failed
    (line,) = [record for record in caplog.records if "stays as it was" in record.message]
    assert line.fields["error"]
    scene.path.write_text(HEAD + "scheduling: {strategy: least-request}\n")
    asyncio.run(scene.reloader.step())
    assert scene.routed() == "least-request"
    assert not scene.picker.counters.reload_failed
    assert scene.picker.counters.reloads == {"error": 1, "ok": 1}


def test_a_deleted_file_keeps_the_old_configuration(scene):
    """A ConfigMap that is replaced may be away for a moment."""
    scene.path.unlink()
    asyncio.run(scene.reloader.step())
    assert scene.routed() == "random"
    assert scene.picker.counters.reloads == {"error": 1}


def test_reloader_reads_again_a_file_that_changed_during_the_read(scene):
    """A second write that comes during the reading of the first is not lost."""

    def change():
        scene.on_read = lambda: None
        scene.path.write_text(HEAD + "scheduling: {strategy: least-request}\n")

    scene.on_read = change
    scene.path.write_text(HEAD + "scheduling: {strategy: round-robin}\n")
    asyncio.run(scene.reloader.step())
    assert scene.routed() == "round-robin"
    asyncio.run(scene.reloader.step())
    assert scene.routed() == "least-request"


def test_settings_are_compared_beside_the_event_loop(scene, monkeypatch):
    """Settings of hundreds of pools take longer to compare than a request may wait."""
    threads = set()

    def note(method):
        def noting(*arguments):
            threads.add(threading.current_thread())
            return method(*arguments)

        return noting

    for name in ("find_restart_fields", "apply_live_fields", "find_changes"):
        monkeypatch.setattr(reloading, name, note(getattr(reloading, name)))
    scene.path.write_text(HEAD + "scheduling: {strategy: round-robin}\n")
    asyncio.run(scene.reloader.step())
    assert scene.routed() == "round-robin"
    assert threads
    assert threading.main_thread() not in threads


def test_a_changed_symlink_is_a_change(tmp_path):
    """Kubernetes swaps a mounted ConfigMap by turning a symbolic link around."""
    for name, strategy in (("one", "random"), ("two", "round-robin")):
        (tmp_path / name).mkdir()
        text = HEAD + f"scheduling: {{strategy: {strategy}}}\n"
        (tmp_path / name / "config.yaml").write_text(text)
    link = tmp_path / "now"
    link.symlink_to(tmp_path / "one")
    scene = ReloadScene(link / "config.yaml")
    link.unlink()
    link.symlink_to(tmp_path / "two")
    asyncio.run(scene.reloader.step())
    assert scene.routed() == "round-robin"


def test_fields_that_need_a_restart_are_named(scene, caplog):
    """Ports and prefix schedule stay; the log and a gauge say so."""
    scene.path.write_text(HEAD + "server: {grpc_port: 7}\nprefix: {capacity_blocks: 5}\n")
    asyncio.run(scene.reloader.step())
    assert scene.picker.counters.restart_needed
    line = caplog.records[-1]
    assert line.message == "the configuration needs a restart"
    assert line.fields == {"fields": "server.grpc_port,prefix.capacity_blocks"}


def test_pending_names_fields_that_cannot_change():
    """Live fields of a section that also has fixed ones are not named."""
    old = Settings()
    new = Settings(
        server=ServerSection(metrics_port=1),
        pool=PoolSource(name="x"),
        scrape=ScrapeSection(stale_after_s=9.0, path="/m"),
        limits=LimitsSection(max_streams=5, max_message_bytes=1 << 30),
        scheduling=SchedulingSection(strategy="random"),
        seed=3,
    )
    assert list(reloading.find_restart_fields(old, new)) == [
        "server.metrics_port",
        "pool.name",
        "scrape.path",
        "limits.max_message_bytes",
        "seed",
    ]


async def test_requests_never_see_a_partial_configuration(scene):
    """A request between two reloads is routed by one profile and its own picker."""
    wanted = {
        "random": "random-picker",
        "round-robin": "round-robin",
        "lmetric": "max-score-picker",
    }
    for turn in range(TURNS):
        strategy = list(wanted)[turn % 3]
        scene.path.write_text(HEAD + f"scheduling: {{strategy: {strategy}}}\n" + "#" * turn)
        step = asyncio.ensure_future(scene.reloader.step())
        outcomes = []
        while not step.done():
            outcomes.append(scene.parts.director.route(RAW, 1.0))
            await asyncio.sleep(0)
        outcomes.append(scene.parts.director.route(RAW, 1.0))
        assert all(outcome.picker == wanted[outcome.profile] for outcome in outcomes)
        assert outcomes[-1].profile == strategy
    assert scene.picker.counters.reloads == {"ok": TURNS}


def test_flags_override_the_file_after_a_reload(tmp_path):
    """Flags are applied again at every reload."""
    path = tmp_path / "config.yaml"
    path.write_text(HEAD + "pool: {endpoints: ['10.0.0.1:8000']}\n")
    parser = argparse.ArgumentParser()
    flags.add(parser)
    args, unknown = parser.parse_known_args(["--config-file", str(path), "--strategy", "random"])
    args.unknown_flags = unknown
    path.write_text(HEAD + "pool: {endpoints: ['10.0.0.1:8000']}\nseed: 5\n")
    settings = flags.resolve(args).settings
    assert (settings.seed, settings.scheduling.strategy) == (5, "random")
