import base64
import json
import struct
from array import array
from collections import Counter

import msgspec
import pytest

from extproc.decision import Decision, Disaggregation
from extproc.endpoint import NO_LOAD, Candidate, Endpoint, Load, StepTimeModel
from extproc.recording import recorder, rows
from extproc.request import HttpRequest, InferenceRequest, hash_affinity_key
from tests.support import recordings
from tests.support.canary import CANARY
from tests.support.pool_fixture import PoolFixture

LOAD = Load(at=9.0, engine="vllm", waiting=0.0, running=1.0, kv_usage=0.5)


def a_candidate(number, *, load=LOAD, **facts):
    """An endpoint of that number."""
    return Candidate(Endpoint(f"10.0.0.{number}:8000"), load, age_s=1.0, **facts)


def a_decision(candidates, *, chosen=0, **facts):
    """A decision for one of some candidates."""
    request = InferenceRequest("chat", "m", prompt_tokens=100, **facts)
    return Decision(
        request,
        [candidates[chosen].endpoint],
        candidates=candidates,
        block_hashes=[1, 2],
        matched_tokens=64,
    )


def lines(recording):
    """Everything that waits, as JSON."""
    return [json.loads(line) for line in recording.take(10_000).splitlines()]


def hashes(row):
    """Block hashes of a decision's row."""
    return list(
        struct.unpack(
            f"<{len(base64.b64decode(row['blocks'])) // 8}Q", base64.b64decode(row["blocks"])
        )
    )


def add(active, decision, *, now=10.0):
    """Record a decision."""
    hashes = active.hash_prompt(decision)
    return active.add_routed(decision.without_prompt(), hashes, now=now, queued_s=0.0)


@pytest.mark.parametrize("make", [list, tuple, lambda chain: array("Q", chain)])
def test_hashes_are_packed_from_any_sequence(make):
    """Each takes 8 bytes, little-endian, on every machine."""
    chain = [1, 2**60 - 1, 0x0102030405060708]
    packed = rows.pack_hashes(make(chain))
    assert packed == b"".join(value.to_bytes(8, "little") for value in chain)
    assert list(rows.unpack_hashes(packed)) == chain


def test_a_decision_has_endpoints_and_states_before_it():
    """The header comes first, then what the decision refers to."""
    active = recordings.recordings()
    recording = active.start()
    add(active, a_decision([a_candidate(1), a_candidate(2)], chosen=1))
    written = lines(recording)
    kinds = ["recording", "endpoint", "state", "endpoint", "state", "decision"]
    assert [line["kind"] for line in written] == kinds
    decision = written[-1]
    assert written[3]["n"] == decision["endpoint"]
    assert (hashes(decision), decision["matched_tokens"]) == ([1, 2], 64)
    assert decision["candidates"]["endpoints"] == [0, 1]


@pytest.mark.parametrize(
    ("stages", "recorded"),
    [
        (None, {}),
        (
            {"prefill": "10.0.0.2:8000", "encode_reason": "no-media"},
            {
                "decision_type": "prefill-decode",
                "prefill_endpoint": "10.0.0.2:8000",
                "encode_reason": "no-media",
            },
        ),
        (
            {"prefill_reason": "cached", "encode": "10.0.0.3:8000"},
            {
                "decision_type": "encode-decode",
                "prefill_reason": "cached",
                "encode_endpoints": "10.0.0.3:8000,10.0.0.4:8000",
            },
        ),
    ],
)
def test_a_decision_has_the_endpoints_of_its_stages(stages, recorded):
    """Or why there are none; without stages none of it."""
    plain = a_decision([a_candidate(1)])
    parts = {
        name: msgspec.structs.replace(plain, endpoints=[Endpoint(value), Endpoint("10.0.0.4:8000")])
        if name in {"prefill", "encode"}
        else value
        for name, value in (stages or {}).items()
    }
    active = recordings.recordings()
    first, second = active.start(), active.start()
    split = None if stages is None else Disaggregation(**parts)
    add(active, msgspec.structs.replace(plain, disaggregation=split))
    names = [*rows.DecisionRow.__struct_fields__]
    names = names[names.index("decision_type") :]
    for recording in (first, second):
        row = lines(recording)[-1]
        assert {name: row[name] for name in names if name in row} == recorded


def test_recordings_beside_each_other_number_endpoints_for_themselves():
    """A row that waits in both has the number of its endpoint in each, and the same blocks."""
    active = recordings.recordings()
    first = active.start()
    add(active, a_decision([a_candidate(1)]))
    second = active.start()
    add(active, a_decision([a_candidate(2)]))
    rows_of_both = [lines(recording)[-3:] for recording in (first, second)]
    numbers = []
    for endpoint, _, decision in rows_of_both:
        assert (endpoint["address"], endpoint["n"]) == ("10.0.0.2:8000", decision["endpoint"])
        assert decision["candidates"]["endpoints"] == [decision["endpoint"]]
        assert hashes(decision) == [1, 2]
        numbers.append(decision["endpoint"])
    assert numbers == [1, 0]


def test_an_endpoint_of_two_pools_has_a_number_in_each():
    """Pools scrape and learn for themselves, so each has a state, which is written once."""
    active = recordings.recordings()
    recording = active.start()
    ours, theirs = a_candidate(1), a_candidate(1, rates=StepTimeModel(step_s=0.5))
    for _ in range(2):
        for pool, candidate in (("a", ours), ("b", theirs)):
            add(active, msgspec.structs.replace(a_decision([candidate]), pool=pool))
    written = lines(recording)[1:]
    assert [line["kind"] for line in written] == [
        *("endpoint", "state", "decision") * 2,
        *("decision",) * 2,
    ]
    assert [(line["n"], line["pool"]) for line in written if line["kind"] == "endpoint"] == [
        (0, "a"),
        (1, "b"),
    ]
    decided = [line for line in written if line["kind"] == "decision"]
    assert [line["candidates"]["endpoints"] for line in decided] == [[0], [1]] * 2
    assert [line["endpoint"] for line in decided] == [0, 1] * 2


def test_states_are_written_when_they_change():
    """A load that stays has one row; another load, or other step times, has another."""
    active = recordings.recordings()
    recording = active.start()
    candidate = a_candidate(1)
    other_load = msgspec.structs.replace(candidate, load=Load(at=10.0, running=2.0))
    other_rates = msgspec.structs.replace(other_load, rates=StepTimeModel(step_s=0.02))
    kinds = []
    for current in (candidate, candidate, other_load, other_rates, other_rates):
        add(active, a_decision([current]))
        kinds.append([line["kind"] for line in lines(recording)])
    assert kinds[1:] == [["decision"], ["state", "decision"], ["state", "decision"], ["decision"]]


def test_other_settings_begin_with_a_header():
    """Waiting rows stay behind the header that they were decided with."""
    active = recordings.recordings()
    recording = active.start()
    active.add_header()
    assert lines(recording) == []
    for _ in range(2):
        add(active, a_decision([a_candidate(1)]))
        active.add_header()
    assert [line["kind"] for line in lines(recording)] == [
        *("recording", "endpoint", "state", "decision") * 2,
        "recording",
    ]


def test_a_restarted_recording_begins_with_everything():
    """The next file can be read without the one before."""
    active = recordings.recordings()
    recording = active.start()
    add(active, a_decision([a_candidate(1)]))
    lines(recording)
    recording.restart()
    add(active, a_decision([a_candidate(1)]))
    assert [line["kind"] for line in lines(recording)] == [
        *("recording", "endpoint", "state", "decision")
    ]


def test_an_end_has_times_and_usage():
    """Usage that the engine did not report is left out."""
    active = recordings.recordings()
    recording = active.start()
    number = add(active, a_decision([a_candidate(1)]))
    active.add_ends([rows.EndRow(number, "200", 0.5, 2.0, output_tokens=7)])
    assert lines(recording)[-1] == {
        "kind": "end",
        "n": number,
        "status": "200",
        "ttft_s": 0.5,
        "total_s": 2.0,
        "output_tokens": 7,
    }


def test_rows_without_room_are_counted_and_noted():
    """A full queue drops what comes; the next rows say how much."""
    counts = Counter()
    active = recordings.recordings(counts=counts)
    recording = active.start()
    for _ in range(recorder.MAX_ENTRIES + 5):
        add(active, a_decision([a_candidate(1)]))
    assert counts["dropped"] == 5
    written = lines(recording)
    assert {"kind": "loss", "rows": 5} in written
    assert counts["recorded"] == recorder.MAX_ENTRIES


def test_ends_are_recorded_as_far_as_there_is_room():
    """Those that come together are not dropped together."""
    counts = Counter()
    active = recordings.recordings(counts=counts)
    recording = active.start()
    active.add_ends([rows.EndRow(number) for number in range(recorder.MAX_ENTRIES + 2)])
    active.add_ends([rows.EndRow(-1)])
    assert counts["dropped"] == 3
    assert lines(recording)[-1] == {"kind": "end", "n": recorder.MAX_ENTRIES - 1}


@pytest.mark.parametrize(("num_candidates", "per_s", "recorded"), [(8, 1000, 63), (125, 20, 5)])
def test_a_second_has_so_many_candidates(num_candidates, per_s, recorded):
    """The work has a bound, however many requests there are; every decision is there."""
    active = recordings.recordings()
    recording = active.start()
    candidates = [a_candidate(number) for number in range(num_candidates)]
    for number in range(per_s):
        add(active, a_decision(candidates, chosen=3), now=10.0 + number / per_s)
    decisions = [line for line in lines(recording) if line["kind"] == "decision"]
    assert len(decisions) == per_s
    assert sum("candidates" in line for line in decisions) == pytest.approx(recorded, abs=1)


def test_a_file_begins_with_candidates():
    """Those of the next decision are recorded, so that the states of all endpoints are known."""
    active = recordings.recordings()
    recording = active.start()
    candidates = [a_candidate(number) for number in range(1001)]
    for _ in range(3):
        add(active, a_decision(candidates))
        written = lines(recording)
        recording.restart()
        assert "candidates" in written[-1]
        assert {line["kind"] for line in written[1:-1]} == {"endpoint", "state"}


def test_neither_prompt_nor_session_is_recorded():
    """Hashes stand for both."""
    active = recordings.recordings()
    recording = active.start()
    session = CANARY + "\ud83d"  # which no Unicode text can have
    decision = a_decision([a_candidate(1)], session=session, prompt=CANARY.encode() * 100)
    add(active, decision)
    written = recording.take(100)
    assert CANARY.encode() not in written
    assert b'"session":' in written


def test_prompts_that_no_strategy_hashed_are_hashed():
    """A recording of round robin can be compared with strategies that read prefixes."""
    active = recordings.recordings()
    recording = active.start()
    decision = msgspec.structs.replace(
        a_decision([a_candidate(1)], prompt=b"x" * 1000), block_hashes=()
    )
    add(active, decision)
    assert len(hashes(lines(recording)[-1])) == 3


def test_an_unknown_load_is_left_out():
    """A load that never was is no load of minus infinity."""
    active = recordings.recordings()
    recording = active.start()
    add(active, a_decision([a_candidate(1, load=NO_LOAD)]))
    assert "load" not in lines(recording)[2]
    assert rows.restore_load(rows.record_load(NO_LOAD)) is NO_LOAD


@pytest.mark.parametrize("session", ["", "a"])
@pytest.mark.parametrize("count", [1, 4])
def test_the_hash_by_which_ties_are_broken_is_recorded(session, count):
    """It is that of session or first message, whether the decision needed it or not."""
    pages = {f"10.0.0.{n}:8000": LOAD for n in range(count)}
    pool_fixture = PoolFixture(pages, profile="adaptive")
    message = {"role": "user", "content": "Hello"}
    body = {"model": "m", "messages": [message], "prompt_cache_key": session}
    raw = HttpRequest({":path": "/v1/chat/completions"}, msgspec.json.encode(body))
    decision = pool_fixture.director.route(raw, pool_fixture.now)
    assert (decision.affinity_seed is not None) == (count > 1)
    _, seed = recordings.recordings().hash_prompt(decision)
    assert seed == hash_affinity_key(session or "Hello")
