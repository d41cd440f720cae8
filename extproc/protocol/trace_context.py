"""Trace context of requests (W3C): parsing, sampling, and the header for engines.

Spans are recorded elsewhere; this says which trace a request belongs to, and whether it is sampled.
"""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Mapping
from typing import Final

import msgspec

TRACEPARENT: Final = "traceparent"
TRACESTATE: Final = "tracestate"

#: Longest `tracestate` that spans carry (characters): what W3C Trace Context demands at least.
_MAX_TRACESTATE: Final = 512

#: Characters of a `traceparent` of version 00, which later versions may only extend.
_LENGTH: Final = 55

_FORMAT: Final = re.compile(
    r"(?!ff)([0-9a-f]{2})-((?!0{32})[0-9a-f]{32})-((?!0{16})[0-9a-f]{16})-([0-9a-f]{2})(?:-.*)?"
)

#: Last digits of flags without the lowest bit, which says that the trace is sampled.
_UNSAMPLED_DIGITS: Final = frozenset("02468ace")

#: Flags that are defined: sampled, and that the trace id is random.
_SAMPLED: Final = 0x01
_DEFINED_FLAGS: Final = 0x03

_ID_SPACE: Final = 1 << 64


class TraceContext(msgspec.Struct, frozen=True, gc=False):
    """Position in a trace.

    Attributes:
        trace_id: 32 hexadecimal digits in lower case, not all zero.
        span_id: Span of the trace that the next one is a child of: 16 such digits.
        flags: Flags as a number, 0..3; bit 0 says that the trace is sampled.
        parent_span_id: Span of the caller, which `span_id` is a child of; empty where it has none
            or is the caller's itself.
        tracestate: Value of `tracestate`, as it came; empty for one that is too long.
    """

    trace_id: str
    span_id: str
    flags: int = _SAMPLED
    parent_span_id: str = ""
    tracestate: str = ""

    @property
    def is_sampled(self) -> bool:
        """True if the spans of the trace are recorded."""
        return bool(self.flags & _SAMPLED)

    @property
    def traceparent(self) -> str:
        """Value of the header `traceparent`, version 00."""
        return f"00-{self.trace_id}-{self.span_id}-{self.flags:02x}"


def parse_traceparent(value: str) -> TraceContext | None:
    """Parse the header `traceparent` of any version; None if it is malformed.

    `span_id` of the result is the span of the caller.
    """
    parts = _FORMAT.fullmatch(value)
    if parts is None or (parts[1] == "00" and len(value) != _LENGTH):
        return None
    return TraceContext(parts[2], parts[3], int(parts[4], 16) & _DEFINED_FLAGS)


def sampled_trace_id(headers: Mapping[str, str]) -> str:
    """Trace id of a request whose caller samples its trace; empty for any other."""
    value = headers.get(TRACEPARENT)
    if value is None or value[_LENGTH - 1 : _LENGTH] in _UNSAMPLED_DIGITS:
        return ""
    parsed = parse_traceparent(value)
    return parsed.trace_id if parsed is not None and parsed.is_sampled else ""


class TraceSampler:
    """Sampler of requests: by the trace they belong to, or by chance.

    Args:
        ratio: Share of traces that are sampled, 0..1, by the lower half of the trace id, as in
            `TraceIdRatioBased` of OpenTelemetry.
        is_parent_based: Follow the decision of the caller where it has one.
        rng: Source of trace and span ids; replicas need different ones.
    """

    def __init__(self, ratio: float, *, is_parent_based: bool, rng: random.Random) -> None:
        self._ratio = ratio
        self._bound = round(ratio * _ID_SPACE)
        self._is_parent_based = is_parent_based
        self._rng = rng
        self._draw = rng.random

    def start(
        self, headers: Mapping[str, str], read_call_traceparent: Callable[[], str]
    ) -> TraceContext | None:
        """Start the span of a request; None if it is not sampled, which sets no header.

        The caller is the data plane where it has a span of the same trace, or else the client. A
        client whose trace is not sampled costs a look at its header.

        Args:
            read_call_traceparent: Reads `traceparent` of the gRPC call, by which the data plane
                names its own span; empty without one.

        Returns:
            The context of the new span, whose `traceparent` the engine is to receive.
        """
        value = headers.get(TRACEPARENT)
        if value and self._is_parent_based and value[_LENGTH - 1 : _LENGTH] in _UNSAMPLED_DIGITS:
            return None
        caller = parse_traceparent(value) if value else None
        call_value = read_call_traceparent()
        data_plane = parse_traceparent(call_value) if call_value else None
        if data_plane is not None and (caller is None or data_plane.trace_id == caller.trace_id):
            caller = data_plane
        if caller is None:
            return self._start_trace() if self._draw() < self._ratio else None
        if self._is_parent_based:
            is_sampled = caller.is_sampled
        else:
            is_sampled = int(caller.trace_id[16:], 16) < self._bound
        if not is_sampled:
            return None
        state = headers.get(TRACESTATE, "")
        return TraceContext(
            caller.trace_id,
            self.make_span_id(),
            caller.flags | _SAMPLED,
            caller.span_id,
            state if len(state) <= _MAX_TRACESTATE else "",
        )

    def make_span_id(self) -> str:
        """Draw an id for a span."""
        return f"{self._rng.getrandbits(64) or 1:016x}"

    def _start_trace(self) -> TraceContext:
        """Start a trace whose id samples it in every process with the same ratio."""
        lower = self._rng.randrange(max(1, self._bound))
        # An id of zeros is none; one of 2^128 draws is.
        trace_id = self._rng.getrandbits(64) << 64 | lower or 1
        return TraceContext(f"{trace_id:032x}", self.make_span_id())
