import json

import pytest

from extproc.errors import ConfigError
from extproc.simulator.fleet import traces, workloads
from tests.simulator.fleet.builders import sessions

MOONCAKE = [
    '{"timestamp": 0, "input_length": 1100, "output_length": 50, "hash_ids": [7, 8, 9]}',
    "",
    '{"timestamp": 3000, "input_length": 1030, "output_length": 20, "hash_ids": [7, 8, 12]}',
    '{"timestamp": 3000, "input_length": 513, "output_length": 0, "hash_ids": [40, 41]}',
]
AZURE = [
    "TIMESTAMP,ContextTokens,GeneratedTokens",
    "2023-11-16 18:15:46.6805900,374,44",
    "2023-11-16 18:15:50.9951690,396,109",
]
BURSTGPT = [
    "Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type",
    "5,ChatGPT,472,18,490,Conversation log",
    "45,ChatGPT,1087,0,1087,Conversation log",
    "118.5,GPT-4,417,276,693,API log",
]


def a_row(hash_id):
    """A row of one block."""
    return json.dumps(
        {"timestamp": 1, "input_length": 512, "output_length": 1, "hash_ids": [hash_id]}
    )


def read(kind, rows, **more):
    return list(traces.read(kind, rows, where="trace", **more))


def test_mooncake_rows_share_the_blocks_their_ids_share():
    """Equal hash ids are equal 512-token blocks, each 32 blocks of an engine."""
    (_, first), (_, second), (_, third) = read("mooncake", MOONCAKE)
    assert [len(work.keys) for work in (first, second, third)] == [
        1100 // 16,
        1030 // 16,
        513 // 16,
    ]
    assert first.keys[:64] == second.keys[:64]
    assert not set(first.keys[64:]) & set(second.keys[64:])
    assert not set(first.keys) & set(third.keys)
    assert (first.prompt_tokens, first.output_tokens, third.output_tokens) == (1100, 50, 1)


def test_mooncake_times_are_milliseconds():
    """The first row begins the trace, in seconds."""
    assert [at for at, _ in read("mooncake", MOONCAKE)] == [0.0, 3.0, 3.0]


def test_azure_rows_share_nothing():
    """Azure's trace has lengths and times only."""
    (first_at, first), (second_at, second) = read("azure", AZURE)
    assert (first.prompt_tokens, first.output_tokens) == (374, 44)
    assert first_at == 0.0
    assert second_at == pytest.approx(4.314579, abs=1e-6)
    assert not set(first.keys) & set(second.keys)


@pytest.mark.parametrize("is_newer", [False, True])
def test_burstgpt_rows_have_seconds_and_lengths(is_newer):
    """A request without an answer failed; newer files have a session and a duration besides."""
    rows = [row.replace(",", ",s,1,", 1) for row in BURSTGPT[1:]]
    header = BURSTGPT[0].replace(",", ",Session ID,Elapsed time,", 1)
    read_rows = read("burstgpt", [header, *rows] if is_newer else BURSTGPT)
    assert [(at, work.prompt_tokens, work.output_tokens) for at, work in read_rows] == [
        (5.0, 472, 18),
        (118.5, 417, 276),
    ]


def test_rows_of_one_moment_can_be_spread():
    """Equal time stamps come apart evenly, in their order."""
    assert [at for at, _ in read("mooncake", MOONCAKE, spread_s=3.0)] == [0.0, 3.0, 4.5]


@pytest.mark.parametrize(
    ("kind", "row"),
    [
        ("mooncake", "not json"),
        ("mooncake", '{"timestamp": 1, "input_length": 5}'),
        ("mooncake", '{"timestamp": 1, "input_length": "x", "output_length": 1, "hash_ids": []}'),
        ("mooncake", a_row(-1)),
        ("mooncake", a_row(2**58)),
        ("azure", "2023-11-16 18:15:46.68,374"),
        ("azure", "yesterday,374,44"),
        ("azure", "2023-11-16 18:15:46.6805900,many,44"),
        ("burstgpt", "7,ChatGPT,472"),
        ("burstgpt", "inf,ChatGPT,472,18"),
        ("burstgpt", "7,ChatGPT,472,-18"),
    ],
)
def test_a_bad_line_is_named(kind, row):
    """A line that is not what the format says ends the reading with its number."""
    first = {"mooncake": MOONCAKE[0], "azure": AZURE[1], "burstgpt": BURSTGPT[0]}
    rows = [first[kind], row]
    with pytest.raises(ConfigError, match="trace: line 2: expected"):
        read(kind, rows)


def test_keys_of_the_largest_id_fit_into_63_bits():
    """Hashes of prefix blocks are made of them as signed integers."""
    ((_, work),) = read("mooncake", [a_row(2**58 - 2)])
    assert 2**62 < work.keys[-1] < 2**63


def test_a_trace_is_replayed_at_its_own_times():
    """The rate scale divides times, and what is skipped does not delay the rest."""
    trace = workloads.TraceWorkload(format="mooncake", file="t", rate_scale=2.0)
    assert [session.at for session in sessions(trace, rows=MOONCAKE)] == [0.0, 1.5, 1.5]
    later = workloads.TraceWorkload(format="mooncake", file="t", first=1, requests=1)
    (only,) = sessions(later, rows=MOONCAKE)
    assert only.at == 0.0
    assert only.specs[0].prompt_tokens == 1030


def test_requests_too_long_for_the_engines_are_left_out():
    """The bound is on prompt and answer together."""
    trace = workloads.TraceWorkload(format="mooncake", file="t", longest_tokens=1100)
    prompts = [session.specs[0].prompt_tokens for session in sessions(trace, rows=MOONCAKE)]
    assert prompts == [1030, 513]
