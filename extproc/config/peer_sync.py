"""The `peer_sync` section: exchange of request counts between replicas over Redis."""

from __future__ import annotations

import msgspec

from extproc.config import constraints


class PeerSyncSection(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Exchange of started and ended requests between replicas, over a Redis or Valkey stream.

    No request waits for it; while the server is away, replicas route without it.

    Attributes:
        url: Address of the server, as `redis://:password@host:6379/0`, `rediss://` or `unix://`.
            Empty: replicas exchange nothing, and need no store.
        password_file: File with the server's password, such as a key of a mounted Secret. It is read
            at every connection, so a new password needs no restart. Empty: the password of `url`.
        stream: Key of the stream. Replicas that share endpoints use the same key. A client that can
            write to it can make endpoints look busy, so the server needs a password.
        flush_s: Shortest time between two writes (seconds). After a pause an event is written at
            once; under load, events are collected for this time. 0.002 are at most 500 writes per
            second.
        beat_s: Seconds between two complete lists of open requests, which repair lost events.
        silent_s: Seconds without a message after which a replica counts as gone. 5 are five lists.
        max_entries: Entries that the stream retains, approximately (count). 10000 are some seconds;
            a reader that is further behind starts at the end.
    """

    url: str = ""
    password_file: str = ""
    stream: constraints.Name = "extproc"
    flush_s: constraints.Seconds = 0.002
    beat_s: constraints.PositiveSeconds = 1.0
    silent_s: constraints.PositiveSeconds = 5.0
    max_entries: constraints.Positive = 10_000
