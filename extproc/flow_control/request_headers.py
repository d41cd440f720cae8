"""Request headers that flow control reads."""

from __future__ import annotations

import math
from collections.abc import Hashable, Mapping

import msgspec

from extproc.request import shorten_id

#: Digits of the longest number that is read from a header.
_MAX_LENGTH = 11


class EnqueueRequest(msgspec.Struct, frozen=True, gc=False, kw_only=True):
    """Properties of a request that is about to be queued.

    Attributes:
        tenant: Tenant that sent it; empty if unknown.
        target: Key of the endpoints that can serve it; see `QueuedItem`.
        size: Bytes of its body.
        tokens: Its prompt's estimated tokens.
        timeout_s: Longest wait it asks for; None for none.
        slo_s: Seconds to the first token it asks for; infinity for none.
    """

    tenant: str = ""
    priority: int = 0
    objective: str = ""
    target: Hashable = ""
    size: int = 0
    tokens: int = 0
    timeout_s: float | None = None
    slo_s: float = math.inf


class FlowHeaders(msgspec.Struct, frozen=True, kw_only=True):
    """Names of the headers to read, in lower case.

    Attributes:
        tenant_headers: Name the tenant; the first that is there counts.
        by_adapter: Whether the model or adapter is the tenant where no header names one.
        timeout_headers: Name the longest wait in milliseconds.
        slo_headers: Name the time to first token asked for, in milliseconds.
    """

    tenant_headers: tuple[str, ...] = (
        "x-llm-d-inference-fairness-id",
        "x-gateway-inference-fairness-id",
    )
    by_adapter: bool = False
    timeout_headers: tuple[str, ...] = ("x-extproc-queue-timeout-ms",)
    slo_headers: tuple[str, ...] = ("x-llm-d-slo-ttft-ms", "x-slo-ttft-ms")

    def tenant(self, headers: Mapping[str, str], served_by: str) -> str:
        """The tenant of a request, see `shorten_id`; empty if no header names it.

        Args:
            headers: Headers of the request, names in lower case.
            served_by: The adapter or model it asks for.
        """
        for name in self.tenant_headers:
            tenant = headers.get(name)
            if tenant:
                return shorten_id(tenant)
        return shorten_id(served_by) if self.by_adapter else ""

    def timeout_s(self, headers: Mapping[str, str]) -> float | None:
        """The longest wait a request asks for."""
        return _milliseconds(headers, self.timeout_headers)

    def slo_s(self, headers: Mapping[str, str]) -> float:
        """Seconds to the first token a request asks for; infinity for none."""
        seconds = _milliseconds(headers, self.slo_headers)
        return math.inf if seconds is None else seconds


def _milliseconds(headers: Mapping[str, str], names: tuple[str, ...]) -> float | None:
    """Seconds from a header in milliseconds; None if it is absent or no number."""
    for name in names:
        text = headers.get(name)
        if text and text.isascii() and text.isdigit() and len(text) <= _MAX_LENGTH:
            return int(text) / 1000.0
    return None
