import pytest

from extproc.parsing import canonical_prompt
from tests.parsing import builders
from tests.parsing.builders import CHAT, chat, user

PICTURE = "data:image/png;base64," + "QUJD" * 100
NO_MESSAGES = "invalid chat completions request: must have valid messages field"


def test_fields_of_a_chat_request():
    """Model, stream flag, token bound, session, subset and prompt size are read."""
    request = chat(user("hello"), stream=True, max_completion_tokens=7, max_tokens=9, user="u1")
    assert (request.api, request.model, request.adapter) == ("chat", "m", "")
    assert (request.stream, request.max_tokens, request.session) == (True, 7, "u1")
    assert request.prompt == b"\xffuser\xfehello"
    assert request.prompt_tokens == 2


@pytest.mark.parametrize("messages", [None, [], {}, "hi", 5, ["hi"], [None], [[]]])
def test_messages_must_be_a_list_of_messages(messages):
    """Absent, empty or malformed messages are refused with the text of docs/spec/protocol.md#request-flow."""
    assert builders.refused(CHAT, {"model": "m", "messages": messages}) == NO_MESSAGES


def test_absent_messages_are_refused():
    """A chat body with a prompt in place of messages is refused."""
    assert builders.refused(CHAT, {"model": "m", "prompt": "hi"}) == NO_MESSAGES


@pytest.mark.parametrize("messages", [{}, [], [user("hi")]])
def test_missing_model_is_reported_first(messages):
    """Point 70: no model is what the client hears, whatever else is wrong."""
    assert builders.refused(CHAT, {"messages": messages}) == "model not found in request body"


@pytest.mark.parametrize("model", [None, "", 5, ["m"], {"a": "m"}])
def test_model_must_be_a_name(model):
    """A model that is no non-empty string counts as missing."""
    body = {"model": model, "messages": [user("hi")]}
    assert builders.refused(CHAT, body) == "model not found in request body"


@pytest.mark.parametrize("header", ["x_llm_d_model_name_rewrite", "x_gateway_model_name_rewrite"])
def test_a_header_supplies_a_missing_model(header):
    """The rewrite header names the model where the body names none, and only there."""
    bare, named = {"messages": [user("hi")]}, {"model": "m", "messages": [user("hi")]}
    assert builders.parsed(CHAT, bare, **{header: "t"}).model == "t"
    assert builders.parsed(CHAT, named, **{header: "t"}).model == "m"


@pytest.mark.parametrize(
    "fields",
    [
        {"stream": None},
        {"stream": "yes"},
        {"max_tokens": "many"},
        {"max_tokens": -1},
        {"user": 7},
        {"metadata": "x"},
        {"tools": 1},
        {"tools": None},
        {"tool_choice": 1},
        {"cache_salt": 9},
        {"chat_template_kwargs": []},
    ],
)
def test_harmless_fields_of_other_types(fields):
    """A field beside model and messages never refuses a request, whatever its type."""
    request = chat(user("hi"), **fields)
    assert (request.stream, request.max_tokens, request.session) == (False, None, "")


def test_token_bound_may_be_a_float():
    """JSON does not tell 128 from 128.0, and some clients send the latter."""
    assert chat(user("hi"), max_tokens=128.0).max_tokens == 128


def test_token_bound_is_bounded():
    """A number no engine would generate does not reach anybody's arithmetic."""
    assert chat(user("hi"), max_tokens=10**400).max_tokens == 2**31 - 1


def test_text_parts_read_like_a_string():
    """The same text has the same bytes as a string and as a part, whatever else the part says."""
    part = {"type": "text", "text": "hi", "cache_control": {"type": "ephemeral"}}
    assert chat(user([part])).prompt == chat(user("hi")).prompt


def test_parts_are_not_run_together():
    """Two parts differ from one part with their joined text."""
    two = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    assert chat(user(two)).prompt != chat(user("ab")).prompt


def test_pictures_are_digested():
    """A base64 picture is 32 digits of the prompt; another picture makes another prompt."""
    picture = [{"type": "image_url", "image_url": {"url": PICTURE}}]
    other = [{"type": "image_url", "image_url": {"url": PICTURE + "QUJE"}}]
    prompt = chat(user(picture)).prompt
    assert canonical_prompt.digest(PICTURE).encode() in prompt
    assert b"QUJDQUJD" not in prompt
    assert prompt != chat(user(other)).prompt


def test_plain_addresses_are_not_hashed():
    """A picture by address is its address."""
    part = {"type": "image_url", "image_url": {"url": "https://example.org/cat.png"}}
    assert b"https://example.org/cat.png" in chat(user([part])).prompt


def test_sound_is_digested():
    """Base64 under `data` is digested too."""
    part = {"type": "input_audio", "input_audio": {"data": "QUJD" * 50, "format": "wav"}}
    assert len(chat(user([part])).prompt) < 150


@pytest.mark.parametrize(
    "fields",
    [
        {"tools": [{"type": "function", "function": {"name": "f"}}]},
        {"functions": [{"name": "f"}]},
        {"chat_template_kwargs": {"enable_thinking": False}},
        {"chat_template": "{{ messages }}"},
        {"documents": [{"text": "d"}]},
        {"reasoning_effort": "high"},
        {"cache_salt": "s"},
    ],
)
def test_options_precede_the_messages(fields):
    """An option that changes the beginning of the prompt changes the beginning of the bytes."""
    plain, changed = chat(user("hi")).prompt, chat(user("hi"), **fields).prompt
    assert changed.endswith(plain)
    assert len(changed) > len(plain)


@pytest.mark.parametrize(
    "fields", [{"tools": []}, {"tools": None}, {"chat_template_kwargs": {}}, {"cache_salt": ""}]
)
def test_empty_options_are_absent(fields):
    """An option that says nothing leaves the prompt as it is."""
    assert chat(user("hi"), **fields).prompt == chat(user("hi")).prompt


def test_salt_comes_first():
    """The cache salt stands before the tools, so that nothing is shared across salts."""
    tools = [{"type": "function", "function": {"name": "f"}}]
    assert chat(user("hi"), cache_salt="s", tools=tools).prompt.startswith(b"\xf8s\xf9")


@pytest.mark.parametrize(
    "extra",
    [
        {"name": "bob"},
        {"tool_call_id": "bob"},
        {"tool_calls": [{"id": "1"}]},
        {"function_call": {"name": "f"}},
        {"reasoning_content": "because"},
        {"reasoning": "because"},
    ],
)
def test_fields_of_a_message_count(extra):
    """Names, tool calls and kept reasoning are part of the prompt."""
    plain = {"role": "assistant", "content": "hi"}
    assert chat(plain).prompt != chat({**plain, **extra}).prompt


def test_adapter_of_sglang():
    """SGLang names a LoRA adapter apart from the model."""
    request = chat(user("hi"), lora_path="sql")
    assert (request.adapter, request.target) == ("sql", "sql")


def test_lone_surrogates_are_mended():
    """A string cut inside an emoji is read; pairs and escaped backslashes stay as they are."""
    text = rb'"\ud83d a \ud83d\ude00 \\ud83d \ud83d"'
    body = b'{"model":"m","messages":[{"role":"user","content":' + text + b"}]}"
    expected = "\ufffd a \U0001f600 \\ud83d \ufffd"
    assert builders.parsed(CHAT, body).prompt == b"\xffuser\xfe" + expected.encode()
