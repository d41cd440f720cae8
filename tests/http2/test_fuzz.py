"""Damaged sessions: no undeclared error, answers that a client understands, memory within limits."""

from __future__ import annotations

import random
from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from tests.support import http2_fuzzing

#: Frames of one example.
FRAMES = 400


@given(st.integers(0, 2**32))
def test_damaged_frames_break_no_rule(seed):
    http2_fuzzing.fuzz(random.Random(seed), FRAMES, Counter())


def test_sessions_reach_the_limits():
    """The sequences of the search meet most limits, and many of them continue."""
    counts: Counter[str] = Counter()
    http2_fuzzing.fuzz(random.Random(1), 20_000, counts)
    assert {"stream_error", "connection_error", "streams", "message_bytes"} <= counts.keys()
    assert {"grpc_message", "receive_budget", "header_list"} <= counts.keys()
