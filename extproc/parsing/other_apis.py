"""APIs other than OpenAI's JSON: Anthropic messages, ranking, prompts without a template, opaque bodies.

Rerank and score are one query against many documents. The engine makes one prompt per pair. The query
comes first in each of them, so it is the shared prefix. Which fields make a valid request differs
between engine versions: the engine judges.

Generation without a chat template is vLLM's tokens-in surface and SGLang's native one.

Opaque requests, on an unknown path, with a cut body, or with audio or images in a multipart form, are
never refused, but for a compressed form. What can be read cheaply is read, so that a request on an
unknown path still finds its model and its prefix (GIE conformance posts `{model, prompt}` to paths of
its own; SageMaker posts any OpenAI body to `/invocations`).

Of the form of an audio transcription or translation, or of an edit or variation of an image (RFC
7578), short text fields are read, and files are stepped over. A form that cannot be read is routed
without a model, as an engine with one model would serve it. There is no prompt to hash but the
optional text one: encoder-decoder models keep no prefix cache of the audio.
"""

from __future__ import annotations

import io
import re
from collections.abc import Mapping
from typing import Any, Final

import msgspec

from extproc import decision
from extproc.decision import Rejection
from extproc.parsing import bounded_decoder, canonical_prompt, envelope, narrow_types, openai_api
from extproc.request import HttpRequest, InferenceRequest, RequestBody, shorten_id

_WANTED_MESSAGES: Final = "invalid messages request: must have at least one message"


class AnthropicMessage(msgspec.Struct, gc=False):
    """One message; only an object can be one."""

    role: narrow_types.Role = None
    content: narrow_types.Content = None


class MessagesBody(envelope.Envelope, gc=False):
    """Fields that are read from a messages body."""

    messages: list[AnthropicMessage] | None = None
    system: narrow_types.Content = None
    tools: msgspec.Raw = canonical_prompt.ABSENT
    chat_template_kwargs: msgspec.Raw = canonical_prompt.ABSENT
    output_config: narrow_types.Object = None


_MESSAGES_DECODER = msgspec.json.Decoder(MessagesBody)

#: Beginning of a block of Claude Code that changes with every request and that vLLM leaves out.
_BILLING: Final = "x-anthropic-billing-header:"


def parse_messages(raw: HttpRequest, api: str) -> InferenceRequest | Rejection:
    """Read a messages request; 400 without a model or without at least one message."""
    body = envelope.decode(_MESSAGES_DECODER, raw, wanted=_WANTED_MESSAGES)
    if isinstance(body, Rejection):
        return body
    if not body.messages:
        return decision.bad_request(_WANTED_MESSAGES)
    fields = [
        canonical_prompt.salt(body.cache_salt),
        canonical_prompt.option(b"k", body.chat_template_kwargs),
        _effort(body.output_config),
        canonical_prompt.option(b"t", body.tools),
    ]
    if body.system is not None:
        fields += (canonical_prompt.MESSAGE, b"system", _system_content(body.system))
    message = None
    for message in body.messages:
        # System messages stay in their place, as in engines: agents add one with every turn, and the
        # prompt of the turn before remains a prefix (vLLM, entrypoints/anthropic/inline_system.py).
        read = _system_content if message.role == "system" else canonical_prompt.content
        fields += (
            canonical_prompt.MESSAGE,
            canonical_prompt.as_bytes(message.role),
            read(message.content),
        )
        del message
    body.messages = None
    return envelope.request(api, raw, body, prompt=canonical_prompt.joined_prompt(fields))


def _effort(output_config: object) -> bytes:
    """The effort of the reasoning, which chat templates may read; empty when there is none."""
    effort = output_config.get("effort") if type(output_config) is dict else None
    return canonical_prompt.OPTION + b"e" + effort.encode() if type(effort) is str else b""


def _system_content(content: object) -> bytes:
    """Content of a system prompt without the blocks that vLLM leaves out."""
    if type(content) is list and any(map(_is_billing, content)):
        content = [block for block in content if not _is_billing(block)]
    return canonical_prompt.content(content)


def _is_billing(block: object) -> bool:
    if type(block) is canonical_prompt.TextPart:
        text: object = block.text
    else:
        text = block.get("text") if type(block) is dict else None
    return type(text) is str and text.startswith(_BILLING)


_WANTED_RANKING: Final = "invalid ranking request: must be a JSON object"


class RankingBody(envelope.Envelope, gc=False):
    """Query and documents under the names rerank (Jina, Cohere) and score (vLLM) give them."""

    query: Any = None
    queries: Any = None
    text_1: Any = None
    data_1: Any = None
    documents: Any = None
    items: Any = None
    text_2: Any = None
    data_2: Any = None


_RANKING_DECODER = msgspec.json.Decoder(RankingBody)


def parse_ranking(raw: HttpRequest, api: str) -> InferenceRequest | Rejection:
    """Read a rerank or score request; 400 without a model."""
    body = envelope.decode(_RANKING_DECODER, raw, wanted=_WANTED_RANKING)
    if isinstance(body, Rejection):
        return body
    sides = (
        (body.query, body.queries, body.text_1, body.data_1),
        (body.documents, body.items, body.text_2, body.data_2),
    )
    content = b"".join(
        [canonical_prompt.MESSAGE + b"".join(map(canonical_prompt.content, side)) for side in sides]
    )
    return envelope.request(api, raw, body, prompt=canonical_prompt.text_prompt(content))


_NO_TOKENS: Final = "invalid generate request: must have token_ids field"
_NOT_AN_OBJECT: Final = "invalid generate request: must be a JSON object"


class GenerateBody(envelope.Envelope, gc=False):
    """Fields that are read from a body for vLLM `/inference/v1/generate`.

    `features` holds `mm_hashes` and `mm_placeholders`, each a list per modality.
    """

    token_ids: narrow_types.TextOrIds = None
    features: Any = None


class NativeGenerateBody(envelope.Envelope, gc=False):
    """Fields that are read from a `/generate` body: names of SGLang, vLLM, TGI and Triton."""

    input_ids: narrow_types.TextOrIds = None
    text: Any = None
    prompt: narrow_types.TextOrIds = None
    inputs: Any = None
    text_input: Any = None
    parameters: narrow_types.Object = None


_TOKENS_DECODER = msgspec.json.Decoder(GenerateBody)
_NATIVE_DECODER = msgspec.json.Decoder(NativeGenerateBody)


def parse_generate(raw: HttpRequest, api: str) -> InferenceRequest | Rejection:
    """Read a tokens-in request; 400 without token ids. The model is optional there."""
    body = envelope.decode_loose(_TOKENS_DECODER, raw, wanted=_NO_TOKENS)
    if isinstance(body, Rejection):
        return body
    ids = body.token_ids
    if type(ids) is canonical_prompt.Packed:
        packed: bytes | None = ids.ids
    else:
        packed = canonical_prompt.pack(ids) if type(ids) is list and ids else None
    if packed is None:
        return decision.bad_request(_NO_TOKENS)
    placeholders = canonical_prompt.read_placeholders(body.features)
    if placeholders:
        rows = io.BytesIO(packed)
        canonical_prompt.stamp(rows, placeholders)
        packed = rows.getvalue()
    prompt = canonical_prompt.with_cache_salt(
        canonical_prompt.Prompt(packed, len(packed) // canonical_prompt.WIDTH), body.cache_salt
    )
    return envelope.request(api, raw, body, prompt=prompt)


def parse_native_generate(raw: HttpRequest, api: str) -> InferenceRequest | Rejection:
    """Read a `/generate` request: 400 only for what is not a JSON object.

    Several engines use this path with bodies of their own; none of them names a model.
    """
    body = envelope.decode_loose(_NATIVE_DECODER, raw, wanted=_NOT_AN_OBJECT)
    if isinstance(body, Rejection):
        return body
    prompt = canonical_prompt.NOTHING
    for value in (body.input_ids, body.text, body.prompt, body.inputs, body.text_input):
        candidate = canonical_prompt.prompt_of(value)
        if candidate is not None:
            prompt = candidate
            break
    salted = canonical_prompt.with_cache_salt(prompt, body.cache_salt)
    body = msgspec.structs.replace(body, sampling_params=_sampling_params(body))
    return envelope.request(api, raw, body, prompt=salted)


def _sampling_params(body: NativeGenerateBody) -> Any:
    """Parameters under SGLang's or TGI's name; of a list for a batch, the largest bound."""
    sampling = body.sampling_params or body.parameters
    if type(sampling) is not list:
        return sampling
    bounds = [params.get("max_new_tokens") for params in sampling if type(params) is dict]
    return {"max_new_tokens": max([b for b in bounds if type(b) is int], default=None)}


#: Larger bodies on unknown paths are not looked into: uploads, not prompts.
MAX_OPAQUE_BYTES: Final = 1 << 20

#: Largest size of a cut body for which its `content-length` counts (bytes): a larger claim must not
#: make an endpoint look busy.
MAX_LENGTH: Final = 64 << 20

_STREAM = re.compile(rb'"stream"\s*:\s*true')


class LooseBody(envelope.Envelope, gc=False):
    """The usual places of a prompt, and the name of an adapter that an engine is to load."""

    prompt: narrow_types.TextOrIds = None
    messages: Any = None
    input: narrow_types.TextOrIds = None
    text_input: Any = None
    lora_name: Any = None


_DECODER = msgspec.json.Decoder(LooseBody)
_ENVELOPE = msgspec.json.Decoder(envelope.Envelope)


def parse_opaque(raw: HttpRequest, api: str) -> InferenceRequest:
    """Read model and prompt if the body is a small JSON object that has them."""
    body = None if len(raw.body) > MAX_OPAQUE_BYTES else _decode(_DECODER, raw)
    if body is None:
        return envelope.unparsed_request(raw, api)
    if body.lora_name is not None:
        # `/v1/load_lora_adapter`: the path is that of files, and no adapter serves the request.
        body = msgspec.structs.replace(body, lora_path=None)
    prompt = (
        canonical_prompt.prompt_of(body.prompt)
        or openai_api.loose_prompt(body.messages)
        or canonical_prompt.prompt_of(body.input)
        or canonical_prompt.prompt_of(body.text_input)
        or canonical_prompt.NOTHING
    )
    return envelope.request(
        api, raw, body, prompt=canonical_prompt.with_cache_salt(prompt, body.cache_salt)
    )


def parse_envelope(raw: HttpRequest, api: str) -> InferenceRequest:
    """Read everything but the prompt, for work that leaves nothing in a prefix cache."""
    body = _decode(_ENVELOPE, raw)
    if body is None:
        return envelope.unparsed_request(raw, api)
    return envelope.request(api, raw, body, prompt=canonical_prompt.NOTHING)


def _decode(
    decoder: msgspec.json.Decoder[envelope.BodyT], raw: HttpRequest
) -> envelope.BodyT | None:
    if not raw.body[:64].lstrip().startswith(b"{"):
        return None
    try:
        return bounded_decoder.decode(decoder, raw.body)
    except (ValueError, RecursionError):
        mended = envelope.mend_surrogates(raw.body)
        if mended == raw.body:
            return None
        return _decode(decoder, msgspec.structs.replace(raw, body=mended))


def parse_truncated(raw: HttpRequest, api: str) -> InferenceRequest:
    """Read a body of which only the beginning was shown (BUFFERED_PARTIAL).

    The raw bytes are the prompt: equal beginnings of bodies are equal beginnings of prompts, as
    long as a client writes its fields in one order. `content-length` tells the whole size.
    """
    member = envelope.find_model(raw.body)
    model = "" if member is None or member.span is None else _unquote(raw.body[slice(*member.span)])
    content_length = raw.headers.get("content-length", "")
    length = int(content_length) if content_length.isdecimal() and len(content_length) < 16 else 0
    length = max(min(length, MAX_LENGTH), len(raw.body))
    return InferenceRequest(
        api,
        model=model or envelope.model_header(raw.headers),
        prompt=bytes(raw.body),
        prompt_tokens=canonical_prompt.estimate(length),
        stream=_STREAM.search(raw.body) is not None,
        session=envelope.session_of_headers(raw.headers),
        subset=raw.subset,
        prompt_bytes=length,
    )


def _unquote(text: RequestBody) -> str:
    try:
        return str(msgspec.json.decode(text))
    except ValueError:
        return ""


#: A form has a handful of fields; whatever follows the last of so many parts is not read.
MAX_PARTS: Final = 64
#: No header block of a part, and no field worth reading, is longer.
MAX_FIELD_BYTES: Final = 8192

_BOUNDARY = re.compile(r'[;\s]boundary=(?:"([^"]{1,200})"|([^\s;,"]{1,200}))', re.IGNORECASE)
_NAME = re.compile(
    rb'^content-disposition:(?:[^\r\n"]|"[^"\r\n]*")*?;\s*name=(?:"([^"\r\n]*)"|([^\s;"]+))',
    re.IGNORECASE | re.MULTILINE,
)
#: What may follow a boundary.
_DELIMITED = re.compile(rb"--|[ \t]*+(?:\r\n|\r?\Z)")
_WANTED = frozenset({"model", "prompt", "stream", "user"})


def parse_form(raw: HttpRequest, api: str) -> InferenceRequest:
    """Read a request of audio or images in a form; never refused."""
    match = _BOUNDARY.search(raw.headers.get("content-type", ""))
    if match is None:
        return parse_opaque(raw, api)
    boundary = match[1] or match[2]
    fields = read_form(raw.body, boundary.encode())
    known = envelope.unparsed_request(raw, api)
    prompt = canonical_prompt.text_prompt(fields.get("prompt", "").encode())
    return InferenceRequest(
        api,
        model=fields.get("model") or known.model,
        prompt=prompt.content,
        prompt_tokens=prompt.tokens,
        stream=fields.get("stream", "").lower() in {"true", "1"},
        session=known.session or shorten_id(fields.get("user", "")),
        subset=raw.subset,
        prompt_bytes=prompt.text_bytes,
    )


def read_form(body: RequestBody, boundary: bytes) -> Mapping[str, str]:
    """The last value of each wanted text field; malformed fields are absent.

    Args:
        body: The form, whole or cut.
        boundary: As in the content type, without the leading dashes.
    """
    return {
        name: body[start:stop].decode("utf-8", "replace")
        for name, (start, stop) in _spans(body, boundary).items()
    }


def model_span(raw: HttpRequest) -> tuple[int, int] | None:
    """Start and end of the value of the last `model` field; None if there is none."""
    match = _BOUNDARY.search(raw.headers.get("content-type", ""))
    if match is None:
        return None
    return _spans(raw.body, (match[1] or match[2]).encode()).get("model")


def _spans(body: RequestBody, boundary: bytes) -> Mapping[str, tuple[int, int]]:
    """Start and end of the values of the wanted fields."""
    fields: dict[str, tuple[int, int]] = {}
    delimiter = b"--" + boundary
    start = body.find(delimiter)
    for _ in range(MAX_PARTS):
        if start < 0:
            break
        start += len(delimiter)
        if body[start : start + 2] == b"--":  # the end of the form
            break
        end = _find_part_end(body, b"\r\n" + delimiter, start)
        _read_part(fields, body, (start, end if end >= 0 else len(body)))
        start = end + 2 if end >= 0 else -1
    return fields


def _find_part_end(body: RequestBody, delimiter: bytes, start: int) -> int:
    """Find the delimiter behind a part; -1 for none. A line may begin as one, and go on."""
    end = body.find(delimiter, start)
    for _ in range(MAX_PARTS):
        if end < 0 or _DELIMITED.match(body, end + len(delimiter)):
            return end
        end = body.find(delimiter, end + 1)
    return -1


def _read_part(
    fields: dict[str, tuple[int, int]], body: RequestBody, span: tuple[int, int]
) -> None:
    start, end = span
    blank = body.find(b"\r\n\r\n", start, min(end, start + MAX_FIELD_BYTES))
    if blank < 0 or end - blank - 4 > MAX_FIELD_BYTES:
        return
    match = _NAME.search(body, start, blank)
    if match is None:
        return
    name = (match[1] if match[1] is not None else match[2]).decode("utf-8", "replace")
    if name in _WANTED:
        fields[name] = (blank + 4, end)
