"""The transport that tests run on: EXTPROC_TEST_TRANSPORT, or the default."""

from __future__ import annotations

import os
from typing import Final, Literal, cast

TRANSPORT: Final = cast(
    'Literal["grpcio", "native"]', os.environ.get("EXTPROC_TEST_TRANSPORT", "native")
)

#: Flags of `extproc serve` that choose it.
FLAGS: Final = ("--transport", TRANSPORT)
