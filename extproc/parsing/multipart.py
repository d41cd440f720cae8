"""Audio transcription and translation: the fields of a multipart form (RFC 7578).

Only short text fields are read; the file is stepped over. A form that cannot be read is routed
without a model, as an engine with one model would serve it. There is no prompt to hash but the
optional text one: encoder-decoder models keep no prefix cache of the audio.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Final

from extproc.parsing import canonical_prompt, envelope, opaque
from extproc.request import HttpRequest, InferenceRequest, RequestBody, shorten_id

#: A form has a handful of fields; whatever follows the last of so many parts is not read.
MAX_PARTS: Final = 64
#: No header block of a part, and no field worth reading, is longer.
MAX_FIELD_BYTES: Final = 8192

_BOUNDARY = re.compile(r'boundary=(?:"([^"]{1,200})"|([^\s;,"]{1,200}))', re.IGNORECASE)
_NAME = re.compile(
    rb'^content-disposition:[^\r\n]*?;\s*name=(?:"([^"\r\n]*)"|([^\s;"]+))',
    re.IGNORECASE | re.MULTILINE,
)
_WANTED = frozenset({"model", "prompt", "stream", "user"})


def parse(raw: HttpRequest, api: str) -> InferenceRequest:
    """Read a transcription or translation request; never refused."""
    match = _BOUNDARY.search(raw.headers.get("content-type", ""))
    if match is None:
        return opaque.parse(raw, api)
    boundary = match[1] or match[2]
    fields = read(raw.body, boundary.encode())
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


def read(body: RequestBody, boundary: bytes) -> Mapping[str, str]:
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
        end = body.find(b"\r\n" + delimiter, start)
        _read_part(fields, body, (start, end if end >= 0 else len(body)))
        start = end + 2 if end >= 0 else -1
    return fields


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
