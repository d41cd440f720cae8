"""h2spec and the client of grpc-go: where they are."""

from __future__ import annotations

import shutil
from pathlib import Path

from tests.support import programs

#: Where `make http2tools` puts them.
BUILT = Path(__file__).resolve().parents[2] / ".cache/tools"


def need(name: str) -> str:
    """Return the path of a tool; skips where it is missing, or fails where it is required."""
    path = shutil.which(name, path=str(BUILT))
    if path is None:
        raise programs.missing(f"needs {name}: make http2tools", "EXTPROC_REQUIRE_HTTP2TOOLS")
    return path
