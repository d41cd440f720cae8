"""Value that discovery reports for one pool."""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from extproc.endpoint import Endpoint
from extproc.pool import inference_policy


class DiscoveredPool(msgspec.Struct, frozen=True):
    """State of one pool as discovered.

    Attributes:
        endpoints: All of it, each address once.
        exists: Whether the object that defines the pool is there; without it there are no
            endpoints, and requests are answered with 503
            (docs/reference/protocol-conformance.md#point-65).
        policy: Priorities and rewrites.
        app_protocol: Protocol of the engines: `http`, `kubernetes.io/h2c`, or empty when not
            set.
        annotations: Of the object that defines the pool.
        created: Creation time of that object, RFC 3339 in UTC; empty when unknown.
    """

    endpoints: tuple[Endpoint, ...] = ()
    exists: bool = True
    policy: inference_policy.InferencePolicy = inference_policy.EMPTY_POLICY
    app_protocol: str = ""
    annotations: Mapping[str, str] = {}
    created: str = ""
