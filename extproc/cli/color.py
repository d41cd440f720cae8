"""Color on terminals: off in pipes and files, with `NO_COLOR`, and on dumb terminals."""

from __future__ import annotations

import os
from typing import TextIO

_CODES = {"red": "31", "green": "32", "yellow": "33", "bold": "1"}


def paint(text: str, style: str, stream: TextIO) -> str:
    """Text in a style, `red`, `green`, `yellow` or `bold`, if the stream shows any."""
    plain = os.environ.get("NO_COLOR") or os.environ.get("TERM") == "dumb"
    if plain or not stream.isatty():
        return text
    return f"\x1b[{_CODES[style]}m{text}\x1b[0m"
