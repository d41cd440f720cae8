import itertools
import json

import pytest

from extproc.cli import main
from extproc.errors import ConfigError
from extproc.simulator import replay_traces

MOONCAKE = (
    '{"timestamp": 1000, "input_length": 1100, "output_length": 5, "hash_ids": [1, 2, 3]}\n'
    '{"timestamp": 3000, "input_length": 700, "output_length": 5, "hash_ids": [1, 9]}\n'
)
AZURE = (
    "TIMESTAMP,ContextTokens,GeneratedTokens\n"
    "2023-11-16 18:15:46.6805900,374,44\n"
    "2023-11-16 18:15:47.6805900,200,4\n"
)
SHAREGPT = [
    {
        "id": "a",
        "conversations": [
            {"from": "human", "value": "x" * 400},
            {"from": "gpt", "value": "y" * 80},
            {"from": "human", "value": "z" * 40},
            {"from": "gpt", "value": "y" * 8},
        ],
    },
    {"id": "b", "conversations": [{"from": "gpt", "value": "nobody spoke to it"}]},
]
VLLM = '{"prompt": "' + "x" * 200 + '", "output_tokens": 7}\n{"prompt": "hello"}\n'
VLLM += '{"prompt": "nothing", "output_tokens": 0}\n'

BURSTGPT = (
    "Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type\n"
    "5,ChatGPT,472,18,490,Conversation log\n"
    "45,ChatGPT,1087,0,1087,Conversation log\n"
    "118,GPT-4,417,276,693,API log\n"
)

FILES = {
    "mooncake": MOONCAKE,
    "azure": AZURE,
    "burstgpt": BURSTGPT,
    "sharegpt": json.dumps(SHAREGPT),
    "vllm-bench": VLLM,
}


def write(tmp_path, text):
    """A file of a trace."""
    path = tmp_path / "trace"
    path.write_text(text)
    return path


@pytest.mark.parametrize("name", FILES)
def test_formats_are_known_by_their_beginning(tmp_path, name):
    """No flag names the format."""
    assert replay_traces.find_format(write(tmp_path, FILES[name])) == name


@pytest.mark.parametrize(
    ("name", "rate", "lengths"),
    [
        ("mooncake", None, [(1100, 5), (700, 5)]),
        ("azure", None, [(374, 44), (200, 4)]),
        ("burstgpt", None, [(472, 18), (417, 276)]),
        ("sharegpt", 2.0, [(100, 20), (130, 2)]),
        ("vllm-bench", 2.0, [(50, 7), (1, 256), (1, 1)]),
    ],
)
def test_requests_have_their_lengths(tmp_path, name, rate, lengths):
    """Tokens of prompts and answers, as the file has them or four bytes each."""
    path = write(tmp_path, FILES[name])
    traffic = replay_traces.read(path, name, rate_per_s=rate, max_requests=100)
    assert [
        (request.spec.prompt_tokens, request.spec.output_tokens) for request in traffic.requests
    ] == lengths
    assert traffic.requests[0].at == 0.0


LIKE_SHAREGPT = [
    {
        "conversations": [
            {"role": "user", "content": "é" * 80},
            {"role": "assistant", "content": "y"},
        ]
    }
]


@pytest.mark.parametrize(
    ("prompt", "lengths"),
    [
        ([{"role": "system", "content": "x" * 40}, {"role": "user", "content": "y" * 8}], [12]),
        (["x" * 40, "y" * 8], [10, 2]),
        ([0, 151_000, 262_143] * 16, [48]),
    ],
)
def test_a_prompt_may_be_a_list(tmp_path, prompt, lengths):
    """Of messages, of prompts, or of tokens, each of which counts as one."""
    path = write(tmp_path, json.dumps({"prompt": prompt, "output_tokens": 3}))
    name = replay_traces.find_format(path)
    traffic = replay_traces.read(path, name, rate_per_s=2.0, max_requests=9)
    specs = [request.spec for request in traffic.requests]
    assert [(spec.prompt_tokens, spec.output_tokens) for spec in specs] == [
        (length, 3) for length in lengths
    ]
    assert [len(spec.keys) for spec in specs] == [length // 16 for length in lengths]


QUESTION, ANSWER, LAST = "x" * 40, "y" * 8, "z" * 20


def row_of(field, names, *, name="from", text="value", **more):
    """A row with a message of each speaker."""
    words = itertools.cycle([QUESTION, ANSWER])
    messages = [
        {name: speaker, text: word} if speaker else {text: word}
        for speaker, word in zip(names, words, strict=False)
    ]
    return {field: messages, **more}


OPENAI = {"name": "role", "text": "content"}
PARTS = {"role": "user", "content": [{"type": "text", "text": LAST}, {"type": "image_url"}]}


@pytest.mark.parametrize(
    ("row", "lengths"),
    [
        (row_of("conversations", ["user", "chatgpt"]), [(10, 2)]),
        (row_of("conversations", ["Human", "Bing", "human"]), [(10, 2)]),
        (row_of("conversations", ["alice", "bob", "alice", "bob"]), [(10, 2), (22, 2)]),
        (row_of("conversations", ["tutor", "user"]), []),
        (row_of("conversations", ["", "", ""]), [(10, 2)]),
        (row_of("messages", ["user", "assistant"], **OPENAI), [(10, 2)]),
        (row_of("messages", ["user", "assistant", "user"], **OPENAI), [(10, 2), (22, 256)]),
        (row_of("messages", ["user"], **OPENAI, output_tokens=7), [(10, 7)]),
        ({"messages": [PARTS, {"role": "assistant", "content": None}]}, [(5, 1)]),
    ],
)
@pytest.mark.parametrize("is_list", [False, True])
def test_answers_are_found_by_speaker_or_by_turn(tmp_path, row, lengths, is_list):
    """Whatever a dataset calls its speakers; a request may end with a question."""
    rows = [row, row_of("conversations", ["human", "gpt"])]
    path = write(tmp_path, json.dumps(rows) if is_list else "\n".join(map(json.dumps, rows)))
    name = replay_traces.find_format(path)
    traffic = replay_traces.read(path, name, rate_per_s=2.0, max_requests=9)
    assert [
        (request.spec.prompt_tokens, request.spec.output_tokens) for request in traffic.requests
    ] == [*lengths, (10, 2)]


@pytest.mark.parametrize(
    ("rows", "words"),
    [
        ([row_of("conversations", ["a", "b", "c"])], "got only speakers a, b, c;"),
        ([row_of("conversations", ["human", "human"])], "got only speakers human;"),
        ([{"id": 1, "items": []}], "got no message, but fields id, items;"),
        ([], "got nothing;"),
    ],
)
def test_files_without_answers_are_explained(tmp_path, rows, words):
    """With the names that were found, and those that are known."""
    path = write(tmp_path, json.dumps(rows))
    with pytest.raises(ConfigError, match=words) as caught:
        replay_traces.read(path, "sharegpt", rate_per_s=2.0, max_requests=9)
    assert "one of ai, assistant, bard" in str(caught.value)


@pytest.mark.parametrize("piece", [1, 7, 1 << 20])
@pytest.mark.parametrize(
    ("text", "lengths"),
    [
        (json.dumps(SHAREGPT), [(100, 20), (130, 2)]),
        (json.dumps(SHAREGPT, indent=2), [(100, 20), (130, 2)]),
        ("\n".join(map(json.dumps, SHAREGPT)), [(100, 20), (130, 2)]),
        (json.dumps(LIKE_SHAREGPT, ensure_ascii=False), [(40, 1)]),
    ],
)
def test_conversations_are_read_piece_by_piece(tmp_path, monkeypatch, piece, text, lengths):
    """A list or lines, wherever a piece ends: the file is never in memory as a whole."""
    monkeypatch.setattr(replay_traces, "_PIECE", piece)
    path = write(tmp_path, text)
    assert replay_traces.find_format(path) == "sharegpt"
    traffic = replay_traces.read(path, "sharegpt", rate_per_s=1.0, max_requests=100)
    assert [
        (request.spec.prompt_tokens, request.spec.output_tokens) for request in traffic.requests
    ] == lengths


def test_only_wanted_conversations_are_read(tmp_path):
    """Others may be broken."""
    path = write(tmp_path, json.dumps(SHAREGPT)[:-1] + ", nonsense")
    traffic = replay_traces.read(path, "sharegpt", rate_per_s=1.0, max_requests=2)
    assert len(traffic.requests) == 2
    with pytest.raises(ConfigError, match="conversation 3"):
        replay_traces.read(path, "sharegpt", rate_per_s=1.0, max_requests=3)


def test_times_of_azure_may_have_a_zone(tmp_path):
    """As those of 2024 have; a fraction may be missing."""
    rows = ("2024-05-10 00:00:00.009930+00:00,1,2", "2024-05-10 00:00:01+00:00,3,4")
    path = write(tmp_path, "\n".join(("TIMESTAMP,ContextTokens,GeneratedTokens", *rows)))
    traffic = replay_traces.read(path, "azure", rate_per_s=None, max_requests=9)
    assert traffic.duration_s == pytest.approx(0.99007)


@pytest.mark.parametrize(
    ("name", "old", "new"),
    [
        ("mooncake", '"timestamp": 3000', '"timestamp": 1e9'),
        ("azure", "2023-11-16 18:15:47", "2023-11-28 18:15:47"),
    ],
)
def test_a_gap_of_days_is_refused(tmp_path, name, old, new):
    """A simulation would scrape idle engines all the while."""
    path = write(tmp_path, FILES[name].replace(old, new))
    with pytest.raises(ConfigError, match="requests at most 24 hours apart, got a gap of 2"):
        replay_traces.read(path, name, rate_per_s=None, max_requests=10)


def test_turns_of_sharegpt_repeat_what_was_said(tmp_path):
    """The second prompt begins with the first and its answer, in one session."""
    path = write(tmp_path, FILES["sharegpt"])
    (session,) = replay_traces.read(path, "sharegpt", rate_per_s=1.0, max_requests=9).sessions
    first, second = session.specs
    assert list(second.keys[: len(first.keys)]) == list(first.keys)
    assert len(second.keys) == 520 // 64


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "got nothing"),
        ("hello\n", "line 1: expected a recording"),
        ('{"other": 1}\n', "got '{\"other\": 1}'"),
    ],
)
def test_other_files_are_refused(tmp_path, text, words):
    """The error lists the formats."""
    with pytest.raises(ConfigError) as caught:
        replay_traces.find_format(write(tmp_path, text))
    assert words in str(caught.value)


@pytest.mark.parametrize(
    ("name", "text", "where"),
    [
        ("mooncake", MOONCAKE + '{"timestamp": "x"}\n', "line 3"),
        ("mooncake", MOONCAKE + MOONCAKE.replace("1100", "-1"), "line 3"),
        ("mooncake", MOONCAKE + MOONCAKE.replace(": 5", ": -5"), "line 3"),
        ("azure", AZURE + "yesterday,1,2\n", "line 4"),
        ("azure", AZURE + "2023-11-16 18:15:48,-1,2\n", "line 4: .*, got -1 tokens;"),
        ("azure", AZURE + "2023-11-16 18:15:48,1,-2\n", "line 4: .*, got -2 tokens;"),
        ("vllm-bench", VLLM + '{"prompt": 5}\n', "line 4"),
        ("vllm-bench", VLLM + '{"prompt": "a", "output_tokens": -5}\n', "line 4"),
        ("sharegpt", '[{"conversations": 5}]', "trace: conversation 1"),
        ("sharegpt", '[{"conversations": []}, {"x": ', "trace: conversation 2"),
        ("sharegpt", "[" + '{"x":' * 100_000, "trace: conversation 1"),
    ],
)
def test_broken_lines_are_named(tmp_path, name, text, where):
    """File and line stand in the error."""
    rate = 1.0 if name in {"vllm-bench", "sharegpt"} else None
    with pytest.raises(ConfigError, match=where):
        replay_traces.read(write(tmp_path, text), name, rate_per_s=rate, max_requests=100)


@pytest.mark.parametrize(
    ("name", "words", "error"),
    [
        ("azure", ["--engines", "1"], "no --profile"),
        ("azure", ["--profile", "demo"], "no --engines"),
        ("azure", ["--engines", "1", "--profile", "demo", "--rate", "1"], "--rate"),
        ("sharegpt", ["--engines", "1", "--profile", "demo"], "--rate"),
        ("sharegpt", ["--rate-scale", "2"], "--rate R is the rate"),
        ("azure", ["--engines", "1", "--profile", "demo", "--rate-scale", "1e-6"], "24 hours"),
        ("azure", ["--rate-scale", "0"], "above 0"),
        ("azure", ["--engines", "1", "--profile", "demo", "--pool", "a"], "a trace has no pools"),
    ],
)
def test_fleet_and_times_are_asked_for(tmp_path, capsys, name, words, error):
    """A flag names what a file does not have."""
    path = write(tmp_path, FILES[name])
    assert main.main(["replay", str(path), *words]) == 2
    assert error in capsys.readouterr().err


def test_a_plan_may_be_for_more_load_than_the_trace(tmp_path, capsys):
    """A rate that is a hundred times as high takes more engines, of the same requests."""
    rows = [f"2023-11-16 18:{n // 60:02}:{n % 60:02}.0000000,2000,50" for n in range(200)]
    path = write(tmp_path, "\n".join([AZURE.splitlines()[0], *rows]))
    argv = ["plan", str(path), "--slo", "ttft_p95=1s", "--profile", "l4-8b-fp8"]
    sizes = {}
    for scale in ("1", "100"):
        flags = ["--rate-scale", scale, "--json", "-", "--seeds", "1", "--jobs", "1"]
        assert main.main([*argv, *flags]) == 0
        output = capsys.readouterr()
        sizes[scale] = min(s["engines"] for s in json.loads(output.out) if s["is_enough"])
    assert sizes["100"] > sizes["1"]
    assert "trace at 100 times its rate: 200 requests in 2 s" in output.err


def test_a_plan_of_a_trace_looks_for_the_number_of_engines(tmp_path, capsys):
    """The flag for it would have no effect."""
    argv = ["plan", str(write(tmp_path, AZURE)), "--slo", "ttft_mean=1s", "--profile", "demo"]
    assert main.main([*argv, "--engines", "7"]) == 2
    assert "--max-engines N is the largest fleet" in capsys.readouterr().err


def test_requests_that_no_engine_takes_are_named(tmp_path, capsys):
    """A replay counts them; no fleet is large enough for them, and nothing can be tuned."""
    long = '{"timestamp": 4000, "input_length": 40000, "output_length": 5, "hash_ids": [1]}'
    path = write(tmp_path, MOONCAKE + long)
    fleet = ["--profile", "h100-8b-bf16", "--jobs", "1", "--seeds", "1"]
    assert main.main(["replay", str(path), "--engines", "1", *fleet]) == 0
    note = "too long: 1 request, which engines of 32768 tokens refuse; write --engine max_model_len=40005"
    assert note in capsys.readouterr().out
    for command in (
        ["plan", str(path), "--slo", "ttft_mean=1s"],
        ["tune", str(path), "--engines", "1"],
    ):
        assert main.main([*command, *fleet]) == 2
        assert "1 longer ones, up to 40005 tokens" in capsys.readouterr().err
    argv = ["plan", str(path), "--slo", "ttft_mean=9s", "--engine", "max_model_len=40005", *fleet]
    assert main.main(argv) == 0


def test_a_trace_is_replayed(tmp_path, capsys):
    """It has neither agreement nor fidelity."""
    path = write(tmp_path, MOONCAKE)
    words = ["--engines", "2", "--profile", "demo", "--strategy", "adaptive"]
    argv = ["replay", str(path), *words, "--strategy", "random", "--jobs", "1", "--seeds", "1"]
    assert main.main(argv) == 0
    out = capsys.readouterr().out
    assert "2 requests in 2 s, 2 endpoints" in out
    assert "Agreement" not in out
    assert "Verdict: random" in out
