"""Envelope of the JSON surfaces: common fields, decoding, the session hint and error messages.

The fields are typed `Any` on purpose: a value of an unexpected type then reads as absent instead
of refusing the request. Fields not named here or in a surface are skipped, never built.

The session hint ties the turns of one conversation together. It is the first of these that is a
non-empty string:

| order | where | why there |
|---|---|---|
| 1 | body `prompt_cache_key` | made for this: the client says which prompts share a prefix |
| 2 | body `conversation`, `conversation.id` | names the conversation itself |
| 3 | body `metadata.session_id` | a custom of agent frameworks |
| 4 | headers, in the order of `SESSION_HEADERS` | set by gateways and tools, may cover many prompts |
| 5 | body `user`, `metadata.user_id`, `safety_identifier` | names a person: many conversations |
| 6 | body `previous_response_id` | names the last turn only, so it changes with every turn |

Anthropic clients put account and session into `metadata.user_id`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, Final, NamedTuple, TypeVar

import msgspec

from extproc import decision
from extproc.decision import Rejection
from extproc.parsing import bounded_decoder, canonical_prompt, media, narrow_types
from extproc.request import (
    MAX_NAME_BYTES,
    HttpRequest,
    InferenceRequest,
    MediaSpan,
    RequestBody,
    shorten_id,
)

#: Without `x-session-token`: by default it has the token of the session-affinity plugins, which names
#: an endpoint and is the same for all of its clients.
SESSION_HEADERS = (
    "x-session-id",
    "x-claude-code-session-id",
    "session-id",
    "session_id",
    "x-session-affinity",
)

_SESSION_HEADERS = frozenset(SESSION_HEADERS)


def session_of_headers(headers: Mapping[str, str]) -> str:
    """The hint in the headers; empty when there is none."""
    if _SESSION_HEADERS.isdisjoint(headers):
        return ""
    for name in SESSION_HEADERS:
        value = headers.get(name)
        if value:
            return shorten_id(value)
    return ""


def session_of(headers: Mapping[str, str], body: Envelope) -> str:
    """The hint in body and headers.

    Args:
        headers: Names in lower case.

    Returns:
        At most `request.MAX_ID_BYTES` bytes; empty when there is no hint.
    """
    if not (
        body.prompt_cache_key
        or body.conversation
        or body.metadata
        or body.user
        or body.safety_identifier
        or body.previous_response_id
    ):
        return session_of_headers(headers)
    metadata, conversation = body.metadata, body.conversation
    session_id = user_id = None
    if type(metadata) is dict:
        session_id, user_id = metadata.get("session_id"), metadata.get("user_id")
    if type(conversation) is dict:
        conversation = conversation.get("id")
    for hint in (
        body.prompt_cache_key,
        conversation,
        session_id,
        session_of_headers(headers),
        body.user,
        user_id,
        body.safety_identifier,
        body.previous_response_id,
    ):
        if hint and type(hint) is str:
            return shorten_id(hint)
    return ""


#: Headers that name the model to be served, in place of the one in the body
#: (docs/spec/protocol.md#model-rewrite).
MODEL_HEADERS = ("x-llm-d-model-name-rewrite", "x-gateway-model-name-rewrite")
EPP_MODEL, GATEWAY_MODEL = MODEL_HEADERS

NO_MODEL: Final = decision.bad_request("model not found in request body")

#: Beginnings and ends of the text for a body that is not a JSON object.
_NOT_JSON = "error unmarshaling request bodyMap: "
_TOO_DEEP = "exceeded max depth"
_NOT_UTF8 = "JSON is malformed: invalid UTF-8"

#: More tokens than any engine generates: keeps arithmetic on a client's number within floats.
TOKEN_LIMIT: Final = 2**31 - 1

#: All up to a lone surrogate: plain bytes, escapes, surrogate pairs. Possessive, so that no input
#: makes it try again.
_PAIRED = re.compile(
    rb"(?:[^\\]++|\\[^u]|\\u(?![dD][89a-fA-F])"
    rb"|\\u[dD][89abAB][0-9a-fA-F]{2}\\u[dD][c-fC-F][0-9a-fA-F]{2})*+",
    re.DOTALL,
)
_LONE = re.compile(rb"\\u[dD][89a-fA-F][0-9a-fA-F]{2}")
#: Lone surrogates that are mended in one body (count): each is a character cut in two.
_MAX_MENDED: Final = 4096


class Envelope(msgspec.Struct, gc=False):
    """Fields that mean the same on every JSON surface.

    A base of the surfaces' own structs because msgspec decodes exactly one type in one pass.
    """

    model: Any = None
    stream: Any = None
    max_completion_tokens: Any = None
    max_tokens: Any = None
    max_output_tokens: Any = None
    sampling_params: narrow_types.Object = None
    cache_salt: Any = None
    lora_path: Any = None
    prompt_cache_key: Any = None
    conversation: narrow_types.Object = None
    metadata: narrow_types.Object = None
    user: Any = None
    safety_identifier: Any = None
    previous_response_id: Any = None


BodyT = TypeVar("BodyT", bound=Envelope)

_ENVELOPE = msgspec.json.Decoder(Envelope)


def decode(
    decoder: msgspec.json.Decoder[BodyT], raw: HttpRequest, *, wanted: str
) -> BodyT | Rejection:
    """Decode a body and see that it names a model.

    Args:
        wanted: Expectation to report when the prompt field is of the wrong type.

    Returns:
        The body, or 400 for what is not a JSON object, names no model, or misuses that field.
    """
    body = decode_loose(decoder, raw, wanted=wanted)
    if isinstance(body, Rejection):
        return body
    # As `model_of`, without a call.
    model = body.model
    return body if (type(model) is str and model) or model_header(raw.headers) else NO_MODEL


def decode_loose(
    decoder: msgspec.json.Decoder[BodyT], raw: HttpRequest, *, wanted: str
) -> BodyT | Rejection:
    """Like `decode`, for surfaces on which a model is optional."""
    try:
        # Most bodies are short, and a call takes as long as a message.
        if len(raw.body) <= bounded_decoder.SHORT_BYTES:
            return decoder.decode(raw.body)
        return bounded_decoder.decode(decoder, raw.body)
    except msgspec.ValidationError as error:
        return _type_error_rejection(raw, error, wanted=wanted)
    except msgspec.DecodeError as error:
        mended = mend_surrogates(raw.body)
        if mended != raw.body:
            mended_raw = msgspec.structs.replace(raw, body=mended)
            return decode_loose(decoder, mended_raw, wanted=wanted)
        return not_json(str(error))
    except UnicodeDecodeError:
        return not_json(_NOT_UTF8)
    except RecursionError:
        return too_deep()


def mend_surrogates(body: RequestBody) -> RequestBody:
    r"""Replace lone surrogates, which JSON permits and Unicode does not, by U+FFFD.

    JavaScript clients that cut a string inside an emoji send them as `\ud83d`; json.loads in the
    engines accepts them. A body with more than `_MAX_MENDED` of them stays as it is.
    """
    if b"\\ud" not in body and b"\\uD" not in body:
        return body
    mended = bytearray(body)
    at = 0
    for _ in range(_MAX_MENDED):
        paired = _PAIRED.match(body, at)
        lone = paired and _LONE.match(body, paired.end())
        if not lone:
            return bytes(mended) if at else body
        at = lone.end()
        mended[at - 4 : at] = b"fffd"
    return body


def _type_error_rejection(
    raw: HttpRequest, error: msgspec.ValidationError, *, wanted: str
) -> Rejection:
    """Rejection of a body that is no object, or whose prompt field has the wrong type."""
    try:
        body = bounded_decoder.decode(_ENVELOPE, raw.body)
    except (ValueError, RecursionError):
        return not_json(str(error))
    return decision.bad_request(wanted) if model_of(body, raw.headers) else NO_MODEL


def not_json(why: str) -> Rejection:
    """Rejection of a body that is no JSON object. `why` is the decoder's message."""
    return decision.bad_request(_NOT_JSON + why)


def too_deep() -> Rejection:
    """The body nests deeper than we, or an engine, would follow."""
    return not_json(_TOO_DEEP)


def model_header(headers: Mapping[str, str]) -> str:
    """The model a header supplies; empty when none does."""
    # Written out: every request is looked at, and hardly any has one.
    return headers.get(EPP_MODEL) or headers.get(GATEWAY_MODEL) or ""


def model_of(body: Envelope, headers: Mapping[str, str]) -> str:
    """The model the body names, else the one a header supplies, else nothing."""
    model = body.model
    return model if type(model) is str and model else model_header(headers)


def unparsed_request(raw: HttpRequest, api: str) -> InferenceRequest:
    """Build a request from its headers only."""
    return InferenceRequest(
        api,
        model=model_header(raw.headers),
        session=session_of_headers(raw.headers),
        subset=raw.subset,
    )


def request(
    api: str,
    raw: HttpRequest,
    body: Envelope,
    *,
    prompt: canonical_prompt.Prompt,
    may_have_media: bool = True,
) -> InferenceRequest:
    """Build the request from the parsed parts.

    Args:
        may_have_media: False where the prompt has none, so that it is not searched for any.
    """
    adapter = body.lora_path
    if adapter is None:
        adapter = ""
    elif type(adapter) is not str:
        adapter, prompt = _adapter_of_batch(adapter, prompt)
    model = body.model if type(body.model) is str else ""
    content, tokens, text_bytes = prompt.content, prompt.tokens, prompt.text_bytes
    spans: tuple[MediaSpan, ...] = ()
    if may_have_media and text_bytes and media.MARKER in content:
        content, spans, text_bytes = media.lay_out(content, model, media.video_size(raw.headers))
        tokens = canonical_prompt.estimate(text_bytes) + sum([span.tokens for span in spans])
    return InferenceRequest(
        api,
        model=model or model_header(raw.headers),
        adapter=adapter,
        prompt=content,
        prompt_tokens=tokens,
        stream=body.stream is True,
        max_tokens=_max_tokens(body),
        session=session_of(raw.headers, body),
        subset=raw.subset,
        prompt_bytes=text_bytes,
        media=spans,
    )


def _adapter_of_batch(
    value: Any, prompt: canonical_prompt.Prompt
) -> tuple[str, canonical_prompt.Prompt]:
    """The adapter that `lora_path` stands for where it is no text, and the prompt under it.

    SGLang takes a name, or none, for each prompt of a batch. Where they differ, the batch goes by
    the first name, and its prompt is salted with all of them: what an engine cached under other
    adapters is of no use to it.
    """
    if type(value) is bytes:  # a text that is too long for any name
        return value[: 2 * MAX_NAME_BYTES].decode("utf-8", "ignore"), prompt
    names = [name or "" for name in value] if type(value) is list else [value or ""]
    first = names[0] if names else ""
    if type(first) is str and names.count(first) == len(names):
        return first, prompt
    name = next((name for name in names if type(name) is str and name), "")
    return name, canonical_prompt.with_cache_salt(prompt, canonical_prompt.item(value))


def _max_tokens(body: Envelope) -> int | None:
    bound, sampling = body.max_tokens, body.sampling_params
    if body.max_completion_tokens is None:
        if bound is None and body.max_output_tokens is None and sampling is None:
            return None  # as most requests have it
        if type(bound) is int and 0 <= bound <= TOKEN_LIMIT:
            return bound
    sampling = sampling if type(sampling) is dict else {}
    for bound in (
        body.max_completion_tokens,
        body.max_tokens,
        body.max_output_tokens,
        sampling.get("max_new_tokens"),
        sampling.get("max_tokens"),
    ):
        if (type(bound) is int or type(bound) is float) and bound >= 0:
            return int(min(bound, TOKEN_LIMIT))
    return None


#: Strings of the outermost object, and brackets, that `find_model` looks at (count): some 25 ms. A
#: conversation of 10,000 messages has 20,000.
MAX_TOKENS: Final = 30_000

#: The next string or bracket. Possessive, so that no input makes it try again.
_TOKEN = re.compile(rb'[^"{}\[\]]*+("[^"\\]*+(?:\\.[^"\\]*+)*+"|[{}\[\]])', re.DOTALL)
#: The next bracket, whatever strings stand before it.
_BRACKET = re.compile(rb'(?:[^"{}\[\]]++|"[^"\\]*+(?:\\.[^"\\]*+)*+")*+([{}\[\]])', re.DOTALL)
OPENED: Final = re.compile(rb"[ \t\r\n]*+\{[ \t\r\n]*+")
COLON: Final = re.compile(rb"[ \t\r\n]*+:[ \t\r\n]*+")
STRING: Final = re.compile(rb'"[^"\\]*+(?:\\.[^"\\]*+)*+"', re.DOTALL)

MODEL_KEY: Final = b'"model"'


class ModelMember(NamedTuple):
    """The last member `model` of the outermost object.

    Attributes:
        has_model: Whether there is one.
        span: Start and end of its value, a JSON string; None for another value, and without one.
    """

    has_model: bool
    span: tuple[int, int] | None


def find_model(body: RequestBody) -> ModelMember | None:
    """Find the model of a JSON object by depth, also in a cut body, and however its key is escaped.

    Returns:
        None where the body begins with no object, or has more than `MAX_TOKENS` tokens.
    """
    opened = OPENED.match(body)
    if opened is None:
        return None
    member = ModelMember(has_model=False, span=None)
    depth, at = 1, opened.end()
    for _ in range(MAX_TOKENS):
        token = (_TOKEN if depth == 1 else _BRACKET).match(body, at)
        if token is None:
            # The end, which only a cut body reaches with a bracket open.
            return member
        at = token.end()
        start = token.start(1)
        first = body[start]
        if first == 0x22:
            if _is_model(body[start:at]) and (colon := COLON.match(body, at)):
                value = STRING.match(body, colon.end())
                member = ModelMember(has_model=True, span=value and value.span())
                at = value.end() if value else colon.end()
        elif first in b"{[":
            depth += 1
        else:
            depth -= 1
            if not depth:
                return member
    return None


def _is_model(string: RequestBody) -> bool:
    """True if a JSON string decodes to `model`."""
    if string == MODEL_KEY:
        return True
    # The longest way to write five characters takes six bytes each.
    if b"\\" not in string or len(string) > 32:
        return False
    try:
        return bool(msgspec.json.decode(string) == "model")
    except (msgspec.DecodeError, UnicodeDecodeError):
        return False
