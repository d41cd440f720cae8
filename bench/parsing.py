"""Measures body parsers: microseconds per body, by API surface and size. Prints a table."""

import json
import struct
import time

from extproc.parsing import surfaces
from extproc.request import HttpRequest

WORDS = "the quick brown fox jumps over the lazy dog and keeps running until nightfall; "


def text(size):
    return (WORDS * (size // len(WORDS) + 1))[:size]


def turns(size, messages):
    length = size // messages
    return [
        {"role": ("user", "assistant")[i % 2], "content": text(length)} for i in range(messages)
    ]


def chat(size, messages, tools=0):
    tool = {
        "type": "function",
        "function": {"name": "search", "description": text(300), "parameters": {"type": "object"}},
    }
    body = {
        "model": "meta/llama",
        "messages": [{"role": "system", "content": text(200)}, *turns(size, messages)],
        "stream": True,
        "max_tokens": 256,
        "temperature": 0.7,
        "user": "somebody",
    }
    if tools:
        body["tools"] = [tool] * tools
    return json.dumps(body).encode()


def grpc(tokens):
    ids = bytearray()
    for token in tokens:
        rest = token
        while rest > 127:
            ids.append(rest & 127 | 128)
            rest >>= 7
        ids.append(rest)

    def field(number, value):
        size, head = len(value), bytearray([number << 3 | 2])
        while size > 127:
            head.append(size & 127 | 128)
            size >>= 7
        head.append(size)
        return bytes(head) + value

    message = field(2, field(2, bytes(ids)))
    return struct.pack(">BI", 0, len(message)) + message


def dumped(**body):
    return json.dumps(body).encode()


def multipart(size):
    part = b'--b\r\nContent-Disposition: form-data; name="%s"\r\n\r\n%s\r\n'
    return part % (b"file", bytes(range(256)) * (size // 256)) + part % (b"model", b"w") + b"--b--"


CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
IMAGE = {"type": "image_url", "image_url": {"url": "data:image/png;base64," + "QUJD" * 90_000}}
IDS = [(i * 7919) % 128_000 for i in range(8000)]
CASES = (
    ("chat 2 kB, 3 messages", CHAT, chat(1600, 2)),
    ("chat 35 kB, 21 messages", CHAT, chat(34_000, 20)),
    ("chat 35 kB, 61 messages, 10 tools", CHAT, chat(30_000, 60, tools=10)),
    ("chat 400 kB, 41 messages", CHAT, chat(398_000, 40)),
    ("chat 400 kB, 1001 messages", CHAT, chat(340_000, 1000)),
    (
        "chat 35 kB, one non-ASCII char per message",
        CHAT,
        chat(33_000, 20).replace(b"quick", b"qu\xc3\xafck", 20),
    ),
    (
        "chat with a 360 kB image",
        CHAT,
        dumped(model="m", messages=[{"role": "user", "content": [IMAGE]}]),
    ),
    ("completions 2 kB", TEXT, dumped(model="m", prompt=text(2000))),
    ("completions 400 kB", TEXT, dumped(model="m", prompt=text(400_000))),
    ("completions 8k token ids", TEXT, dumped(model="m", prompt=IDS)),
    ("responses 35 kB", "/v1/responses", dumped(model="m", input=turns(34_000, 20))),
    ("messages 35 kB", "/v1/messages", dumped(model="m", messages=turns(34_000, 20))),
    ("gRPC Generate 8k token ids", "/vllm.grpc.engine.VllmEngine/Generate", grpc(IDS)),
    ("audio form 1 MB", "/v1/audio/transcriptions", multipart(1_000_000)),
    ("opaque GET", "/v1/models", b""),
)


def microseconds(raw):
    """Median of nine runs, each long enough to time."""
    surfaces.parse(raw)
    once = time.perf_counter()
    surfaces.parse(raw)
    loops = max(3, int(0.02 / max(time.perf_counter() - once, 1e-7)))
    runs = []
    for _ in range(9):
        start = time.perf_counter()
        for _ in range(loops):
            surfaces.parse(raw)
        runs.append((time.perf_counter() - start) / loops)
    runs.sort()
    return runs[0] * 1e6, runs[4] * 1e6


def main():
    print(f"{'case':44} {'body':>9} {'best us':>9} {'median us':>9} {'tokens':>8}")
    for name, path, body in CASES:
        headers = {
            ":path": path,
            ":method": "POST" if body else "GET",
            "content-type": "multipart/form-data; boundary=b" if "form" in name else "",
        }
        raw = HttpRequest(headers, body)
        parsed = surfaces.parse(raw)
        best, median = microseconds(raw)
        print(f"{name:44} {len(body):9} {best:9.1f} {median:9.1f} {parsed.prompt_tokens:8}")


if __name__ == "__main__":
    main()
