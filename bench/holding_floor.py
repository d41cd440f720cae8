"""Measures what gRPC itself takes for waiting streams: two messages are read, nothing parsed.

python -m bench.holding_floor PORT

Answers once it gets SIGUSR1, and gives memory back as the picker does.
"""

from __future__ import annotations

import asyncio
import gc
import signal
import sys

import grpc
import uvloop

from bench.stream_load import METHOD
from extproc.protocol.messages import ContinueResponse, MessageKind
from extproc.server import ext_proc_servicer, grpc_workarounds
from extproc.wire import codec

MOST_BYTES = 1 << 27


async def main(port: int) -> None:
    answer = codec.encode(ContinueResponse(MessageKind.REQUEST_HEADERS))
    crowds = grpc_workarounds.IdleMemoryTrimmer(grpc_workarounds.trimmer())
    released = asyncio.Event()
    streams = 0

    async def process(_, context) -> None:
        nonlocal streams
        streams += 1
        crowds.count(streams)
        try:
            for _ in range(2):
                await context.read()
            await released.wait()
            await context.write(answer)
            await context.read()
        finally:
            streams -= 1
            crowds.count(streams)

    server = ext_proc_servicer.build_server(MOST_BYTES)
    handler = grpc.stream_stream_rpc_method_handler(process)
    _, service, method = METHOD.decode().split("/")
    handlers = grpc.method_handlers_generic_handler(service, {method: handler})
    server.add_generic_rpc_handlers((handlers,))
    server.add_insecure_port(f"127.0.0.1:{port}")
    asyncio.get_running_loop().add_signal_handler(signal.SIGUSR1, released.set)
    await server.start()
    gc.collect()
    gc.freeze()
    print("floor is ready", flush=True)
    await server.wait_for_termination()


if __name__ == "__main__":
    uvloop.run(main(int(sys.argv[1])))
