"""Measures what hostile bodies cost to parse: CPU per MiB, memory per byte; exits 1 over a bar.

Each body is as long as `--mib`, on every surface that could read it. CPU is process time, the least of
three runs; memory is the peak that tracemalloc sees beside the body.

    python bench/hostile_bodies.py [--mib 4]
"""

import argparse
import base64
import os
import struct
import sys
import time
import tracemalloc

from extproc.parsing import surfaces
from extproc.request import HttpRequest
from extproc.server import grpc_workarounds

MAX_MS_PER_MIB = 30.0
MAX_TIMES_SIZE = 4.0
#: Memory that any body may take (bytes): a few thousand values.
FLOOR_BYTES = 2 * 1024 * 1024

SURFACES = {
    "/v1/chat/completions": "messages",
    "/v1/completions": "prompt",
    "/v1/embeddings": "input",
    "/v1/responses": "input",
    "/v1/messages": "messages",
    "/v1/rerank": "documents",
    "/v1/score": "text_2",
    "/pooling": "input",
    "/generate": "text",
    "/inference/v1/generate": "token_ids",
    "/v1/conversations": "items",
    "/tokenize": "prompt",
    "/invocations": "prompt",
}


def filled(head, unit, tail, size):
    """JSON of a size, of one unit again and again."""
    return head + unit * ((size - len(head) - len(tail)) // len(unit)) + tail


def values(size):
    """Name and JSON value."""
    yield "objects", filled(b"[", b"{},", b"{}]", size)
    yield "arrays", filled(b"[", b"[],", b"[]]", size)
    yield "arrays of one", filled(b"[", b"[1],", b"[1]]", size)
    yield "short strings", filled(b"[", b'"ab",', b'"ab"]', size)
    yield "empty strings", filled(b"[", b'"",', b'""]', size)
    yield "token ids", filled(b"[", b"1,", b"1]", size)
    yield "larger token ids", filled(b"[", b"1000,", b"1000]", size)
    yield "token ids of three digits", filled(b"[", b"999,", b"999]", size)
    yield "floats", filled(b"[", b"1.5,", b"1.5]", size)
    yield "huge numbers", filled(b"[", b"9" * 300 + b",", b"1]", size)
    yield "nested", filled(b"[", b"[" * 500 + b"]" * 500 + b",", b"[]]", size)
    yield "nested deep", b"[" * (size // 2) + b"]" * (size // 2)
    yield "messages", filled(b"[", b'{"role":"user"},', b"{}]", size)
    yield "messages without content", filled(b"[", b'{"role":"user"},', b'{"role":"user"}]', size)
    short = b'{"role":"user","name":"ab"}'
    yield "short messages", filled(b"[", short + b",", short + b"]", size)
    yield "contents", filled(b"[", b'{"role":"user","content":[{},{}]},', b"{}]", size)
    part = filled(b"[", b"{},", b"{}]", 40_000)
    yield "parts", filled(b"[", b'{"role":"user","content":' + part + b"},", b"{}]", size)
    yield (
        "text parts",
        filled(b'[{"role":"user","content":[', b'{"type":"text","text":""},', b"{}]}]", size),
    )
    part = b'{"role":"user","content":[{"type":"text","text":"ab"}]}'
    yield "messages of a part", filled(b"[", part + b",", part + b"]", size)
    yield "text", filled(b'"', b"a", b'"', size)
    yield "wide text", filled(b'"', b"a", "😀".encode() + b'"', size)
    yield "wide escaped text", filled(b'"', b"\\n", b'\\ud83d\\ude00"', size)
    yield "escaped unicode", filled(b'"', b"\\u4e2d", b'"', size)
    yield (
        "message of wide text",
        (b'[{"role":"user","content":' + filled(b'"', b"a", "😀".encode() + b'"', size) + b"}]"),
    )
    keys = b"".join(b'"%07x":1,' % at for at in range(size // 12))
    yield "many keys", b"[{" + keys + b'"a":1}]'
    yield "equal keys", filled(b"[{", b'"a":1,', b'"a":1}]', size)
    yield "lone surrogates", filled(b'"', b"\\ud83d", b'"', size)


def images(size):
    """Name and parts of content with images."""
    png = b"\x89PNG\r\n\x1a\n\0\0\0\rIHDR" + struct.pack(">II", 65_535, 65_535) + b"\x08\2\0\0\0"
    jpeg = b"\xff\xd8" + b"\xff\xe1\0\2" * 4000
    gif = b"GIF89a" + struct.pack("<HH", 4000, 3000) + b"\0" * 14_000
    for name, head in (("huge", png), ("of segments", jpeg), ("of 12 million pixels", gif)):
        part = image(b"data:image/x;base64," + base64.b64encode(head + b"\0" * 100))
        yield f"images {name}", filled(b"[", part + b",", part + b"]", size)
    short = image(b"data:;base64," + base64.b64encode(gif[:33]))
    yield "images of 33 bytes", filled(b"[", short + b",", short + b"]", size)
    url, empty = image(b"https://a/b"), b'{"type":"image"}'
    yield "images by URL", filled(b"[", url + b",", url + b"]", size)
    yield "empty images", filled(b"[", empty + b",", empty + b"]", size)
    result = b'{"type":"tool_result","content":[%b]}' % b",".join([url] * 50)
    yield "images in results", filled(b"[", result + b",", result + b"]", size)
    head, tail = image(b"data:image/png;base64,|").split(b"|")
    yield "one image", b"[" + filled(head, b"AAAA", tail, size) + b"]"
    yield "one image of few colors", b"[" + filled(head, b"/9j/", tail, size) + b"]"


def image(url):
    """A part of content."""
    return b'{"type":"image_url","image_url":{"url":"%b"}}' % url


def bodies(size):
    """Name, path and body."""
    named = list(values(size))
    for path, field in SURFACES.items():
        for name, value in named:
            yield (
                f"{path} {field} of {name}",
                path,
                b'{"model":"m","%b":%b}' % (field.encode(), value),
            )
    for path, field in (
        ("/v1/chat/completions", "messages"),
        ("/v1/responses", "input"),
        ("/v1/messages", "messages"),
    ):
        for name, parts in images(size):
            message = b'{"role":"user","content":%b}' % parts
            yield (
                f"{path} {field} of {name}",
                path,
                b'{"model":"Qwen2.5-VL-7B","%b":[%b]}' % (field.encode(), message),
            )
    for field in ("metadata", "user", "sampling_params", "cache_salt", "tools", "model"):
        for name, value in named:
            body = b'{"model":"m","messages":[{"content":"a"}],"%b":%b}' % (field.encode(), value)
            yield f"{field} of {name}", "/v1/chat/completions", body
    yield "backslashes", "/v1/chat/completions", b'{"a":"' + b"\\" * size
    yield "quotes", "/v1/chat/completions", b'"' * size
    yield "spaces", "/v1/chat/completions", b" " * size
    yield "form of parts", "/v1/audio/transcriptions", b"--b\r\n\r\n\r\n" * (size // 9)
    for name, run in (("ids", b"\x01"), ("long ids", b"\xff\xff\x01")):
        ids = run * (size // len(run))
        yield f"gRPC {name}", "/vllm.grpc.engine.VllmEngine/Generate", grpc(2, sized(2, ids))
    half = sized(2, b"\x01" * (size // 2))
    yield "gRPC ids in two fields", "/vllm.grpc.engine.VllmEngine/Generate", grpc(2, half + half)
    pictures = sized(7, sized(5, b"\x08\x01\x10\x05") + sized(6, b"hash"))
    message = sized(2, half) + pictures
    yield "gRPC pictures", "/vllm.grpc.engine.VllmEngine/Generate", frame(message)
    empty = b"\x12\x00" * (size // 2)
    yield "gRPC fields", "/vllm.grpc.engine.VllmEngine/Generate", grpc(2, empty)


def sized(number, value):
    """A protobuf field."""
    size, head = len(value), bytearray([number << 3 | 2])
    while size > 127:
        head.append(size & 127 | 128)
        size >>= 7
    head.append(size)
    return bytes(head) + value


def grpc(number, value):
    """A gRPC frame of one field."""
    return frame(sized(number, value))


def frame(message):
    """A gRPC frame."""
    return struct.pack(">BI", 0, len(message)) + message


def cpu_s(raw):
    """Process time of one parse."""
    begun = time.process_time()
    surfaces.parse(raw)
    return time.process_time() - begun


def peak_bytes(raw):
    """Most memory that one parse takes beside the body."""
    tracemalloc.start()
    outcome = surfaces.parse(raw)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    del outcome
    return peak


def main():
    grpc_workarounds.configure_malloc(os.environ)  # as `extproc serve`
    options = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    options.add_argument("--mib", type=float, default=4.0)
    size = int(options.parse_args().mib * 1024 * 1024)
    over = 0
    print(f"{'body':64} {'MiB':>6} {'ms/MiB':>7} {'x size':>7}")
    for name, path, body in bodies(size):
        headers = {":path": path, ":method": "POST", "content-type": "multipart/x; boundary=b"}
        raw = HttpRequest(headers, body)
        mib = len(body) / 2**20
        cpu = min(cpu_s(raw) for _ in range(3)) * 1000 / mib
        times = max(0, peak_bytes(raw) - FLOOR_BYTES) / len(body)
        marks = "*" * (cpu > MAX_MS_PER_MIB) + "#" * (times > MAX_TIMES_SIZE)
        over += bool(marks)
        print(f"{name:64} {mib:6.1f} {cpu:7.2f} {times:7.2f} {marks}", flush=True)
    print(f"{over} bodies over {MAX_MS_PER_MIB:.0f} ms per MiB (*) or {MAX_TIMES_SIZE:.0f} x (#)")
    sys.exit(over > 0)


if __name__ == "__main__":
    main()
