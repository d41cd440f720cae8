"""Requests: as they arrive from the data plane, and as they read once parsed."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping
from typing import Final, Literal, TypeAlias
from urllib.parse import unquote

import mmh3
import msgspec

#: Estimated UTF-8 bytes per prompt token. Four is the usual figure for English text with a
#: 32k to 128k vocabulary; it only scales estimates, never what is sent. It stands until a model's
#: own ratio is learned.
BYTES_PER_TOKEN = 4


#: Longest name of a model or an adapter (bytes of UTF-8): adapters are often named by their path. A
#: request with a longer one is refused.
MAX_NAME_BYTES: Final = 512

#: Longest request id, session and tenant that is remembered (bytes of UTF-8).
MAX_ID_BYTES: Final = 256

#: Characters of a shortened id that stand as they were.
_HEAD = 191


def shorten_id(text: str) -> str:
    """An id as it is remembered: itself, or its beginning and a digest when it is too long.

    A cut alone would make one tenant of two whose ids differ behind it.

    Returns:
        At most `MAX_ID_BYTES` bytes; two different ids stay different.
    """
    size = len(text)
    if 4 * size <= MAX_ID_BYTES or (size <= MAX_ID_BYTES and text.isascii()):
        return text
    written = text.encode("utf-8", "surrogatepass")
    if len(written) <= MAX_ID_BYTES:
        return text
    head = written[:_HEAD].decode("utf-8", "ignore")
    return f"{head}~{hashlib.sha256(written).hexdigest()}"


def hash_affinity_key(key: str | bytes) -> int:
    """Hash of a session or of the beginning of a message, 32 bits (MurmurHash3).

    Of bytes: mmh3 crashes on a string that has half of a surrogate pair.
    """
    if isinstance(key, str):
        key = key.encode("utf-8", "surrogatepass")
    return mmh3.hash(key, 0, False)


def is_long_name(name: str) -> bool:
    """True if a model or adapter name is longer than `MAX_NAME_BYTES`."""
    if 4 * len(name) <= MAX_NAME_BYTES:
        return False
    return len(name.encode("utf-8", "surrogatepass")) > MAX_NAME_BYTES


#: A request body. It is a bytearray where it grew from many chunks: joining 32 MiB, and copying them
#: again for each edit, would block the event loop for 40 ms each.
RequestBody: TypeAlias = bytes | bytearray


#: Where the path is read, in order, and what it is when none of them is there.
PATH_HEADERS: Final = (":path", "x-original-path", "x-forwarded-path")
DEFAULT_PATH: Final = "/v1/completions"

#: Longest path that is decoded (characters): that of 1 MiB takes 160 ms.
MAX_DECODED_PATH: Final = 256


def path_of(headers: Mapping[str, str]) -> str:
    """The path as sent, from the first header that has one; query string included."""
    for name in PATH_HEADERS:
        path = headers.get(name)
        if path:
            return path
    return DEFAULT_PATH


def split_path(path: str) -> list[str]:
    """Segments of a path as engines read it: decoded, without query and empty segments."""
    name = path.partition("?")[0]
    # Engines decode a path, which a data plane forwards as it is.
    if "%" in name and len(path) <= MAX_DECODED_PATH:
        name = unquote(name)
    # What merges slashes behind the data plane makes one path of all of these; other engines answer 404.
    return [segment for segment in name.split("/") if segment]


class HttpRequest(msgspec.Struct, frozen=True, gc=False):
    """One HTTP request as the data plane sent it, before parsing.

    Attributes:
        headers: Header names in lower case, pseudo headers included; of duplicates the last.
        body: The body, byte for byte; empty when there is none or it was not shown.
        truncated: The data plane showed only the beginning of the body (BUFFERED_PARTIAL).
        subset: Endpoints the data plane allows (EPP protocol 004, subset hint): `ip:port` or bare
            `ip` tokens. None means no hint; an empty tuple means none is allowed.
    """

    headers: Mapping[str, str]
    body: RequestBody = b""
    truncated: bool = False
    subset: tuple[str, ...] | None = None

    @property
    def method(self) -> str:
        """The HTTP method; empty if the data plane did not show it."""
        return self.headers.get(":method", "")


MediaKind: TypeAlias = Literal["image", "video", "audio"]


class MediaSpan(msgspec.Struct, frozen=True, gc=False, array_like=True):
    """An image, a video or audio in a prompt.

    Attributes:
        kind: What it is.
        start: Offset in `InferenceRequest.prompt`.
        size: Bytes that stand for it there.
        tokens: Prompt tokens that models like the one in the body make of it (estimate).
        is_sized: Whether its size is known; else a usual one is assumed.
        count: Items (count): more than one in the last span of a prompt with very many.
        digest: Of its content, 64 bits; 0 within other parts, such as tool results.
    """

    kind: MediaKind
    start: int
    size: int
    tokens: int
    is_sized: bool
    count: int = 1
    digest: int = 0


class InferenceRequest(msgspec.Struct, frozen=True, gc=False):
    """A parsed inference request.

    Attributes:
        api: API surface: `chat`, `completions`, `embeddings`, ..., `opaque`, or `grpc` for an
            unknown gRPC method.
        model: The LLM name in the body; empty when it names none.
        adapter: The LoRA adapter, where the surface names one apart from the model. vLLM names an
            adapter in `model`, so this is then empty and `target` is the model.
        prompt: The prompt as stable bytes in the order the engine sees it: equal beginnings are
            equal bytes. It is hashed, never sent, logged or decoded; empty once a request waits.
        prompt_tokens: Estimated prompt length in tokens; exact for tokenized prompts.
        prompt_bytes: Bytes of text `prompt_tokens` is estimated from, besides those of `media`; 0 when
            it is exact.
        media: Images, videos and audio in the prompt, in order; `prompt_tokens` has their tokens.
        stream: Whether the client requested a streamed answer.
        max_tokens: Upper bound on generated tokens; None when the request sets none.
        session: Identity of the conversation; empty when the request states none.
        subset: See `HttpRequest.subset`.
        objective: Name of the InferenceObjective the client named, if it is one of this pool; empty
            otherwise.
        priority: Its priority; 0 where there is none. Below 0 a request may be dropped when
            endpoints are full.
    """

    api: str
    model: str = ""
    adapter: str = ""
    prompt: bytes = b""
    prompt_tokens: int = 0
    stream: bool = False
    max_tokens: int | None = None
    session: str = ""
    subset: tuple[str, ...] | None = None
    prompt_bytes: int = 0
    objective: str = ""
    priority: int = 0
    media: tuple[MediaSpan, ...] = ()

    @property
    def stable_bytes(self) -> int:
        """Bytes of a prompt of text, with the room of its media; 0 for token ids."""
        return self.prompt_bytes + (sum([span.size for span in self.media]) if self.media else 0)

    @property
    def target(self) -> str:
        """The name an engine must be able to serve: the adapter if there is one, else the model."""
        return self.adapter or self.model


#: Label of a request that names no model, or no tenant.
UNNAMED: Final = "none"


class RequestLabels(msgspec.Struct, frozen=True, gc=False):
    """Labels of a request in metrics, where their number is bounded; they are text of clients.

    Attributes:
        client_model: Model or adapter that the client named; `none` where it named none.
        target_model: Model or adapter that the engine is asked for; `none` for none.
        tenant: Tenant; `none` where no header names one.
    """

    client_model: str
    target_model: str
    tenant: str
    priority: int

    @classmethod
    def from_request(
        cls, request: InferenceRequest, *, tenant: str, client_model: str = ""
    ) -> RequestLabels:
        """Labels of a request of this tenant; an empty `client_model` is that of the request."""
        model = request.target or UNNAMED
        return cls(client_model or model, model, tenant or UNNAMED, request.priority)


#: Digits of the longest number that is read from a header.
_MAX_DIGITS: Final = 11


class FlowHeaders(msgspec.Struct, frozen=True, kw_only=True):
    """Names of the headers to read, in lower case.

    Attributes:
        tenant_headers: Name the tenant; the first that is there counts.
        by_adapter: Whether the model or adapter is the tenant where no header names one.
        timeout_headers: Name the longest wait in milliseconds.
        slo_headers: Name the time to first token asked for, in milliseconds.
    """

    tenant_headers: tuple[str, ...] = (
        "x-llm-d-inference-fairness-id",
        "x-gateway-inference-fairness-id",
    )
    by_adapter: bool = False
    timeout_headers: tuple[str, ...] = ("x-extproc-queue-timeout-ms",)
    slo_headers: tuple[str, ...] = ("x-llm-d-slo-ttft-ms", "x-slo-ttft-ms")

    def tenant(self, headers: Mapping[str, str], served_by: str) -> str:
        """The tenant of a request, see `shorten_id`; empty if no header names it.

        Args:
            served_by: The adapter or model it asks for.
        """
        for name in self.tenant_headers:
            tenant = headers.get(name)
            if tenant:
                return shorten_id(tenant)
        return shorten_id(served_by) if self.by_adapter else ""

    def timeout_s(self, headers: Mapping[str, str]) -> float | None:
        """The longest wait a request asks for."""
        return _milliseconds(headers, self.timeout_headers)

    def slo_s(self, headers: Mapping[str, str]) -> float:
        """Seconds to the first token a request asks for; infinity for none."""
        seconds = _milliseconds(headers, self.slo_headers)
        return math.inf if seconds is None else seconds


def _milliseconds(headers: Mapping[str, str], names: tuple[str, ...]) -> float | None:
    """Seconds from a header in milliseconds; None if it is absent or no number."""
    for name in names:
        text = headers.get(name)
        if text and text.isascii() and text.isdigit() and len(text) <= _MAX_DIGITS:
            return int(text) / 1000.0
    return None
