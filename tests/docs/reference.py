"""Tables of configuration and scenario fields, from the structs and their docstrings."""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from extproc import election
from extproc.autoscaling import demand_estimator, policies
from extproc.config import (
    autoscaling,
    decisions,
    pool_annotations,
    pool_sections,
    reloading,
    settings,
    tracing,
    validation,
)
from extproc.endpoint import LabelExpression
from extproc.flow_control import priority_band, rate_limit
from extproc.pool import endpoint_health
from extproc.prefix_cache import blocks
from extproc.routing import pool_match, usage_limit
from extproc.scheduling import load_bounds
from extproc.simulator.fleet import client, scenario, workloads
from extproc.xds import resources

SECTIONS = (
    ("server", settings.ServerSection),
    ("pool", pool_sections.PoolSource),
    ("pool.kubernetes", pool_sections.KubernetesSection),
    ("pool.kubernetes.selector_expressions[]", LabelExpression),
    ("pools[]", pool_sections.PoolSection),
    ("pools.match", pool_match.PoolMatch),
    ("cluster", pool_sections.ClusterSection),
    ("cluster.match_rules[]", pool_annotations.MatchRule),
    ("cluster.lease", election.ElectionSettings),
    ("scrape", settings.ScrapeSection),
    ("health", endpoint_health.OutlierDetectionSettings),
    ("scheduling", pool_sections.SchedulingSection),
    ("scheduling.saturation", load_bounds.SaturationRules),
    ("prefix", settings.PrefixSection),
    ("prefix.schedule", blocks.Schedule),
    ("kv_events", settings.KvEventsSection),
    ("limits", settings.LimitsSection),
    ("flow_control", settings.FlowControlSection),
    (
        "flow_control.bands[], flow_control.default_band, flow_control.default_negative_band",
        priority_band.PrioritySettings,
    ),
    ("flow_control.usage_limit", usage_limit.UsageLimit),
    ("flow_control.limit, flow_control.limits[]", rate_limit.RateLimit),
    ("autoscaling", autoscaling.AutoscalingSection),
    ("autoscaling.discovered_pools[]", autoscaling.ScalingRule),
    ("autoscaling.keda", autoscaling.KedaSection),
    ("pool.autoscaling", autoscaling.ScalingSection),
    ("pool.autoscaling.meter", demand_estimator.EstimatorSettings),
    ("pool.autoscaling.params, policy: adaptive", policies.AdaptivePolicy),
    ("pool.autoscaling.params, policy: kubeai", policies.KubeAIPolicy),
    ("pool.autoscaling.params, policy: queue-depth", policies.QueueDepthPolicy),
    ("pool.autoscaling.target", autoscaling.ScaleTarget),
    ("pool.autoscaling.launch", autoscaling.LaunchSection),
    ("responses", settings.ResponsesSection),
    ("decisions", decisions.DecisionsSection),
    ("xds", settings.XdsSection),
    ("xds.health_check", resources.HealthCheck),
    ("xds.outliers", resources.OutlierDetection),
    ("peer_sync", settings.PeerSyncSection),
    ("log", settings.LogSection),
    ("tracing", tracing.TracingSection),
)

SCENARIO = (
    ("top level of a scenario", scenario.Scenario),
    ("fleet[]", scenario.EngineGroup),
    ("client", client.Client),
    ("picking", scenario.Picking),
    ("outages[]", scenario.Outage),
    ("autoscaling of a scenario", scenario.ScenarioAutoscaling),
    ("autoscaling.hold", scenario.HoldSpec),
    ("strategies[], written out", scenario.Variant),
    *(
        (f"workload, kind: {kind.__struct_config__.tag}", kind)
        for kind in workloads.Workload.__args__
    ),
    ("workload.groups[]", workloads.Group),
    ("lengths of prompts, answers, turns and pauses", workloads.Lengths),
)


def attributes(section: type[msgspec.Struct]) -> dict[str, str]:
    """Field to its text in the `Attributes` of its docstring, or of a class it inherits from."""
    texts = {}
    for cls in reversed(section.__mro__):
        part = inspect.cleandoc(cls.__doc__ or "").partition("Attributes:\n")[2]
        for match in re.finditer(r"^    (\w+): (.*(?:\n {8}.*)*)", part, re.MULTILINE):
            texts[match.group(1)] = " ".join(match.group(2).split())
    return texts


def shown(value: object) -> str:
    """A default as YAML."""
    if isinstance(value, workloads.Lengths):
        return f"`{{mean: {value.mean:g}, lowest: {value.lowest:g}}}`"
    first = value[0] if isinstance(value, Sequence) and value else value
    if isinstance(first, msgspec.Struct):
        return "see below"
    if value in ((), {}):
        return "none"
    return "`" + msgspec.json.encode(value).decode() + "`"


def constraint(schema: Mapping[str, Any]) -> str:
    """A JSON Schema as a few words: type, range or choices."""
    if "anyOf" in schema:
        choices = [constraint(part) for part in schema["anyOf"] if part.get("type") != "null"]
        return " or ".join(dict.fromkeys(choices))
    if "enum" in schema:
        return ", ".join(f"`{choice}`" for choice in schema["enum"])
    if "const" in schema:
        return f"`{schema['const']}`"
    if schema.get("type") in ("integer", "number"):
        return schema["type"] + "".join(_range(schema))
    if schema.get("type") == "array":
        inner = schema.get("items")
        return f"list of {constraint(inner)}" if inner else "list"
    if "type" not in schema:
        return "object" if "$ref" in schema else "any"
    return {"object": "map", "string": "text"}.get(schema["type"], schema["type"])


def _range(schema: Mapping[str, Any]) -> Iterator[str]:
    low, high = schema.get("minimum"), schema.get("maximum")
    if low is not None and high is not None:
        yield f", {low} to {high}"
    elif low is not None:
        yield f" >= {low}"
    elif high is not None:
        yield f" <= {high}"
    if "exclusiveMinimum" in schema:
        yield f" > {schema['exclusiveMinimum']}"
    if "exclusiveMaximum" in schema:
        yield f" < {schema['exclusiveMaximum']}"


def properties(section: type[msgspec.Struct]) -> Mapping[str, Any]:
    """The fields of a struct as JSON Schemas, by their names in YAML."""
    (schema,), components = msgspec.json.schema_components(
        [section], schema_hook=lambda _: {"description": "any"}, ref_template="{name}"
    )
    return components[schema["$ref"]]["properties"]


def linked(text: str) -> str:
    """Text of a docstring with citations of pages as links."""
    return re.sub(r"\bdocs/([\w/.-]+\.md(?:#[\w-]+)?)", _as_link, text)


def _as_link(match: re.Match[str]) -> str:
    page, _, anchor = match[1].partition("#")
    title = (anchor or Path(page).stem).replace("-", " ")
    return f"[{title}](../{match[1]})"


def cell(text: str) -> str:
    """Text of a docstring in a cell of a table."""
    return linked(" ".join(text.split())).replace("|", "\\|")


def table(name: str, section: type[msgspec.Struct]) -> str:
    """A heading and a table with a row for each field."""
    rows = [
        f"### {name}",
        "",
        "| field | type | default | meaning and reason |",
        "|---|---|---|---|",
    ]
    texts, shapes = attributes(section), properties(section)
    for field in msgspec.structs.fields(section):
        if not validation.is_for_files(field.encode_name):
            continue
        if field.required:
            default = "required"
        elif field.default_factory is not msgspec.NODEFAULT:
            default = shown(field.default_factory())
        else:
            default = shown(field.default)
        shape = constraint(shapes[field.encode_name])
        rows.append(
            f"| `{field.encode_name}` | {cell(shape)} | {default} | {cell(texts[field.name])} |"
        )
    return "\n".join(rows)


def configuration_block() -> str:
    """All sections of a configuration."""
    texts = attributes(settings.Settings)
    top = [
        "### top level",
        "",
        "| field | type | default | meaning and reason |",
        "|---|---|---|---|",
        f"| `parse_bodies` | boolean | `true` | {cell(texts['parse_bodies'])} |",
        f"| `conformance` | boolean | `false` | {cell(texts['conformance'])} |",
        f"| `seed` | integer | `null` | {cell(texts['seed'])} |",
    ]
    return "\n\n".join(["\n".join(top), *(table(name, section) for name, section in SECTIONS)])


#: Types of sections in `Settings`: a struct, or pools.
GROUPS = (msgspec.Struct, tuple)


def reload_block() -> str:
    """Live fields and fields that need a restart, by section."""

    def row(section: str, kind: type[msgspec.Struct]) -> str:
        fields = [
            field
            for field in msgspec.structs.fields(kind)
            if validation.is_for_files(field.encode_name)
            and (section or not isinstance(getattr(settings.Settings(), field.name), GROUPS))
        ]
        live = [f for f in fields if f.name in reloading.LIVE.get(section, ())]
        at_once, later = (
            ", ".join(f"`{field.encode_name}`" for field in group) or "none"
            for group in (live, [field for field in fields if field not in live])
        )
        return f"| {f'`{section}`' if section else 'top level'} | {at_once} | {later} |"

    rows = ["| section | at once | after a restart |", "|---|---|---|"]
    rows.append(row("", settings.Settings))
    for field in msgspec.structs.fields(settings.Settings):
        value = getattr(settings.Settings(), field.name)
        if isinstance(value, GROUPS):
            rows.append(row(field.name, pool_sections.PoolSection if value == () else type(value)))
    return "\n".join(rows)


def scenario_block() -> str:
    """Every field of a scenario."""
    return "\n\n".join(table(name, section) for name, section in SCENARIO)
