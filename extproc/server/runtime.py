"""Configures gRPC's C core before it is loaded, which is when it reads its settings."""

from __future__ import annotations

import os
import sys

#: Without the listener of the event engine, the thread that waits for events reads the sockets
#: itself. With it, another thread does and wakes the first one: a hop more for every message.
#: Measured by `python -m bench.overhead`.
EXPERIMENTS = "-event_engine_listener"

_VARIABLE = "GRPC_EXPERIMENTS"


def configure_grpc_core() -> bool:
    """Set gRPC experiments, unless the environment does.

    Returns:
        False if gRPC was loaded already, so that the setting has no effect.
    """
    os.environ.setdefault(_VARIABLE, EXPERIMENTS)
    return "grpc" not in sys.modules
