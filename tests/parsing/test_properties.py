import json

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from extproc.decision import Rejection
from extproc.parsing import bounded_decoder, other_apis, surfaces, vllm_grpc
from extproc.request import HttpRequest, InferenceRequest, path_of
from tests.parsing import builders
from tests.parsing.builders import CHAT, chat
from tests.support.canary import CANARY
from tests.support.seeded import examples

PATHS = st.sampled_from([*(f"/v1/{surface.path}" for surface in surfaces.SURFACES), "/x", ""])
METHODS = st.sampled_from(["", "POST", "PUT"])

leaves = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.floats(),
    st.text(max_size=8),
    st.sampled_from([CANARY, "data:" + CANARY * 20, "\ud800", "image_url", "image", "input_audio"]),
)
keys = st.sampled_from(
    ["type", "text", "role", "content", "data", "id", "url", "image_url", "cache_control"]
)
values = st.recursive(
    leaves,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(keys, inner, max_size=4),
    max_leaves=12,
)
FIELDS = [
    *("model", "messages", "prompt", "input", "items", "system", "tools", "stream", "user"),
    *("max_tokens", "metadata", "conversation", "cache_salt", "token_ids", "input_ids", "text"),
    *("query", "documents", "text_1", "sampling_params", "features", "instructions", "lora_path"),
]
bodies = st.dictionaries(st.sampled_from(FIELDS), values, max_size=6)


def check(path, body, *, method="POST", truncated=False, **headers):
    """Parse; the outcome is a value, and no refusal quotes the body."""
    raw = HttpRequest({":method": method, ":path": path, **headers}, body, truncated=truncated)
    outcome = surfaces.parse(raw)
    if isinstance(outcome, Rejection):
        assert outcome.status == 400
        assert CANARY not in outcome.message
        assert not truncated
        assert surfaces.surface_of(path_of(raw.headers)) != surfaces.OPAQUE
        return
    assert isinstance(outcome, InferenceRequest)
    assert isinstance(outcome.prompt, bytes)
    assert isinstance(outcome.model, str)
    assert isinstance(outcome.session, str)
    assert outcome.prompt_tokens >= 0
    assert outcome.max_tokens is None or outcome.max_tokens >= 0


@settings(max_examples=examples(100), deadline=None)
@given(PATHS, METHODS, st.binary(max_size=200), st.booleans())
def test_any_bytes_on_any_path(path, method, body, truncated):
    """No bytes on no path make the parser raise."""
    check(path, body, method=method, truncated=truncated)


@settings(max_examples=examples(100), deadline=None)
@given(PATHS, bodies)
def test_any_json_on_any_path(path, body):
    """Fields of any type, NaN and lone surrogates included, are read or refused."""
    check(path, json.dumps(body).encode())


@settings(max_examples=examples(100), deadline=None)
@given(PATHS, bodies, st.data())
def test_mutated_json(path, body, data):
    """Cut, overwritten and repeated bytes inside valid JSON are read or refused."""
    text = json.dumps({"model": "m", **body}, ensure_ascii=False).encode("utf-8", "surrogatepass")
    start = data.draw(st.integers(0, len(text)))
    stop = data.draw(st.integers(start, len(text)))
    patch = data.draw(st.sampled_from([b"", b'"', b"\\", b"\xff", b"{", b"\\ud800", b"1" * 400]))
    check(path, text[:start] + patch + text[stop:])
    check(path, text[:stop], truncated=True)


@settings(max_examples=examples(100), deadline=None)
@given(
    st.lists(
        st.sampled_from(
            [
                b"--b",
                b"\r\n",
                b"\r\n--b",
                b"--",
                b'Content-Disposition: form-data; name="model"',
                b"content-disposition: form-data; name=",
                b'name="model"',
                b"\xff\x00",
                b"w",
                b'"',
            ]
        ),
        max_size=24,
    )
)
def test_any_form(pieces):
    """A form of any shape is a request, never a refusal."""
    body = b"".join(pieces)
    if body:
        content_type = "multipart/form-data; boundary=b"
        builders.parsed("/v1/audio/transcriptions", body, content_type=content_type)
    other_apis.read_form(body, b"")


@settings(max_examples=examples(100), deadline=None)
@given(st.sampled_from(["Generate", "Embed"]), st.binary(max_size=60), st.data())
def test_any_grpc_message(method, message, data):
    """A well-framed message of any bytes is read or refused."""
    length = data.draw(st.sampled_from([len(message), len(message), 0, 2**32 - 1]))
    path = f"/vllm.grpc.engine.VllmEngine/{method}"
    check(path, b"\0" + length.to_bytes(4, "big") + message)
    # The same bytes as the token run of a tokenized input.
    inner = b"\x12" + bytes([len(message)]) + message
    framed = b"\x12" + bytes([len(inner)]) + inner
    check(path, b"\0" + len(framed).to_bytes(4, "big") + framed)


@given(st.lists(st.integers(0, 2**32 - 1), max_size=40))
def test_varints_round_trip(ids):
    """Any run of varints reads back as the ids it was made from."""
    run = bytearray()
    for token in ids:
        groups = [token >> shift & 127 for shift in range(0, max(token.bit_length(), 1), 7)]
        run += bytes([group | 128 for group in groups[:-1]] + groups[-1:])
    assert vllm_grpc.unpack_varints(bytes(run)) == ids


texts = st.text(st.sampled_from('ab\x00\x1e\u00e9\U0001f600{}[]",:'), max_size=4)
text_part = st.builds(lambda text: {"type": "text", "text": text}, texts)
picture = st.builds(
    lambda text: {"type": "image_url", "image_url": {"url": "data:" + text * 40}}, texts
)
# A list of one text part and that text are the same prompt, so lists start at two parts.
contents = st.one_of(st.none(), texts, st.lists(text_part | picture, min_size=2, max_size=3))
names = st.text(st.sampled_from("ab"), min_size=1, max_size=2)
calls = st.lists(st.fixed_dictionaries({"id": names}), min_size=1, max_size=2)
messages = st.fixed_dictionaries(
    {"role": st.sampled_from(["system", "user", "assistant", "tool", "us"]), "content": contents},
    optional={"name": names, "tool_call_id": names, "tool_calls": calls, "reasoning": names},
)
histories = st.lists(messages, min_size=1, max_size=4)
options = st.fixed_dictionaries(
    {}, optional={"tools": calls, "cache_salt": names, "chat_template_kwargs": st.just({"a": 1})}
)


@settings(max_examples=examples(100), deadline=None)
@given(histories, histories, options)
def test_next_turn_extends_the_prompt(history, more, fields):
    """The prompt of a later turn starts with the bytes of the earlier turn."""
    before, after = chat(*history, **fields), chat(*history, *more, **fields)
    assert after.prompt.startswith(before.prompt)
    assert len(after.prompt) > len(before.prompt)


@settings(max_examples=examples(100), deadline=None)
@given(histories, histories, options, options)
@example([{"role": "us", "content": "er"}], [{"role": "user", "content": ""}], {}, {})
@example([{"role": "user", "content": None}], [{"role": "user", "content": ""}], {}, {})
def test_different_conversations_differ(first, other, fields, others):
    """Equal bytes mean equal options and equal histories."""
    same = (first, fields) == (other, others)
    assert (chat(*first, **fields).prompt == chat(*other, **others).prompt) is same


@settings(max_examples=examples(100), deadline=None)
@given(histories, st.lists(st.integers(1, 3), min_size=1, max_size=4), st.data())
def test_any_change_of_a_message_changes_the_prompt(history, numbers, data):
    """Taking one message out, or doubling it, changes the prompt."""
    at = data.draw(st.integers(0, len(history) - 1))
    doubled = [*history[: at + 1], *history[at:]]
    assert chat(*history).prompt != chat(*doubled).prompt
    ids = {"model": "m", "prompt": [numbers, numbers]}
    flat = {"model": "m", "prompt": numbers + numbers}
    path = "/v1/completions"
    assert builders.parsed(path, ids).prompt != builders.parsed(path, flat).prompt


@settings(max_examples=examples(100), deadline=None)
@given(st.sampled_from(["/v1/messages", "/v1/responses", "/invocations"]), histories, histories)
def test_prompts_of_other_surfaces_extend(path, history, more):
    """Anthropic, Responses and unknown paths keep the prefix property."""
    field = "input" if path.endswith("responses") else "messages"
    before = builders.parsed(path, {"model": "m", field: history})
    after = builders.parsed(path, {"model": "m", field: [*history, *more]})
    assert after.prompt.startswith(before.prompt)


parameters = st.dictionaries(st.sampled_from(["max_new_tokens", "x"]), leaves)
usual = st.fixed_dictionaries(
    {"model": names},
    optional={
        "messages": histories,
        "input": histories | texts | st.lists(st.integers(-1, 2**32), max_size=3),
        "items": histories,
        "prompt": texts | st.lists(st.integers(-1, 2**32), max_size=3) | st.lists(text_part),
        "token_ids": st.lists(st.integers(0, 2**32), max_size=3),
        "system": contents,
        "instructions": contents,
        "tools": calls,
        "metadata": st.dictionaries(st.sampled_from(["session_id", "user_id", "x"]), leaves),
        "conversation": names | st.fixed_dictionaries({"id": names}, optional={"x": names}),
        "sampling_params": parameters | st.lists(parameters, max_size=2),
        "parameters": parameters,
        "output_config": st.dictionaries(st.sampled_from(["effort", "x"]), leaves),
        "user": leaves,
        "lora_path": names | st.lists(names, max_size=2),
        "max_tokens": leaves,
    },
)


@settings(max_examples=examples(300), deadline=None)
@given(PATHS, usual | bodies, st.sampled_from([b"", b"}", b"\xff", b',"user":']))
def test_narrow_types_change_no_outcome(path, body, end):
    """A body is read or refused alike whether it is decoded into narrow types first or at once."""
    raw = builders.post(path, json.dumps(body).encode() + end)
    outcomes = []
    for short_bytes in (-1, 1 << 20):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(bounded_decoder, "SHORT_BYTES", short_bytes)
            outcomes.append(surfaces.parse(raw))
    assert outcomes[0] == outcomes[1]


@settings(max_examples=examples(100), deadline=None)
@given(st.binary(max_size=80), st.text(max_size=12))
def test_any_path_and_content_type(body, noise):
    """Odd paths and content types are read like any other."""
    check(noise, body, **{"content-type": f"multipart/form-data; boundary={noise}"})
    check(f"/audio/translations?{noise}", body, **{"content-type": f'x; boundary="{noise}"'})
    check(CHAT, body, **{"x-session-id": noise, "content-length": noise})
