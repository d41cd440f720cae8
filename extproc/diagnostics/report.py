"""Report of `extproc doctor`: the findings about an installation, as a table or as JSON."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Final

import msgspec

from extproc.config.finding import FAILURES, Finding, Severity, clean, merge_places
from extproc.config.settings import Settings
from extproc.diagnostics import engine_diagnosis, envoy_diagnosis, picker_diagnosis
from extproc.diagnostics.pages import EnvoyPages, PickerPages
from extproc.endpoint import Endpoint

#: Severities in the order of the summary, with the words for one and several.
_COUNTED: Final[Sequence[tuple[Severity, str, str]]] = (
    ("error", "error", "errors"),
    ("warning", "warning", "warnings"),
    ("note", "note", "notes"),
    ("fine", "check passed", "checks passed"),
)


class InstallationPages(msgspec.Struct, frozen=True, kw_only=True):
    """Everything that was looked at.

    Attributes:
        envoy: Pages of Envoy; None if none was named.
        picker: Pages of extproc; None if none was named.
        endpoints: Endpoints by the name of their pool, whether looked at or not.
    """

    envoy: EnvoyPages | None = None
    picker: PickerPages | None = None
    engines: Sequence[engine_diagnosis.EngineExamination] = ()
    endpoints: Mapping[str, Sequence[Endpoint]] = {}


class InstallationReport(msgspec.Struct, frozen=True):
    """Findings about an installation.

    Attributes:
        findings: Findings, the worst first; those that differ in the place only are merged.
    """

    findings: Sequence[Finding]

    @property
    def status(self) -> int:
        """Exit status: 1 if there is an error."""
        return int(any(finding.severity in FAILURES for finding in self.findings))

    def to_lines(self) -> Iterator[str]:
        """The report for people: a table of what is not as expected, and a summary."""
        for finding in self.findings:
            if finding.severity == "fine":
                continue
            yield f"{finding.severity:<9}{finding.check:<26}{clean(finding.place)}"
            yield f"{'':<9}{'found':<9}{clean(finding.got)}"
            yield f"{'':<9}{'expected':<9}{clean(finding.wanted)}"
            if finding.fix:
                yield f"{'':<9}{'fix':<9}{clean(finding.fix)}"
        counts = Counter(finding.severity for finding in self.findings)
        yield ", ".join(
            f"{counts[severity]} {singular if counts[severity] == 1 else plural}"
            for severity, singular, plural in _COUNTED
        )

    def to_json(self) -> Mapping[str, object]:
        """The report for programs."""
        return {
            "ok": not self.status,
            "findings": [finding.to_json() for finding in self.findings],
        }


def diagnose(pages: InstallationPages, settings: Settings) -> InstallationReport:
    """Judge the pages of an installation."""
    findings = [
        msgspec.structs.replace(finding, severity="error") if finding.severity == "cut" else finding
        for finding in _diagnose_all(pages, settings)
    ]
    return InstallationReport(tuple(merge_places(findings)))


def _diagnose_all(pages: InstallationPages, settings: Settings) -> Iterator[Finding]:
    listed = [endpoint for members in pages.endpoints.values() for endpoint in members]
    if pages.envoy is not None:
        addresses = frozenset(endpoint.address for endpoint in listed)
        yield from envoy_diagnosis.diagnose(pages.envoy, settings, endpoints=addresses)
    if pages.picker is not None:
        yield from picker_diagnosis.diagnose(pages.picker)
    yield from engine_diagnosis.compare(pages.engines, settings)
    num_left = len(listed) - len(pages.engines)
    if num_left or not listed:
        yield Finding(
            "note",
            "engines_read",
            "engines",
            f"{num_left} of {len(listed)} engines were not read"
            if listed
            else "no engine was read: neither flags nor files list any",
            wanted="all engines of the pool",
            fix="raise --timeout, or look at a part of the pool with --endpoints"
            if listed
            else "write --server with the metrics port of a running extproc, or --endpoints",
        )
