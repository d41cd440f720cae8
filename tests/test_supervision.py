"""Loops that raise, under virtual time."""

from __future__ import annotations

import ast
import asyncio
import logging
import random
from collections import Counter
from pathlib import Path
from types import SimpleNamespace

import pytest

from extproc import supervision
from extproc.scrape import client
from extproc.server import ext_proc_servicer
from extproc.supervision import (
    LONGEST_PAUSE_S,
    LOOPS,
    REPEAT_S,
    ExceptionLog,
    Supervisor,
    place_of,
)


class SupervisorScene:
    """A supervisor whose pauses take no time; `now` moves by them."""

    def __init__(self):
        self.now = 0.0
        self.pauses = []
        self.subject = Supervisor(clock=lambda: self.now, rng=random.Random(1), sleep=self.sleep)

    async def sleep(self, seconds):
        self.pauses.append(seconds)
        self.now += seconds
        await asyncio.sleep(0)


@pytest.fixture
def scene(caplog):
    caplog.set_level(logging.INFO, logger="extproc.supervision")
    return SupervisorScene()


def raising(*errors):
    """A loop that raises one error after another, and then returns."""
    rest = list(errors)

    async def run():
        if rest:
            raise rest.pop(0)

    return run


def test_a_loop_that_raises_runs_again(scene, caplog):
    """It is counted by loop, logged with its place and without its message, and goes on."""
    asyncio.run(
        scene.subject.keep("scrape", raising(ValueError("a secret prompt")), instance="10.0.0.1")
    )
    assert scene.subject.failures["scrape"] == 1
    assert sum(scene.subject.failures.values()) == 1
    (line,) = caplog.messages
    assert line.startswith("loop scrape (10.0.0.1) failed and goes on: ValueError at ")
    assert "test_supervision.py:" in line
    assert "secret" not in caplog.text


def test_pauses_double_up_to_a_cap(scene):
    """A loop that always fails tries again less and less often, and never less than every 10 s."""
    asyncio.run(scene.subject.keep("xds", raising(*[OSError()] * 12)))
    wanted = [min(LONGEST_PAUSE_S, 0.5 * 2**n) for n in range(12)]
    for pause, most in zip(scene.pauses, wanted, strict=True):
        assert most / 2 <= pause <= most


def test_a_repeated_failure_is_logged_rarely(scene, caplog):
    """One place is logged once in ten minutes, with how often it came; another place at once."""
    run = raising(*[OSError()] * 200)

    async def other():
        raise KeyError

    async def scenario():
        await scene.subject.keep("peer_sync", run)
        await scene.subject.attempt("peer_sync", other())

    asyncio.run(scenario())
    assert scene.now > REPEAT_S
    failed = [line for line in caplog.messages if "failed" in line]
    assert len([line for line in failed if "OSError" in line]) <= 2 + scene.now / REPEAT_S
    assert "times since it was last logged" in caplog.text
    assert len([line for line in failed if "KeyError" in line]) == 1
    assert scene.subject.failures["peer_sync"] == 201


def test_degraded_until_a_step_works(scene, caplog):
    """The loop is degraded from its failure to its next good step, which is logged once."""
    degraded = []
    turns = iter(range(10))

    async def run():
        if next(turns) < 2:
            raise LookupError
        degraded.append(scene.subject.degraded)
        scene.subject.record_success("discovery", "a")
        degraded.append(scene.subject.degraded)
        scene.subject.record_success("discovery", "a")

    asyncio.run(scene.subject.keep("discovery", run, instance="a"))
    assert degraded == [["discovery"], []]
    assert caplog.messages[-1] == "loop discovery works again"
    assert len(caplog.messages) == 2


def test_the_pause_restarts_after_a_successful_step(scene):
    """A loop that worked in between is restarted soon."""
    turns = iter(range(10))

    async def run():
        turn = next(turns)
        if turn == 9:
            return
        if turn == 5:
            scene.subject.record_success("reload")
        raise LookupError

    asyncio.run(scene.subject.keep("reload", run))
    assert scene.pauses[4] > 4.0
    assert scene.pauses[5] <= 0.5


def test_a_loop_is_degraded_until_all_instances_recover(scene):
    """Endpoints fail and recover one by one; the loop is well again with the last of them."""
    subject = scene.subject
    subject.record_failure("scrape", OSError(), instance="a")
    subject.record_failure("scrape", OSError(), instance="b")
    subject.record_success("scrape", "a")
    assert subject.degraded == ["scrape"]
    subject.record_success("scrape", "b")
    assert subject.degraded == []


def test_a_loop_without_failures_for_a_while_is_working(scene, monkeypatch):
    """A loop that reports no steps is well again once it has run for a while."""
    monkeypatch.setattr(supervision, "CALM_S", 0.0)
    turns = iter(range(3))

    async def run():
        if next(turns) == 0:
            raise OSError
        for _ in range(5):
            await asyncio.sleep(0)
        assert scene.subject.degraded == []

    asyncio.run(scene.subject.keep("kubernetes", run))


def test_a_removed_loop_is_not_degraded(scene):
    """A loop that was cancelled, as that of an endpoint that left, leaves nothing behind."""

    async def scenario():
        async def run():
            raise OSError

        task = asyncio.ensure_future(scene.subject.keep("scrape", run, instance="a"))
        while not scene.subject.degraded:
            await asyncio.sleep(0)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        assert task.cancelled()

    asyncio.run(scenario())
    assert scene.subject.degraded == []


def test_only_a_real_cancellation_ends_a_loop(scene):
    """A library that cancels itself must not end a loop without a word."""
    again = asyncio.Event()

    async def run():
        if not scene.subject.failures["peer_sync"]:
            raise asyncio.CancelledError
        again.set()
        await asyncio.Event().wait()

    async def scenario():
        task = asyncio.ensure_future(scene.subject.keep("peer_sync", run))
        await again.wait()
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        assert task.cancelled()

    asyncio.run(scenario())
    assert scene.subject.failures["peer_sync"] == 1


@pytest.mark.parametrize("kind", [MemoryError, RecursionError, AssertionError, ExceptionGroup])
def test_exceptions_of_every_kind_are_survived(scene, kind):
    """Also an allocation that is too large, and the exceptions of a group of tasks."""
    error = ExceptionGroup("several", [OSError()]) if kind is ExceptionGroup else kind()
    asyncio.run(scene.subject.keep("pools", raising(error)))
    assert scene.subject.failures["pools"] == 1


@pytest.mark.parametrize("kind", [SystemExit, KeyboardInterrupt])
def test_an_exit_ends_the_process(scene, kind):
    """The short list of what is not survived."""

    async def run():
        raise kind

    with pytest.raises(kind):
        asyncio.run(scene.subject.keep("pools", run))
    assert not sum(scene.subject.failures.values())


def test_a_failed_attempt_is_counted_and_not_repeated(scene):
    """A callback or a step of the drain that raises stops nothing after it."""
    subject = scene.subject

    def bad():
        raise TypeError

    assert not subject.call("pools", bad, instance="n/p")
    assert subject.call("pools", lambda: None)
    assert not asyncio.run(subject.attempt("drain", raising(OSError())()))
    assert asyncio.run(subject.attempt("drain", raising()()))
    assert (subject.failures["pools"], subject.failures["drain"]) == (1, 1)
    assert subject.degraded == []


def test_callbacks_and_lost_tasks_are_counted(scene, caplog):
    """An exception in a timer or in a task without a waiter is logged and counted, without its text."""

    async def scenario():
        loop = asyncio.get_running_loop()
        loop.set_exception_handler(scene.subject.handle)
        loop.call_soon(lambda: {}["a secret prompt"])
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        loop.call_exception_handler({"message": "something else"})

    asyncio.run(scenario())
    assert scene.subject.failures["callback"] == 1
    assert "KeyError at test_supervision.py:" in caplog.text
    assert "secret" not in caplog.text
    assert caplog.messages[-1] == "event loop: something else"


def test_the_place_is_the_innermost_line_of_the_package():
    """An exception that passes through this package is placed there, not where it was caught."""
    with pytest.raises(TypeError) as raised:
        client.target(None, 80, path="/")
    assert place_of(raised.value).startswith("TypeError at extproc/endpoint.py:")
    grouped = ExceptionGroup("several", [ExceptionGroup("more", [raised.value])])
    assert place_of(grouped) == place_of(raised.value)


def test_loop_names_are_declared_once():
    """Label values are bounded: they are these."""
    assert len(set(LOOPS)) == len(LOOPS)
    assert list(Supervisor().failures) == list(LOOPS)
    assert place_of(ValueError()) == "ValueError at an unknown place"


#: Tasks that end with what started them, which is supervised or serves one stream.
SHORT = {
    "server/control_plane_servers.py": "a stream's reader",
    "diagnostics/collector.py": "the pages of one look",
    "server/metrics_access.py": "the review of one token",
    "scrape/kv_event_connection.py": "the set-up of one accepted connection",
    "server/native_server.py": "the TLS handshake of one accepted connection",
    "autoscaling/runtime/scale_subresource.py": "Events of one target, beside the look for its rivals",
}


def unsupervised(tree):
    """Lines at which a task is made of something else than `keep` or `attempt`."""

    def is_kept(node):
        called = node.func if isinstance(node, ast.Call) else None
        name = getattr(called, "attr", getattr(called, "id", ""))
        return name in {"keep", "attempt"}

    for function in ast.walk(tree):
        if not isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        supervised = {
            target.id
            for node in ast.walk(function)
            if isinstance(node, ast.Assign) and is_kept(node.value)
            for target in node.targets
            if isinstance(target, ast.Name)
        }
        for node in ast.walk(function):
            if isinstance(node, ast.Call) and getattr(node.func, "attr", "") == "create_task":
                argument = node.args[0]
                if not is_kept(argument) and getattr(argument, "id", "") not in supervised:
                    yield node.lineno


def test_every_task_is_supervised():
    """A loop that is started some other way could end the process, or end without a word."""
    root = Path(supervision.__file__).parent
    places = {}
    for path in sorted(root.rglob("*.py")):
        name = path.relative_to(root).as_posix()
        text = path.read_text()
        if "create_task" in text and not name.startswith(("simulator/", "cli/", "demo/")):
            lines = list(unsupervised(ast.parse(text)))
            if lines:
                places[name] = lines
    assert {name: len(lines) for name, lines in places.items()} == dict.fromkeys(SHORT, 1)


class LoopBugError(Exception):
    """Exception of broken parts."""


def broken(*_, **__):
    """Any method with a bug."""
    raise LoopBugError("text of a request")


def test_exception_log_writes_a_place_once_a_minute_without_the_message(caplog):
    """A client that runs into a bug with every request fills no disk, and its text is not logged."""
    times = iter((0.0, 1.0, 59.0, 61.0))
    counts: Counter[tuple[str, str]] = Counter()
    log = ExceptionLog(counts, lambda: next(times))
    for _ in range(4):
        try:
            broken()
        except LoopBugError as error:
            log.record(error)
    assert len(caplog.records) == 2
    assert "text of a request" not in caplog.text
    assert list(counts.values()) == [4]


def test_exception_log_counts_by_the_line_of_the_package():
    """An exception of a library counts under the line of the package that called it."""
    counts: Counter[tuple[str, str]] = Counter()
    with pytest.raises(LoopBugError) as raised:
        ext_proc_servicer.bind(
            SimpleNamespace(add_insecure_port=broken), "127.0.0.1:0", flag="--grpc-port"
        )
    ExceptionLog(counts, lambda: 0.0).record(raised.value)
    ((kind, fixture),) = counts
    assert kind == "LoopBugError"
    assert fixture.startswith("extproc/server/ext_proc_servicer.py:")


def test_exception_log_bounds_its_places():
    """Plugins that raise ever new types share one key above a hundred."""
    counts: Counter[tuple[str, str]] = Counter()
    log = ExceptionLog(counts, lambda: 0.0)
    for number in range(300):
        log.record(type(f"Error{number}", (Exception,), {})())
    assert len(counts) == 101
    assert counts.total() == 300


@pytest.mark.parametrize("interval_s", [0.2, 1.0, 5.0])
def test_loops_share_the_ticks_of_their_interval(interval_s):
    """The first sleep ends on a tick, whenever the loop began, and the others are one interval long."""
    for start in (0.0, 0.05, 17.31, 1e6 + 0.999):
        first_s = supervision.seconds_to_tick(start, interval_s)
        assert 0.5 * interval_s - 1e-6 <= first_s <= 1.5 * interval_s + 1e-6
        late = start + first_s + 0.01 * interval_s  # as a busy event loop is
        assert supervision.seconds_to_tick(late, interval_s) == pytest.approx(
            0.99 * interval_s, abs=1e-6
        )
