"""Tokens of prompts: by the files of a model on this machine, and in the answers of engines.

The folder is one of Hugging Face's: `tokenizer.json`, and for chats a template in `chat_template.jinja`
or `tokenizer_config.json`. A prompt is rendered like vLLM does; what another setting of the request
would change is left to engines. The only module that loads `tokenizers` and Jinja.
"""

from __future__ import annotations

import datetime as dt
import json
import re
from array import array
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple, NoReturn

import msgspec

from extproc import distribution
from extproc.errors import ConfigError
from extproc.parsing import canonical_prompt

#: Characters of a rendered prompt at most.
_MAX_TEXT: Final = 4 * 1024 * 1024

#: Fields of a request that change its tokens in ways of vLLM's own.
_UNKNOWN: Final = frozenset(
    {"chat_template", "continue_final_message", "prompt_embeds", "truncate_prompt_tokens"}
)

#: A template that reads the parts of a content itself, as `for part in message.content`.
_READS_PARTS: Final = re.compile(r"for\s+\w+\s+in\s+\w+(\.content|\[['\"]content['\"]\])")

#: A template that reads the effort of reasoning, or whether to reason, which some versions of vLLM derive
#: from the effort.
_READS_EFFORT: Final = re.compile(r"\b(reasoning_effort|enable_thinking)\b")

#: Tags round what an assistant generates.
_GENERATION: Final = re.compile(r"(\{%[-+]?\s*)(end)?generation\b")

#: Fields of a function among the tools of a request, in the order in which templates get them.
_FUNCTION_FIELDS: Final = ("name", "description", "parameters")

#: Tokens of the tokenizer's configuration that templates use.
_NAMED_TOKENS: Final = ("bos_token", "eos_token", "pad_token", "unk_token")

_decode: Final = msgspec.json.Decoder(dict[str, Any]).decode

#: Tokens in an answer at most (count), and their bytes, which take 30 ms of the event loop with their
#: blocks; and bytes of identifiers and places of images: some 400 images.
_MAX_TOKENS: Final = 262_144
_MAX_TOKENS_BYTES: Final = 2 * 1024 * 1024
_MAX_FEATURES_BYTES: Final = 64 * 1024


class _ChatTemplate(NamedTuple):
    compiled: Any
    reads_parts: bool
    reads_effort: bool


class LocalTokenizer:
    """Tokenizer of a model and its adapters. It takes CPU: call it in a thread.

    Raises:
        ConfigError: A package of the extra `tokenizer` is not installed, or a file cannot be read.
    """

    def __init__(self, folder: str) -> None:
        tokenizers = _load("tokenizers")
        path = Path(folder)
        try:
            self._tokenizer = tokenizers.Tokenizer.from_file(str(path / "tokenizer.json"))
            # Those of training, which engines do not apply.
            self._tokenizer.no_truncation()
            self._tokenizer.no_padding()
            config = _read_config(path)
            sources = _templates_of(path, config)
        except Exception as error:  # noqa: BLE001 - `tokenizers` raises bare ones
            raise _unreadable(folder, str(error)) from None
        self._names = {
            name: _text_of(config[name]) for name in _NAMED_TOKENS if config.get(name) is not None
        }
        self._templates = {
            name: _compile(source, folder, name) for name, source in sources.items() if source
        }

    def tokenize(self, api: str, body: bytes) -> array[int] | None:
        """Tokens of a request; None where only its engine knows them.

        Args:
            api: `chat` or `completions`.

        Raises:
            ValueError: The body is no such request, or its template refuses it.
        """
        try:
            request = _decode(body)
        except (msgspec.DecodeError, RecursionError) as error:
            raise ValueError(str(error)) from None
        if any(request.get(name) for name in _UNKNOWN):
            return None
        if api != "chat":
            return self._tokenize_completion(request)
        try:
            text = self._render(request)
        except Exception as error:  # noqa: BLE001 - of a template, on messages of any kind
            raise ValueError(f"the template refuses the request: {error}") from None
        if text is None:
            return None
        return self._encode(text, add_special_tokens=bool(request.get("add_special_tokens")))

    def _render(self, request: Mapping[str, Any]) -> str | None:
        """The prompt of a chat; None where only its engine knows it."""
        tools = [_read_tool(tool) for tool in request.get("tools") or ()]
        name = "tool_use" if tools and "tool_use" in self._templates else "default"
        template = self._templates.get(name)
        if template is None or None in tools:
            return None
        if template.reads_effort and request.get("reasoning_effort") is not None:
            return None
        messages = _read_messages(request.get("messages"), reads_parts=template.reads_parts)
        if None in messages:
            return None
        text: str = template.compiled.render(
            {
                **self._names,
                **(request.get("chat_template_kwargs") or {}),
                "messages": messages,
                "tools": tools or None,
                "documents": request.get("documents"),
                "add_generation_prompt": request.get("add_generation_prompt", True),
            }
        )
        return text

    def _tokenize_completion(self, request: Mapping[str, Any]) -> array[int] | None:
        prompt = request.get("prompt")
        if isinstance(prompt, list) and len(prompt) == 1 and not isinstance(prompt[0], int):
            prompt = prompt[0]
        if isinstance(prompt, str):
            return self._encode(
                prompt, add_special_tokens=request.get("add_special_tokens") is not False
            )
        if isinstance(prompt, list) and prompt and all(type(token) is int for token in prompt):
            try:
                return array("I", prompt)
            except OverflowError:
                raise ValueError("a token id outside of 32 bits") from None
        return None

    def _encode(self, text: str, *, add_special_tokens: bool) -> array[int]:
        if len(text) > _MAX_TEXT:
            raise ValueError(f"a prompt of {len(text)} characters")
        try:
            encoding = self._tokenizer.encode(text, add_special_tokens=add_special_tokens)
        except BaseException as error:  # noqa: BLE001 - a panic of Rust is no Exception
            raise ValueError(f"the tokenizer failed: {error}") from None
        return array("I", encoding.ids)


def is_available(folder: str) -> bool:
    """True if a folder has a tokenizer, and the packages that it takes are installed."""
    try:
        _load("tokenizers")
        _load("jinja2")
    except ConfigError:
        return False
    return (Path(folder) / "tokenizer.json").exists()


def _read_config(path: Path) -> Mapping[str, Any]:
    file = path / "tokenizer_config.json"
    return _decode(file.read_bytes()) if file.exists() else {}


def _templates_of(path: Path, config: Mapping[str, Any]) -> Mapping[str, str]:
    """Chat templates of a folder by name: `default`, and `tool_use` for requests with tools."""
    file = path / "chat_template.jinja"
    if file.exists():
        sources = {"default": file.read_text(encoding="utf-8")}
        file = path / "additional_chat_templates" / "tool_use.jinja"
        if file.exists():
            sources["tool_use"] = file.read_text(encoding="utf-8")
        return sources
    template = config.get("chat_template") or []
    if isinstance(template, list):
        named = {entry["name"]: str(entry["template"]) for entry in template}
        return {name: named[name] for name in ("default", "tool_use") if name in named}
    return {"default": str(template)}


def _compile(source: str, folder: str, name: str) -> _ChatTemplate:
    """A template, which reaches nothing but what it is given."""
    jinja2, sandbox = _load("jinja2"), _load("jinja2.sandbox")
    environment = sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _refuse
    environment.globals["strftime_now"] = _now
    try:
        # Training marks answers by a tag of Hugging Face's, which renders its body in a scope.
        compiled = environment.from_string(_GENERATION.sub(r"\1\2with", source))
    except jinja2.TemplateError as error:
        raise _unreadable(folder, f"its chat template `{name}`: {error}") from None
    return _ChatTemplate(
        compiled, bool(_READS_PARTS.search(source)), bool(_READS_EFFORT.search(source))
    )


def _to_json(
    value: object,
    ensure_ascii: bool = False,  # noqa: FBT001, FBT002 - the order of Hugging Face's filter
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,  # noqa: FBT001, FBT002 - the same
) -> str:
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def _refuse(message: str) -> NoReturn:
    raise ValueError(message)


def _now(form: str) -> str:
    return dt.datetime.now().astimezone().strftime(form)


def _text_of(token: object) -> str:
    """A named token, which older files describe by a mapping."""
    return str(token.get("content", "")) if isinstance(token, dict) else str(token)


def _read_messages(messages: object, *, reads_parts: bool) -> list[Mapping[str, Any] | None]:
    if not isinstance(messages, list):
        raise ValueError("no messages")  # noqa: TRY004 - the request is at fault
    return [_read_message(message, reads_parts=reads_parts) for message in messages]


def _read_message(message: Mapping[str, Any], *, reads_parts: bool) -> Mapping[str, Any] | None:
    """A message as vLLM gives it to templates; None where a part is not text."""
    role, content = message["role"], message.get("content")
    parts = content if isinstance(content, list) else [] if content is None else [content]
    texts = [text for part in parts if (text := _text_part(part)) is not None]
    if len(texts) < len(parts):
        return None
    read: dict[str, Any] = {"role": role, "content": "\n".join(texts)}
    if reads_parts and role != "tool":
        read["content"] = [{"type": "text", "text": text} for text in texts]
    if isinstance(message.get("name"), str):
        read["name"] = message["name"]
    if role == "tool" and "tool_call_id" in message:
        read["tool_call_id"] = message["tool_call_id"]
    if role == "developer":
        read["tools"] = message.get("tools")
    if role == "assistant":
        reasoning = message.get("reasoning")
        if reasoning is None:
            reasoning = message.get("reasoning_content")
        if reasoning is not None:
            read["reasoning"] = read["reasoning_content"] = reasoning
        if message.get("tool_calls"):
            read["tool_calls"] = [_with_arguments(call) for call in message["tool_calls"]]
    return read


def _read_tool(tool: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """A tool as vLLM gives it to templates; None for fields that its versions treat differently."""
    function = tool["function"]
    if tool.keys() - {"type", "function"} or function.keys() - set(_FUNCTION_FIELDS):
        return None
    return {
        "type": tool.get("type", "function"),
        "function": {name: function.get(name) for name in _FUNCTION_FIELDS},
    }


def _text_part(part: object) -> str | None:
    if isinstance(part, dict) and part.get("type") == "text":
        part = part.get("text")
    return part if isinstance(part, str) else None


def _with_arguments(call: Mapping[str, Any]) -> Mapping[str, Any]:
    """A tool call whose arguments are decoded, as templates expect them; malformed ones are {}."""
    function = call["function"]
    arguments = function.get("arguments")
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments)
        except ValueError:
            arguments = {}
    elif not isinstance(arguments, dict | list):
        arguments = {}
    return {**call, "function": {**function, "arguments": arguments}}


def _unreadable(folder: str, why: str) -> ConfigError:
    return ConfigError(
        "kv_events.tokenizer_path",
        wanted="a folder with the tokenizer.json of the model, and a chat template that Jinja reads",
        got=f"{folder}: {why}",
        fix="name such a folder, or leave it empty: engines are asked for tokens then",
    )


def _load(name: str) -> Any:
    import importlib  # noqa: PLC0415 - with packages that are an extra

    try:
        return importlib.import_module(name)
    except ImportError:
        raise ConfigError(
            "kv_events.tokenizer_path",
            wanted=f"the Python package {name.partition('.')[0]}",
            got="it is not installed",
            fix=f"{distribution.install_command('tokenizer')}, or leave it empty",
        ) from None


class _Features(msgspec.Struct, gc=False):
    mm_hashes: msgspec.Raw = msgspec.Raw(b"null")
    mm_placeholders: msgspec.Raw = msgspec.Raw(b"null")


class _Rendered(msgspec.Struct, gc=False):
    """Answer of `/render`, or of `/tokenize`."""

    token_ids: msgspec.Raw = msgspec.Raw(b"null")
    tokens: msgspec.Raw = msgspec.Raw(b"null")
    features: _Features | None = None


class _RenderedPrompts(msgspec.Struct, array_like=True, gc=False):
    """Answer to several prompts, or to one."""

    first: _Rendered | None = None
    second: msgspec.Raw = msgspec.Raw()


class _ListedTokens(msgspec.Struct, array_like=True, gc=False):
    """Tokens of several prompts, or of one."""

    first: msgspec.Raw
    second: msgspec.Raw = msgspec.Raw()


_decode_rendered = msgspec.json.Decoder(_Rendered).decode
_decode_tokens = msgspec.json.Decoder(list[int] | None).decode
_decode_listed = msgspec.json.Decoder(_ListedTokens).decode
_decode_prompts = msgspec.json.Decoder(_RenderedPrompts).decode


def read_rendered(answer: bytes) -> tuple[array[int], Sequence[tuple[int, int, str]]] | None:
    """Tokens in the answer of an engine, and (offset, length, identifier) of each media item.

    Returns:
        None for several prompts; no tokens, or no items, where they are too long.

    Raises:
        msgspec.DecodeError, UnicodeDecodeError, OverflowError, RecursionError: It is no answer, or its
            tokens have more than 32 bits.
    """
    if answer.lstrip().startswith(b"["):
        prompts = _decode_prompts(answer)
        rendered = None if bytes(prompts.second) else prompts.first
    else:
        rendered = _decode_rendered(answer)
    if rendered is None:
        return None
    listed = rendered.tokens
    if bytes(memoryview(listed)[1:64]).lstrip().startswith(b"["):
        # SGLang has a list for each prompt where the prompt of the request is a list.
        lists = _decode_listed(listed)
        if bytes(lists.second):
            return None
        listed = lists.first
    tokens = _read_tokens(rendered.token_ids) or _read_tokens(listed)
    return tokens, _read_placeholders(rendered.features)


def _read_tokens(raw: msgspec.Raw) -> array[int]:
    """Tokens in an answer; none where they are too many or too long."""
    encoded = bytes(raw)
    if len(encoded) > _MAX_TOKENS_BYTES or encoded.count(b",") >= _MAX_TOKENS:
        return array("I")
    return array("I", _decode_tokens(encoded) or ())


def _read_placeholders(features: _Features | None) -> Sequence[tuple[int, int, str]]:
    """(offset, length, identifier) of each image, video and audio; none where that is too long."""
    if features is None:
        return ()
    hashes, places = bytes(features.mm_hashes), bytes(features.mm_placeholders)
    if len(hashes) + len(places) > _MAX_FEATURES_BYTES:
        return ()
    return canonical_prompt.read_placeholders(
        {"mm_hashes": msgspec.json.decode(hashes), "mm_placeholders": msgspec.json.decode(places)}
    )
