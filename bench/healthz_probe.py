"""Requests /healthz of a picker again and again, and prints the longest wait.

    python bench/healthz_probe.py PORT

Runs as a process of its own, so that a bench that drives thousands of clients does not delay it.
Prints `ready`, probes until its standard input ends, then prints a line of JSON: `longest_s` and
`failures`, the probes without an answer.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import socket
import sys
import time

#: Seconds between two probes, after a failed one, and the longest wait for an answer.
PROBE_S = 0.005
RETRY_S = 0.2
LIMIT_S = 300.0

REQUEST = b"GET /healthz HTTP/1.1\r\nhost: x\r\n\r\n"


def is_over(seconds: float) -> bool:
    """True if standard input ends within so many seconds."""
    return bool(select.select([sys.stdin], [], [], seconds)[0])


def main() -> None:
    port = int(sys.argv[1])
    with contextlib.suppress(PermissionError):
        os.nice(-10)  # its turn on a busy machine is no wait for the picker
    longest_s, failures = 0.0, 0
    print("ready", flush=True)
    while not is_over(RETRY_S if failures else PROBE_S):
        begun = time.perf_counter()
        try:
            with socket.create_connection(("127.0.0.1", port), LIMIT_S) as connection:
                begun = time.perf_counter()
                while True:
                    connection.sendall(REQUEST)
                    if not connection.recv(4096):
                        break
                    longest_s = max(longest_s, time.perf_counter() - begun)
                    if is_over(PROBE_S):
                        break
                    begun = time.perf_counter()
        except OSError:
            failures += 1
            longest_s = max(longest_s, time.perf_counter() - begun)
    print(json.dumps({"longest_s": longest_s, "failures": failures}), flush=True)


if __name__ == "__main__":
    main()
