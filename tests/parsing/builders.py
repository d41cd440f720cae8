"""Builders of raw requests that name only the fact that matters."""

import json
import struct

from extproc.decision import Rejection
from extproc.parsing import surfaces
from extproc.request import HttpRequest, InferenceRequest

CHAT = "/v1/chat/completions"


def post(path, body, **headers):
    """A POST; header names take underscores for dashes."""
    named = {name.replace("_", "-"): value for name, value in headers.items()}
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    return HttpRequest({":method": "POST", ":path": path, **named}, data)


def parsed(path, body, **headers):
    outcome = surfaces.parse(post(path, body, **headers))
    assert isinstance(outcome, InferenceRequest), outcome
    return outcome


def refused(path, body, **headers):
    outcome = surfaces.parse(post(path, body, **headers))
    assert isinstance(outcome, Rejection), outcome
    assert outcome.status == 400
    return outcome.message


def chat(*messages, **fields):
    return parsed(CHAT, {"model": "m", "messages": list(messages), **fields})


def user(content):
    return {"role": "user", "content": content}


def varint(value):
    """A number of protobuf."""
    out = bytearray()
    while value > 127:
        out.append(value & 127 | 128)
        value >>= 7
    return bytes([*out, value])


def field(number, value):
    """A field of protobuf: a varint, or bytes with their length."""
    if isinstance(value, int):
        return varint(number << 3) + varint(value)
    return varint(number << 3 | 2) + varint(len(value)) + value


def frame(message, flag=0):
    """A message of gRPC."""
    return struct.pack(">BI", flag, len(message)) + message
