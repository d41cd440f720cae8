"""Servers on loopback that answer with any bytes."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Iterator


@contextlib.contextmanager
def answering(answer: bytes, *, is_open: bool = False) -> Iterator[str]:
    """A server that answers one request with these bytes; yields `host:port`.

    Args:
        is_open: The answer goes on until the client leaves.
    """
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def serve() -> None:
            connection, _ = listener.accept()
            with connection, contextlib.suppress(OSError):  # the client may leave
                connection.recv(65_536)
                connection.sendall(answer)
                if not is_open:
                    connection.shutdown(socket.SHUT_WR)
                # A close with unread bytes would take the answer back.
                while connection.recv(65_536):
                    pass

        thread = threading.Thread(target=serve, daemon=True)
        thread.start()
        yield f"127.0.0.1:{listener.getsockname()[1]}"
        thread.join()
