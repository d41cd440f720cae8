"""Recordings of a picker: in files, and for clients of the metrics port."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import socket
import threading
from collections import Counter
from random import Random

import msgspec
import pytest
from aiohttp import web

from bench import soak
from extproc.cli import main
from extproc.config.decisions import DecisionsSection, RecordSection
from extproc.config.pool_sections import PoolSection, SchedulingSection
from extproc.config.settings import FlowControlSection
from extproc.demo import stack
from extproc.flow_control.priority_band import PrioritySettings
from extproc.recording import reader, recorder, rows
from extproc.scrape.kv_event_subscriber import KvEventsSection
from extproc.server import admin, decision_recording
from extproc.simulator import replay
from tests.e2e import http1
from tests.support.waiting import until


@pytest.fixture(autouse=True)
def _patient(monkeypatch):
    """Let a busy machine take long for the last write."""
    monkeypatch.setattr(decision_recording, "_END_S", 300.0)


def settings(path=None, **facts):
    """A picker that records in a file, or does not."""
    plain = soak.settings(holding=False)
    record = None if path is None else RecordSection(file=str(path), **facts)
    server = msgspec.structs.replace(plain.server, metrics_port=stack.free_port())
    return msgspec.structs.replace(plain, decisions=DecisionsSection(record=record), server=server)


def send(core, source, count):
    """Requests with their answers, one after the other."""
    for _ in range(count):
        headers, body = source.request()
        stream = core.open(headers, body)
        core.passes(0.1)
        core.say(stream, *source.answer(len(body)))
        stream.finish()


def build_recorder(configured, counts=None, **callbacks):
    """A recorder whose clock stands still."""
    usual = {"clock": lambda: 1.0, "settle": lambda: None, "on_change": lambda _: None}
    counts = Counter() if counts is None else counts
    return decision_recording.DecisionRecorder(configured, counts, **{**usual, **callbacks})


@contextlib.asynccontextmanager
async def serving_pages():
    """A picker that has synced, and the port of its pages."""
    chosen = settings()
    core = soak.Core(chosen)
    await core.picker.sync()
    await core.picker.start_admin()
    try:
        yield core, chosen.server.metrics_port
    finally:
        core.picker.decision_recorder.close()
        await core.picker.admin_server.close()


@contextlib.asynccontextmanager
async def running(loop):
    """A loop of the picker while the block runs."""
    task = asyncio.ensure_future(loop())
    await asyncio.sleep(0)
    try:
        yield
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def test_decisions_are_recorded_in_a_file(tmp_path):
    """A recording is replayed: every decision is the same, and usage is known."""
    path = tmp_path / "decisions.jsonl"
    core = soak.Core(settings(path))
    await core.picker.sync()
    async with running(core.picker.loops()["recording"]):
        send(core, soak.Chats(Random(1)), 40)
        await until(lambda: core.picker.counters.recorded_rows["recorded"] == 80)
    loaded = replay.load(path, strategies=["round-robin"], configs=())
    assert loaded.agreements[0].decisions == 40
    assert loaded.agreements[0].ratio >= 0.99
    assert len(loaded.traffic.requests) == 40
    assert loaded.traffic.num_estimated == 0
    assert {request.spec.output_tokens for request in loaded.traffic.requests} == {64}


async def test_a_recording_names_the_settings_in_force():
    """Those of each pool too; a reload begins anew with a header."""
    plain = settings()
    own = SchedulingSection(strategy="random")
    pools = (PoolSection(name="a"), PoolSection(name="b", scheduling=own))
    subject = build_recorder(plain)
    recording = subject.recordings.start()
    subject.recordings.add_ends([rows.EndRow(1)])
    first, _ = map(json.loads, recording.take(100).splitlines())
    subject.reconfigure(msgspec.structs.replace(plain, scheduling=own, pools=pools))
    (second,) = map(json.loads, recording.take(100).splitlines())
    assert (first["settings"]["scheduling"]["strategy"], "pools" in first) == ("adaptive", False)
    assert second["settings"]["scheduling"]["strategy"] == "random"
    assert second["pools"]["b"]["scheduling"]["strategy"] == "random"
    assert set(second["pools"]) == {"b"}
    assert len(first["process"]) == 16
    assert second["process"] == first["process"]


def test_a_replay_reads_the_recorded_settings():
    """Bands of priorities too, that no body was parsed, and KV events without addresses and paths."""
    flow_control = FlowControlSection(
        enabled=True, bands=(PrioritySettings(priority=-1, max_requests=5, order="edf"),)
    )
    kv_events = KvEventsSection(enabled=True, cpu_weight=0.6)
    configured = msgspec.structs.replace(
        kv_events,
        bind="tcp://10.0.0.1:5557",
        render_url="http://render:8000",
        tokenizer_path="/models/m",
    )
    recorded = msgspec.structs.replace(
        settings(), flow_control=flow_control, parse_bodies=False, kv_events=configured
    )
    subject = build_recorder(recorded)
    recording = subject.recordings.start()
    subject.recordings.add_ends([rows.EndRow(1)])
    (line, _) = recording.take(100).splitlines()
    read = replay.recorded_settings(msgspec.json.decode(line, type=rows.HeaderRow), "recording")
    assert (read.flow_control, read.parse_bodies) == (flow_control, False)
    assert read.kv_events == kv_events


async def test_a_picker_without_a_recording_adds_nothing():
    """Requests are recorded from the first recording's start to the last one's end."""
    core = soak.Core(settings())
    await core.picker.sync()
    assert "recording" not in core.picker.loops()
    assert core.shared.observer.recordings is None
    recordings = core.picker.decision_recorder.recordings
    recording = recordings.start()
    assert core.shared.observer.recordings is recordings
    recordings.stop(recording)
    assert core.shared.observer.recordings is None


async def test_files_are_rotated(tmp_path):
    """Each file can be read by itself, and replayed where it has decisions.

    What a file begins with, depends on the batches in which rows are made: it may be ends alone.
    """
    path = tmp_path / "decisions.jsonl"
    core = soak.Core(settings(path, max_file_bytes=20_000, max_files=2))
    await core.picker.sync()
    source = soak.Chats(Random(1))
    async with running(core.picker.loops()["recording"]):
        for rows in range(40, 240, 40):
            send(core, source, 20)
            await until(lambda rows=rows: core.picker.counters.recorded_rows["recorded"] >= rows)
    names = sorted(file.name for file in tmp_path.iterdir())
    assert names == ["decisions.jsonl", "decisions.jsonl.1"]
    for name in names:
        source = reader.RecordingReader(name)
        read = [*source.read(reader.read_lines(tmp_path / name))]
        assert source.header is not None
        if any(isinstance(row, reader.RecordedDecision) for row in read):
            assert replay.load(tmp_path / name, strategies=(), configs=()).agreements[0].decisions
        else:
            assert read


async def test_a_file_is_written_while_more_comes_than_is_taken(tmp_path):
    """A batch ends where requests come faster than their rows are made."""
    path = tmp_path / "decisions.jsonl"
    subject = build_recorder(settings(path))
    async with running(subject.run), asyncio.timeout(300):
        while not path.exists() or not path.stat().st_size:
            for number in range(100):
                subject.recordings.add_ends([rows.EndRow(number)])
            await asyncio.sleep(0)


async def test_a_disk_that_fails_costs_rows_and_one_log_line(tmp_path, caplog):
    """Requests go on; the recording begins anew when the folder is back."""
    folder = tmp_path / "gone"
    counts = Counter()
    recorder = build_recorder(settings(folder / "f"), counts)
    caplog.set_level(logging.INFO, "extproc.server")
    async with running(recorder.run):
        await until(lambda: len(recorder.recordings))
        for failed in (1, 2):
            recorder.recordings.add_ends([rows.EndRow(failed)])
            await until(lambda failed=failed: counts["failed"] >= failed)
        folder.mkdir()
        recorder.recordings.add_ends([rows.EndRow(3)])
        await until(lambda: len(caplog.records) >= 2)
        for number in (4, 5):  # another line would come before the second of them is written
            recorder.recordings.add_ends([rows.EndRow(number)])
            written = f'"n":{number}'
            await until(lambda written=written: written in (folder / "f").read_text())
    assert [record.getMessage().partition(":")[0] for record in caplog.records] == [
        "decisions are not recorded",
        f"decisions are recorded again in {folder / 'f'}",
    ]


async def test_a_file_that_cannot_be_written_is_a_problem_before_the_first_request(tmp_path):
    """Its cause is known, and its series are there; both end once the folder is there."""
    folder = tmp_path / "gone"
    counts = Counter()
    recorder = build_recorder(settings(folder / "f"), counts)
    async with running(recorder.run):
        await until(lambda: recorder.error)
        assert recorder.error == f"the folder {folder} is missing or not writable"
        assert dict(counts) == {"recorded": 0, "dropped": 0, "failed": 0}
        folder.mkdir()
        recorder.recordings.add_ends([rows.EndRow(1)])
        await until(lambda: not recorder.error)


async def test_a_client_records_what_comes(tmp_path):
    """`extproc record` writes a file that can be replayed, and the picker forgets it."""
    path = tmp_path / "decisions.jsonl"
    async with serving_pages() as (core, port):
        words = ["record", str(path), "--server", f"127.0.0.1:{port}"]
        recordings = core.picker.decision_recorder.recordings
        copying = asyncio.ensure_future(asyncio.to_thread(main.main, [*words, "--seconds", "60"]))
        await until(lambda: len(recordings))
        send(core, soak.Chats(Random(1)), 10)
        await until(lambda: core.picker.counters.recorded_rows["recorded"] == 20)
        core.passes(60.0)
        assert await copying == 0
        assert not len(recordings)
    source = reader.RecordingReader("f")
    events = list(source.read(reader.read_lines(path)))
    assert len(events) == 20
    assert source.header.settings["scheduling"]["strategy"] == "adaptive"


@pytest.mark.parametrize("count", [0, 10])
async def test_a_client_whose_server_ends_fails(tmp_path, capsys, count):
    """Its recording is shorter than it wanted; the rows that came are kept."""
    path = tmp_path / "decisions.jsonl"
    async with serving_pages() as (core, port):
        words = ["record", str(path), "--server", f"127.0.0.1:{port}"]
        subject = core.picker.decision_recorder
        copying = asyncio.ensure_future(asyncio.to_thread(main.main, [*words, "--seconds", "60"]))
        await until(lambda: len(subject.recordings))
        send(core, soak.Chats(Random(1)), count)
        await until(lambda: core.picker.counters.recorded_rows["recorded"] == 2 * count)
        subject.close()
        assert await copying == 1
    assert "cut off" in capsys.readouterr().err
    if count:
        assert len([*reader.RecordingReader("f").read(reader.read_lines(path))]) == 2 * count


@pytest.mark.parametrize("seconds", ["0", "x", "nan", "1e9"])
async def test_a_recording_has_a_length(seconds):
    """An invalid length is refused."""
    async with serving_pages() as (_, port):
        answer = await http1.ask(port, f"/debug/record?seconds={seconds}")
    assert answer.status == 400
    assert "expected ?seconds=" in json.loads(answer.body)["error"]["message"]


async def test_few_clients_record_at_a_time(monkeypatch):
    """Each recording costs every request something."""
    monkeypatch.setattr(decision_recording, "MAX_CLIENTS", 0)
    async with serving_pages() as (_, port):
        answer = await http1.ask(port, "/debug/record")
    assert answer.status == 429


def test_record_reports_a_server_that_does_not_answer(tmp_path, capsys):
    """Status 1, with what to do."""
    words = ["record", str(tmp_path / "f"), "--server", "127.0.0.1:1"]
    assert main.main(words) == 1
    assert "--metrics-port" in capsys.readouterr().err


@pytest.fixture
def slow_writes(monkeypatch):
    """Events: writes may end, and one began."""
    may_write, is_writing = threading.Event(), threading.Event()
    write = recorder.RotatingFile.write

    def write_slowly(file, lines):
        is_writing.set()
        may_write.wait(300)
        return write(file, lines)

    monkeypatch.setattr(recorder.RotatingFile, "write", write_slowly)
    return may_write, is_writing


async def test_a_write_under_way_ends_before_the_file_is_closed(tmp_path, slow_writes):
    """A recording that is cancelled while a thread writes loses nothing, and leaves no file open."""
    may_write, is_writing = slow_writes
    path = tmp_path / "f"
    subject = build_recorder(settings(path))
    task = asyncio.ensure_future(subject.run())
    await until(lambda: len(subject.recordings))
    subject.recordings.add_ends([rows.EndRow(1, "200")])
    await until(is_writing.is_set)
    task.cancel()
    await asyncio.sleep(0)
    assert not task.done()
    may_write.set()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert path.read_bytes().count(b"\n") == 2


@pytest.mark.parametrize("is_under_way", [True, False])
async def test_a_file_that_stalls_does_not_keep_the_process(
    tmp_path, monkeypatch, caplog, is_under_way
):
    """Neither a write under way nor the last one is waited for without end, as on a mount."""
    may_write, is_writing = threading.Event(), threading.Event()

    def stall(_file, _lines):
        is_writing.set()
        may_write.wait(300)

    monkeypatch.setattr(recorder.RotatingFile, "write", stall)
    monkeypatch.setattr(decision_recording, "_END_S", 0.01)
    path = tmp_path / "f"
    subject = build_recorder(settings(path))
    task = asyncio.ensure_future(subject.run())
    try:
        await until(lambda: len(subject.recordings))
        subject.recordings.add_ends([rows.EndRow(1, "200")])
        if is_under_way:
            await until(is_writing.is_set)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            async with asyncio.timeout(300):
                await task
    finally:
        may_write.set()
    assert not len(subject.recordings)
    assert caplog.messages == [
        f"the last decisions are not recorded: writing {path} takes too long"
    ]


async def test_a_stop_while_the_file_gets_full_leaves_files_with_headers(tmp_path, slow_writes):
    """Rows that come during the write that fills a file are in the next one, which is a recording."""
    may_write, is_writing = slow_writes
    path = tmp_path / "f"
    subject = build_recorder(
        settings(path, max_file_bytes=10),
        settle=lambda: subject.recordings.encode(),  # noqa: PLW0108 - it is built later
    )
    task = asyncio.ensure_future(subject.run())
    await until(lambda: len(subject.recordings))
    subject.recordings.add_ends([rows.EndRow(1, "200")])
    await until(is_writing.is_set)
    subject.recordings.add_ends([rows.EndRow(2, "200")])
    task.cancel()
    await asyncio.sleep(0)
    subject.recordings.add_ends([rows.EndRow(3, "200")])
    may_write.set()
    with pytest.raises(asyncio.CancelledError):
        await task
    files = [
        reader.RecordingReader("f").read(reader.read_lines(tmp_path / n)) for n in ("f.1", "f")
    ]
    assert [[event.row.n for event in events] for events in files] == [[1], [2, 3]]


async def test_a_client_that_leaves_ends_its_recording():
    """Its place is for others at once, also where nothing comes that could be written to it."""
    async with serving_pages() as (core, port):
        recordings = core.picker.decision_recorder.recordings
        _, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(b"GET /debug/record?seconds=86400 HTTP/1.1\r\nhost: 127.0.0.1\r\n\r\n")
        await until(lambda: len(recordings))
        writer.close()
        await until(lambda: not len(recordings))


async def test_a_client_that_does_not_read_is_disconnected(monkeypatch):
    """It would keep its place, and hold up the end of the process."""
    is_over = asyncio.Event()

    class EndlessRecorder:
        has_room = True

        async def stream(self, _seconds, *, is_gone):
            try:
                while not is_gone():
                    yield b"x" * 1_000_000
            finally:
                is_over.set()

    monkeypatch.setattr(admin, "_WRITE_S", 0.01)
    facts = dict.fromkeys(admin.AdminPages.__struct_fields__)
    pages = admin.AdminPages(**{**facts, "decision_recorder": EndlessRecorder()})
    application = web.Application()
    application.router.add_get("/debug/record", pages.record)
    server = admin.AdminServer()
    port = await server.start(application, host="127.0.0.1", port=0)
    try:
        with socket.create_connection(("127.0.0.1", port)) as client:
            client.sendall(b"GET /debug/record HTTP/1.1\r\nhost: 127.0.0.1\r\n\r\n")
            async with asyncio.timeout(300):
                await is_over.wait()
    finally:
        await server.close()
