"""The references of the README, made from the docstrings of the settings and of scenarios.

    python -m tests.docs.reference [--write]

prints the blocks, or puts that of scenarios into the README; a test holds the README against both.
"""

from __future__ import annotations

import inspect
import re
import sys
import textwrap
from collections.abc import Sequence
from pathlib import Path

import msgspec

from extproc.autoscaling import meter
from extproc.autoscaling.policies import adaptive, kubeai, queue_depth
from extproc.config import (
    autoscaling,
    found_claims,
    grammar,
    holding,
    reloading,
    settings,
    sharing,
    sources,
)
from extproc.dispatch import claims
from extproc.election import settings as election
from extproc.holding import allowance
from extproc.pool import condition
from extproc.prefix import blocks
from extproc.sim.virtual import client, lengths, scenario, workloads
from extproc.xds import traits

README = Path(__file__).parents[2] / "docs/reference/index.md"
BEGIN, END = "<!-- scenario -->\n", "\n<!-- /scenario -->"

SECTIONS = (
    ("server", settings.Server),
    ("pool", sources.Source),
    ("pool.kubernetes", sources.Kubernetes),
    ("pools, each", sources.Pool),
    ("pools.match", claims.Claim),
    ("cluster", sources.Cluster),
    ("cluster.claims, each", found_claims.ClaimRule),
    ("cluster.lease", election.Settings),
    ("scrape", settings.Scrape),
    ("health", condition.Settings),
    ("scheduling", grammar.Scheduling),
    ("prefix", settings.Prefix),
    ("prefix.schedule", blocks.Schedule),
    ("limits", settings.Limits),
    ("holding", holding.Holding),
    ("holding.limit, holding.limits, each", allowance.Limit),
    ("autoscaling", autoscaling.Autoscaling),
    ("autoscaling.found, each", autoscaling.Rule),
    ("autoscaling.keda", autoscaling.Keda),
    ("pool.autoscaling", autoscaling.Scaling),
    ("pool.autoscaling.meter", meter.Settings),
    ("pool.autoscaling.params, policy: adaptive", adaptive.Adaptive),
    ("pool.autoscaling.params, policy: kubeai", kubeai.KubeAI),
    ("pool.autoscaling.params, policy: queue-depth", queue_depth.QueueDepth),
    ("pool.autoscaling.target", autoscaling.Target),
    ("pool.autoscaling.launch", autoscaling.Launch),
    ("answers", settings.Answers),
    ("explain", settings.Explain),
    ("xds", settings.Xds),
    ("xds.health_check", traits.HealthCheck),
    ("xds.outliers", traits.Outliers),
    ("sharing", sharing.Sharing),
    ("log", settings.Log),
)

SCENARIO = (
    ("top level of a scenario", scenario.Scenario),
    ("fleet, each", scenario.Engines),
    ("client", client.Client),
    ("picking", scenario.Picking),
    ("outages, each", scenario.Outage),
    ("autoscaling of a scenario", scenario.Autoscaling),
    ("autoscaling.hold", scenario.Hold),
    ("strategies, each that is not one word", scenario.Variant),
    *(
        (f"workload, kind: {kind.__struct_config__.tag}", kind)
        for kind in workloads.Workload.__args__
    ),
    ("workload.groups, each", workloads.Group),
    ("lengths of prompts, answers, turns and pauses", lengths.Lengths),
)


def attributes(section: type[msgspec.Struct]) -> dict[str, str]:
    """Field to its text in the `Attributes` of the docstring."""
    text = inspect.getdoc(section) or ""
    part = text.partition("Attributes:\n")[2]
    found = {}
    for match in re.finditer(r"^    (\w+): (.*(?:\n {8}.*)*)", part, re.MULTILINE):
        found[match.group(1)] = " ".join(match.group(2).split())
    return found


def shown(value: object) -> str:
    """A default as YAML."""
    if isinstance(value, lengths.Lengths):
        return f"`{{mean: {value.mean:g}, lowest: {value.lowest:g}}}`"
    first = value[0] if isinstance(value, Sequence) and value else value
    if isinstance(first, msgspec.Struct):
        return "see below"
    if value in ((), {}):
        return "none"
    return "`" + msgspec.json.encode(value).decode() + "`"


def table(name: str, section: type[msgspec.Struct]) -> str:
    """One section as a Markdown table."""
    rows = [f"**{name}**", "", "| field | default | meaning and reason |", "|---|---|---|"]
    texts = attributes(section)
    for field in msgspec.structs.fields(section):
        if field.required:
            default = "required"
        elif field.default_factory is not msgspec.NODEFAULT:
            default = shown(field.default_factory())
        else:
            default = shown(field.default)
        text = texts[field.name].replace("|", "\\|")
        rows.append(f"| `{field.encode_name}` | {default} | {text} |")
    return "\n".join(rows)


def block() -> str:
    """All sections."""
    tables = [table(name, section) for name, section in SECTIONS]
    texts = attributes(settings.Settings)
    top = [
        "**top level**",
        "",
        "| field | default | meaning and reason |",
        "|---|---|---|",
        f"| `conformance` | `false` | {texts['conformance']} |",
        f"| `seed` | `null` | {texts['seed']} |",
    ]
    return "\n\n".join([*tables, "\n".join(top)])


def reload_block() -> str:
    """What is live and what needs a restart, by section."""

    def named(section: str, names: Sequence[str]) -> str:
        kind = settings.Settings
        if section:
            kind = sources.Pool if section == "pools" else type(getattr(kind(), section))
        encoded = {field.name: field.encode_name for field in msgspec.structs.fields(kind)}
        return ", ".join(f"`{encoded[name]}`" for name in names) or "none"

    rows = ["| section | at once | after a restart |", "|---|---|---|"]
    rows += [
        f"| {f'`{row.section}`' if row.section else 'top level'} "
        f"| {named(row.section, row.live)} | {named(row.section, row.restart)} |"
        for row in reloading.TABLE
    ]
    return "\n".join(rows)


def scenario_block() -> str:
    """Every field of a scenario."""
    return "\n\n".join(table(name, section) for name, section in SCENARIO)


def main() -> None:
    if "--write" not in sys.argv:
        print(textwrap.dedent(block()), reload_block(), scenario_block(), sep="\n\n")
        return
    head, _, rest = README.read_text().partition(BEGIN)
    tail = rest.partition(END)[2]
    README.write_text(head + BEGIN + scenario_block() + END + tail)


if __name__ == "__main__":
    main()
