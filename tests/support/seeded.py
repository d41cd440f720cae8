"""Number of examples of a property."""

from __future__ import annotations

from hypothesis import settings


def examples(count: int) -> int:
    """So many with the profile that CI asks for, and fewer with `quick`; see tests/conftest.py."""
    return count * settings().max_examples // 100
