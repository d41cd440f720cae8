"""Recordings of decisions with stages of other endpoints: as lines, as Parquet, and replayed."""

from __future__ import annotations

from collections import Counter

import msgspec
import pytest

from extproc.cli import record
from extproc.config import loader
from extproc.endpoint import Load
from extproc.pool.observed_page import ScrapeToken
from extproc.recording import reader, rows
from extproc.recording.recorder import Recordings
from extproc.simulator import replay
from tests.support import disaggregation, recordings

#: Columns of stages.
STAGES = (
    *("decision_type", "prefill_endpoint", "prefill_reason", "encode_endpoints", "encode_reason"),
)


@pytest.fixture
def lines():
    """A recording of requests that are split, and of others."""
    settings = loader.settings(loader.parse(disaggregation.FILE, where="x"))
    scheduling = msgspec.to_builtins(settings.scheduling, str_keys=True)
    header = msgspec.structs.replace(recordings.header(), settings={"scheduling": scheduling})
    parts = disaggregation.build()
    active = Recordings(
        Counter(),
        lambda: header,
        schedule=settings.prefix.schedule,
        on_change=lambda _: None,
    )
    recording = active.start()
    for member in parts.store.pool.members:
        load = Load(at=0.5, engine="vllm", waiting=0.0, running=0.0, kv_usage=0.1)
        parts.store.observe(ScrapeToken(member.endpoint, 0), load, 0.5)
    for number in range(12):
        now = 1.0 + number
        text = disaggregation.LONG if number % 3 else "short"
        raw = disaggregation.request(f"{number % 4} {text}", has_picture=number % 4 == 0)
        decision = parts.director.route(raw, now)
        hashes = active.hash_prompt(decision)
        known = active.add_routed(decision.without_prompt(), hashes, now=now, queued_s=0.0)
        reservation = parts.director.reserve(decision, now)
        active.add_ends([rows.EndRow(known, "200", 0.1, 0.5, decision.request.prompt_tokens, 0, 9)])
        parts.director.release(reservation, now + 0.5, answered=True)
    return recording.take(1000)


def decisions(path):
    """Rows of the decisions in a file."""
    events = reader.RecordingReader(str(path)).read(reader.read_lines(path))
    return [event.row for event in events if isinstance(event, reader.RecordedDecision)]


def test_the_decode_decision_is_replayed(lines, tmp_path):
    """It is made again by its profile, and the stages are left alone."""
    path = tmp_path / "decisions.jsonl"
    path.write_bytes(lines)
    types = {row.decision_type for row in decisions(path)}
    assert types == {"decode-only", "prefill-decode", "encode-decode", "encode-prefill-decode"}
    (agreement,) = replay.load(path, strategies=[], configs=()).agreements
    assert (agreement.strategy, agreement.decisions, agreement.agreed) == (
        *("recorded (decode)", 12, 12),
    )


def test_parquet_has_columns_of_stages(lines, tmp_path):
    """A file from before has none of them, and is read nevertheless."""
    table = pytest.importorskip("pyarrow.parquet", reason="needs pyarrow")
    plain, path, older = (tmp_path / name for name in ("a.jsonl", "b.parquet", "c.parquet"))
    plain.write_bytes(lines)
    record.write_recording(path, iter([lines]))
    assert decisions(path) == decisions(plain)
    columns = table.read_table(path)
    assert {disaggregation.PREFILL, disaggregation.OTHER_PREFILL} >= {
        address for address in columns["prefill_endpoint"].to_pylist() if address
    }
    table.write_table(columns.drop_columns([*STAGES]), older)
    assert [row.endpoint for row in decisions(older)] == [row.endpoint for row in decisions(plain)]
    assert {row.decision_type for row in decisions(older)} == {""}
