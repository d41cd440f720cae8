"""The environment variables of OpenTelemetry, and what they turn on."""

from collections import Counter

import pytest

from extproc.config.tracing import TracePlan, TracingSection, build_traces, plan_traces
from extproc.errors import ConfigError

ENDPOINT = {"OTEL_EXPORTER_OTLP_ENDPOINT": "http://collector:4317"}
SECURE = {"OTEL_EXPORTER_OTLP_ENDPOINT": "https://collector:4317"}


def plan(enabled=None, **environment):
    return plan_traces(TracingSection(enabled=enabled), environment)


def test_defaults_are_those_of_upstream():
    """An endpoint turns traces on: a tenth of those that no caller decided, over gRPC."""
    expected = TracePlan("otlp", "grpc", 0.1, True, 2048, 512)
    assert plan(**ENDPOINT) == expected
    assert plan(OTEL_EXPORTER_OTLP_TRACES_ENDPOINT="http://collector:4317") == expected
    assert plan(OTEL_TRACES_EXPORTER="otlp") == expected
    assert plan(enabled=True) == expected


@pytest.mark.parametrize(
    ("enabled", "environment"),
    [
        (None, {}),
        (None, {"OTEL_EXPORTER_OTLP_ENDPOINT": ""}),
        (None, {"OTEL_SERVICE_NAME": "picker"}),
        (False, ENDPOINT),
        (None, {**ENDPOINT, "OTEL_TRACES_EXPORTER": "none"}),
        (True, {"OTEL_TRACES_EXPORTER": "none"}),
        (True, {**ENDPOINT, "OTEL_SDK_DISABLED": "true"}),
        (None, {**ENDPOINT, "OTEL_SDK_DISABLED": "TRUE"}),
        (None, {**ENDPOINT, "OTEL_TRACES_SAMPLER": "always_off"}),
    ],
)
def test_nothing_is_traced(enabled, environment):
    """Without a receiver, or where traces are turned off, there is no plan."""
    assert plan(enabled, **environment) is None


@pytest.mark.parametrize(
    ("sampler", "argument", "ratio", "is_parent_based"),
    [
        ("always_on", "", 1.0, False),
        ("traceidratio", "0.25", 0.25, False),
        ("traceidratio", "", 0.1, False),
        ("parentbased_always_on", "0.5", 1.0, True),
        ("parentbased_always_off", "", 0.0, True),
        ("parentbased_traceidratio", "0", 0.0, True),
        ("", "1", 1.0, True),
    ],
)
def test_samplers(sampler, argument, ratio, is_parent_based):
    """Every sampler of the specification that needs no other service."""
    planned = plan(OTEL_TRACES_SAMPLER=sampler, OTEL_TRACES_SAMPLER_ARG=argument, **ENDPOINT)
    assert (planned.ratio, planned.is_parent_based) == (ratio, is_parent_based)


@pytest.mark.parametrize(
    ("environment", "protocol"),
    [
        ({"OTEL_EXPORTER_OTLP_PROTOCOL": "http/protobuf"}, "http/protobuf"),
        (
            {
                "OTEL_EXPORTER_OTLP_PROTOCOL": "http/protobuf",
                "OTEL_EXPORTER_OTLP_TRACES_PROTOCOL": "grpc",
            },
            "grpc",
        ),
    ],
)
def test_protocols(environment, protocol):
    """The protocol of traces beats that of all signals."""
    assert plan(**ENDPOINT, **environment).protocol == protocol


def test_size_of_the_queue():
    """The bound of waiting spans is that of the batch processor."""
    planned = plan(**ENDPOINT, OTEL_BSP_MAX_QUEUE_SIZE="10")
    assert (planned.max_queued_spans, planned.max_batch_spans) == (10, 10)
    planned = plan(**ENDPOINT, OTEL_BSP_MAX_EXPORT_BATCH_SIZE="10")
    assert (planned.max_queued_spans, planned.max_batch_spans) == (2048, 10)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("OTEL_TRACES_EXPORTER", "zipkin"),
        ("OTEL_EXPORTER_OTLP_PROTOCOL", "http/json"),
        ("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "carrier-pigeon"),
        ("OTEL_TRACES_SAMPLER", "jaeger_remote"),
        ("OTEL_TRACES_SAMPLER_ARG", "10"),
        ("OTEL_TRACES_SAMPLER_ARG", "nan"),
        ("OTEL_TRACES_SAMPLER_ARG", "-0.1"),
        ("OTEL_TRACES_SAMPLER_ARG", "ten"),
        ("OTEL_BSP_MAX_QUEUE_SIZE", "0"),
        ("OTEL_BSP_MAX_QUEUE_SIZE", "many"),
    ],
)
def test_unsupported_values_are_refused(name, value):
    """A value that would be ignored is an error that names its variable."""
    with pytest.raises(ConfigError, match=name):
        plan(**{**ENDPOINT, name: value})


@pytest.mark.parametrize("prefix", ["OTEL_EXPORTER_OTLP_", "OTEL_EXPORTER_OTLP_TRACES_"])
@pytest.mark.parametrize("suffix", ["CERTIFICATE", "CLIENT_KEY", "CLIENT_CERTIFICATE"])
@pytest.mark.parametrize("name", ["missing.pem", "empty.pem", "."])
def test_tls_files_that_cannot_be_read_are_refused(tmp_path, prefix, suffix, name):
    """The exporter would go on without them, or end the process."""
    (tmp_path / "empty.pem").touch()
    with pytest.raises(ConfigError, match=f"{prefix}{suffix}"):
        plan(**{**SECURE, prefix + suffix: str(tmp_path / name)})


@pytest.mark.parametrize("prefix", ["OTEL_EXPORTER_OTLP_", "OTEL_EXPORTER_OTLP_TRACES_"])
@pytest.mark.parametrize(
    ("suffix", "missing"),
    [("CLIENT_KEY", "CLIENT_CERTIFICATE"), ("CLIENT_CERTIFICATE", "CLIENT_KEY")],
)
def test_half_a_client_certificate_is_refused(tmp_path, prefix, suffix, missing):
    """The core of gRPC aborts over a key without a chain, and over a chain without a key."""
    file = tmp_path / "client.pem"
    file.write_text("pem")
    with pytest.raises(ConfigError, match=f"^{prefix}{missing}"):
        plan(**{**SECURE, prefix + suffix: str(file)})
    both = {prefix + suffix: str(file), prefix + missing: str(file)}
    assert plan(**SECURE, **both) is not None
    # A chain may hold its key.
    over_http = {"OTEL_EXPORTER_OTLP_PROTOCOL": "http/protobuf", prefix + suffix: str(file)}
    assert plan(**SECURE, **over_http) is not None


_PLAIN = "http://collector:4317"
_TLS = "https://collector:4317"


@pytest.mark.parametrize(
    ("environment", "refused"),
    [
        ({"ENDPOINT": _PLAIN, "CERTIFICATE": "/nope"}, ""),
        ({"ENDPOINT": _PLAIN, "CLIENT_KEY": "/nope"}, ""),
        ({"CERTIFICATE": "/nope"}, ""),
        ({"ENDPOINT": "collector:4317", "INSECURE": "True", "CERTIFICATE": "/nope"}, ""),
        ({"ENDPOINT": "collector:4317", "TRACES_INSECURE": "true", "CERTIFICATE": "/nope"}, ""),
        ({"ENDPOINT": _PLAIN, "TRACES_INSECURE": "true", "TRACES_CERTIFICATE": "/nope"}, ""),
        ({"ENDPOINT": _TLS, "TRACES_ENDPOINT": _PLAIN, "CERTIFICATE": "/nope"}, ""),
        ({"ENDPOINT": _TLS, "TRACES_INSECURE": "true", "TRACES_CERTIFICATE": "/nope"}, ""),
        ({"ENDPOINT": _TLS, "TRACES_CERTIFICATE": __file__, "CERTIFICATE": "/nope"}, ""),
        ({"ENDPOINT": "collector:4317", "CERTIFICATE": "/nope"}, "CERTIFICATE"),
        ({"ENDPOINT": _PLAIN, "INSECURE": "false", "CERTIFICATE": "/nope"}, "CERTIFICATE"),
        (
            {
                "ENDPOINT": _PLAIN,
                "INSECURE": "true",
                "TRACES_INSECURE": "false",
                "CERTIFICATE": "/nope",
            },
            "CERTIFICATE",
        ),
        ({"ENDPOINT": _TLS, "INSECURE": "true", "CERTIFICATE": "/nope"}, "CERTIFICATE"),
        ({"ENDPOINT": _PLAIN, "TRACES_ENDPOINT": _TLS, "CERTIFICATE": "/nope"}, "CERTIFICATE"),
        ({"ENDPOINT": _PLAIN, "TRACES_CERTIFICATE": "/nope"}, "TRACES_CERTIFICATE"),
        ({"PROTOCOL": "http/protobuf", "ENDPOINT": _PLAIN, "CERTIFICATE": "/nope"}, ""),
        (
            {
                "PROTOCOL": "http/protobuf",
                "ENDPOINT": _TLS,
                "TRACES_CERTIFICATE": __file__,
                "CERTIFICATE": "/nope",
            },
            "",
        ),
        ({"PROTOCOL": "http/protobuf", "ENDPOINT": _TLS, "CERTIFICATE": "/nope"}, "CERTIFICATE"),
        (
            {"PROTOCOL": "http/protobuf", "ENDPOINT": _PLAIN, "CLIENT_CERTIFICATE": "/nope"},
            "CLIENT_CERTIFICATE",
        ),
    ],
)
def test_tls_files_that_are_not_read_are_not_checked(environment, refused):
    """Endpoint and variables say which files the exporter reads."""
    environment = {f"OTEL_EXPORTER_OTLP_{name}": value for name, value in environment.items()}
    if not refused:
        assert plan(enabled=True, **environment) is not None
        return
    with pytest.raises(ConfigError, match=f"^OTEL_EXPORTER_OTLP_{refused}"):
        plan(enabled=True, **environment)


def test_value_that_the_exporter_refuses_is_an_error(monkeypatch):
    """Variables that only the exporter reads are errors of the configuration as well."""
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_COMPRESSION", "squeeze")
    with pytest.raises(ConfigError, match="squeeze"):
        build_traces(TracingSection(), ENDPOINT, clock=lambda: 0.0, counts=Counter())
