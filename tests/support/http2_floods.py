"""Floods of HTTP/2 frames, by the limit of the server that each exceeds."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

import hpack

from tests.support.http2_frames import (
    ACK,
    CALL,
    CONTINUATION,
    DATA,
    END_HEADERS,
    HEADERS,
    PATH,
    PING,
    PREFACE,
    PRIORITY,
    RST_STREAM,
    SETTINGS,
    WINDOW_UPDATE,
    frame,
    number,
)

START: Final = PREFACE + frame(SETTINGS) + frame(SETTINGS, ACK)


def encode_call(path: str = PATH, content_type: str = "application/grpc") -> bytes:
    """Encode the header block of a call, without a table of fields."""
    encoder = hpack.Encoder()
    encoder.header_table_size = 0
    block = encoder.encode(
        list({**dict(CALL), ":path": path, "content-type": content_type}.items())
    )
    # The first block of a client begins with the table of no size that it announces.
    return b"\x20" + block.removeprefix(b"\x20")


def open_call(stream_id: int, block: bytes, flags: int = END_HEADERS) -> bytes:
    """Build the frame that opens a stream."""
    return frame(HEADERS, flags, stream_id, block)


def build_floods(path: str = PATH) -> Mapping[str, bytes]:
    """Build floods; all bytes of a client, by limit.

    Args:
        path: A method of the server whose calls go on until the client ends them.
    """
    block, refused = encode_call(path), encode_call(content_type="text/html")
    call, many = open_call(1, block), range(3, 3003, 2)
    floods = {
        "rapid_reset": b"".join(
            open_call(i, block) + frame(RST_STREAM, 0, i, number(8)) for i in range(3, 60_003, 2)
        ),
        "ping_flood": frame(PING, 0, 0, bytes(8)) * 1500,
        "settings_flood": frame(SETTINGS) * 200,
        "priority_flood": frame(PRIORITY, 0, 9, bytes(5)) * 1500,
        "window_update_flood": call + frame(WINDOW_UPDATE, 0, 1, number(1)) * 6000,
        "empty_frame_flood": call + frame(DATA, 0, 1) * 3000,
        "unknown_frame_flood": frame(0x20) * 1500,
        "closed_stream_flood": open_call(1, refused) + frame(DATA, 0, 1) * 25_000,
        "stream_error_flood": b"".join(open_call(i, refused) for i in many),
        "continuation_flood": open_call(1, b"", 0)
        + frame(CONTINUATION, 0, 1, b"\x00\x01a\x01b") * 20,
    }
    # A table of 4096 bytes is allowed until the client acknowledges that there is none.
    bomb = open_call(1, b"\x40\x01x\x7f\xa1\x1e" + b"y" * 4000 + b"\xbe" * 1000)
    return {
        **{limit: START + flood for limit, flood in floods.items()},
        "header_list": PREFACE + frame(SETTINGS) + bomb,
    }
