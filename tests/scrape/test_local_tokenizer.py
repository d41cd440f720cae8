"""Tokens of prompts by the files of a model: a small one, which the tests write."""

import asyncio
import contextlib
import json
import re
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from extproc.errors import ConfigError
from extproc.request import HttpRequest
from extproc.scrape.kv_event_subscriber import KvEventsSection, require
from extproc.scrape.local_tokenizer import LocalTokenizer, is_available
from tests.scrape.conftest import answer
from tests.scrape.rendering_engines import RENDERED, decision, mapped, reply, running

tokenizers = pytest.importorskip("tokenizers", reason="the extra tokenizer is not installed")

WORDS = ("<unk>", "<s>", "user", "assistant", "system", ":", "hello", "world", "a", "b", "tools")
IDS = {word: number for number, word in enumerate(WORDS)}

TEMPLATE = """\
{{ bos_token }} {% for message in messages %}{{ message.role }} : {{ message.content }} \
{% for call in message.tool_calls or [] %}{{ call.function.arguments.a }} {% endfor %}\
{% endfor %}
{% if tools %}tools {% endif %}
{% if kind %}{{ kind }} {% endif %}
{% if add_generation_prompt %}assistant : {% endif %}"""

PARTS = (
    "{% for m in messages %}{% if m.content is string %}tools {{ m.content }}{% else %}"
    "{% for part in m['content'] %}{{ part.text }} {% endfor %}{% endif %}{% endfor %}"
)


@pytest.fixture(scope="module")
def write(tmp_path_factory):
    """Writes a model's folder."""

    def write(template=TEMPLATE, *, config=None):
        folder = tmp_path_factory.mktemp("model")
        model = tokenizers.models.WordLevel(IDS, unk_token="<unk>")
        tokenizer = tokenizers.Tokenizer(model)
        tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
        tokenizer.post_processor = tokenizers.processors.TemplateProcessing(
            single="<s> $A", special_tokens=[("<s>", IDS["<s>"])]
        )
        tokenizer.save(str(folder / "tokenizer.json"))
        if template:
            (folder / "chat_template.jinja").write_text(template)
        config = {"bos_token": {"content": "<s>"}} if config is None else config
        (folder / "tokenizer_config.json").write_text(json.dumps(config))
        return str(folder)

    return write


@pytest.fixture(scope="module")
def local(write):
    return LocalTokenizer(write())


def words(tokens):
    return None if tokens is None else " ".join(WORDS[token] for token in tokens)


def chat(*messages, **fields):
    return json.dumps({"messages": messages, **fields}).encode()


def user(content):
    return {"role": "user", "content": content}


TOOL = {"function": {"name": "f"}}
CALL = {"function": {"name": "f", "arguments": '{"a": "b"}'}}


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        (chat(user("hello world")), "<s> user : hello world assistant :"),
        (chat(user("a"), add_generation_prompt=False), "<s> user : a"),
        (chat(user("a"), add_special_tokens=True), "<s> <s> user : a assistant :"),
        (chat(user("a"), tools=[TOOL]), "<s> user : a tools assistant :"),
        (chat(user("a"), tools=[TOOL | {"x": 1}]), None),
        (chat(user("a"), tools=[{"function": {"name": "f", "strict": True}}]), None),
        (chat(user("a"), reasoning_effort="high"), "<s> user : a assistant :"),
        (chat(user("a"), chat_template_kwargs={"kind": "b"}), "<s> user : a b assistant :"),
        (chat(user([{"type": "text", "text": "a"}, "b"])), "<s> user : a b assistant :"),
        (
            chat({"role": "assistant", "content": "a", "tool_calls": [CALL]}),
            "<s> assistant : a b assistant :",
        ),
        (chat(user([{"type": "image_url", "image_url": {"url": "x"}}])), None),
        (chat(user("a"), continue_final_message=True), None),
        (chat(user("a"), chat_template="x"), None),
    ],
)
def test_chats_are_rendered_by_the_template(local, body, expected):
    """With the fields of the request that reach it; images and templates of clients are left out."""
    assert words(local.tokenize("chat", body)) == expected


@pytest.mark.parametrize(
    ("prompt", "fields", "expected"),
    [
        ("hello a", {}, "<s> hello a"),
        (["hello a"], {}, "<s> hello a"),
        ("hello a", {"add_special_tokens": False}, "hello a"),
        ([6, 8], {}, "hello a"),
        ([[6, 8]], {}, "hello a"),
        (["a", "b"], {}, None),
        ([], {}, None),
        (None, {}, None),
        ("a", {"truncate_prompt_tokens": 1}, None),
    ],
)
def test_completions_are_their_text_or_tokens(local, prompt, fields, expected):
    """Several prompts in a request are left out."""
    body = json.dumps({"prompt": prompt, **fields}).encode()
    assert words(local.tokenize("completions", body)) == expected


def test_lengths_of_training_change_no_prompt(write):
    """Files of models that were trained further may have some, which engines do not apply."""
    folder = Path(write())
    tokenizer = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokenizer.enable_truncation(4)
    tokenizer.enable_padding(length=8)
    tokenizer.save(str(folder / "tokenizer.json"))
    local = LocalTokenizer(str(folder))
    for prompt in ("a", "a b a b a b"):
        body = json.dumps({"prompt": prompt}).encode()
        assert words(local.tokenize("completions", body)) == f"<s> {prompt}"


@pytest.mark.parametrize(
    ("api", "body"),
    [
        ("chat", b"{"),
        ("chat", b"[" * 100_000),
        ("chat", b"{}"),
        ("chat", chat("text")),
        ("chat", chat({"role": "assistant", "tool_calls": [{"arguments": "{}"}]})),
        ("chat", chat({"role": "assistant", "tool_calls": 7})),
        ("chat", chat({"content": "a"})),
        ("chat", chat(user("a"), tools=[{"x": 1}])),
        ("completions", b'{"prompt": [-1]}'),
        ("completions", json.dumps({"prompt": "a" * 5_000_000}).encode()),
    ],
)
def test_other_bodies_are_refused(local, api, body):
    """By an expected exception, whatever they are."""
    with pytest.raises(ValueError, match=r"."):
        local.tokenize(api, body)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner),
    max_leaves=8,
)


@given(
    st.dictionaries(
        st.sampled_from(["messages", "prompt", "tools", "chat_template_kwargs", "documents"]), JSON
    )
)
def test_any_request_has_tokens_or_none_or_is_refused(local, document):
    """No other exception leaves it."""
    for api in ("chat", "completions"):
        with contextlib.suppress(ValueError):
            local.tokenize(api, json.dumps(document).encode())


def test_a_template_is_found_in_the_configuration(write):
    """The default one of several, or that for tools; without any, chats are left to engines."""
    config = {"chat_template": "{{ messages[0].content }} b", "bos_token": "<s>"}
    assert (
        words(LocalTokenizer(write("", config=config)).tokenize("chat", chat(user("a")))) == "a b"
    )
    config["chat_template"] = [
        {"name": "tool_use", "template": "b"},
        {"name": "default", "template": "{{ bos_token }} a"},
    ]
    local = LocalTokenizer(write("", config=config))
    assert words(local.tokenize("chat", chat(user("x")))) == "<s> a"
    assert words(local.tokenize("chat", chat(user("x"), tools=[TOOL]))) == "b"
    assert LocalTokenizer(write("", config={})).tokenize("chat", chat(user("a"))) is None


def test_a_template_for_tools_is_found_in_its_own_file(write):
    """Beside `chat_template.jinja`; the configuration is not read then."""
    folder = write("a", config={"chat_template": [{"name": "tool_use", "template": "hello"}]})
    assert words(LocalTokenizer(folder).tokenize("chat", chat(user("x"), tools=[TOOL]))) == "a"
    file = Path(folder) / "additional_chat_templates" / "tool_use.jinja"
    file.parent.mkdir()
    file.write_text("b")
    assert words(LocalTokenizer(folder).tokenize("chat", chat(user("x"), tools=[TOOL]))) == "b"
    file.write_text("{% for %}")
    with pytest.raises(ConfigError, match="`tool_use`"):
        LocalTokenizer(folder)


@pytest.mark.parametrize("name", ["reasoning_effort", "enable_thinking"])
def test_a_template_that_reads_the_effort_leaves_it_to_engines(write, name):
    """Versions of vLLM differ in the settings that they derive from the effort of a request."""
    local = LocalTokenizer(write(f"{{{{ {name} }}}} a"))
    assert words(local.tokenize("chat", chat(user("x")))) == "a"
    assert local.tokenize("chat", chat(user("x"), reasoning_effort="high")) is None
    tokens = local.tokenize("chat", chat(user("x"), chat_template_kwargs={name: "b"}))
    assert words(tokens) == "b a"


@pytest.mark.parametrize(
    ("tool", "parameters"),
    [
        (TOOL, "null"),
        (
            {"function": {"parameters": {"b": 1, "a": 2}, "name": "f"}, "type": "function"},
            '{"b": 1, "a": 2}',
        ),
    ],
)
def test_tools_are_read_like_vllm_reads_them(write, tool, parameters):
    """In its order of fields, with null for those that are absent."""
    function = f'{{"name": "f", "description": null, "parameters": {parameters}}}'
    expected = f'{{"type": "function", "function": {function}}}'
    template = f"{{% if tools[0] | tojson == {expected!r} %}}a{{% endif %}}"
    tokens = LocalTokenizer(write(template)).tokenize("chat", chat(user("x"), tools=[tool]))
    assert words(tokens) == "a"


@pytest.mark.parametrize(
    ("message", "expected"),
    [
        (user(["hello", "world"]), "hello world"),
        (user("hello world"), "hello world"),
        (user(None), ""),
        ({"role": "tool", "content": ["a", "b"]}, "tools a b"),
        ({"role": "tool", "content": "a"}, "tools a"),
    ],
)
def test_a_template_may_read_the_parts_of_a_message(write, message, expected):
    """They are not joined then, and a text is one part; those of tools are a text always."""
    local = LocalTokenizer(write(PARTS))
    assert words(local.tokenize("chat", chat(message))) == expected


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"content": None}, ""),
        ({}, ""),
        ({"content": [{"type": "text", "text": None}]}, None),
        ({"content": 7}, None),
        ({"content": "a", "reasoning": "b"}, "a b b"),
        ({"content": "a", "reasoning_content": "b"}, "a b b"),
        ({"content": "a", "tool_calls": []}, "a"),
        ({"content": "a", "unknown": "b"}, "a"),
        ({"content": "a", "name": "b"}, "a b"),
    ],
)
def test_messages_are_read_like_vllm_reads_them(write, fields, expected):
    """No content is an empty one, reasoning has two names, and other fields are left out."""
    template = (
        "{% for m in messages %}{{ m.content }} {{ m.reasoning }} {{ m.reasoning_content }} "
        "{{ m.unknown }} {{ m.name }} {% if m.tool_calls is defined %}tools{% endif %}{% endfor %}"
    )
    local = LocalTokenizer(write(template))
    assert words(local.tokenize("chat", chat({"role": "assistant", **fields}))) == expected


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ('{"a": 1}', '{"a": 1}'),
        ("[1]", "[1]"),
        ('"x"', '"x"'),
        ("", "{}"),
        ("{", "{}"),
        (None, "{}"),
        ({"a": 1}, '{"a": 1}'),
    ],
)
def test_arguments_of_tool_calls_are_decoded(write, arguments, expected):
    """Of any kind; malformed ones are an empty mapping."""
    call = {"function": {"name": "f", "arguments": arguments}}
    text = "messages[0].tool_calls[0].function.arguments | tojson"
    template = f"{{% if {text} == {expected!r} %}}a{{% else %}}b{{% endif %}}"
    message = {"role": "assistant", "tool_calls": [call]}
    assert words(LocalTokenizer(write(template)).tokenize("chat", chat(message))) == "a"


@pytest.mark.parametrize(
    "template",
    [
        "{{ raise_exception('no') }}",
        "{{ messages.__class__.__mro__ }}",
        "{% for number in range(10 ** 9) %}a{% endfor %}",
        "{{ messages.append(1) }}",
        "{{ strftime_now('%Y') + 1 }}",
    ],
)
def test_templates_are_confined(write, template):
    """They reach nothing beyond the request, and may refuse it."""
    with pytest.raises(ValueError, match="the template refuses"):
        LocalTokenizer(write(template)).tokenize("chat", chat(user("a")))


def test_templates_have_the_filters_of_hugging_face(write):
    """JSON without escapes for HTML."""
    template = (
        "{% for x in [1, 2] %}{% break %}{% endfor %}"
        "{% if messages[0].content | tojson == '\"<>\"' %}a{% endif %}"
    )
    local = LocalTokenizer(write(template))
    assert words(local.tokenize("chat", chat(user("<>")))) == "a"


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ("", '{"b": "ü", "a": [1, 2]}'),
        ("separators=(',', ':')", '{"b":"ü","a":[1,2]}'),
        ("sort_keys=True", '{"a": [1, 2], "b": "ü"}'),
        ("ensure_ascii=True", '{"b": "\\u00fc", "a": [1, 2]}'),
        ("True", '{"b": "\\u00fc", "a": [1, 2]}'),
        ("indent=0", '{\n"b": "ü",\n"a": [\n1,\n2\n]\n}'),
    ],
)
def test_json_of_templates_has_the_form_that_they_ask_for(write, arguments, expected):
    """With the arguments of Hugging Face's filter, in their order."""
    value = "{'b': 'ü', 'a': [1, 2]}"
    template = f"{{% if {value} | tojson({arguments}) == {expected!r} %}}a{{% endif %}}"
    assert words(LocalTokenizer(write(template)).tokenize("chat", chat(user("x")))) == "a"


@pytest.mark.parametrize(
    ("template", "expected"),
    [
        ("{% generation %}{{ messages[0].content }}{% endgeneration %} b", "a b"),
        ("{%- generation -%} {{ messages[0].content }} {%- endgeneration -%} b", "<unk>"),
        ("{% set x = 'a' %}{% generation %}{% set x = 'b' %}{% endgeneration %}{{ x }}", "a"),
    ],
)
def test_templates_may_mark_what_is_generated(write, template, expected):
    """By the tag of Hugging Face, which renders its body; names that are set in it end with it."""
    assert words(LocalTokenizer(write(template)).tokenize("chat", chat(user("a")))) == expected


def test_a_folder_that_cannot_be_read_is_refused(write, tmp_path, monkeypatch):
    """At the start, and so are missing packages."""
    with pytest.raises(ConfigError, match=re.escape(str(tmp_path))):
        LocalTokenizer(str(tmp_path))
    with pytest.raises(ConfigError, match="chat template"):
        LocalTokenizer(write("{% for %}"))
    settings = KvEventsSection(enabled=True, tokenizer_path=write())
    pytest.importorskip("zmq")
    require(settings)
    assert is_available(settings.tokenizer_path)
    assert not is_available(str(tmp_path))
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    with pytest.raises(ConfigError, match=r"pip install 'extproc-epp\[tokenizer\]'"):
        require(settings)
    assert not is_available(settings.tokenizer_path)


async def test_prompts_are_mapped_by_a_tokenizer_without_an_engine(write):
    """In a thread; what it leaves out is asked of the engine, and what it refuses is not."""
    settings = KvEventsSection(tokenizer_path=write())
    async with running(reply(RENDERED), settings=settings) as (server, prefixes, renderer):
        body = chat(user("a " * 100))
        assert await mapped(server, renderer, body=body) == ["mapped"]
        assert not server.requests
        assert len(prefixes.prompts.find([11, 12])[0].keys) == 105 // 16
        assert await mapped(server, renderer, chain=[1], body=b"[]") == ["failed"]
        image = chat(user([{"type": "image_url"}]))
        assert await mapped(server, renderer, chain=[2], body=image) == ["mapped"]
        assert len(server.requests) == 1


async def test_an_engine_that_renders_nothing_does_not_stop_the_tokenizer(write):
    """Its rest concerns what it is asked."""
    settings = KvEventsSection(tokenizer_path=write(), render_budget_ms=600_000.0)
    absent = answer(b"{}", status="404 Not Found")
    async with running(absent, settings=settings) as (server, prefixes, renderer):
        image = chat(user([{"type": "image_url"}]))
        assert await mapped(server, renderer, chain=[2], body=image) == ["unsupported"]
        raw = HttpRequest({}, chat(user("a " * 100)))
        async with asyncio.timeout(300):
            await renderer.render_ahead(decision(server), raw)
        assert prefixes.prompts.covers([11, 12])
