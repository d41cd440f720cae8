"""Usage at the end of answers."""

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
            {"prompt": 3, "completion": 4, "cached": 1},
        ),
        (b'{"choices":[{"text":"\\"usage\\":{\\"prompt_tokens\\":1}"}]}', {}),
        (b'{"usage":{"prompt_tokens":7', {}),
        (b'{"usage":{"prompt_tokens":-7}}', {}),
        (b'{"usage":' + b'{"a":' * 5000, {}),
        (b'{"usage":{"a":' + b"[" * 1000 + b"]" * 1000 + b"}}", {}),
        (b"", {}),
    ],
)
def test_usage_is_read_from_the_end(tail, expected):
    """Whole and streamed answers of three APIs; null, text and broken objects report nothing."""
    assert usage.read(tail) == expected


@given(st.binary(max_size=300))
def test_no_bytes_make_reading_fail(garbage):
    """Reading is total."""
    assert set(usage.read(b'{"usage":{' + garbage)) <= {"prompt", "completion", "cached"}
