"""The bad-input table of the README: every row is sent, and what comes back is written down.

    python -m tests.docs.bad_input

prints the block; a test holds the README against it. Requests run through the codec, the exchange
and the real dispatcher; configuration and pages through their readers.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping

import msgspec

from extproc.config import loader
from extproc.discovery import endpoint_list
from extproc.endpoint import Load, ServedModels
from extproc.errors import ConfigError, ProtocolError
from extproc.protocol.body_buffer import BufferBudget
from extproc.protocol.exchange import Exchange, ExchangeSettings
from extproc.protocol.messages import ImmediateResponse, ProcessingResponse
from extproc.scrape import metrics_page
from extproc.server.stream_context import STALLED
from extproc.wire import codec, protobuf_decoder
from extproc.wire.pb import ext_proc_pb2 as pb
from tests.support.pool_fixture import PoolFixture

CHAT = "/v1/chat/completions"
GENERATE = "/vllm.grpc.engine.VllmEngine/Generate"
ADDRESS = "10.0.0.1:8000"


def message_text(reply: ProcessingResponse) -> str:
    """An answer in one line."""
    if isinstance(reply, ImmediateResponse):
        if reply.grpc_status is not None:
            return f"gRPC status {reply.grpc_status} ``{reply.body.decode()}``"
        message = json.loads(reply.body)["error"]["message"]
        more = [f"{name}: {value}" for name, value in reply.headers[1:]]
        return f"{reply.status} ``{message}``" + (f" ({', '.join(more)})" if more else "")
    return "routed"


def ask(
    path: str,
    body: bytes,
    *,
    headers: Mapping[str, str] | None = None,
    house: PoolFixture | None = None,
    subset: list[str] | None = None,
    limit: int = 1 << 20,
    budget: int = 1 << 30,
) -> str:
    """Send one POST in FULL_DUPLEX_STREAMED; returns the first answer."""
    house = house or PoolFixture({ADDRESS: None})
    exchange = Exchange(ExchangeSettings(max_body_bytes=limit), BufferBudget(budget))
    head = pb.ProcessingRequest()
    for name, value in {":method": "POST", ":path": path, **(headers or {})}.items():
        head.request_headers.headers.headers.add(key=name, raw_value=value.encode())
    if subset is not None:
        hint = head.metadata_context.filter_metadata[protobuf_decoder.SUBSET_NAMESPACE]
        hint.fields[protobuf_decoder.SUBSET_KEY].list_value.SetInParent()
        hint.fields[protobuf_decoder.SUBSET_KEY].list_value.extend(subset)
    part = pb.ProcessingRequest()
    part.request_body.body = body
    part.request_body.end_of_stream = True
    answers: list[ProcessingResponse] = []
    for message in (head, part):
        answers += exchange.receive(codec.decode(message.SerializeToString()))
        if exchange.pending is not None:
            answers += exchange.apply_outcome(house.decide(exchange.pending))
    exchange.close()
    return message_text(answers[0])


def stalled() -> str:
    """Send the headers of a POST and wait; returns what is answered then."""
    exchange = Exchange(ExchangeSettings(max_body_bytes=1 << 20), BufferBudget(1 << 30))
    return message_text(exchange.reject(STALLED))


def several() -> PoolFixture:
    """An endpoint that listed two models, under `unknown_model: reject`."""
    pool_fixture = PoolFixture({ADDRESS: None})
    listed = ServedModels(frozenset({"llama"}), frozenset({"sql"}))
    pool_fixture.store.observe_models(pool_fixture.store.pool.members[0].endpoint, listed)
    routing = pool_fixture.director.routing
    strict = msgspec.structs.replace(routing.settings, reject_unlisted=True)
    pool_fixture.director.reconfigure(msgspec.structs.replace(routing, settings=strict))
    return pool_fixture


def wire(*messages: bytes) -> str:
    """Send bytes as ext_proc messages; returns what the stream says."""
    exchange = Exchange(ExchangeSettings(max_body_bytes=1 << 20), BufferBudget(1 << 30))
    answers: list[ProcessingResponse] = []
    try:
        for message in messages:
            answers += exchange.receive(codec.decode(message))
    except ProtocolError as error:
        return f"stream ends INVALID_ARGUMENT: `{error}`"
    finally:
        exchange.close()
    return message_text(answers[0]) if answers else "nothing; the message is ignored"


def config(text: str) -> str:
    """Read a configuration."""
    try:
        loader.settings(loader.parse(text, where="extproc.yaml"))
    except ConfigError as error:
        return f"exit 2: `{error}`"
    return "taken"


def endpoints(document: object) -> str:
    """Read an endpoint list."""
    try:
        endpoint_list.from_document(document, where="endpoints.yaml")
    except ConfigError as error:
        return f"old list stays, at start exit 2: `{error}`"
    return "taken"


def metrics(text: bytes) -> str:
    """Read a metrics page."""
    read = metrics_page.read(text, 0.0)
    if isinstance(read, Load):
        return f"waiting {read.waiting}, running {read.running}"
    return f"scrape fails: `{read.reason}`; the last load stays and ages"


HEADER = b"apiVersion: extproc/v1alpha1\nkind: ExtProcConfig\n".decode()
NAMED = b'{"model":"%s","messages":[{"role":"user","content":"x"}]}'
GRPC = {"content-type": "application/grpc"}
OPTIONS = {"content-type": "multipart/form-data"}

#: What was sent, in words, and the sending.
ROWS: Mapping[str, Callable[[], str]] = {
    'chat: `{"model": ` (cut JSON)': lambda: ask(CHAT, b'{"model": '),
    "chat: `hello` (no JSON)": lambda: ask(CHAT, b"hello"),
    "chat: `[1]` (no object)": lambda: ask(CHAT, b"[1]"),
    "chat: 10,000 nested arrays": lambda: ask(CHAT, b'{"model":"m","messages":' + b"[" * 10_000),
    "chat: no `model`": lambda: ask(CHAT, b'{"messages":[{"role":"user","content":"x"}]}'),
    "chat: `model` is a number": lambda: ask(CHAT, b'{"model":7,"messages":[]}'),
    "chat: no `messages`": lambda: ask(CHAT, b'{"model":"m"}'),
    "chat: `messages` is a string": lambda: ask(CHAT, b'{"model":"m","messages":"x"}'),
    "completions: no `prompt`": lambda: ask("/v1/completions", b'{"model":"m"}'),
    "embeddings: no `input`": lambda: ask("/v1/embeddings", b'{"model":"m"}'),
    "responses: no `input`": lambda: ask("/v1/responses", b'{"model":"m"}'),
    "messages (Anthropic): no message": lambda: ask("/v1/messages", b'{"model":"m","messages":[]}'),
    "chat: `max_tokens` is a string, `stream` null": lambda: ask(
        CHAT,
        b'{"model":"m","messages":[{"role":"user","content":"x"}],"max_tokens":"9","stream":null}',
    ),
    "chat: a model that no endpoint lists": lambda: ask(CHAT, NAMED % b"gpt"),
    "chat: the same with `unknown_model: reject`": lambda: ask(
        CHAT, NAMED % b"gpt", house=several()
    ),
    "chat: `content-encoding: gzip`": lambda: ask(
        CHAT, b"\x1f\x8b", headers={"content-encoding": "gzip"}
    ),
    "chat: empty body": lambda: ask(CHAT, b""),
    "unknown path, any bytes": lambda: ask("/upload", b"\x00\xff"),
    "transcription: multipart without a boundary": lambda: ask(
        "/v1/audio/transcriptions", b"x", headers=OPTIONS
    ),
    "gRPC Generate: 3 bytes": lambda: ask(GENERATE, b"\x00\x00\x00", headers=GRPC),
    "gRPC Generate: compressed frame": lambda: ask(
        GENERATE, b"\x01\x00\x00\x00\x01x", headers=GRPC
    ),
    "gRPC: unknown method": lambda: ask("/a.B/C", b"\x00\x00\x00\x00\x00", headers=GRPC),
    "body above `limits.max_body_bytes` (here 10)": lambda: ask(CHAT, b"x" * 11, limit=10),
    "body above 64 KiB and a quarter of `limits.max_assembly_bytes` (here 300,000)": lambda: ask(
        CHAT, b"x" * 75_001, budget=300_000
    ),
    "body that does not arrive within `limits.body_idle_s`": stalled,
    "chat: `prefer: if-available`, and no cached prefix": lambda: ask(
        CHAT, NAMED % b"m", headers={"prefer": "if-available"}
    ),
    "subset hint that names no endpoint of the pool": lambda: ask(
        "/x", b"", subset=["10.9.9.9:8000"]
    ),
    "subset hint with a wrong port": lambda: ask("/x", b"", subset=["10.0.0.1:1"]),
    "empty subset hint": lambda: ask("/x", b"", subset=[]),
    "no endpoint in the pool": lambda: ask("/x", b"", house=PoolFixture({})),
    "client sends `x-gateway-destination-endpoint`": lambda: (
        ask("/x", b"", headers={"x-gateway-destination-endpoint": "9.9.9.9:1"})
        + ", and the header is overwritten"
    ),
    "ext_proc: bytes that are no message": lambda: wire(b"\xff\xff\xff"),
    "ext_proc: a message of an unknown kind": lambda: wire(b"\x92\x06\x00"),
    "ext_proc: request headers twice": lambda: wire(b"\x12\x00", b"\x12\x00"),
    "config: unknown key": lambda: config(HEADER + "scheduling: {strategi: random}"),
    "config: wrong type": lambda: config(HEADER + "server: {grpc_port: many}"),
    "config: port out of range": lambda: config(HEADER + "server: {grpc_port: 70000}"),
    "endpoints file: no port": lambda: endpoints({"endpoints": ["10.0.0.1"]}),
    "endpoints file: unknown key": lambda: endpoints(
        {"endpoints": [{"adress": "10.0.0.1", "port": 8000}]}
    ),
    "endpoints file: the same twice": lambda: endpoints({"endpoints": [ADDRESS, ADDRESS]}),
    "metrics page: HTML": lambda: metrics(b"<!doctype html><html></html>"),
    "metrics page: one value is garbage": lambda: metrics(
        b"vllm:num_requests_waiting 3.0\nvllm:num_requests_running oops\n"
    ),
}


def block() -> str:
    """All rows as a Markdown table."""
    rows = ["| sent | what comes back |", "|---|---|"]
    for sent, send in ROWS.items():
        answer = send().replace("|", "\\|").replace("\n", " ")
        rows.append(f"| {sent} | {answer} |")
    return "\n".join(rows)


if __name__ == "__main__":
    print(block())
