"""Compares the native transport with grpcio: CPU per request and latency, in turns.

    python -m bench.transport [--rounds 8] [--seconds 1.5] [--write]

Two picker processes with equal settings but for `server.transport` are up at the same time, behind
one Envoy with a listener for each, and are loaded in turns, each round in another order. `envoy` rows
go through Envoy to a backend; `direct` rows are streams of `bench.stream_load` to the picker, without
Envoy. Ratios are taken between the two slices of a round. Envoy and client share the machine with the
pickers, so CPU time is the measure; latency is that of a busy machine.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import os
import statistics
import sys
from collections.abc import AsyncIterator, Mapping
from typing import Any

import msgspec
import uvloop

from bench import rig
from bench.stream_load import REQUEST_ID, framed, load_streams
from bench.wire_load import load, post
from extproc.demo import stack
from extproc.protocol.messages import BodyMode
from extproc.wire.pb import ext_proc_pb2 as pb

TRANSPORTS = ("grpcio", "native")
CONNECTIONS = (1, 32)
SIZES_BYTES = (2_000, 40_000, 400_000)

#: Largest piece of a body that Envoy sends in a message.
_PIECE_BYTES = 64 * 1024


class RunningPicker(msgspec.Struct):
    """A picker process and the ports that reach it.

    Attributes:
        server: For its CPU time.
        envoy: Port of Envoy's listener.
        direct: Port of ext_proc.
    """

    server: rig.Rig
    envoy: int
    direct: int


@contextlib.asynccontextmanager
async def pickers() -> AsyncIterator[Mapping[str, RunningPicker]]:
    """Both pickers, a backend and one Envoy."""
    async with stack.stack() as children:
        backend = await children.start(
            "backend",
            [sys.executable, str(rig.ROOT / "bench/wire_load.py"), "backend", "0", "0"],
            ready="listening on ",
        )
        address = backend.ready_line.rpartition(" ")[2]
        ports = {
            name: stack.EnvoyPorts(stack.free_port(), stack.free_port(), stack.free_port())
            for name in TRANSPORTS
        }
        running = {}
        for name, its in ports.items():
            child = await children.extproc(
                *("--endpoints", address, "--host", "127.0.0.1", "--secure-serving=false"),
                *("--transport", name, "--grpc-port", str(its.extproc), "--metrics-port", "0"),
                *("--grpc-health-port", "0", "--drain-timeout", "0s"),
            )
            server = rig.Rig(its.listener, 0, child.process.pid, children)
            running[name] = RunningPicker(server, its.listener, its.extproc)
        await children.envoy(_envoy_config(ports))
        yield running


def _envoy_config(ports: Mapping[str, stack.EnvoyPorts]) -> dict[str, Any]:
    """The duplex profile with a listener and a cluster for each picker."""
    template = rig.ROOT / "envoy" / rig.TEMPLATES["fds"]
    config = stack.envoy_config(template, ports[TRANSPORTS[0]], plaintext=True)
    resources = config["static_resources"]
    (listener,) = resources["listeners"]
    (cluster,) = (it for it in resources["clusters"] if it["name"] == "extproc")
    cluster.pop("health_checks", None)
    for name in TRANSPORTS[1:]:
        own, own_cluster = copy.deepcopy(listener), copy.deepcopy(cluster)
        own["name"] = own_cluster["name"] = name
        own["address"]["socket_address"]["port_value"] = ports[name].listener
        own_cluster["load_assignment"] = stack.assignment(
            name, [f"127.0.0.1:{ports[name].extproc}"]
        )
        manager = own["filter_chains"][0]["filters"][0]["typed_config"]
        for http_filter in manager["http_filters"]:
            if http_filter["name"] == "envoy.filters.http.ext_proc":
                service = http_filter["typed_config"]["grpc_service"]
                service["envoy_grpc"]["cluster_name"] = name
        resources["listeners"].append(own)
        resources["clusters"].append(own_cluster)
    return config


def messages(body: bytes, headers: Mapping[str, str] = {}) -> tuple[bytes, bytes]:
    """Framed messages of a request, and of the response headers, as Envoy sends them."""
    head = pb.ProcessingRequest()
    fields = {
        ":method": "POST",
        ":path": "/v1/chat/completions",
        ":authority": "bench",
        "content-type": "application/json",
        "content-length": str(len(body)),
        "x-request-id": REQUEST_ID.decode(),
        **headers,
    }
    for name, value in fields.items():
        head.request_headers.headers.headers.add(key=name, raw_value=value.encode())
    head.protocol_config.request_body_mode = int(BodyMode.FULL_DUPLEX_STREAMED)
    sent = [head]
    for at in range(0, len(body), _PIECE_BYTES):
        piece = pb.ProcessingRequest()
        piece.request_body.body = body[at : at + _PIECE_BYTES]
        piece.request_body.end_of_stream = at + _PIECE_BYTES >= len(body)
        sent.append(piece)
    answered = pb.ProcessingRequest()
    answered.response_headers.headers.headers.add(key=":status", raw_value=b"200")
    return (
        framed([message.SerializeToString() for message in sent]),
        framed([answered.SerializeToString()]),
    )


async def measure(
    picker: RunningPicker, where: str, body: bytes, *, connections: int, seconds: float
) -> dict[str, float]:
    """One slice of time: CPU of a request in the picker (µs), latency (ms), requests per second."""
    before = picker.server.cpu_s()
    if where == "envoy":
        request = post("/v1/chat/completions", body)
        stats = await load(picker.envoy, request, connections=connections, seconds=seconds)
    else:
        request, response = messages(body)
        stats = await load_streams(
            picker.direct,
            request,
            response,
            body_bytes=len(body),
            connections=connections,
            seconds=seconds,
        )
    used = picker.server.cpu_s() - before
    assert not stats["failed"], stats
    return {
        "cpu_us": used / stats["requests"] * 1e6,
        "p50_ms": stats["p50"] * 1e3,
        "p99_ms": stats["p99"] * 1e3,
        "rps": stats["requests"] / stats["seconds"],
    }


async def compare(rounds: int, seconds: float) -> list[dict[str, Any]]:
    """A row for each place, size and number of connections."""
    rows = []
    async with pickers() as running:
        for where in ("direct", "envoy"):
            for size_bytes in SIZES_BYTES:
                body = rig.chat(size_bytes)
                for connections in CONNECTIONS:
                    slices: dict[str, list[dict[str, float]]] = {name: [] for name in TRANSPORTS}
                    for number in range(-1, rounds):
                        order = TRANSPORTS if number % 2 else TRANSPORTS[::-1]
                        for name in order:
                            figures = await measure(
                                running[name],
                                where,
                                body,
                                connections=connections,
                                seconds=seconds,
                            )
                            if number >= 0:
                                slices[name].append(figures)
                    rows.append(_row(where, size_bytes, connections, slices))
                    print(_line(rows[-1]), flush=True)
    return rows


def _row(
    where: str, size_bytes: int, connections: int, slices: Mapping[str, list[dict[str, float]]]
) -> dict[str, Any]:
    """Medians of each transport, and the ratios of the rounds."""
    ratios = [
        native["cpu_us"] / plain["cpu_us"]
        for native, plain in zip(slices["native"], slices["grpcio"], strict=True)
    ]
    row: dict[str, Any] = {"where": where, "body_bytes": size_bytes, "connections": connections}
    for name in TRANSPORTS:
        row[name] = {
            key: round(statistics.median(figures[key] for figures in slices[name]), 2)
            for key in slices[name][0]
        }
    row["cpu_ratio"] = [
        round(value, 2) for value in (statistics.median(ratios), min(ratios), max(ratios))
    ]
    return row


def _line(row: Mapping[str, Any]) -> str:
    median, least, most = row["cpu_ratio"]
    shown = ", ".join(
        f"{name} {row[name]['cpu_us']:.0f} us, p50 {row[name]['p50_ms']:.2f} and p99 "
        f"{row[name]['p99_ms']:.1f} ms, {row[name]['rps']:.0f}/s"
        for name in TRANSPORTS
    )
    return (
        f"{row['where']:6} {row['body_bytes']:6} B {row['connections']:2} connections: {shown}; "
        f"CPU {median:.2f} [{least:.2f} to {most:.2f}]"
    )


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--seconds", type=float, default=1.5)
    parser.add_argument("--write", action="store_true", help="write bench/results/transport.json")
    args = parser.parse_args()
    before = os.getloadavg()
    figures = uvloop.run(compare(args.rounds, args.seconds))
    if args.write:
        loads = {"load_before": before[0], "load_after": os.getloadavg()[0]}
        rig.write(
            "transport",
            f"python -m bench.transport --rounds {args.rounds} --seconds {args.seconds} --write",
            {"rows": figures, **loads},
        )
