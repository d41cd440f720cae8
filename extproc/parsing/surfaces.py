"""API surfaces: the table of request paths whose bodies are understood, and their parsing.

`parse` turns an HTTP request into an inference request or a rejection. `first_user_message` reads the key
of hash-by-prefix strategies from a parsed one. A `PreparsedRequest` carries what another process parsed,
for `parse` and `model_edit`.

Source: docs/spec/protocol.md#request-paths.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import Final

import msgspec

from extproc import decision
from extproc.decision import BodyEdit, Rejection
from extproc.parsing import canonical_prompt, envelope, openai_api, other_apis, vllm_grpc
from extproc.parsing.envelope import EPP_MODEL, GATEWAY_MODEL
from extproc.request import (
    MAX_DECODED_PATH,
    MAX_NAME_BYTES,
    HttpRequest,
    InferenceRequest,
    is_long_name,
    path_of,
    split_path,
)


class ModelPlace(msgspec.Struct, frozen=True, gc=False, array_like=True):
    """Bytes of a body that a model name replaces.

    Attributes:
        start: Offset of the first byte that is replaced.
        stop: Offset behind the last one; equal to `start` where the name is added.
        before: Bytes before a name that is added.
        after: Bytes after it.
        is_form: Whether it is a field of a form, where a name is plain text; else it is JSON.
    """

    start: int
    stop: int
    before: bytes = b""
    after: bytes = b""
    is_form: bool = False

    def fill(self, model: str) -> BodyEdit | None:
        """Fill in a name; None for a name that would end a form field with a line break."""
        if not self.is_form:
            content = self.before + msgspec.json.encode(model) + self.after
        elif "\r" in model or "\n" in model:
            return None
        else:
            content = model.encode()
        return BodyEdit(self.start, self.stop, content)


class ParseResult(msgspec.Struct, frozen=True, gc=False, array_like=True):
    """Results of parsing a body.

    Attributes:
        request: The request; None where it is refused.
        refusal: The rejection of a request that is refused; None elsewhere.
        supplied: The request as if a header had named its model, where nothing names one and nothing
            else is wrong with it; None elsewhere.
        place: Where another model name goes; None where none can.
    """

    request: InferenceRequest | None
    refusal: Rejection | None
    supplied: InferenceRequest | None
    place: ModelPlace | None


class PreparsedRequest(HttpRequest, frozen=True, gc=False):
    """A request whose body is parsed already, or is not to be parsed.

    Attributes:
        outcome: Result for `surfaces.parse`.
    """

    outcome: InferenceRequest | Rejection = decision.bad_request("")
    supplied: InferenceRequest | None = None
    place: ModelPlace | None = None


def attach(raw: HttpRequest, result: ParseResult) -> PreparsedRequest:
    """Attach the results of parsing to a request."""
    outcome = result.request or result.refusal or decision.bad_request("")
    return PreparsedRequest(
        raw.headers,
        raw.body,
        raw.truncated,
        raw.subset,
        outcome=outcome,
        supplied=result.supplied,
        place=result.place,
    )


class Surface(msgspec.Struct, frozen=True, gc=False):
    """An API surface: a path, and what is done with its requests and responses.

    Attributes:
        path: Suffix of the request path, in full segments.
        api: Its name, `InferenceRequest.api`.
        parse: Parser of a request with a body; takes the request and `api`. Total.
        accepts_truncated: Whether `parse` reads a body of which only the beginning was shown. The
            bytes of others are their prompt then.
        drops_prompt: Whether the prompt is dropped: without inference it leaves nothing in a prefix
            cache, and an index that learned from it would predict blocks that no engine holds.
        observes_response: Whether responses report usage; if not, the stream ends after the decision
            (docs/spec/protocol.md#response-flow).
        is_plain_text: Whether the prompt is the user's own text, without roles, for
            `first_user_message`.
        find_model: Finds the value of the model in a form, as start and end offset; None for JSON.
    """

    path: str
    api: str
    parse: Callable[[HttpRequest, str], InferenceRequest | Rejection]
    accepts_truncated: bool = False
    drops_prompt: bool = False
    observes_response: bool = True
    is_plain_text: bool = False
    find_model: Callable[[HttpRequest], tuple[int, int] | None] | None = None


#: The surfaces by path; the longest path counts. Only these can refuse a request.
SURFACES: Final = (
    Surface("chat/completions", "chat", openai_api.parse_chat),
    Surface("chat/completions/render", "chat_render", openai_api.parse_chat, drops_prompt=True),
    Surface("completions", "completions", openai_api.parse_completion, is_plain_text=True),
    Surface(
        "completions/render", "completions_render", openai_api.parse_completion, drops_prompt=True
    ),
    Surface("embeddings", "embeddings", openai_api.parse_embeddings),
    Surface("responses", "responses", openai_api.parse_responses),
    Surface("conversations", "conversations", openai_api.parse_conversation),
    Surface("images/generations", "images", openai_api.parse_completion),
    Surface(
        "images/edits",
        "image_edits",
        other_apis.parse_form,
        accepts_truncated=True,
        find_model=other_apis.model_span,
    ),
    Surface(
        "images/variations",
        "image_variations",
        other_apis.parse_form,
        accepts_truncated=True,
        find_model=other_apis.model_span,
    ),
    Surface(
        "audio/transcriptions",
        "transcriptions",
        other_apis.parse_form,
        accepts_truncated=True,
        find_model=other_apis.model_span,
    ),
    Surface(
        "audio/translations",
        "translations",
        other_apis.parse_form,
        accepts_truncated=True,
        find_model=other_apis.model_span,
    ),
    Surface("messages", "messages", other_apis.parse_messages),
    Surface(
        "messages/count_tokens",
        "count_tokens",
        other_apis.parse_envelope,
        drops_prompt=True,
        observes_response=False,
    ),
    Surface("rerank", "rerank", other_apis.parse_ranking),
    Surface("score", "score", other_apis.parse_ranking),
    Surface("pooling", "pooling", openai_api.parse_pooling),
    Surface("tokenize", "tokenize", other_apis.parse_envelope, drops_prompt=True),
    Surface("inference/v1/generate", "generate", other_apis.parse_generate),
    Surface("generate", "sglang_generate", other_apis.parse_native_generate),
    Surface("vllm.grpc.engine.VllmEngine/Generate", "grpc_generate", vllm_grpc.parse_generate),
    Surface("vllm.grpc.engine.VllmEngine/Embed", "grpc_embed", vllm_grpc.parse_embed),
)

#: Any other path.
OPAQUE: Final = Surface("", "opaque", other_apis.parse_opaque)

#: Any other gRPC method: routed by its headers.
GRPC: Final = Surface(
    "", "grpc", envelope.unparsed_request, accepts_truncated=True, observes_response=False
)

#: Names of the surfaces whose responses are not observed.
UNOBSERVED: Final = frozenset(
    surface.api for surface in (*SURFACES, OPAQUE, GRPC) if not surface.observes_response
)

#: Names of the surfaces whose prompt is plain text.
PLAIN_TEXT: Final = frozenset(surface.api for surface in SURFACES if surface.is_plain_text)

#: Methods that carry a prompt; without `:method` the data plane did not say.
_POSTING = frozenset({"", "POST", "PUT", "PATCH"})

_BY_PATH = {surface.path: surface for surface in SURFACES}
_MAX_SEGMENTS = max(path.count("/") for path in _BY_PATH) + 1

#: Paths that are remembered, far more than real traffic has; those that are decoded.
_MAX_CACHED_PATHS = 512


def surface_of(path: str) -> Surface:
    """The surface of a path without query and empty segments; `OPAQUE` if there is none."""
    return _find_cached(path) if len(path) <= MAX_DECODED_PATH else _find(path)


def _find(path: str) -> Surface:
    segments = split_path(path)
    for depth in range(min(_MAX_SEGMENTS, len(segments)), 0, -1):
        surface = _BY_PATH.get("/".join(segments[-depth:]))
        if surface is not None:
            return surface
    return OPAQUE


_find_cached = lru_cache(maxsize=_MAX_CACHED_PATHS)(_find)


#: The rejection of a model or adapter name above the limit.
LONG_NAME: Final = decision.bad_request(
    f"expected a model or adapter name of at most {MAX_NAME_BYTES} bytes, got a longer one; "
    "correct the name"
)

#: Content codings that change a body (RFC 9110, 8.4.1, and those registered since); two have an older
#: name that begins with `x-`.
_CODINGS: Final = frozenset({"gzip", "deflate", "compress", "br", "zstd", "dcb", "dcz"})

#: The rejection of a compressed body on a path whose bodies are understood: engines do not decompress.
ENCODED_BODY: Final = Rejection(
    415,
    "expected a request body without content-encoding, got an encoded one; send it uncompressed",
)


def parse(raw: HttpRequest) -> InferenceRequest | Rejection:
    """Parse a request. Total: any bytes give a request or a rejection.

    Args:
        raw: A request whose body is complete, or marked as truncated.

    Returns:
        The request, `opaque` when there is no body or the path is not in the table (`grpc` when it
        is a gRPC method); or a rejection with status 400 (docs/spec/protocol.md#request-flow) on a
        path that is, and on every path for a model or adapter name that is too long; or
        `ENCODED_BODY`.
    """
    if type(raw) is PreparsedRequest:
        return raw.outcome
    headers = raw.headers
    method = headers.get(":method", "")
    if raw.body and (method in _POSTING or method.upper() in _POSTING):
        request = _parse_body(raw)
        if isinstance(request, Rejection):
            return request
    else:
        request = envelope.unparsed_request(raw, OPAQUE.api)
    model, adapter = request.model, request.adapter
    # As `envelope.model_header`, without a call.
    header = headers.get(EPP_MODEL) or headers.get(GATEWAY_MODEL) or ""
    # A character has four bytes at most: most names need no closer look.
    if 4 * (len(model) + len(adapter) + len(header)) <= MAX_NAME_BYTES:
        return request
    return LONG_NAME if any(map(is_long_name, (model, adapter, header))) else request


def _is_encoded(encoding: str) -> bool:
    """True for a content encoding by which a body cannot be read; some clients write its charset."""
    codings = encoding.lower().split(",")
    return any(coding.strip().removeprefix("x-") in _CODINGS for coding in codings)


def _parse_body(raw: HttpRequest) -> InferenceRequest | Rejection:
    path = raw.headers.get(":path") or path_of(raw.headers)
    surface = _find_cached(path) if len(path) <= MAX_DECODED_PATH else _find(path)
    if surface is OPAQUE and raw.headers.get("content-type", "").startswith("application/grpc"):
        surface = GRPC
    encoding = raw.headers.get("content-encoding")
    if encoding and surface.path and _is_encoded(encoding):
        return ENCODED_BODY
    is_cut = raw.truncated and not surface.accepts_truncated
    try:
        parsed = (other_apis.parse_truncated if is_cut else surface.parse)(raw, surface.api)
    except RecursionError:
        # Decoding stayed within the interpreter's depth, and writing the value again did not.
        is_opaque = surface is OPAQUE
        return envelope.unparsed_request(raw, surface.api) if is_opaque else envelope.too_deep()
    if surface.drops_prompt and not isinstance(parsed, Rejection):
        return msgspec.structs.replace(
            parsed, prompt=b"", prompt_tokens=0, prompt_bytes=0, media=()
        )
    return parsed


def parse_headers(raw: HttpRequest) -> PreparsedRequest:
    """Parse the headers of a request only, so that its body is forwarded whatever it is."""
    outcome = parse(msgspec.structs.replace(raw, body=b""))
    return PreparsedRequest(raw.headers, raw.body, raw.truncated, raw.subset, outcome=outcome)


def parse_supplied(raw: HttpRequest, model: str) -> InferenceRequest | Rejection | None:
    """Parse a request without a model as if a header had named it.

    Args:
        raw: A request that `parse` refuses with `envelope.NO_MODEL`.

    Returns:
        As of `parse`; None where its body was read before, and something else is wrong with it.
    """
    if type(raw) is PreparsedRequest:
        supplied = raw.supplied
        return None if supplied is None else msgspec.structs.replace(supplied, model=model)
    headers = {**raw.headers, envelope.MODEL_HEADERS[0]: model}
    return parse(msgspec.structs.replace(raw, headers=headers))


#: What starts the next field; the likely ones first. Nine searches for one byte each are thirty
#: times as fast as one for a class of nine.
_FIELD_MARKERS = tuple(bytes([marker]) for marker in range(0xFF, 0xF6, -1))

_SEPARATOR = len(canonical_prompt.SEPARATOR)

#: How a user's message starts in a framed prompt.
_USER = canonical_prompt.MESSAGE + b"user"
_USER_TEXT = _USER + canonical_prompt.TEXT

#: Bytes of the first user message that are looked at; four for each character of the longest
#: prefix that may be configured.
USER_MESSAGE_BYTES = 4 * 4096

#: Characters of which no text takes more than `USER_MESSAGE_BYTES`.
_PART_CHARACTERS = USER_MESSAGE_BYTES // 4


def first_user_message(request: InferenceRequest) -> str:
    """The text parts of the first user message, or the prompt of a completion.

    KubeAI's rule (docs/spec/prior-systems.md#prefixhash): chat takes the first message with role
    user and ignores system prompt, images and tools; completions take the prompt, of a list its
    first element; embeddings, rerank and audio have none.

    Returns:
        At most `USER_MESSAGE_BYTES` bytes as text; empty when the surface has none.
    """
    text = find_first_user_message(request)
    return text if isinstance(text, str) else text.decode()


def find_first_user_message(request: InferenceRequest) -> str | bytes:
    """The same, as bytes where it is a single part in ASCII, which need not be copied."""
    prompt = request.prompt
    if request.api in PLAIN_TEXT:
        # The first text of a prompt has no marker; a cache salt before it ends with a separator.
        at = (
            prompt.find(canonical_prompt.SEPARATOR) + _SEPARATOR
            if prompt.startswith(canonical_prompt.SALT)
            else 0
        )
        return _text(prompt, at, len(prompt))
    begin = 0 if prompt.startswith(_USER_TEXT) else _find_user_message(prompt)
    if begin < 0:
        return ""
    at = begin + len(_USER)
    if not prompt.startswith(canonical_prompt.TEXT, at):  # a name comes first, or there is no text
        at = prompt.find(canonical_prompt.TEXT, begin)
        if at < 0 or prompt.find(canonical_prompt.MESSAGE, begin + 1, at) >= 0:
            return ""
    limit = begin + len(_USER) + 2 * USER_MESSAGE_BYTES  # markers count, too
    if at < limit:
        last = at + 1 + USER_MESSAGE_BYTES
        end = prompt.find(canonical_prompt.MESSAGE, at + 1, last)
        part = prompt[at + 1 : end if end >= 0 else last]
        if part.isascii():  # and so without a marker
            return part
    end = prompt.find(canonical_prompt.MESSAGE, at + 1)
    if end < 0:
        end = limit
    if at >= end:
        return ""
    following = prompt.find(canonical_prompt.TEXT, at + 1, end)
    text = _text(prompt, at + 1, following if following >= 0 else end)
    at = following
    while at >= 0 and len(text) < USER_MESSAGE_BYTES:
        following = prompt.find(canonical_prompt.TEXT, at + 1, end)
        text += _text(prompt, at + 1, following if following >= 0 else end)
        at = following
    return text[:USER_MESSAGE_BYTES]


def reduce_prompt(request: InferenceRequest) -> bytes:
    """The shortest prompt with the opening of a request; empty for a request without one."""
    text = first_user_message(request)
    if not text:
        return b""
    if request.api in PLAIN_TEXT:
        return text.encode()
    # Parts, since of one text no more than `USER_MESSAGE_BYTES` are read; the marker behind is their end.
    parts = (text[at : at + _PART_CHARACTERS] for at in range(0, len(text), _PART_CHARACTERS))
    return b"".join(
        (
            _USER,
            *(canonical_prompt.TEXT + part.encode() for part in parts),
            canonical_prompt.MESSAGE,
        )
    )


def reduce_preparsed(raw: HttpRequest) -> HttpRequest:
    """The request as it is queued: a stored prompt is reduced to its first user message."""
    if type(raw) is not PreparsedRequest or not isinstance(raw.outcome, InferenceRequest):
        return raw
    outcome = msgspec.structs.replace(raw.outcome, prompt=reduce_prompt(raw.outcome))
    return msgspec.structs.replace(raw, outcome=outcome)


def no_user_message(_: InferenceRequest) -> str:
    """Replacement of `first_user_message` for profiles that do not read it."""
    return ""


def _find_user_message(prompt: bytes) -> int:
    """Offset of the first user message, -1 if there is none.

    A search for one byte is several times as fast as one for the marker with its role, and most
    often the user's message is the first or follows one system prompt.
    """
    begin = prompt.find(canonical_prompt.MESSAGE)
    if begin < 0 or prompt.startswith(_USER, begin):
        return begin
    begin = prompt.find(canonical_prompt.MESSAGE, begin + 1)
    if begin < 0 or prompt.startswith(_USER, begin):
        return begin
    return prompt.find(_USER, begin)


def _text(prompt: bytes, begin: int, end: int) -> str:
    """The text that starts at `begin` and does not reach beyond its field and `end`."""
    end = min(end, begin + USER_MESSAGE_BYTES)
    try:
        return prompt[begin:end].decode()
    except UnicodeDecodeError:
        pass  # another field follows, or the cut goes through a character
    for marker in _FIELD_MARKERS:
        marker_at = prompt.find(marker, begin, end)
        if marker_at >= 0:
            end = marker_at
    return prompt[begin:end].decode("utf-8", "ignore")
