import argparse
from operator import attrgetter

import pytest

from extproc.cli import flag_table, flags
from extproc.config import profile_builder, settings
from extproc.errors import ConfigError

ENDPOINTS = "--endpoints=10.0.0.1:8000"


def resolve(*words):
    parser = argparse.ArgumentParser(allow_abbrev=False, exit_on_error=False)
    flags.add(parser)
    args, args.unknown_flags = parser.parse_known_args(words)
    return flags.resolve(args)


#: Flag, its words, the setting it reaches and what is there then.
REACHES = [
    ("strategy", ["--strategy", "round-robin"], "scheduling.strategy", "round-robin"),
    ("host", ["--host", "127.0.0.1"], "server.host", "127.0.0.1"),
    ("grpc-port", ["--grpc-port", "1"], "server.grpc_port", 1),
    ("grpc-health-port", ["--grpc-health-port=2"], "server.grpc_health_port", 2),
    ("metrics-port", ["-metrics-port", "3"], "server.metrics_port", 3),
    ("metrics-endpoint-auth", ["--metrics-endpoint-auth"], "server.metrics_endpoint_auth", True),
    (
        "metrics-endpoint-auth",
        ["--metrics-endpoint-auth=false"],
        "server.metrics_endpoint_auth",
        False,
    ),
    ("secure-serving", ["--secure-serving=false"], "server.secure_serving", False),
    ("secure-serving", ["--secure-serving", "false"], "server.secure_serving", False),
    ("secure-serving", ["-secure-serving=false"], "server.secure_serving", False),
    ("secure-serving", ["--secure-serving"], "server.secure_serving", True),
    ("cert-path", ["--cert-path", "/certs"], "server.cert_path", "/certs"),
    ("enable-cert-reload", ["--enable-cert-reload=f"], "server.enable_cert_reload", False),
    ("health-checking", ["--health-checking=false"], "server.health_checking", False),
    ("drain-timeout", ["--drain-timeout", "1m30s"], "server.drain_timeout_s", 90.0),
    ("transport", ["--transport", "grpcio"], "server.transport", "grpcio"),
    ("xds", ["--xds"], "xds.enabled", True),
    ("xds-port", ["--xds-port", "0"], "xds.port", 0),
    ("kubeconfig", ["--kubeconfig", "f"], "cluster.kubeconfig", "f"),
    (
        "ha-enable-leader-election",
        ["--ha-enable-leader-election"],
        "cluster.leader_election",
        True,
    ),
    ("allow-unsupported", ["--allow-unsupported"], "scheduling.allow_unsupported", True),
    ("fallback-endpoints", ["--fallback-endpoints", "2"], "scheduling.fallbacks", 2),
    (
        "disable-endpoint-subset-filter",
        ["--disable-endpoint-subset-filter"],
        "scheduling.respect_subset",
        False,
    ),
    ("emit-endpoint-scores", ["--emit-endpoint-scores"], "decisions.scores", True),
    (
        "refresh-metrics-interval",
        ["--refresh-metrics-interval=100ms"],
        "scrape.busy_interval_s",
        0.1,
    ),
    (
        "metrics-staleness-threshold",
        ["--metrics-staleness-threshold=3s"],
        "scrape.stale_after_s",
        3.0,
    ),
    ("model-server-metrics-port", ["--model-server-metrics-port=9400"], "scrape.port", 9400),
    ("model-server-metrics-path", ["--model-server-metrics-path", "/m"], "scrape.path", "/m"),
    (
        "model-server-metrics-https-insecure-skip-verify",
        ["--model-server-metrics-https-insecure-skip-verify=false"],
        "scrape.verify_tls",
        True,
    ),
    (
        "model-server-metrics-scheme",
        ["--model-server-metrics-scheme=https"],
        "scrape.scheme",
        "https",
    ),
    (
        "grpc-max-recv-msg-size",
        ["--grpc-max-recv-msg-size", "70Mi"],
        "limits.max_message_bytes",
        70 * 1024 * 1024,
    ),
    ("grpc-max-recv-msg-size", ["--grpc-max-recv-msg-size="], "limits.max_message_bytes", 36 << 20),
    ("tls-min-version", ["--tls-min-version=VersionTLS13"], "server.tls_min_version", "1.3"),
    ("tls-min-version", ["--tls-min-version="], "server.tls_min_version", "1.2"),
    (
        "tls-cipher-suites",
        ["--tls-cipher-suites", "TLS_ECDHE_RSA_WITH_AES_128_GCM_SHA256, TLS_AES_128_GCM_SHA256"],
        "server.tls_cipher_suites",
        "ECDHE-RSA-AES128-GCM-SHA256:TLS_AES_128_GCM_SHA256",
    ),
    ("conformance-testing", ["--conformance-testing=true"], "conformance", True),
    ("seed", ["--seed", "5"], "seed", 5),
    ("v", ["-v", "4"], "log.level", "debug"),
    ("v", ["--v=2"], "log.level", "info"),
    ("v", ["--v=-1"], "log.level", "info"),
    ("zap-log-level", ["--zap-log-level=warn"], "log.level", "warning"),
    ("zap-log-level", ["--zap-log-level=ERROR"], "log.level", "error"),
    ("zap-log-level", ["--zap-log-level=panic"], "log.level", "error"),
    ("zap-log-level", ["--zap-log-level=1"], "log.level", "debug"),
    ("zap-devel", ["--zap-devel"], "log.level", "debug"),
    ("zap-devel", ["--zap-devel=false"], "log.level", "info"),
    ("zap-devel", ["--zap-devel", "true", "-v", "2"], "log.level", "info"),
    ("zap-encoder", ["--zap-encoder=json"], "log.format", "json"),
    ("zap-encoder", ["--zap-encoder", "console"], "log.format", "text"),
    ("zap-encoder", ["--zap-encoder=json", "--log-format=text"], "log.format", "text"),
    ("log-level", ["-v=5", "--log-level", "error"], "log.level", "error"),
    ("log-format", ["--log-format=json"], "log.format", "json"),
    ("log-requests", ["--log-requests", "errors"], "log.requests", "errors"),
    ("tracing", ["--tracing"], "tracing.enabled", True),
    ("tracing", ["--tracing=false"], "tracing.enabled", False),
]


@pytest.mark.parametrize(("name", "words", "path", "value"), REACHES)
def test_flag_reaches_its_setting(name, words, path, value):
    """Each flag sets what it names."""
    resolved = resolve(ENDPOINTS, *words)
    assert attrgetter(path)(resolved.settings) == value
    assert any(flag.name == name for flag in flag_table.FLAGS)


def test_every_flag_is_in_the_table_above():
    """No flag is taken whose effect is not shown to exist."""
    assert {flag.name for flag in flag_table.FLAGS} == {name for name, *_ in REACHES}


def test_every_path_is_a_setting():
    """The table of flags names settings that exist."""
    for flag in flag_table.FLAGS:
        attrgetter(".".join(flag.path))(settings.Settings())


def test_endpoints_repeat_and_split():
    """Endpoints may be given one by one, between commas, or both."""
    resolved = resolve("--endpoints", "a:1,b:2", "-endpoints=c:3")
    assert resolved.settings.pool.endpoints == ("a:1", "b:2", "c:3")


def test_endpoints_beat_both_sources_of_the_file():
    """A list on the command line takes the place of the file's list and of its endpoints file."""
    text = '{"apiVersion": "extproc/v1alpha1", "kind": "ExtProcConfig", "pool": {"endpoints_file": "f"}}'
    pool = resolve("--config-text", text, ENDPOINTS).settings.pool
    assert pool.endpoints == ("10.0.0.1:8000",)
    assert not pool.endpoints_file
    pool = resolve("--config-text", text, "--endpoints-file", "g").settings.pool
    assert pool.endpoints_file == "g"


def test_strategy_beats_a_written_profile():
    """A word on the command line takes the place of the profile written out in the file."""
    text = (
        '{"apiVersion": "extproc/v1alpha1", "kind": "ExtProcConfig", "scheduling": {"profile": {}}}'
    )
    assert resolve("--config-text", text, ENDPOINTS).profile.name == "custom"
    assert resolve("--config-text", text, ENDPOINTS, "--strategy=random").profile.name == "random"


REFUSED = {
    "no port": (["--endpoints", "10.0.0.1"], "--endpoints", "add the port"),
    "endpoint twice": (["--endpoints", "a:1,a:1"], "--endpoints", "remove one"),
    "two sources": ([ENDPOINTS, "--endpoints-file", "f"], "--endpoints-file", "keep one"),
    "two configurations": (["--config-file=a", "--config-text=b"], "--config-text", "one of them"),
    "selector": (["--endpoint-selector", "app=x"], "--endpoint-selector", "one of them"),
    "metrics TLS": (["--metrics-cert-dir=/c"], "--metrics-cert-dir", "NetworkPolicy"),
    "cipher": (["--tls-cipher-suites=X"], "--tls-cipher-suites", "TLS_ECDHE_RSA_WITH_AES_128_GCM"),
    "mistyped cipher": (
        ["--tls-cipher-suites=TLS_AES_128_GCM_SHA256,TLS_ECDHE_RSA_WITH_AES_128_GCM_SHA"],
        "--tls-cipher-suites",
        "did you mean TLS_ECDHE_RSA_WITH_AES_128_GCM_SHA256?",
    ),
    "cipher of old": (["--tls-cipher-suites=TLS_RSA_WITH_RC4_128_SHA"], "--tls-cipher-suites", ""),
    "TLS 1.1": (["--tls-min-version=VersionTLS11"], "--tls-min-version", "HTTP/2 needs TLS 1.2"),
    "TLS 1.3 of grpcio": (
        ["--transport=grpcio", "--tls-min-version=VersionTLS13"],
        "server.transport",
        "set it to native",
    ),
    "ciphers of grpcio": (
        ["--transport=grpcio", "--tls-cipher-suites=TLS_RSA_WITH_AES_128_GCM_SHA256"],
        "server.transport",
        "GRPC_SSL_CIPHER_SUITES",
    ),
    "negative size": (["--grpc-max-recv-msg-size=-1"], "--grpc-max-recv-msg-size", "64Mi"),
    "range": (["--grpc-port", "70000"], "--grpc-port", "change the value"),
    "negative fallbacks": (["--fallback-endpoints=-1"], "--fallback-endpoints", "change"),
    "word": (["--log-level", "loud"], "--log-level", "debug"),
    "strategy": (["--strategy", "randon"], "--strategy", "random"),
    "typing error": (["--grpc-prot", "1"], "--grpc-prot", "--grpc-port"),
    "camel case of old": (["--poolName", "p"], "--poolName", "--pool-name"),
    "stray word": (["serve"], "serve", "remove it"),
    "not together": (["--refresh-metrics-interval=9s"], "--refresh-metrics-interval", "raise"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_an_unsupported_flag_is_refused_with_a_fix(name):
    """An unsupported flag is refused by its name, with an alternative."""
    words, where, fix = REFUSED[name]
    arguments = (
        words if words[0].startswith(("--endpoints", "--pool-name")) else [ENDPOINTS, *words]
    )
    with pytest.raises(ConfigError) as raised:
        resolve(*arguments)
    assert where in raised.value.where
    assert fix in raised.value.fix


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("total-queued-requests-metric", "vllm:num_requests_waiting"),
        ("total-running-requests-metric", "vllm:num_requests_running"),
        ("kv-cache-usage-percentage-metric", "sglang:token_usage"),
        ("lora-info-metric", ""),
        ("cache-info-metric", "vllm:cache_config_info"),
    ],
)
def test_deprecated_metric_flags_give_a_warning(name, value):
    """A Deployment that sets one starts; engines are recognised by their own metrics."""
    resolved = resolve(ENDPOINTS, f"--{name}={value}")
    (warning,) = resolved.warnings
    assert warning.startswith(f"--{name} has no effect: engines are recognised")


def with_handler(handler):
    return (
        "{apiVersion: llm-d.ai/v1alpha1, kind: EndpointPickerConfig, plugins: "
        f"[{{type: {handler}}}, {{type: decode-filter}}, {{type: prefill-filter}}, "
        "{type: max-score-picker}], schedulingProfiles: "
        "[{name: prefill, plugins: [{pluginRef: prefill-filter}]}, "
        "{name: decode, plugins: [{pluginRef: decode-filter}]}]}"
    )


@pytest.mark.parametrize(
    "handler",
    [
        "disagg-profile-handler, parameters: {deciders: {prefill: a}}",
        "disagg-profile-handler, parameters: {encodeDeciderPluginName: a}",
        "pd-profile-handler, parameters: {deciderPluginName: a}",
    ],
)
def test_a_decider_that_is_no_plugin_is_refused(handler):
    """Upstream does not start either."""
    with pytest.raises(ConfigError) as raised:
        resolve(ENDPOINTS, "--config-text", with_handler(handler))
    assert raised.value.wanted == "a decider among the plugins of the file"
    assert raised.value.got == "a"


SCREENER = """apiVersion: llm-d.ai/v1alpha1
kind: EndpointPickerConfig
plugins:
- type: disaggregatedset-rollout-screener
  parameters:
    scope: {labelSelector: a=b}
    headerSelectors: [{name: revision, headerName: x-revision, labelKey: revision, mode: MODE}]
"""


def test_strict_selectors_are_refused_unless_allowed():
    """Requests for a revision would reach all of them."""
    text = SCREENER.replace("MODE", "strict")
    with pytest.raises(ConfigError) as raised:
        resolve(ENDPOINTS, "--config-text", text)
    assert raised.value.where.endswith("plugins[0].parameters.headerSelectors[0]")
    assert "the header x-revision" in raised.value.got
    assert "--allow-unsupported" in raised.value.fix
    assert resolve(ENDPOINTS, "--config-text", text, "--allow-unsupported")


def test_selectors_that_prefer_are_accepted():
    """They exclude no endpoint upstream either."""
    text = SCREENER.replace("MODE", "prefer")
    assert resolve(ENDPOINTS, "--config-text", text)
    with pytest.raises(ConfigError, match="strict"):
        resolve(ENDPOINTS, "--config-text", text.replace("prefer", "other"))


@pytest.mark.parametrize(
    "parameters", ["{}", '{deciders: {prefill: ""}}', "{stageOrder: decode-first}"]
)
def test_a_handler_without_deciders_is_accepted(parameters):
    """As upstream, the profile for decoding then routes every request, and no other one runs."""
    handler = f"disagg-profile-handler, parameters: {parameters}"
    resolved = resolve(ENDPOINTS, "--config-text", with_handler(handler))
    profile = profile_builder.build_profile(resolved.settings, where="--config-text")
    assert profile.name == "decode"
    assert [plugin.kind for plugin in profile.filters] == ["decode-filter"]


@pytest.mark.parametrize(
    ("parameters", "key"),
    [
        ("{deciders: {prefil: a}}", "deciders.prefil"),
        ("{deciders: {prefill: 3}}", "deciders.prefill"),
        ("{deciders: x}", "deciders"),
        ("{stageOrder: first}", "stageOrder"),
        ("{profiles: {decode: 3}}", "profiles.decode"),
        ("{profiles: {decode: decode}, prefillProfile: prefill}", "prefillProfile"),
    ],
)
def test_misspelt_parameters_of_a_handler_are_refused(parameters, key):
    """As upstream; otherwise engines would idle after a slip of the pen."""
    handler = f"disagg-profile-handler, parameters: {parameters}"
    with pytest.raises(ConfigError, match=rf"plugins\[0\]\.parameters\.{key}: expected"):
        resolve(ENDPOINTS, "--config-text", with_handler(handler))


#: A usual command line of the upstream picker.
UPSTREAM = [
    *("--pool-name", "llama", "--pool-namespace", "", "--grpc-port=9002", "--v", "2"),
    *("--grpc-health-port", "9003", "--metrics-port=9090", "--secure-serving=true"),
    *("--drain-timeout=30s", "--ha-enable-leader-election=false", "--emit-endpoint-scores=false"),
    *("--metrics-endpoint-auth=false", "--refresh-metrics-interval=50ms", "--cert-path="),
    *("--grpc-max-recv-msg-size=", "--tracing=false", "--enable-pprof=false"),
    *("--enable-grpc-stream-metrics=true", "--tls-min-version=VersionTLS12", "-health-checking"),
]


def test_upstream_command_line_is_accepted_without_warnings():
    """Arguments of an upstream Deployment that ask for nothing we lack need no editing."""
    resolved = resolve(ENDPOINTS, *UPSTREAM)
    assert resolved.settings.pool.name == "llama"
    assert not resolved.warnings


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["--zap-stacktrace-level=error"], "--zap-stacktrace-level has"),
        (["--log_file", "x"], "--log_file has"),
        (["--zap_time_encoding", "iso8601"], "--zap_time_encoding"),
        (["-logtostderr"], "-logtostderr"),
        (["--vmodule=a=1"], "--vmodule"),
        (["--stderrthreshold", "2"], "--stderrthreshold"),
        (["--enable-pprof=true"], "profiler"),
        (["--pool-namespace=prod"], "Kubernetes"),
        (["--grpc-max-send-msg-size=1"], "64 KiB"),
        (["--refresh-prometheus-metrics-interval=5s"], "when it is asked for"),
        (["--allow-experimental-plugins"], "every plugin"),
        (["--refresh-metrics-interval=1ms"], "50ms is used"),
    ],
)
def test_harmless_flag_warns_once(words, expected):
    """A flag that changes nothing a client sees is named in one warning, and we start."""
    (warning,) = resolve(ENDPOINTS, *words).warnings
    assert expected in warning


def test_short_refresh_is_clamped():
    """A refresh interval below 50 ms becomes 50 ms, as in the upstream picker."""
    resolved = resolve(ENDPOINTS, "--refresh-metrics-interval=1ms")
    assert resolved.settings.scrape.busy_interval_s == 0.05


@pytest.mark.parametrize(
    ("word", "expected"),
    [
        ("--v=x", "--v: expected a whole number, got 'x'"),
        ("--v=²", "--v: expected a whole number, got '²'"),
        ("--zap-log-level=loud", "panic or a number above 0, got 'loud'"),
        ("--zap-log-level=²", "panic or a number above 0, got '²'"),
        ("--zap-log-level=0", "panic or a number above 0, got '0'"),
        ("--zap-encoder=xml", "--zap-encoder: expected console or json, got 'xml'"),
    ],
)
def test_a_log_flag_that_upstream_refuses_is_refused(word, expected):
    """The error names the values, as a level that is misspelt would hide what is looked for."""
    with pytest.raises(ConfigError) as raised:
        resolve(ENDPOINTS, word)
    assert expected in str(raised.value)


def test_an_encoder_beats_the_file():
    """As every flag does."""
    text = "{apiVersion: extproc/v1alpha1, kind: ExtProcConfig, log: {format: json}}"
    resolved = resolve(ENDPOINTS, "--config-text", text, "--zap-encoder=console")
    assert resolved.settings.log.format == "text"
