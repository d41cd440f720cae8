import struct

import pytest

from tests.parsing import builders

TOOLS = [{"name": "f", "input_schema": {}}]


def test_responses_with_a_string():
    """A string is one user message, behind instructions and tools."""
    body = {"model": "m", "input": "hi", "instructions": "be brief", "max_output_tokens": 5}
    request = builders.parsed("/v1/responses", body)
    assert (request.api, request.max_tokens) == ("responses", 5)
    assert request.prompt == b"\xffsystem\xfebe brief\xffuser\xfehi"


def test_responses_with_items():
    """Messages read as in chat; calls and their results are items of their own."""
    items = [
        {"role": "user", "content": [{"type": "input_text", "text": "hi"}]},
        {"type": "function_call", "name": "f", "arguments": "{}"},
        {"type": "function_call_output", "output": "5"},
        "loose",
    ]
    request = builders.parsed("/v1/responses", {"model": "m", "input": items})
    assert request.prompt.startswith(b"\xffuser\xfehi\xfffunction_call\xfd{")
    string = builders.parsed("/v1/responses", {"model": "m", "input": "hi"})
    assert request.prompt.startswith(string.prompt)


@pytest.mark.parametrize("value", [None, 5, {"a": 1}, True])
def test_responses_without_input(value):
    """Input is a string or a list."""
    message = builders.refused("/v1/responses", {"model": "m", "input": value})
    assert message == "invalid responses request: must have input field"


def test_conversations():
    """The first items of a conversation are its prompt."""
    request = builders.parsed("/v1/conversations", {"model": "m", "items": [builders.user("hi")]})
    assert (request.api, request.prompt) == ("conversations", b"\xffuser\xfehi")


def test_anthropic_messages():
    """Tools, then the system prompt, then the messages."""
    body = {
        "model": "m",
        "system": [{"type": "text", "text": "brief", "cache_control": {"type": "ephemeral"}}],
        "messages": [builders.user("hi")],
        "tools": TOOLS,
        "max_tokens": 9,
        "metadata": {"user_id": "u_session_1"},
        "stream": True,
    }
    request = builders.parsed("/v1/messages", body)
    assert (request.api, request.max_tokens, request.stream) == ("messages", 9, True)
    assert request.session == "u_session_1"
    assert request.prompt.startswith(b'\xf9t[{"name"')
    assert request.prompt.endswith(b"\xffsystem\xfebrief\xffuser\xfehi")


def test_anthropic_cache_breakpoints_move():
    """A breakpoint that moves to the next turn does not change the prompt behind it."""
    result = {"type": "tool_result", "tool_use_id": "1", "content": "x"}
    marked = {**result, "cache_control": {"type": "ephemeral"}}
    before = builders.parsed("/v1/messages", {"model": "m", "messages": [builders.user([marked])]})
    history = [builders.user([result]), builders.user("more")]
    after = builders.parsed("/v1/messages", {"model": "m", "messages": history})
    assert after.prompt.startswith(before.prompt)


@pytest.mark.parametrize("filler", ["", "x" * 20_000])
def test_anthropic_billing_header_is_left_out(filler):
    """The block of Claude Code that changes with every request is not in the prompt, as in vLLM."""
    rules = {"type": "text", "text": f"rules {filler}"}
    body = {"model": "m", "system": [rules], "messages": [builders.user("hi")]}
    billing = {"type": "text", "text": "x-anthropic-billing-header: cc_version=2.1; cch=0a1b2;"}
    marked = {**body, "system": [billing, rules]}
    prompt = builders.parsed("/v1/messages", body).prompt
    assert builders.parsed("/v1/messages", marked).prompt == prompt
    moved = {"role": "system", "content": [billing, rules]}
    marked = {"model": "m", "messages": [moved, builders.user("hi")]}
    assert builders.parsed("/v1/messages", marked).prompt == prompt
    text = {**body, "system": billing["text"]}
    assert b"billing" in builders.parsed("/v1/messages", text).prompt


def test_anthropic_system_messages_stay_in_their_place():
    """Claude Code adds one with every turn; the prompt of the turn before remains its prefix."""
    history = [builders.user("a"), {"role": "system", "content": "note"}]
    body = {"model": "m", "system": "brief", "messages": history}
    before = builders.parsed("/v1/messages", body).prompt
    assert before == b"\xffsystem\xfebrief\xffuser\xfea\xffsystem\xfenote"
    history += [builders.user("b"), {"role": "system", "content": "other"}]
    assert builders.parsed("/v1/messages", body).prompt.startswith(before)


@pytest.mark.parametrize(
    ("field", "first", "second"),
    [
        ("chat_template_kwargs", {"enable_thinking": True}, {"enable_thinking": False}),
        ("output_config", {"effort": "low"}, {"effort": "high"}),
    ],
)
@pytest.mark.parametrize("filler", ["", "x" * 20_000])
def test_anthropic_options_of_the_template(field, first, second, filler):
    """Options that vLLM passes to the chat template precede the messages."""
    body = {"model": "m", "messages": [builders.user("hi" + filler)]}
    plain = builders.parsed("/v1/messages", body).prompt
    prompts = {
        builders.parsed("/v1/messages", {**body, field: value}).prompt for value in (first, second)
    }
    assert len(prompts | {plain}) == 3
    assert all(prompt.endswith(plain) for prompt in prompts)


@pytest.mark.parametrize("value", [None, 5, "low", {"effort": 10**30}, {"effort": None}, []])
def test_anthropic_output_config_of_another_form_counts_as_none(value):
    """An effort that is no text is no option."""
    body = {"model": "m", "messages": [builders.user("hi")]}
    odd = builders.parsed("/v1/messages", {**body, "output_config": value})
    assert odd.prompt == builders.parsed("/v1/messages", body).prompt


@pytest.mark.parametrize("messages", [[], None, "hi", ["hi"]])
def test_anthropic_without_messages(messages):
    """At least one message is demanded."""
    message = builders.refused("/v1/messages", {"model": "m", "messages": messages})
    assert message == "invalid messages request: must have at least one message"


@pytest.mark.parametrize(
    ("path", "api"),
    [
        ("/v1/chat/completions/render", "chat_render"),
        ("/v1/completions/render", "completions_render"),
        ("/tokenize", "tokenize"),
        ("/v1/messages/count_tokens", "count_tokens"),
    ],
)
def test_surfaces_without_computation_have_no_prompt(path, api):
    """Surfaces that compute nothing have a model and no prompt."""
    body = {"model": "m", "messages": [builders.user("hi")], "prompt": "hi", "user": "u"}
    request = builders.parsed(path, body)
    assert (request.api, request.model, request.session) == (api, "m", "u")
    assert (request.prompt, request.prompt_tokens) == (b"", 0)


@pytest.mark.parametrize("path", ["/tokenize", "/v1/messages/count_tokens"])
@pytest.mark.parametrize("body", [b"{", b"[1]", b"\xff", b"{}"])
def test_raw_surfaces_accept_any_body(path, body):
    """Tokenize and count_tokens are routed whatever their body."""
    assert builders.parsed(path, body).model == ""


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/rerank", {"query": "q", "documents": ["a", {"text": "b"}]}),
        ("/v2/rerank", {"query": "q", "documents": ["a"]}),
        ("/score", {"text_1": "q", "text_2": ["a", "b"]}),
        ("/v1/score", {"queries": ["q"], "documents": ["a"]}),
        ("/v1/score", {"data_1": "q", "data_2": "b"}),
    ],
)
def test_ranking(path, body):
    """The query is the beginning of the prompt, the documents follow."""
    request = builders.parsed(path, {"model": "m", **body})
    assert request.api in {"rerank", "score"}
    assert request.prompt.startswith(b"\xff\xfeq\xff")
    assert request.prompt_tokens > 0


def test_vllm_generate():
    """Token ids in, no model needed, the bound inside sampling_params."""
    body = {"token_ids": [5, 6], "sampling_params": {"max_tokens": 4}, "stream": True}
    request = builders.parsed("/inference/v1/generate", body)
    assert (request.api, request.prompt) == ("generate", struct.pack("<2I", 5, 6))
    assert (request.prompt_tokens, request.max_tokens, request.stream) == (2, 4, True)


@pytest.mark.parametrize("ids", [None, [], "abc", ["a"], [-1], {"a": 1}])
def test_vllm_generate_without_tokens(ids):
    """Only a non-empty list of token ids will do."""
    message = builders.refused("/inference/v1/generate", {"token_ids": ids})
    assert message == "invalid generate request: must have token_ids field"


def test_vllm_generate_with_pictures():
    """Alike placeholder tokens of two pictures differ; what stands before them does not."""

    def prompt(name):
        features = {
            "mm_hashes": {"image": [name]},
            "mm_placeholders": {"image": [{"offset": 2, "length": 3}]},
        }
        body = {"token_ids": [1, 2, 9, 9, 9, 3], "features": features}
        return builders.parsed("/inference/v1/generate", body).prompt

    first, other, plain = prompt("a"), prompt("b"), struct.pack("<6I", 1, 2, 9, 9, 9, 3)
    assert first[8:20] != other[8:20]
    assert (first[:8], first[20:]) == (plain[:8], plain[20:])


@pytest.mark.parametrize(
    "features",
    [
        5,
        {},
        {"mm_hashes": 1, "mm_placeholders": 1},
        {"mm_hashes": {"image": 1}, "mm_placeholders": {"image": [1]}},
        {"mm_hashes": {"image": [1]}, "mm_placeholders": {"image": [1]}},
        {"mm_hashes": {"image": ["a"]}, "mm_placeholders": {"image": [{"offset": "x"}]}},
        {"mm_hashes": {"i": ["a"]}, "mm_placeholders": {"i": [{"offset": 0, "length": "x"}]}},
        {"mm_hashes": {"i": ["a"]}, "mm_placeholders": {"i": [{"offset": 9, "length": 9}]}},
        {"mm_hashes": {"i": ["a"]}, "mm_placeholders": {"i": [{"offset": -1, "length": 1}]}},
        {"mm_hashes": {"i": ["a"]}, "mm_placeholders": {"i": [{"offset": 0, "length": -5}]}},
    ],
)
def test_vllm_generate_with_odd_features(features):
    """Features of an unknown form leave the tokens as they are."""
    request = builders.parsed("/inference/v1/generate", {"token_ids": [1, 2], "features": features})
    assert request.prompt == struct.pack("<2I", 1, 2)


@pytest.mark.parametrize(
    ("body", "prompt"),
    [
        ({"text": "hi"}, b"hi"),
        ({"text": ["a", "b"]}, b"a\xfeb"),
        ({"input_ids": [1]}, struct.pack("<I", 1)),
        ({"input_ids": [[1], [2]]}, struct.pack("<I4sI", 1, b"\xff" * 4, 2)),
        ({"prompt": "hi"}, b"hi"),
        ({"inputs": "hi"}, b"hi"),
        ({"text_input": "hi"}, b"hi"),
        ({}, b""),
    ],
)
def test_sglang_generate(body, prompt):
    """Text or ids, alone or in batches; the engine judges a body without any."""
    body = {**body, "sampling_params": {"max_new_tokens": 8}, "lora_path": "sql"}
    request = builders.parsed("/generate", body)
    assert (request.api, request.prompt) == ("sglang_generate", prompt)
    assert (request.max_tokens, request.adapter) == (8, "sql")


@pytest.mark.parametrize("filler", ["", "x" * 20_000])
@pytest.mark.parametrize(
    ("fields", "bound"),
    [
        ({"sampling_params": [{"max_new_tokens": 8}, {"max_new_tokens": 77}]}, 77),
        ({"sampling_params": [{"max_new_tokens": 8}, {}, {"max_new_tokens": "9"}, None]}, 8),
        ({"sampling_params": [{}, {"temperature": 0}]}, None),
        ({"sampling_params": [], "parameters": {"max_new_tokens": 7}}, 7),
        ({"parameters": {"max_new_tokens": 7, "details": True}}, 7),
        ({"parameters": [5, {"max_new_tokens": -1}]}, None),
        ({"max_tokens": 6}, 6),
    ],
)
def test_native_bounds_of_answers(fields, bound, filler):
    """The bound of SGLang, of a batch the largest, that of TGI, or that of Triton."""
    request = builders.parsed("/generate", {"text": "hi" + filler, **fields})
    assert request.max_tokens == bound


def test_sglang_generate_wants_json():
    """SGLang also refuses a body that is no JSON object."""
    message = builders.refused("/generate", b"hello")
    assert message.startswith("error unmarshaling request bodyMap: ")


@pytest.mark.parametrize(
    ("lora_path", "adapter"),
    [(["sql", "sql"], "sql"), (["sql"], "sql"), ([None, ""], ""), ([], ""), (False, "")],
)
def test_native_batch_of_an_adapter_has_its_blocks(lora_path, adapter):
    """A batch whose prompts share an adapter has the blocks that a request for it alone has."""
    body = {"text": ["hi", "ho"], "lora_path": lora_path}
    request = builders.parsed("/generate", body)
    alone = builders.parsed("/generate", {"text": ["hi", "ho"], "lora_path": adapter})
    assert (request.adapter, request.prompt) == (adapter, alone.prompt)


@pytest.mark.parametrize("lora_path", [["sql", None], [None, "sql"], ["sql", "web"], {"sql": 1}, 7])
@pytest.mark.parametrize("prompts", [{"text": ["hi", "ho"]}, {"input_ids": [[1, 2], [3]]}])
def test_native_batch_of_several_adapters_shares_no_block(lora_path, prompts):
    """Its prompt begins like that of no batch under other adapters, and keeps whole tokens."""
    mixed = builders.parsed("/generate", {**prompts, "lora_path": lora_path})
    named = [] if not isinstance(lora_path, list) else [name for name in lora_path if name]
    assert mixed.adapter == (named[0] if named else "")
    other = builders.parsed("/generate", {**prompts, "lora_path": ["web", "sql"]})
    base = builders.parsed("/generate", prompts)
    assert mixed.prompt[:8] != base.prompt[:8]
    assert not other.prompt.startswith(mixed.prompt[:16])
    assert mixed.prompt.endswith(base.prompt)
    assert (len(mixed.prompt) - len(base.prompt)) % 4 == 0


def test_native_adapter_of_a_long_text_is_refused():
    """A name of more than 64 KiB is refused as a shorter one is, and not taken for none."""
    body = {"text": "a" * 300_000 + "\U0001f600", "lora_path": "a" * 100_000}
    assert "adapter name of at most 512 bytes" in builders.refused("/generate", body)
