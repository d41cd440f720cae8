import json
import sys

import msgspec
import pytest

from extproc.cli import serve
from extproc.config.decisions import DecisionsSection, RecordSection
from extproc.config.settings import Settings
from extproc.endpoint import NO_LOAD, AdapterResidency, Candidate, Endpoint, Load
from extproc.errors import ConfigError
from extproc.recording import parquet, reader, rows
from tests.recording.test_recorder import a_candidate, a_decision, add
from tests.support import recordings


def read(lines):
    """All events of a recording."""
    source = reader.RecordingReader("f.jsonl")
    return source, list(source.read(lines.splitlines(keepends=True)))


def recorded(*decisions):
    """A recording of decisions, a second apart."""
    active = recordings.recordings()
    recording = active.start()
    for now, decision in enumerate(decisions, 10):
        add(active, decision, now=float(now))
    return recording.take(1000)


def test_candidates_come_back_as_the_scheduler_saw_them():
    """Every field that plugins read has its value."""
    candidate = Candidate(
        Endpoint("10.0.0.1:8000", name="a", labels={"zone": "x"}),
        Load(at=9.25, engine="vllm", waiting=1.0, adapters=frozenset({"l"}), extra={"a": 0.1}),
        age_s=0.75,
        in_flight=3,
        estimated_requests=3.5,
        prompt_tokens=1000,
        matched_tokens=64,
        queued_tokens=0.1 + 0.2,
        unscraped_tokens=12.0,
        residency=AdapterResidency.ROOM,
        active_context_tokens=1.5,
        conversation_local=True,
    )
    _, (event,) = read(recorded(a_decision([candidate])))
    assert event.candidates == [candidate]
    assert event.chosen == candidate.endpoint
    assert event.unix_s == 1_000_010.0


def test_the_chosen_candidate_is_that_of_the_last_decision_with_candidates():
    """Decisions that come too fast have none of their own."""
    idle, busy, other = a_candidate(1), a_candidate(1, in_flight=2), a_candidate(2)
    decisions = [a_decision([idle, other]), a_decision([idle]), a_decision([busy])]
    decisions[1] = msgspec.structs.replace(decisions[1], candidates=())
    _, events = read(recorded(*decisions))
    assert [len(event.candidates) for event in events] == [2, 0, 1]
    assert [event.chosen_candidate.in_flight for event in events] == [0, 0, 2]


def test_parquet_needs_pyarrow(tmp_path, monkeypatch):
    """The error names the extra, before anything is written or read."""
    monkeypatch.setitem(sys.modules, "pyarrow.parquet", None)
    path = tmp_path / "decisions.parquet"
    with pytest.raises(ConfigError, match=r"extproc-epp\[parquet\]"):
        parquet.require(path)
    path.write_bytes(b"PAR1")
    with pytest.raises(ConfigError, match=r"extproc-epp\[parquet\]"):
        list(reader.read_lines(path))
    parquet.require(tmp_path / "decisions.jsonl")
    record = RecordSection(file=str(path))
    (problem,) = serve.find_problems(Settings(decisions=DecisionsSection(record=record)))
    assert problem.where == str(path)


def test_imputed_loads_come_back_as_imputed():
    """The age is that of the endpoint's own page."""
    page = Load(at=4.0)
    candidate = a_candidate(1)
    imputed = msgspec.structs.replace(candidate, page=page, age_s=6.0)
    void = msgspec.structs.replace(candidate, page=NO_LOAD, age_s=float("inf"))
    _, events = read(recorded(a_decision([imputed]), a_decision([void])))
    first, second = (event.candidates[0] for event in events)
    assert (first.is_imputed, first.age_s) == (True, 6.0)
    assert second.page is NO_LOAD
    assert second.age_s == float("inf")


def test_loads_of_endpoints_that_were_never_scraped_come_back():
    """A load that was imputed from other endpoints has no time."""
    candidate = a_candidate(1, load=Load(running=1.0))
    unscraped = msgspec.structs.replace(candidate, page=NO_LOAD, age_s=float("inf"))
    _, (event,) = read(recorded(a_decision([unscraped])))
    assert event.candidates == [unscraped]


def test_recordings_can_be_concatenated():
    """A second header starts the endpoints anew."""
    first, second = recorded(a_decision([a_candidate(1)])), recorded(a_decision([a_candidate(2)]))
    _, events = read(first + second)
    assert [event.chosen.address for event in events] == ["10.0.0.1:8000", "10.0.0.2:8000"]


def with_process(lines, process, *, step_s=0.0):
    """A recording whose header names its process, behind a step of the Unix clock."""
    header, _, rest = lines.partition(b"\n")
    tree = json.loads(header)
    tree |= {"process": process, "unix_s": tree["unix_s"] + step_s}
    return json.dumps(tree).encode() + b"\n" + rest


def with_end(lines, n):
    """A recording that goes on with the end of a decision."""
    return lines + json.dumps({"kind": "end", "n": n, "status": "200"}).encode() + b"\n"


@pytest.mark.parametrize("names", [("", ""), ("", "b"), ("a", "b")])
def test_processes_of_one_machine_are_told_apart(names):
    """They have the same clock, and their numbers begin at 1, with and without names."""
    files = [with_end(recorded(*[a_decision([a_candidate(1)])] * 2), 2) for _ in names]
    _, events = read(b"".join(map(with_process, files, names)))
    assert [event.key for event in events] == [
        *((0, n) for n in (1, 2, 2)),
        *((1, n) for n in (1, 2, 2)),
    ]


def test_a_process_goes_on_behind_the_header_of_another_file():
    """Also without a name: its numbers grow."""
    decisions = recorded(*[a_decision([a_candidate(1)])] * 2)
    for name in ("", "a"):
        header, endpoint, state, first, second = with_process(decisions, name).splitlines(True)
        lines = [header, endpoint, state, first, header, endpoint, state, second]
        _, events = read(with_end(b"".join(lines), 1))
        assert [event.key for event in events] == [(0, 1), (0, 2), (0, 1)]


@pytest.mark.parametrize("step_s", [2.0, -20.0])
def test_a_clock_that_is_set_moves_no_decision(step_s):
    """A process has the clock of its first header, and ends find their decisions."""
    first = recorded(a_decision([a_candidate(1)]))
    second = first.replace(b'"n":1,"at":10.0', b'"n":2,"at":12.0')
    lines = with_process(first, "a") + with_end(with_process(second, "a", step_s=step_s), 1)
    _, events = read(lines)
    assert [event.key for event in events] == [(0, 1), (0, 2), (0, 1)]
    assert events[1].unix_s - events[0].unix_s == 2.0


def test_a_last_line_that_was_cut_is_left_out():
    """The recorder may be ended while it writes."""
    lines = recorded(a_decision([a_candidate(1)]), a_decision([a_candidate(1)]))
    source, events = read(lines[:-20])
    assert len(events) == 1
    assert source.header is not None


_TABLE = {
    "endpoints": [0],
    **{name: [0] for name in rows.CANDIDATE_FIELDS},
    "conversation_local": [False],
}
_HEAD = """\
{"kind":"recording","version":4}
{"kind":"endpoint","n":0,"address":"10.0.0.1:8000"}
"""


_DECISION = {"kind": "decision", "n": 1, "at": 1, "endpoint": 0}


def _with_rows(*kinds):
    """A recording with these rows behind its endpoint."""
    return (_HEAD + "".join(f"{json.dumps(row)}\n" for row in kinds)).encode()


def _with_table(**columns):
    """A recording whose decision has these columns besides or in place of those of one endpoint."""
    decision = {"kind": "decision", "n": 1, "at": 1, "endpoint": 0, "candidates": _TABLE | columns}
    return f"{_HEAD}{json.dumps(decision)}\n".encode()


def test_requests_may_be_as_long_as_the_picker_accepts():
    """Clients choose the length of a prompt, engines their usage, and a stream may last a month."""
    most = 2**31 - 1
    end = {"kind": "end", "n": 1, "total_s": 30 * 86_400.0}
    end |= dict.fromkeys(("prompt_tokens", "cached_tokens", "output_tokens"), most)
    _, events = read(_with_rows(_DECISION | {"prompt_tokens": most}, end))
    assert [event.row.prompt_tokens for event in events] == [most, most]


@pytest.mark.parametrize(
    ("lines", "where", "words"),
    [
        (b"no JSON\n", "line 1", "malformed"),
        (b'{"kind":"\xff"}\n', "line 1", "invalid start byte"),
        (
            b'{"kind":"recording","version":4,"settings":' + b'{"a":' * 99_999,
            "line 1",
            "while deserializing an object",
        ),
        (b'{"kind":"decision","n":1,"at":1,"endpoint":0}\n', "line 1", "before any header"),
        (b'{"kind":"recording","version":1}\n', "line 1", "version 1"),
        (
            b'{"kind":"recording","version":4}\n{"kind":"decision","n":1,"at":1,"endpoint":5}\n',
            "line 2",
            "endpoint 5 without a row",
        ),
        (
            f'{_HEAD}{{"kind":"decision","n":1,"at":1,"endpoint":0,"blocks":"AAAA"}}\n'.encode(),
            "line 3",
            "blocks of 3 bytes, where each takes 8",
        ),
        (_with_rows(_DECISION | {"queued_s": 1e308}), "line 3", "queued_s of 1e+308, which is not"),
        (_with_rows(_DECISION | {"prompt_tokens": 10**12}), "line 3", "prompt_tokens of 1e+12"),
        (_with_rows({"kind": "end", "n": 1, "ttft_s": -1}), "line 3", "ttft_s of -1, which is not"),
        (
            _with_rows({"kind": "state", "n": 0, "rates": {"decode_s": -1}}),
            "line 3",
            "decode_s of -1",
        ),
        (
            _with_rows({"kind": "state", "n": 0, "rates": {}, "load": {"kv_blocks": -1}}),
            "line 3",
            "kv_blocks of -1",
        ),
        (_with_rows(_DECISION, _DECISION), "line 4", "decision 1 behind decision 1"),
        (_with_table(endpoints=None), "line 3", "Expected `array`"),
        (_with_table(in_flight=[]), "line 3", "a table with columns of other lengths"),
        (_with_table(), "line 3", "endpoint 0 without a state before"),
    ],
)
def test_errors_name_file_line_and_reason(lines, where, words):
    """A file that is no recording is refused with file, line and reason."""
    with pytest.raises(ConfigError) as caught:
        read(lines)
    assert f"f.jsonl: {where}: expected a row of a recording" in str(caught.value)
    assert words in str(caught.value)


def test_lines_have_a_longest_length(tmp_path, monkeypatch):
    """A file without line feeds does not fill the memory."""
    monkeypatch.setattr(reader, "MAX_LINE_BYTES", 10)
    path = tmp_path / "long"
    path.write_bytes(b"short\n" + b"x" * 100)
    with pytest.raises(ConfigError, match="line 2"):
        list(reader.read_lines(path))


@pytest.mark.parametrize("cut", [1, 2, 30])
def test_files_that_are_concatenated_may_have_ends_that_are_cut_off(cut):
    """A picker that is killed while it writes leaves the last row without its end."""
    file = recorded(*[a_decision([a_candidate(1)])] * 2)
    _, events = read(file[:-cut] + file)
    assert [event.row.n for event in events] == ([1, 2, 1, 2] if cut == 1 else [1, 1, 2])


def test_a_row_that_is_broken_in_front_of_other_rows_is_refused():
    """Only a header begins anew, so nothing else can be behind a cut."""
    file = recorded(*[a_decision([a_candidate(1)])] * 2)
    with pytest.raises(ConfigError, match="line 5"):
        read(file[:-30] + file.splitlines(keepends=True)[1])
