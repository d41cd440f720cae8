"""Generated blocks of the documentation: `make reference` writes them, a test compares them.

    python -m tests.docs.generate

A block is what stands between `<!-- NAME -->` and `<!-- /NAME -->` on a page. It may stand on any
page of `docs/`; the function of its name makes its text.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

from tests.docs import (
    bad_input,
    cli_reference,
    helm_reference,
    http_reference,
    layers,
    llmd_metrics,
    metrics_reference,
    plugin_reference,
    reference,
    request_walk,
)
from tests.monitoring import alerts, boards, recording_rules
from tests.protocol import table

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"

#: Name of a block to the function that makes its text.
BLOCKS: Mapping[str, Callable[[], str]] = {
    "alerts": alerts.runbooks_block,
    "bad input": bad_input.block,
    "cli": cli_reference.block,
    "configuration": reference.configuration_block,
    "dashboards": boards.block,
    "helm values": helm_reference.block,
    "http endpoints": http_reference.block,
    "layers": layers.block,
    "llm-d metrics": llmd_metrics.block,
    "metrics": metrics_reference.block,
    "native walk": request_walk.native_block,
    "plugin api": plugin_reference.api_block,
    "plugins": plugin_reference.plugins_block,
    "points": table.reference_block,
    "recording rules": recording_rules.records_block,
    "reload": reference.reload_block,
    "scenario": reference.scenario_block,
    "strategies": plugin_reference.strategies_block,
    "trouble": boards.findings_block,
    "walk": request_walk.block,
}


def pages() -> Iterator[Path]:
    """All pages of the documentation."""
    yield from sorted(DOCS.rglob("*.md"))


def markers(name: str) -> tuple[str, str]:
    """Opening and closing markers of a block."""
    return f"<!-- {name} -->\n", f"\n<!-- /{name} -->"


def filled(text: str) -> str:
    """A page with all its blocks generated anew."""
    for name, make in BLOCKS.items():
        begin, end = markers(name)
        before, opened, rest = text.partition(begin)
        if opened:
            _, closed, after = rest.partition(end)
            assert closed, f"expected{end} after {begin.strip()}, got none; close the block"
            text = f"{before}{begin}{make()}{end}{after}"
    return text


def main() -> None:
    for path in pages():
        text = path.read_text(encoding="utf-8")
        if (new := filled(text)) != text:
            path.write_text(new, encoding="utf-8")
            print(f"rewrote {path.relative_to(ROOT)}")


if __name__ == "__main__":
    main()
