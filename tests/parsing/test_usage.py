"""Usage at the end of answers."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from extproc.parsing import usage

OPENAI = b'{"usage":{"prompt_tokens":7,"completion_tokens":10,"total_tokens":17'


@pytest.mark.parametrize(
    ("tail", "expected"),
    [
        (OPENAI + b"}}", {"prompt": 7, "completion": 10}),
        (
            OPENAI + b',"prompt_tokens_details":{"cached_tokens":5}}}',
            {"prompt": 7, "completion": 10, "cached": 5},
        ),
        (
            OPENAI + b',"prompt_tokens_details":{"multimodal_tokens":{"image":4,"audio":1}}}}',
            {"prompt": 7, "completion": 10, "media": 5},
        ),
        (
            OPENAI + b',"prompt_tokens_details":{"multimodal_tokens":{"image":"4"}}}}',
            {"prompt": 7, "completion": 10},
        ),
        (b"data: " + OPENAI + b"}}\n\ndata: [DONE]\n\n", {"prompt": 7, "completion": 10}),
        (b'data: {"usage":null}\n\ndata: [DONE]\n\n', {}),
        (b'data: {"usage" : {"prompt_tokens": 7}}\n\ndata: {"usage":null}\n\n', {"prompt": 7}),
        (
            (
                b'{"usage":{"input_tokens":3,"output_tokens":4,'
                b'"input_tokens_details":{"cached_tokens":2}}}'
            ),
            {"prompt": 3, "completion": 4, "cached": 2},
        ),
        (
            (
                b'data: {"message":{"usage":{"input_tokens":3,"cache_read_input_tokens":1}}}\n\n'
                b'data: {"usage":{"output_tokens":4}}\n\n'
            ),
            {"prompt": 4, "completion": 4, "cached": 1},
        ),
        (
            (
                b'{"usage":{"input_tokens":3,"output_tokens":4,"cache_read_input_tokens":90,'
                b'"cache_creation_input_tokens":7}}'
            ),
            {"prompt": 100, "completion": 4, "cached": 90},
        ),
        (
            (
                b'{"usage":{"input_tokens":3,"cache_read_input_tokens":null,'
                b'"cache_creation_input_tokens":-1}}'
            ),
            {"prompt": 3},
        ),
        (b'{"choices":[{"text":"\\"usage\\":{\\"prompt_tokens\\":1}"}]}', {}),
        (b'{"usage":{"prompt_tokens":7', {}),
        (b'{"usage":{"prompt_tokens":-7}}', {}),
        (b'{"usage":' + b'{"a":' * 5000, {}),
        (b'{"usage":{"a":' + b"[" * 1000 + b"]" * 1000 + b"}}", {}),
        (b"", {}),
        (OPENAI + b'},"results":[{"te\0xt":"a"}]}', {"prompt": 7, "completion": 10}),
        (b'{"usage":{"prompt_tokens":7,"completion_tokens":' + b"9" * 400 + b"}}", {"prompt": 7}),
        (b'{"usage":{"prompt_tokens":7,"completion_tokens":"8"}}', {"prompt": 7}),
        (b'{"usage":{"prompt_tokens":true,"completion_tokens":8}}', {"completion": 8}),
        (b'{"usage":{"prompt_tokens":7.5,"completion_tokens":1e300}}', {}),
        (b'{"usage":{"prompt_tokens":7,"prompt_tokens_details":[1]}}', {"prompt": 7}),
        (b'{"usage"  :\n    {"prompt_tokens":7}}', {"prompt": 7}),
        (b'{"usage":{"note":"a}b{{","prompt_tokens":7}}', {"prompt": 7}),
        (b'{"usage":{"note":"\xe4\xff","prompt_tokens":7}}', {"prompt": 7}),
        (OPENAI + b'},"metadata":{"usage":"x"}}', {"prompt": 7, "completion": 10}),
    ],
)
def test_usage_is_read_from_the_end(tail, expected):
    """Whole and streamed answers of three APIs; null, text and broken objects report nothing."""
    assert usage.read(tail) == expected


_SGLANG = (
    b'{"text":"\\"meta_info\\":{","output_ids":[1],"meta_info":{"id":"a","finish_reason":'
    b'{"type":"length","length":7},"prompt_tokens":11,"weight_version":"default",'
    b'"completion_tokens":7,"cached_tokens":4,"e2e_latency":0.1}'
)
_SGLANG_COUNTS = {"prompt": 11, "completion": 7, "cached": 4}


@pytest.mark.parametrize(
    ("tail", "expected"),
    [
        (_SGLANG + b"}", _SGLANG_COUNTS),
        (_SGLANG + b" }\n", _SGLANG_COUNTS),
        (b"data: " + _SGLANG + b"}\n\ndata: [DONE]\n\n", _SGLANG_COUNTS),
        ((b"data: " + _SGLANG + b"}\n\n") * 2 + b"data: [DONE]\n\n", _SGLANG_COUNTS),
        (b"data: " + _SGLANG + b"}\n\n", _SGLANG_COUNTS),
        (b"[" + _SGLANG + b"}," + _SGLANG + b"}]", {}),
        (b"data: " + _SGLANG + b',"index":1}\n\ndata: [DONE]\n\n', {}),
        (_SGLANG + b',"more":1}', {}),
        (_SGLANG.replace(b"0.1", b"0." + b"1" * 4000) + b"}", {}),
        (_SGLANG + b"," + OPENAI[1:] + b"}}", {"prompt": 7, "completion": 10}),
        (b'{"embedding":[0.5],"meta_info":{"id":"a","prompt_tokens":5}}', {"prompt": 5}),
    ],
)
def test_usage_of_sglang_is_read_where_there_is_one_answer(tail, expected):
    """With several, whole or streamed, the last one says nothing of the others."""
    assert usage.read(tail) == expected


_START = b'data: {"type":"message_start","message":{"content":[],"usage":%b}}\n\n'
_DELTA = b'data: {"type":"content_block_delta","delta":{"text":"x"}}\n\n'
_END = b'event: message_delta\ndata: {"type":"message_delta","delta":{},"usage":%b}\n\n'
_ZEROS = b'{"input_tokens":0,"output_tokens":0,"cache_read_input_tokens":0}'
_BEGUN = b'{"input_tokens":4,"output_tokens":1,"cache_read_input_tokens":3}'


@pytest.mark.parametrize("before", [b"", b"event: message_start\n"])
@pytest.mark.parametrize(
    ("events", "expected"),
    [
        (_START % _BEGUN + _DELTA, {"prompt": 7, "cached": 3}),
        (_START % _ZEROS + _DELTA, {}),
        (
            _START % _BEGUN + _DELTA + _END % b'{"output_tokens":9}',
            {"prompt": 7, "completion": 9, "cached": 3},
        ),
        (
            _START % _ZEROS + _END % b'{"input_tokens":4,"output_tokens":0}',
            {"prompt": 4, "completion": 0},
        ),
        (_START % _ZEROS + _END % b'{"output_tokens":2}', {"completion": 2}),
        (
            _START % _BEGUN
            + _DELTA.replace(b'"x"', b'"usage"') * 8
            + _END % b'{"output_tokens":9}',
            {"prompt": 7, "completion": 9, "cached": 3},
        ),
    ],
)
def test_the_start_of_an_anthropic_stream_reports_no_answer(before, events, expected):
    """The stream may end early, and then its first event reports tokens of the prompt only."""
    assert usage.read(before + events) == expected


def test_an_answer_that_names_the_start_of_a_stream_reports_all():
    """Of an answer that is no stream, a text in the input of a tool changes nothing."""
    body = b'{"content":[{"type":"tool_use","input":{"type":"message_start"}}],"usage":%b}' % _BEGUN
    assert usage.read(body) == {"prompt": 7, "completion": 1, "cached": 3}


_INPUT = (
    b'{"content":[{"type":"tool_use","input":{"usage":{"note":"{{{",'
    b'"output_tokens":1,"cache_read_input_tokens":2000000000}}}],"usage":'
)


@pytest.mark.parametrize(
    ("tail", "expected"),
    [
        (_INPUT + b'{"input_tokens":9,"output_tokens":2}}', {"prompt": 9, "completion": 2}),
        (_INPUT + b'{"input_tokens":9}}', {"prompt": 9}),
        (_INPUT + b"null}", {}),
        (b"data: {}\n\ndata: " + _INPUT + b'{"input_tokens":9}}\n\n', {"prompt": 9}),
        (
            OPENAI + b',"a":{"usage":{"prompt_tokens":1}},"b":[{"usage":{"prompt_tokens":2}}]}}',
            {"prompt": 7, "completion": 10},
        ),
        (
            b'{"usage":{"input_tokens":9,"output_tokens":2,"input_tokens_details":{"cached_tokens":10}}}',
            {"prompt": 9, "completion": 2, "cached": 9},
        ),
        (
            b'{"usage":{"prompt_tokens":3,"prompt_tokens_details":{"multimodal_tokens":{"a":4}}}}',
            {"prompt": 3, "media": 3},
        ),
        (b'{"usage":{"output_tokens":2,"cache_read_input_tokens":10}}', {"completion": 2}),
    ],
)
def test_parts_of_an_answer_do_not_change_its_usage(tail, expected):
    """Objects of that name elsewhere in the answer count for nothing, nor do parts beyond the prompt."""
    assert usage.read(tail) == expected


@given(st.binary(max_size=300))
def test_no_bytes_make_reading_fail(garbage):
    """Reading is total."""
    assert set(usage.read(b'{"usage":{' + garbage)) <= {"prompt", "completion", "cached"}


_VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(10**400), 10**400)
    | st.floats()
    | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner),
    max_leaves=5,
)


_FIELDS = (
    *("prompt_tokens", "completion_tokens", "input_tokens", "output_tokens"),
    *("cache_read_input_tokens", "cache_creation_input_tokens"),
    *("prompt_tokens_details", "input_tokens_details"),
)


@given(st.dictionaries(st.sampled_from(_FIELDS), _VALUES))
def test_any_values_are_counts_in_range_or_left_out(report):
    """Numbers of any size and values of any type never reach a counter."""
    tail = json.dumps({"usage": report}).encode()
    assert all(0 <= tokens <= usage.MAX_TOKENS for tokens in usage.read(tail).values())


@pytest.mark.parametrize(
    ("weights", "cost"),
    [
        ({"prompt": 1, "completion": 1}, 120.0),
        ({"prompt": 1, "cached": -0.5, "completion": 4}, 150.0),
        ({"completion": 2}, 40.0),
        ({"cached": -1}, 0.0),
    ],
)
def test_cost_is_tokens_times_weights(weights, cost):
    """Each kind counts by its weight, and the sum is never negative."""
    assert usage.cost({"prompt": 100, "completion": 20, "cached": 60}, weights) == cost


def test_cost_without_reported_usage():
    """There is no cost without usage, or without a kind that has a weight."""
    assert usage.cost({}, {"prompt": 1}) is None
    assert usage.cost({"prompt": 1}, {"cached": 1}) is None


@pytest.mark.parametrize(
    ("tail", "expected"),
    [
        (b'{"id":"chatcmpl-1","choices":[{"message":{"tool_calls":[{"id":"call_2"}]}}]}', 2),
        (b'{"object":"chat.completion","id" : "chatcmpl-1","choices":[]}', 1),
        (b'{"choices":[' + b'{"text":"x"},' * 500 + b'{}],"usage":{},"id":"chatcmpl-1"}', 1),
        (b'data: {"choices":[],"id":"chatcmpl-1"}\n\ndata: [DONE]\n\n', 1),
        (b'{"choices":[{"text":"\\"id\\":\\"secret\\""}]}', 0),
        (b'{"id":7}', 0),
        (b'{"id":""}', 0),
        (b'{"id":"' + b"x" * 257 + b'"}', 0),
        (b"", 0),
    ],
)
def test_ids_of_answers_are_read(tail, expected):
    """Wherever engines put them; text of an answer has none, however it looks."""
    assert list(usage.read_ids(tail)) == ["chatcmpl-1", "call_2"][:expected]


@given(st.binary(max_size=300))
def test_no_bytes_make_reading_ids_fail(garbage):
    """Reading is total, and ids have a bounded length."""
    assert all(0 < len(name) <= 256 for name in usage.read_ids(b'{"id":"' + garbage))
