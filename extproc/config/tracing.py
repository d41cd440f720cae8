"""Settings of tracing, and the standard environment variables of OpenTelemetry."""

from __future__ import annotations

import logging
import math
import random
from collections import Counter
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Final, Literal, TypeAlias, cast

import msgspec

from extproc import distribution
from extproc.discovery.static_discovery import open_regular
from extproc.errors import ConfigError
from extproc.protocol.trace_context import TraceSampler

if TYPE_CHECKING:
    from extproc.telemetry.otlp import OtlpTracer

_log = logging.getLogger("extproc.traces")

#: Share of traces that are sampled where neither caller nor environment say, as upstream.
DEFAULT_RATIO: Final = 0.1

#: Spans that wait for export at most (count), the default of OpenTelemetry.
_MAX_QUEUED_SPANS: Final = 2048

#: Spans of an export (count), the same.
_MAX_BATCH_SPANS: Final = 512

#: Variables that name a receiver.
_ENDPOINTS: Final = ("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT")

#: Beginnings of the variables of the exporter: those of traces, and those of all signals.
_TRACES: Final = "OTEL_EXPORTER_OTLP_TRACES_"
_ALL_SIGNALS: Final = "OTEL_EXPORTER_OTLP_"

#: Ends of the variables that name files of TLS.
_TLS_FILES: Final = ("CERTIFICATE", "CLIENT_KEY", "CLIENT_CERTIFICATE")

Exporter: TypeAlias = Literal["otlp", "console"]
OtlpProtocol: TypeAlias = Literal["grpc", "http/protobuf"]


class TracingSection(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Traces over OpenTelemetry; all else is in its environment variables.

    Attributes:
        enabled: Trace requests; needs the extra `otel`. Null: where the environment names a
            receiver (`OTEL_EXPORTER_OTLP_ENDPOINT`) or an exporter (`OTEL_TRACES_EXPORTER`), so that
            nothing is loaded where no traces are collected. True without a receiver sends to
            http://localhost:4317.
    """

    enabled: bool | None = None


class TracePlan(msgspec.Struct, frozen=True):
    """Sampling and export of traces.

    Attributes:
        exporter: `otlp`, or `console`, which prints spans as JSON on standard output.
        ratio: Share of traces that are sampled by chance, 0..1.
        is_parent_based: Whether the decision of the caller comes first.
        max_queued_spans: Spans that wait for export; more are dropped (count).
        max_batch_spans: Spans of an export, at most as many as may wait (count).
    """

    exporter: Exporter
    protocol: OtlpProtocol
    ratio: float
    is_parent_based: bool
    max_queued_spans: int
    max_batch_spans: int


def plan_traces(section: TracingSection, environment: Mapping[str, str]) -> TracePlan | None:
    """Read the environment; None where no request is traced.

    Raises:
        ConfigError: A variable has a value that is not supported.
    """
    exporter = environment.get("OTEL_TRACES_EXPORTER", "")
    is_wanted = section.enabled
    if is_wanted is None:
        is_wanted = bool(exporter) or any(environment.get(name) for name in _ENDPOINTS)
    is_disabled = environment.get("OTEL_SDK_DISABLED", "").lower() == "true"
    if not is_wanted or is_disabled or exporter == "none":
        return None
    sampler = environment.get("OTEL_TRACES_SAMPLER") or "parentbased_traceidratio"
    root = sampler.removeprefix("parentbased_")
    ratio = _read_ratio(sampler, root, environment.get("OTEL_TRACES_SAMPLER_ARG", ""))
    is_parent_based = sampler != root
    if not is_parent_based and not ratio:
        return None
    max_queued = _read_count(environment, "OTEL_BSP_MAX_QUEUE_SIZE", _MAX_QUEUED_SPANS)
    max_batch = _read_count(environment, "OTEL_BSP_MAX_EXPORT_BATCH_SIZE", _MAX_BATCH_SPANS)
    exporter = _choose("OTEL_TRACES_EXPORTER", exporter or "otlp", "otlp", "console")
    protocol = _read_protocol(environment)
    if exporter == "otlp":
        _check_tls_files(environment, protocol)
    return TracePlan(
        cast("Exporter", exporter),
        protocol,
        ratio,
        is_parent_based,
        max_queued,
        min(max_batch, max_queued),
    )


class Traces(msgspec.Struct, frozen=True):
    """Sampler and sender of traces; both None where no request is traced."""

    sampler: TraceSampler | None = None
    tracer: OtlpTracer | None = None


def build_traces(
    section: TracingSection,
    environment: Mapping[str, str],
    *,
    clock: Callable[[], float],
    counts: Counter[str],
) -> Traces:
    """Build what traces requests.

    Args:
        counts: Spans by result; updated while they are sent.

    Raises:
        ConfigError: A variable has a value that is not supported, or traces are demanded and the
            extra is not installed.
    """
    plan = plan_traces(section, environment)
    if plan is None:
        return Traces()
    try:
        from extproc.telemetry import otlp  # noqa: PLC0415 - an extra, not for everybody
    except ImportError as error:
        missing = _missing_extra_error(error.name)
        if section.enabled:
            raise missing from None
        _log.warning("no traces are sent: %s", missing)
        return Traces()
    # Not the seed of the configuration: replicas that share one would make equal ids.
    rng = random.Random()
    try:
        tracer = otlp.OtlpTracer(
            exporter=plan.exporter,
            protocol=plan.protocol,
            max_queued_spans=plan.max_queued_spans,
            max_batch_spans=plan.max_batch_spans,
            clock=clock,
            rng=rng,
            counts=counts,
        )
    except Exception as error:
        raise ConfigError(
            "OTEL_EXPORTER_OTLP_*",
            wanted="values that the exporter of OpenTelemetry takes",
            got=f"{type(error).__name__}: {error}",
            fix="correct the variable, or set OTEL_SDK_DISABLED=true",
        ) from error
    return Traces(TraceSampler(plan.ratio, is_parent_based=plan.is_parent_based, rng=rng), tracer)


def _missing_extra_error(module: str | None) -> ConfigError:
    """Error of traces that are demanded without the packages to send them."""
    return ConfigError(
        "tracing.enabled",
        wanted="the OpenTelemetry SDK and its OTLP exporters",
        got=f"no module {module}" if module else "they cannot be imported",
        fix=f"{distribution.install_command('otel')}, or --tracing=false",
    )


def _read_protocol(environment: Mapping[str, str]) -> OtlpProtocol:
    for name in ("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "OTEL_EXPORTER_OTLP_PROTOCOL"):
        if environment.get(name):
            return cast("OtlpProtocol", _choose(name, environment[name], "grpc", "http/protobuf"))
    return "grpc"


def _check_tls_files(environment: Mapping[str, str], protocol: OtlpProtocol) -> None:
    """Check the files that the exporter reads; gRPC ends the process over half a pair.

    Raises:
        ConfigError: A file cannot be read or is empty, or a client certificate has no key or no chain.
    """
    if protocol == "http/protobuf":
        for name in _list_http_files(environment):
            _check_tls_file(name, environment[name])
        return
    for prefix in _list_grpc_prefixes(environment):
        for suffix in _TLS_FILES:
            if path := environment.get(prefix + suffix):
                _check_tls_file(prefix + suffix, path)
        names = prefix + "CLIENT_KEY", prefix + "CLIENT_CERTIFICATE"
        missing = [name for name in names if not environment.get(name)]
        if len(missing) == 1:
            raise ConfigError(
                missing[0],
                wanted=f"a file, as {' and '.join(names)} belong together",
                got="none",
                fix="set both, or unset both",
            )


def _list_http_files(environment: Mapping[str, str]) -> list[str]:
    """Variables of the files that the exporter over HTTP uses: for each, that of traces wins.

    Files of the client have to exist without TLS as well, or no request is sent.
    """
    endpoint = next((value for name in _ENDPOINTS if (value := environment.get(name))), "")
    suffixes = _TLS_FILES if endpoint.lower().startswith("https") else _TLS_FILES[1:]
    choices = [(_TRACES + suffix, _ALL_SIGNALS + suffix) for suffix in suffixes]
    winners = (next((name for name in names if environment.get(name)), "") for names in choices)
    return [name for name in winners if name]


def _list_grpc_prefixes(environment: Mapping[str, str]) -> tuple[str, ...]:
    """Beginnings of the variables whose files the exporter over gRPC reads."""
    insecure = environment.get(_TRACES + "INSECURE")
    is_insecure = (insecure or "").lower() == "true"
    if not is_insecure and _TRACES + "CERTIFICATE" in environment:
        # Read for an endpoint without TLS as well, and instead of the files of all signals.
        return (_TRACES,)
    endpoint = environment.get(_ENDPOINTS[0]) or environment.get(_ENDPOINTS[1], "http:")
    scheme = endpoint.partition(":")[0].strip().lower()
    if insecure is None:
        insecure = environment.get(_ALL_SIGNALS + "INSECURE")
    has_tls = scheme != "http" if insecure is None else insecure.lower() != "true"
    if scheme != "https" and not has_tls:
        return ()
    return (_ALL_SIGNALS,) if is_insecure else (_TRACES, _ALL_SIGNALS)


def _check_tls_file(name: str, path: str) -> None:
    try:
        with open(path, "rb", opener=open_regular) as file:
            fault = "" if file.read(1) else "an empty file"
    except OSError as error:
        fault = f"{type(error).__name__}: {error.strerror}"
    if fault:
        raise ConfigError(
            name,
            wanted=f"a file in PEM at {path}",
            got=fault,
            fix="mount it there, or unset the variable",
        )


def _choose(name: str, value: str, *values: str) -> str:
    if value in values:
        return value
    raise ConfigError(
        name, wanted=" or ".join(values), got=repr(value), fix="set it to one of these, or unset it"
    )


def _read_ratio(sampler: str, root: str, argument: str) -> float:
    """Share of traces that a sampler samples by chance, 0..1."""
    if root in ("always_on", "always_off"):
        return float(root == "always_on")
    if root != "traceidratio":
        raise ConfigError(
            "OTEL_TRACES_SAMPLER",
            wanted="always_on, always_off or traceidratio, or one of them after parentbased_",
            got=repr(sampler),
            fix="set it to one of these, or unset it for parentbased_traceidratio",
        )
    try:
        ratio = float(argument) if argument else DEFAULT_RATIO
    except ValueError:
        ratio = math.nan
    if not 0.0 <= ratio <= 1.0:
        raise ConfigError(
            "OTEL_TRACES_SAMPLER_ARG",
            wanted="a share of requests from 0 to 1",
            got=repr(argument),
            fix="write 0.01 to trace one request in a hundred",
        )
    return ratio


def _read_count(environment: Mapping[str, str], name: str, default: int) -> int:
    value = environment.get(name, "")
    if not value:
        return default
    if value.isascii() and value.isdigit() and int(value):
        return int(value)
    raise ConfigError(
        name, wanted="a number of spans above 0", got=repr(value), fix=f"unset it for {default}"
    )
