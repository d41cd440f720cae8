"""Requests of hostile clients, by kind."""

from __future__ import annotations

import base64
import json
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

from bench import soak_messages

#: Bytes of what clients choose at will: as long as Envoy lets a header be, and longer in bodies.
LONG_HEADER = 32 * 1024
LONG_NAME = 256 * 1024
HUGE = 1024 * 1024


class Hostile(NamedTuple):
    """One request and what comes of it.

    Attributes:
        request: Messages up to its decision.
        answer: Messages after it, if it was routed.
    """

    request: list[bytes]
    answer: list[bytes]


def _post(
    number: int,
    *,
    headers: Mapping[str, str] | None = None,
    fields: Mapping[str, Any] | None = None,
    status: str = "200",
    subset: list[str] | None = None,
    path: str = "/v1/chat/completions",
) -> Hostile:
    """A chat request of its own prompt, with what is hostile in it."""
    body = {
        "model": "m",
        "messages": [{"role": "user", "content": f"{number} " + "some words " * 10}],
        **(fields or {}),
    }
    named = {":method": "POST", ":path": path, "content-type": "application/json"}
    usage = {"prompt_tokens": 40, "completion_tokens": 1}
    return Hostile(
        [
            soak_messages.headers({**named, **(headers or {})}, subset=subset),
            soak_messages.body(json.dumps(body).encode()),
        ],
        [
            soak_messages.headers(
                {":status": status, "content-type": "application/json"}, response=True
            ),
            soak_messages.body(json.dumps({"usage": usage}).encode(), response=True),
        ],
    )


def _long(number: int, size: int) -> str:
    return f"{number:08}" + "x" * size


def _image(number: int, kind: str) -> list[dict[str, object]]:
    """Messages with an item of media, of which no other request has the bytes."""
    data = base64.b64encode(
        b"\x89PNG\r\n\x1a\n%8dIHDR%8d" % (number, number) + bytes(3000)
    ).decode()
    url = f"data:image/png;base64,{data}"
    item = {"url": url} if kind == "image_url" else {"data": data}
    return [{"role": "user", "content": [{"type": kind, kind: item}]}]


def _cut_upload(number: int) -> Hostile:
    posted = _post(number)
    return Hostile([posted.request[0], soak_messages.body(b"x" * 100_000, ends=False)], [])


def _cut_answer(number: int) -> Hostile:
    posted = _post(number)
    begun = soak_messages.body(b"x" * 10_000, response=True, ends=False)
    return Hostile(posted.request, [posted.answer[0], begun])


def _usage(number: int) -> Hostile:
    usage = {_long(number, 2000): number, "prompt_tokens": 10**300, "completion_tokens": -1}
    body = soak_messages.body(json.dumps({"usage": usage}).encode(), response=True)
    return Hostile(_post(number).request, [_post(number).answer[0], body])


def _no_json(number: int) -> Hostile:
    request = _post(number).request
    return Hostile([request[0], soak_messages.body(b"{" + b"\\" * 1000 + b"%d" % number)], [])


KINDS: Mapping[str, Callable[[int], Hostile]] = {
    "distinct models": lambda n: _post(n, fields={"model": f"model-{n}"}),
    "long models": lambda n: _post(n, fields={"model": _long(n, LONG_NAME)}),
    "long models, 404": lambda n: _post(n, fields={"model": _long(n, LONG_NAME)}, status="404"),
    "models of 500 bytes": lambda n: _post(n, fields={"model": _long(n, 490)}),
    "images under long models": lambda n: _post(
        n, fields={"model": _long(n, LONG_NAME), "messages": _image(n, "image_url")}
    ),
    "images": lambda n: _post(n, fields={"messages": _image(n, "image_url")}),
    "audio": lambda n: _post(n, fields={"messages": _image(n, "input_audio")}),
    "long adapters": lambda n: _post(n, fields={"lora_path": _long(n, LONG_NAME)}),
    "adapters of 500 bytes": lambda n: _post(n, fields={"lora_path": _long(n, 490)}),
    "long ids": lambda n: _post(n, headers={"x-request-id": _long(n, LONG_HEADER)}),
    "long sessions": lambda n: _post(n, headers={"x-session-id": _long(n, LONG_HEADER)}),
    "long users": lambda n: _post(n, fields={"user": _long(n, LONG_NAME)}),
    "long salts": lambda n: _post(n, fields={"cache_salt": _long(n, LONG_NAME)}),
    "long tenants": lambda n: _post(
        n, headers={"x-gateway-inference-fairness-id": _long(n, LONG_HEADER)}
    ),
    "long objectives": lambda n: _post(
        n, headers={"x-gateway-inference-objective": _long(n, LONG_HEADER)}
    ),
    "long rewrites": lambda n: _post(
        n, headers={"x-gateway-model-name-rewrite": _long(n, LONG_HEADER)}
    ),
    "long paths": lambda n: _post(n, path="/v1/" + _long(n, LONG_HEADER)),
    "long queries": lambda n: _post(n, path="/v1/chat/completions?" + _long(n, LONG_HEADER)),
    "long hosts": lambda n: _post(n, headers={":authority": _long(n, LONG_HEADER)}),
    "long header names": lambda n: _post(n, headers={"x-" + _long(n, LONG_HEADER): "1"}),
    "long subsets": lambda n: _post(
        n,
        subset=[
            "10.0.0.1:8000",
            *(f"10.{n % 256}.{n // 256}.{at % 256}:8000" for at in range(100)),
        ],
    ),
    "huge prompts": lambda n: _post(
        n, fields={"messages": [{"role": "user", "content": _long(n, HUGE)}]}
    ),
    "uploads that are cut": _cut_upload,
    "answers that are cut": _cut_answer,
    "odd statuses": lambda n: _post(n, status=str(100 + n % 900)),
    "failures": lambda n: _post(n, status="503"),
    "long usage": _usage,
    "no JSON": _no_json,
    "no body": lambda n: Hostile(
        [soak_messages.headers({":method": "GET", ":path": f"/v1/models/{n}"}, ends=True)], []
    ),
}


def numbers(kind: str, start: int) -> Iterator[Hostile]:
    """Requests of one kind, each of its own."""
    make = KINDS[kind]
    number = start
    while True:
        yield make(number)
        number += 1
