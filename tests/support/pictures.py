"""Files of images and audio that are headers and filling, as engines and clients have them."""

import base64
import struct


def png(width, height, *, content=b"x", size=20_000):
    head = b"\x89PNG\r\n\x1a\n\0\0\0\rIHDR" + struct.pack(">II", width, height) + b"\x08\2\0\0\0"
    return _filled(head, content, size)


def gif(width, height, *, size=20_000):
    return _filled(b"GIF89a" + struct.pack("<HH", width, height), b"x", size)


def jpeg(width, height, *, before=b"", size=20_000):
    """A JPEG; `before` are segments before the frame header."""
    frame = b"\xff\xc2\0\x11\x08" + struct.pack(">HH", height, width) + b"\x03"
    return _filled(b"\xff\xd8\xff\xe0\0\x10JFIF" + bytes(10) + before + frame, b"x", size)


def segment(marker, size):
    """A segment of a JPEG of so many bytes."""
    return b"\xff" + bytes([marker]) + struct.pack(">H", size) + b"e" * (size - 2)


def webp(width, height, *, kind="VP8X", size=20_000):
    """A WebP: lossy (`VP8 `), lossless (`VP8L`) or extended."""
    head = b"RIFF\0\0\0\0WEBP" + kind.encode() + b"\0\0\0\0"
    if kind == "VP8 ":
        head += b"\x30\0\0\x9d\x01\x2a" + struct.pack("<HH", width, height)
    elif kind == "VP8L":
        head += b"\x2f" + struct.pack("<I", (width - 1) | (height - 1) << 14)
    else:
        head += bytes(4) + (width - 1).to_bytes(3, "little") + (height - 1).to_bytes(3, "little")
    return _filled(head, b"x", size)


def wav(seconds, *, rate=32_000):
    head = b"RIFF\0\0\0\0WAVEfmt " + struct.pack("<IHHIIHH", 16, 1, 1, rate // 2, rate, 2, 16)
    return _filled(head, b"x", seconds * rate)


def encoded(data):
    return base64.b64encode(data).decode()


def url(data, mime="image/png"):
    return f"data:{mime};base64,{encoded(data)}"


def _filled(head, content, size):
    return head + content * ((size - len(head)) // len(content) + 1)
