"""h2spec and the client of grpc-go: where they are."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest

#: Where `make http2tools` puts them.
BUILT = Path(__file__).resolve().parents[2] / ".cache/tools"

#: CI sets it: it has built both, so a missing one is an error there.
_REQUIRED = os.environ.get("EXTPROC_REQUIRE_HTTP2TOOLS", "") == "1"


def need(name: str) -> str:
    """Return the path of a tool; skips where it is missing, or fails where it is required."""
    path = shutil.which(name, path=str(BUILT))
    if path is None:
        if _REQUIRED:
            pytest.fail(f"{name} is missing: make http2tools")
        pytest.skip(f"needs {name}: make http2tools")
    return path
