from __future__ import annotations

from tests.support.live import live, pytest_pyfunc_call

__all__ = ["live", "pytest_pyfunc_call"]
