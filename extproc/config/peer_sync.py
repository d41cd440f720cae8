"""The `peer_sync` section: exchange of request counts between pickers over Redis."""

from __future__ import annotations

import msgspec

from extproc.config import constraints


class PeerSyncSection(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Exchange of started and ended requests between pickers, over a Redis or Valkey stream.

    It is never on the path of a request; while the server is away, pickers route without it.

    Attributes:
        url: The server, as `redis://:password@host:6379/0`, `rediss://` or `unix://`. Empty: pickers
            do not talk, and need no store.
        password_file: File with the server's password, such as a key of a mounted Secret. It is read
            at every connection, so a new password needs no restart. Empty: the password of `url`.
        stream: Key of the stream; pickers that share endpoints share it. Who can write to it can
            make endpoints look busy, so give the server a password.
        flush_s: Seconds between two writes at least: after a pause a fact is written at once, and
            under load facts are gathered for so long. 0.002 are 500 writes per second at most.
        beat_s: Seconds between two lists of open requests, which make up for what was lost.
        silent_s: Seconds after which a picker that says nothing counts as gone. 5 are five lists.
        max_entries: Writes that the stream keeps, about. 10000 are some seconds, and a reader that
            is further behind begins at the end.
    """

    url: str = ""
    password_file: str = ""
    stream: constraints.Name = "extproc"
    flush_s: constraints.Seconds = 0.002
    beat_s: constraints.PositiveSeconds = 1.0
    silent_s: constraints.PositiveSeconds = 5.0
    max_entries: constraints.Positive = 10_000
