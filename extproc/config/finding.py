"""Findings of `extproc check --envoy` and `extproc doctor`: faults with their fixes."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Iterator, Mapping
from typing import Final, Literal

import msgspec

Severity = Literal["cut", "error", "warning", "note", "fine"]

#: Severities for which a report counts as failed.
FAILURES: Final = frozenset({"cut", "error"})

#: Longest part of a finding that is printed (characters), and places named of those that share it.
_MAX_CHARS: Final = 400
_MAX_PLACES: Final = 3

_ORDER: Final = ("error", "cut", "warning", "note", "fine")


class Finding(msgspec.Struct, frozen=True):
    """Result of one check at one place.

    Attributes:
        severity: `cut` for a limit that ends valid requests or responses, `error` for what does not
            work at all, `warning` for a likely mistake, `note` for a fact to know, `fine` for a
            check that passed.
        check: Name of the check, which stays the same from version to version.
        place: Connection manager, route, cluster, engine or pool.
        got: The value, and its effect.
        wanted: The expected value; empty for a check that passed.
        fix: The YAML or flag to write instead; empty for a check that passed.
    """

    severity: Severity
    check: str
    place: str
    got: str
    wanted: str = ""
    fix: str = ""

    @property
    def text(self) -> str:
        """The value, its effect and the fix, in a line."""
        return f"{self.got}; {self.fix}" if self.fix else self.got

    def to_json(self) -> Mapping[str, str]:
        """The finding for programs."""
        return {
            "severity": self.severity,
            "check": self.check,
            "place": clean(self.place),
            "text": clean(self.text),
            "expected": clean(self.wanted),
            "got": clean(self.got),
            "fix": clean(self.fix),
        }


cut, error, warning, note, fine = (
    functools.partial(Finding, severity) for severity in ("cut", "error", "warning", "note", "fine")
)


def clean(text: str) -> str:
    """Text of others without control characters, cut to what a terminal can bear."""
    printable = "".join(char if char.isprintable() else " " for char in text[: _MAX_CHARS + 1])
    return printable if len(text) <= _MAX_CHARS else f"{printable[:_MAX_CHARS]}..."


def merge_places(findings: Iterable[Finding]) -> Iterator[Finding]:
    """Yield findings sorted by severity; those that differ in the place only become one.

    A fleet of 500 engines with the same flag missing is one mistake.
    """
    places: dict[tuple[str, ...], list[Finding]] = {}
    for finding in findings:
        key = (finding.severity, finding.check, finding.got, finding.wanted, finding.fix)
        places.setdefault(key, []).append(finding)
    groups = sorted(places.values(), key=lambda group: _ORDER.index(group[0].severity))
    for group in groups:
        names = list(dict.fromkeys(finding.place for finding in group))
        place = ", ".join(names[:_MAX_PLACES])
        if len(names) > _MAX_PLACES:
            place += f" and {len(names) - _MAX_PLACES} more"
        yield msgspec.structs.replace(group[0], place=place)
