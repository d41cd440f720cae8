"""`extproc check`: validate a configuration and print its effect, without serving.

It takes the flags of `serve`, so that the arguments of a Deployment can be checked as they stand.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

import msgspec

from extproc.cli import flags, main, plugin_description, serve
from extproc.config import (
    autoscaling,
    envoy_lint,
    epp_handlers,
    finding,
    kubernetes_plan,
    lint,
    loader,
    pool_annotations,
    pool_sections,
    pools,
    reloading,
    validation,
    yaml_documents,
)
from extproc.config.settings import ServerSection, Settings, XdsSection
from extproc.errors import ConfigError
from extproc.routing import pool_match
from extproc.scheduling.disaggregation import DisaggregatedStages
from extproc.scheduling.framework import Signal

_MIB = 1024 * 1024


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Add the flags of the command."""
    parser.add_argument("file", nargs="?", metavar="FILE", help="the same as --config-file")
    parser.add_argument(
        "--plugins", action="store_true", help="list strategies and plugins with their parameters"
    )
    parser.add_argument(
        "--schema", action="store_true", help="print the JSON Schema of the configuration file"
    )
    parser.add_argument(
        "--envoy",
        metavar="FILE",
        help="also read an Envoy configuration, and say which limit cuts a wait or an answer",
    )
    parser.add_argument(
        "--diff",
        metavar="FILE",
        help="also compare with FILE, as if that was running: what is live, what needs a restart",
    )
    parser.add_argument(
        "--json", action="store_true", help="print JSON instead of text, but not for --plugins"
    )
    parser.add_argument("--strict", action="store_true", help="exit with 1 when there are warnings")
    flags.add(parser)


def run(args: argparse.Namespace) -> int:
    """Check; returns the exit status.

    Raises:
        ConfigError: Flags or files are wrong.
    """
    if args.plugins:
        if args.json:
            raise ConfigError(
                "--plugins",
                wanted="no --json, as plugins are listed as text",
                got="both",
                fix="remove --json",
            )
        print("\n".join(plugin_description.describe_plugins()))
        return 0
    if args.schema:
        from extproc.config import schema

        print(schema.text(), end="")
        return 0
    report = _build_report(args)
    if args.json:
        print(json.dumps(report.to_json(), indent=2))
    elif report.errors:
        for error in report.errors:
            main.print_error(error)
    else:
        print("\n".join(report.to_lines()))
    return report.status(strict_warnings=args.strict)


def _take_positional_file(args: argparse.Namespace) -> None:
    """Take FILE for --config-file."""
    if args.file:
        if args.config_file:
            raise ConfigError(
                "--config-file",
                wanted="one configuration",
                got=f"{args.file} besides",
                fix="name it once",
            )
        args.config_file = args.file


def _build_report(args: argparse.Namespace) -> CheckReport:
    """Read all files that the command line names, and go on after errors."""
    try:
        if args.file:
            # FILE may be the value of an unknown flag, which is then the mistake to name.
            flags.find_log_flags(args)
            _take_positional_file(args)
        document = flags.read_document(args)
    except ConfigError as error:
        return CheckReport(args.config_file or "--config-text", errors=(error,))
    resolved, problems = loader.collect(document, lambda read: flags.resolve(args, read))
    errors = list(problems)
    if resolved is None:
        return CheckReport(document.where, errors=tuple(errors))
    settings = resolved.settings
    errors += serve.find_problems(settings)
    report = CheckReport(
        document.where,
        resolved=resolved,
        warnings=(
            *resolved.warnings,
            *lint.find_warnings(settings),
            *serve.find_invalid_certificates(settings.server),
        ),
        notes=(*serve.find_taken_ports(settings), *serve.find_unwritable_files(settings)),
    )
    try:
        report = msgspec.structs.replace(report, description=tuple(_describe_settings(resolved)))
        if args.envoy:
            report = msgspec.structs.replace(report, envoy=_read_envoy(args.envoy, settings))
        if args.diff:
            report = msgspec.structs.replace(report, diff=_compare(args, settings))
    except ConfigError as error:
        errors.append(error)
    return msgspec.structs.replace(report, errors=tuple(errors))


def _compare(args: argparse.Namespace, wanted: Settings) -> reloading.Comparison:
    """Compare with another file, under the same flags."""
    arguments = {**vars(args), "config_file": args.diff, "config_text": None}
    running = flags.resolve(argparse.Namespace(**arguments)).settings
    return reloading.compare(running, wanted, where=args.diff)


def _read_envoy(name: str, settings: Settings) -> EnvoyReport:
    """Read an Envoy configuration and report its effects on requests and responses.

    Raises:
        ConfigError: It is no Envoy configuration.
    """
    tree = yaml_documents.parse_tree(loader.read_text(Path(name)), where=name)
    try:
        findings = tuple(envoy_lint.read(tree, settings, where=name))
    except (AttributeError, KeyError, RecursionError, TypeError, ValueError) as error:
        raise ConfigError(
            name,
            wanted="an Envoy configuration",
            got=f"a value of another form ({type(error).__name__})",
            fix=f"`envoy --mode validate -c {name}` names the value",
        ) from None
    return EnvoyReport(name, envoy_lint.longest_wait_s(settings), findings)


class EnvoyReport(msgspec.Struct, frozen=True):
    """Effects of an Envoy configuration on requests and responses.

    Attributes:
        longest_wait_s: Longest time a request may wait before it is routed (seconds).
    """

    file: str
    longest_wait_s: float
    findings: tuple[finding.Finding, ...]

    def to_lines(self) -> Iterator[str]:
        """Findings, one in a line."""
        wait_s = self.longest_wait_s
        wait_text = f"requests may wait {wait_s:g} s" if wait_s else "requests do not wait"
        yield f"{self.file}, where {wait_text}"
        for result in self.findings:
            yield f"{result.severity:<8}{result.place}: {result.text}"

    def to_json(self) -> Mapping[str, object]:
        """The report for programs."""
        return {
            "file": self.file,
            "longest_wait_s": self.longest_wait_s,
            "findings": [result.to_json() for result in self.findings],
        }


class CheckReport(msgspec.Struct, frozen=True):
    """Result of `extproc check`.

    Attributes:
        where: The file, or the command line.
        errors: Everything for which `serve` would not start; the rest is empty where the file
            cannot be read at all.
        resolved: Settings and profile; None where there are none.
        notes: Facts of this machine that may differ elsewhere, such as a port in use.
        envoy: Report of `--envoy`; None without the flag.
        diff: Report of `--diff`; None without the flag.
    """

    where: str
    errors: tuple[ConfigError, ...] = ()
    resolved: flags.Resolved | None = None
    warnings: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    description: tuple[str, ...] = ()
    envoy: EnvoyReport | None = None
    diff: reloading.Comparison | None = None

    def status(self, *, strict_warnings: bool) -> int:
        """The exit status."""
        if self.errors:
            return 2
        is_cut = self.envoy and any(
            result.severity in finding.FAILURES for result in self.envoy.findings
        )
        is_refused = self.diff and self.diff.refusal
        return 1 if is_cut or is_refused or (strict_warnings and self.warnings) else 0

    def to_lines(self) -> Iterator[str]:
        """The report for people."""
        yield main.paint(f"{self.where} is in order", "green", sys.stdout)
        yield ""
        yield from self.description
        if self.warnings or self.notes:
            yield ""
        label = main.paint("warning:", "yellow", sys.stdout)
        yield from (f"{label} {warning}" for warning in self.warnings)
        yield from (f"note: {note}" for note in self.notes)
        for part in (self.envoy, self.diff):
            if part is not None:
                yield ""
                yield from part.to_lines()

    def to_json(self) -> Mapping[str, object]:
        """The report for programs."""
        settings = self.resolved.settings if self.resolved else None
        profile = self.resolved.profile if self.resolved else None
        signals: frozenset[Signal] = _find_signals(self.resolved) if self.resolved else frozenset()
        return {
            "file": str(self.where),
            "ok": not self.errors,
            "errors": [
                {"where": error.where, "expected": error.wanted, "got": error.got}
                | {"fix": error.fix}
                for error in self.errors
            ],
            "warnings": list(self.warnings),
            "notes": list(self.notes),
            "changed": [
                {"path": change.path, "default": change.before, "value": change.after}
                for change in (reloading.find_changes_from_defaults(settings) if settings else ())
            ],
            "profile": profile.name if profile else None,
            "signals": sorted(signal.value for signal in signals),
            "envoy": self.envoy.to_json() if self.envoy else None,
            "diff": msgspec.to_builtins(self.diff),
        }


def _describe_settings(resolved: flags.Resolved) -> Iterator[str]:
    settings = resolved.settings
    yield from _describe_server(settings.server, settings.xds)
    yield from describe_pools(settings)
    yield from _describe_scheduling(settings, resolved)
    yield from _describe_limits(settings)
    changes = list(reloading.find_changes_from_defaults(settings))
    if changes:
        yield "changed     from the defaults"
    width = max((len(change.path) for change in changes), default=0)
    for change in changes:
        yield f"  {change.path:<{width}}  {change.after} (default {change.before})"


def _describe_server(server: ServerSection, xds: XdsSection) -> Iterator[str]:
    host = server.host or "every address"
    tls = "without TLS"
    if server.secure_serving:
        tls = f"with the certificate in {server.cert_path}" if server.cert_path else "self-signed"
    if server.transport != "native":
        tls += f", {server.transport} transport"
    yield f"server      {host}: ext_proc on {server.grpc_port} ({tls}),"
    yield f"            health on {server.grpc_health_port}, metrics on {server.metrics_port};"
    if xds.enabled:
        yield f"            xDS on {xds.port};"
    yield f"            drains for at most {server.drain_timeout_s:g} s"


def _describe_scheduling(settings: Settings, resolved: flags.Resolved) -> Iterator[str]:
    profile = resolved.profile
    yield f"profile     {profile.name}"
    yield from plugin_description.describe_profile(profile)
    if settings.scheduling.fallbacks:
        yield f"  and {settings.scheduling.fallbacks} further endpoints to fall back to"
    epp = settings.scheduling.epp
    header = "" if epp is None else epp_handlers.find_profile_header(epp, validation.Place(""))
    if epp is not None and header:
        names = ", ".join(written.name for written in epp.scheduling_profiles)
        yield f"by header   {header} names one of {names}"
    yield from _describe_stages(resolved.stages)
    source = settings.scheduling.kv_cache_source
    if source is not None:
        yield (
            f"kv-cache    names an endpoint with at least {source.min_cached_token_delta} more cached "
            f"prompt tokens, reads {plugin_description.join_signals(source.needs)}"
        )
    shadow = settings.scheduling.shadow
    if shadow is not None:
        name = shadow.strategy if shadow.profile is None else shadow.profile.name
        yield f"shadow      {name} looks at {shadow.sample_ratio:.0%} of routed requests"
    yield from _describe_models(settings)
    yield f"signals     {plugin_description.join_signals(_find_signals(resolved)) or 'none'}"
    scrape = settings.scrape
    port = f" on port {scrape.port}" if scrape.port else ""
    if scrape.enabled:
        yield (
            f"scrape      {scrape.scheme} {scrape.path}{port} every {scrape.busy_interval_s:g} s where "
            f"requests are, {scrape.idle_interval_s:g} s elsewhere;"
        )
        yield f"            loads count for {scrape.stale_after_s:g} s"
    else:
        yield "scrape      off"


def _find_signals(resolved: flags.Resolved) -> frozenset[Signal]:
    """Return every signal that decisions read."""
    source = resolved.settings.scheduling.kv_cache_source
    readers = (resolved.profile, resolved.stages, source)
    return frozenset().union(*(reader.needs for reader in readers if reader is not None))


def _describe_stages(stages: DisaggregatedStages | None) -> Iterator[str]:
    for name, stage in ({} if stages is None else stages.by_name).items():
        yield f"{name:<11} {stage.profile.name}, if {plugin_description.describe_plugin(stage.decider)}"
        yield from plugin_description.describe_profile(stage.profile)


def _describe_models(settings: Settings) -> Iterator[str]:
    scrape, scheduling = settings.scrape, settings.scheduling
    if not (scrape.enabled and scrape.models):
        yield "models      not listed: every endpoint counts as serving every model"
        return
    unlisted_action = (
        "is refused with 404" if scheduling.unknown_model == "reject" else "goes to all"
    )
    yield (
        f"models      listed every {scrape.models_interval_s:g} s; one that no endpoint lists "
        f"{unlisted_action}"
    )
    if scheduling.kubeai_names:
        yield "            model_adapter names are read as adapters of the model"


def _describe_limits(settings: Settings) -> Iterator[str]:
    limits = settings.limits
    yield (
        f"limits      bodies {_format_bytes(limits.max_body_bytes)}, together "
        f"{_format_bytes(limits.max_assembly_bytes)}; messages {_format_bytes(limits.max_message_bytes)}; "
        f"{limits.max_streams} streams"
    )
    if not settings.parse_bodies:
        yield "bodies      not parsed: requests are routed by headers and load"
        return
    prefix = settings.prefix
    longest_tokens = prefix.schedule.tokens[
        min(prefix.capacity_blocks, len(prefix.schedule.tokens) - 1)
    ]
    yield (
        f"prefix      {prefix.capacity_blocks} blocks for each endpoint, {_format_bytes(prefix.max_bytes)} "
        f"for all; prompts are matched up to {longest_tokens} tokens"
    )


def _format_bytes(count: int) -> str:
    return f"{count / _MIB:g} MiB" if count >= _MIB else f"{count} bytes"


def describe_pools(settings: Settings) -> Iterator[str]:
    """One paragraph for each pool, and one for those that Kubernetes brings.

    Raises:
        ConfigError: An endpoints file cannot be read, or an election is not possible.
    """
    before: list[pools.PoolPlan] = []
    for plan in pools.pool_plans(settings):
        if settings.pools:
            yield f"pool        {plan.name}, for {pool_match.describe(plan.match)}"
            earlier = next(
                (other for other in before if pool_match.overlaps(other.match, plan.match)), None
            )
            if earlier is not None and not plan.match.is_empty:
                yield f"            pool {earlier.name} comes first where both match a request"
            before += [plan] if not plan.match.is_empty else []
            own = plan.settings.scheduling
            if own is not settings.scheduling:
                yield "            scheduled by rules of its own"
        pool = plan.settings.pool
        yield from _describe_source(pool)
        yield from pool_sections.describe_policy(pool.objectives, pool.rewrites)
        if pool.autoscaling is not None:
            yield from autoscaling.describe_section(pool.autoscaling)
    cluster = settings.cluster
    if cluster.discover_pools != "none":
        place = "the cluster"
        if cluster.discover_pools == "namespace":
            place = f"namespace {cluster.namespace or 'of this process'}"
        yield f"pools       every InferencePool of {place}, as they come and go"
        yield from pool_annotations.describe_match_rules(cluster.match_rules)
        for rule in settings.autoscaling.discovered_pools:
            yield from pool_annotations.describe_scaling_rule(rule)
    elected = kubernetes_plan.plan_election(settings, where="cluster", environment=os.environ)
    if elected is not None and cluster.leader_election:
        lease = elected.lease
        yield f"ready       only the holder of Lease {lease.name} in namespace {lease.namespace}"


def _describe_source(pool: pool_sections.PoolSource) -> Iterator[str]:
    sources = pools.configured_sources(pool) or pools.SOURCES[:1]
    for source in sources:
        first, *endpoints = source.describe(pool)
        yield f"endpoints   {first}"
        yield from (f"            {line}" for line in endpoints)
