"""The event loop of a module."""

from __future__ import annotations

from tests.support.child_process import live, pytest_pyfunc_call

__all__ = ["live", "pytest_pyfunc_call"]
