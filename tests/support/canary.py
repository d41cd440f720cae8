"""Canary: text that tests put into prompts, headers and tokens, and that no log line may have.

`tests/conftest.py` reads every line that a test of this process logs, and an installation every line
of its processes.
"""

from __future__ import annotations

import logging

from extproc.telemetry.log_format import JsonFormatter

#: Stands for prompts and secrets.
CANARY = "canary-of-clients"

#: A header with a secret, as clients send it.
AUTHORIZATION = ("authorization", f"Bearer {CANARY}")


class CanaryHandler(logging.Handler):
    """Handler that formats each record with all of its fields, and keeps the lines with a canary."""

    def __init__(self) -> None:
        super().__init__(logging.DEBUG)
        self.setFormatter(JsonFormatter())
        self.leaks: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        """Look at one record."""
        line = self.format(record)
        if CANARY in line:
            self.leaks.append(line)

    def take_leaks(self) -> list[str]:
        """Lines with a canary since the last call."""
        leaks, self.leaks = self.leaks, []
        return leaks
