"""Table of flags: name, path of the setting it overrides, parser of its value.

Flags of the upstream EPP without a setting here have a table of their own. A value that means what we do
anyway is taken without a word. Any other is either named in one warning, where nothing a client or gateway
relies on is lost, or refused with what to do instead.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import cache
from typing import Any, Literal, get_args, get_origin

import msgspec

from extproc.cli import flag_values
from extproc.cli.flag_values import (
    FALSE,
    TRUE,
    boolean,
    seconds,
    size_bytes,
    text,
    whole_number,
)
from extproc.config import validation
from extproc.config.settings import Settings
from extproc.errors import ConfigError
from extproc.scheduling import registry

#: Below this many seconds the upstream picker clamps its refresh interval; so do we.
SHORTEST_REFRESH_S = 0.05

#: Verbosity from which the upstream picker logs at its debug level.
_DEBUG_VERBOSITY = 4

#: Words of zap, which takes them in upper case as well.
_ZAP_LEVELS = {
    "debug": "debug",
    "info": "info",
    "warn": "warning",
    "error": "error",
    "panic": "error",
}
_ZAP_ENCODERS = {"console": "text", "json": "json"}
_ABOVE_ZERO = re.compile(r"\+?0*[1-9][0-9]*")


class Flag(msgspec.Struct, frozen=True):
    """A flag that overrides a setting.

    Attributes:
        name: Without dashes.
        setting: Dotted path of the setting.
        read: Its text to a value, where the type of the setting's default does not say how; a value
            of None leaves the setting alone.
    """

    name: str
    setting: str
    text: str
    metavar: str = "BOOL"
    read: Callable[[str, str], object] | None = None

    @property
    def path(self) -> tuple[str, ...]:
        """Path of the setting."""
        return tuple(self.setting.split("."))

    @property
    def boolean(self) -> bool:
        """True if the flag may stand without a value."""
        return self.metavar == "BOOL"

    @property
    def reader(self) -> Callable[[str, str], object]:
        """Reader of the value, which takes the name of the flag and its text."""
        return self.read or _READERS[type(_default_value(self))]


_READERS: Mapping[type, Callable[[str, str], object]] = {
    bool: boolean,
    int: whole_number,
    float: seconds,
    str: text,
}


def _default_value(flag: Flag) -> Any:
    value: Any = Settings()
    for name in flag.path:
        value = getattr(value, name)
    return value


def _not(flag: str, text: str) -> bool:
    return not boolean(flag, text)


def _refresh(flag: str, text: str) -> float:
    return max(SHORTEST_REFRESH_S, seconds(flag, text))


def _size_if_any(flag: str, text: str) -> int | None:
    return size_bytes(flag, text) if text else None


def _port_if_any(flag: str, text: str) -> int | None:
    return (whole_number(flag, text) or None) if text else None


def _verbosity(flag: str, text: str) -> str:
    return "debug" if whole_number(flag, text) >= _DEBUG_VERBOSITY else "info"


def _zap(flag: str, text: str) -> str:
    if _ABOVE_ZERO.fullmatch(text):
        return "debug"
    if text.lower() in _ZAP_LEVELS:
        return _ZAP_LEVELS[text.lower()]
    raise ConfigError(
        flag,
        wanted=f"{', '.join(_ZAP_LEVELS)} or a number above 0",
        got=repr(text),
        fix="write one of them, or use --log-level instead",
    )


def _zap_development(flag: str, text: str) -> str | None:
    return "debug" if boolean(flag, text) else None


def _zap_encoder(flag: str, text: str) -> str:
    if text.lower() in _ZAP_ENCODERS:
        return _ZAP_ENCODERS[text.lower()]
    raise ConfigError(
        flag,
        wanted=" or ".join(_ZAP_ENCODERS),
        got=repr(text),
        fix="write one of them, or use --log-format instead",
    )


#: Readers of flags whose values have other words than the setting.
_WITHOUT_DEFAULT = frozenset({_verbosity, _zap_development, flag_values.read_version})


def default(flag: Flag) -> str:
    """The value of a flag that is not set, as it would be written; empty for none."""
    value = _default_value(flag)
    if flag.read is _not:
        value = not value
    if isinstance(value, bool):
        return str(value).lower()
    if value is None or value == "" or flag.read in _WITHOUT_DEFAULT:
        return ""
    return f"{value:g}s" if isinstance(value, float) else str(value)


def choices(flag: Flag) -> Sequence[str]:
    """The words that a flag takes; empty where it takes any."""
    if flag.path == ("scheduling", "strategy"):
        return tuple(registry.profiles())
    if flag.reader is not text:
        return ()
    kind: Any = Settings
    for name in flag.path:
        kind = _field_types(kind)[name]
    return tuple(map(str, get_args(kind))) if get_origin(kind) is Literal else ()


@cache
def _field_types(section: type[msgspec.Struct]) -> Mapping[str, Any]:
    """Types of fields by name; to evaluate them takes a part of what a start takes."""
    return {field.name: field.type for field in msgspec.structs.fields(section)}


FLAGS: Sequence[Flag] = (
    Flag("strategy", "scheduling.strategy", "scheduling strategy", "NAME"),
    Flag("host", "server.host", "address to listen on; empty for all", "IP"),
    Flag("grpc-port", "server.grpc_port", "ext_proc; 0 picks a free one", "PORT"),
    Flag("grpc-health-port", "server.grpc_health_port", "gRPC health", "PORT"),
    Flag("metrics-port", "server.metrics_port", "metrics and debug pages", "PORT"),
    Flag(
        "metrics-endpoint-auth",
        "server.metrics_endpoint_auth",
        "let only tokens that Kubernetes accepts read /metrics; off by default, unlike upstream",
        read=boolean,
    ),
    Flag("xds", "xds.enabled", "serve the endpoints to Envoy over xDS"),
    Flag("xds-port", "xds.port", "xDS; 0 picks a free one", "PORT"),
    Flag("secure-serving", "server.secure_serving", "ext_proc over TLS"),
    Flag("cert-path", "server.cert_path", "folder with tls.crt and tls.key", "FOLDER"),
    Flag(
        "enable-cert-reload",
        "server.enable_cert_reload",
        "read the certificate again when it changes",
    ),
    Flag(
        "tls-min-version",
        "server.tls_min_version",
        "oldest version of TLS: VersionTLS12, the default, or VersionTLS13",
        "VERSION",
        read=flag_values.read_version,
    ),
    Flag(
        "tls-cipher-suites",
        "server.tls_cipher_suites",
        "cipher suites of TLS 1.2, as Go names them, between commas",
        "NAMES",
        read=flag_values.read_suites,
    ),
    Flag("health-checking", "server.health_checking", "gRPC health on the ext_proc port too"),
    Flag("transport", "server.transport", "implementation of gRPC", "NAME"),
    Flag(
        "drain-timeout",
        "server.drain_timeout_s",
        "time from SIGTERM in which streams are served, in a pod in full",
        "DURATION",
    ),
    Flag("kubeconfig", "cluster.kubeconfig", "how to reach Kubernetes", "FILE"),
    Flag(
        "ha-enable-leader-election",
        "cluster.leader_election",
        "be ready only while holding a Lease",
    ),
    Flag(
        "allow-unsupported",
        "scheduling.allow_unsupported",
        "start although the file needs a missing feature, such as a strict header selector",
    ),
    Flag(
        "fallback-endpoints",
        "scheduling.fallbacks",
        "further endpoints that Envoy tries if the chosen one fails",
        "N",
    ),
    Flag(
        "disable-endpoint-subset-filter",
        "scheduling.respect_subset",
        "ignore the endpoints a gateway allows",
        read=_not,
    ),
    Flag(
        "emit-endpoint-scores",
        "decisions.scores",
        "send the scores of endpoints to Envoy as dynamic metadata",
    ),
    Flag(
        "refresh-metrics-interval",
        "scrape.busy_interval_s",
        "between scrapes of a busy endpoint, 50ms or more",
        "DURATION",
        read=_refresh,
    ),
    Flag(
        "metrics-staleness-threshold",
        "scrape.stale_after_s",
        "age at which a load counts as unknown",
        "DURATION",
    ),
    Flag("model-server-metrics-path", "scrape.path", "page to scrape", "PATH"),
    Flag(
        "model-server-metrics-port",
        "scrape.port",
        "port of that page; 0 for that of the endpoint",
        "PORT",
        read=_port_if_any,
    ),
    Flag("model-server-metrics-scheme", "scrape.scheme", "scheme of that page", "SCHEME"),
    Flag(
        "model-server-metrics-https-insecure-skip-verify",
        "scrape.verify_tls",
        "take any certificate of engines",
        read=_not,
    ),
    Flag(
        "grpc-max-recv-msg-size",
        "limits.max_message_bytes",
        "largest gRPC message",
        "BYTES",
        read=_size_if_any,
    ),
    Flag(
        "conformance-testing",
        "conformance",
        "accept the header of conformance tests that names an endpoint",
    ),
    Flag(
        "seed",
        "seed",
        "seed of all random draws; drawn from the system unless set",
        "N",
        read=whole_number,
    ),
    # Of the flags for a setting, the last of this table wins.
    Flag(
        "zap-devel",
        "log.level",
        "true is debug, unless a flag below names a level",
        read=_zap_development,
    ),
    Flag("v", "log.level", "verbosity; 4 and more is debug", "N", read=_verbosity),
    Flag("zap-log-level", "log.level", "the level by name, as zap has it", "LEVEL", read=_zap),
    Flag("log-level", "log.level", "least severe level that is logged", "LEVEL"),
    Flag("zap-encoder", "log.format", "json, or console, which is text", "WORD", read=_zap_encoder),
    Flag("log-format", "log.format", "format of log lines", "FORMAT"),
    Flag("log-requests", "log.requests", "requests with a line", "WHICH"),
    Flag(
        "tracing",
        "tracing.enabled",
        "send traces; by default where OTEL_EXPORTER_OTLP_ENDPOINT is set",
        read=boolean,
    ),
)


class CompatibleFlag(msgspec.Struct, frozen=True):
    """Flag of the upstream EPP.

    Attributes:
        name: Without dashes.
        accepted_values: Values that change nothing here.
        message: Text that says what to do instead, or why nothing has to be done.
        refused: Whether any other value ends the program; otherwise it is a warning.
    """

    name: str
    accepted_values: frozenset[str]
    message: str
    refused: bool = False

    @property
    def boolean(self) -> bool:
        """True if it may stand without a value, meaning true."""
        return not self.accepted_values.isdisjoint({"true", "false"})


_EMPTY = frozenset({""})
_NO_METRICS_TLS = "/metrics is served without TLS; guard its port with a NetworkPolicy"
_OTHER_METRIC = (
    "engines are recognised by the metrics they export, and another name is not looked for; it is "
    "deprecated upstream, too: remove it"
)

COMPATIBLE_FLAGS: Sequence[CompatibleFlag] = (
    CompatibleFlag(
        "grpc-max-send-msg-size", _EMPTY, "answers are sent in messages of 64 KiB at most"
    ),
    CompatibleFlag(
        "refresh-prometheus-metrics-interval",
        _EMPTY,
        "the metrics page is made when it is asked for",
    ),
    CompatibleFlag("metrics-cert-dir", _EMPTY, _NO_METRICS_TLS, refused=True),
    CompatibleFlag("metrics-client-ca-file", _EMPTY, _NO_METRICS_TLS, refused=True),
    CompatibleFlag("enable-pprof", FALSE, "there is no profiler page"),
    CompatibleFlag("enable-grpc-stream-metrics", TRUE | FALSE, "streams are always counted"),
    CompatibleFlag("allow-experimental-plugins", FALSE, "every plugin is allowed"),
    CompatibleFlag("total-queued-requests-metric", frozenset(), _OTHER_METRIC),
    CompatibleFlag("total-running-requests-metric", frozenset(), _OTHER_METRIC),
    CompatibleFlag("kv-cache-usage-percentage-metric", frozenset(), _OTHER_METRIC),
    CompatibleFlag("lora-info-metric", frozenset(), _OTHER_METRIC),
    CompatibleFlag("cache-info-metric", frozenset(), _OTHER_METRIC),
)

#: Log flags of Go programs without a value that do not have `log` or `zap` in their name.
_LOG_FLAGS = frozenset({"add-dir-header", "skip-headers", "one-output"})

#: Log flags that take a value, which may be the next word.
VALUED_LOG_FLAGS = (
    *("log-backtrace-at", "log-dir", "log-file", "log-file-max-size", "log-flush-frequency"),
    *("stderrthreshold", "vmodule", "zap-stacktrace-level", "zap-time-encoding"),
)


def compatibility_warnings(args: argparse.Namespace) -> Iterator[str]:
    """A warning for each flag that has no effect.

    Raises:
        ConfigError: A flag asks for something that must not silently be missing.
    """
    for flag in COMPATIBLE_FLAGS:
        value: str | None = getattr(args, flag.name.replace("-", "_"))
        if value is None or value in flag.accepted_values:
            continue
        if flag.refused:
            raise ConfigError(
                f"--{flag.name}", wanted=_accepted_text(flag), got=repr(value), fix=flag.message
            )
        yield f"--{flag.name} has no effect: {flag.message}"


def unknown_flag_warnings(words: Sequence[str], *, known: Iterable[str]) -> Iterator[str]:
    """Warnings for log flags among unknown words.

    Raises:
        ConfigError: A word is no log flag.
    """
    names = list(known)
    value_may_follow = False
    for word in words:
        name, equals, _ = word.lstrip("-").partition("=")
        name = name.replace("_", "-")
        if word.startswith("-") and _log_flag(name):
            yield log_flag_warning(word)
            value_may_follow = not equals
        elif value_may_follow and not word.startswith("-"):
            value_may_follow = False
        else:
            raise _unknown_flag_error(word, name, names)


def log_flag_warning(word: str) -> str:
    """A warning for a log flag of Go programs."""
    return f"{word} has no effect: logging is set with --log-level"


def _accepted_text(flag: CompatibleFlag) -> str:
    if flag.boolean:
        return "false" if "false" in flag.accepted_values else "true"
    named = sorted(flag.accepted_values - _EMPTY)
    return f"nothing or {named[0]}" if named else "nothing"


def _log_flag(name: str) -> bool:
    return name in _LOG_FLAGS or "log" in name or name.startswith("zap")


def _unknown_flag_error(word: str, name: str, known: Sequence[str]) -> ConfigError:
    if not word.startswith("-"):
        return ConfigError(
            word, wanted="flags only", got="a word that belongs to none", fix="remove it"
        )
    return ConfigError(
        word,
        wanted="a flag of this command",
        got="an unknown one",
        fix=validation.suggest(f"--{name}", [f"--{flag}" for flag in known], "see --help"),
    )
