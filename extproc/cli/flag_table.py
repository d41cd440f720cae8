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

from extproc.config import validation
from extproc.config.settings import Settings
from extproc.errors import ConfigError
from extproc.scheduling import registry

#: Below this many seconds the upstream picker clamps its refresh interval; so do we.
SHORTEST_REFRESH_S = 0.05

#: Verbosity from which the upstream picker logs at its debug level.
_DEBUG_VERBOSITY = 4

_ZAP_LEVELS = {"debug": "debug", "info": "info", "warn": "warning", "error": "error"}
_ZAP_ENCODERS = {"console": "text", "json": "json"}


_PLAIN = re.compile(r"\d+(\.\d*)?|\.\d+")
_SIZE = re.compile(r"(\d+)\s*([kKMG]?)(i?)(B?)")
_POWER = {"": 0, "k": 1, "K": 1, "M": 2, "G": 3}
_TRUE = frozenset({"1", "t", "T", "true", "TRUE", "True"})
_FALSE = frozenset({"0", "f", "F", "false", "FALSE", "False"})


def text(_: str, value: str) -> str:
    """The text itself."""
    return value


def seconds(flag: str, value: str) -> float:
    """A Go duration such as `1m30s` or `50ms`, or plain seconds.

    Raises:
        ConfigError: It is neither.
    """
    if _PLAIN.fullmatch(value):
        return float(value)
    duration_s = validation.parse_duration(value)
    if duration_s is None:
        raise ConfigError(
            flag, wanted="a duration", got=repr(value), fix="write 30s, 1m30s, 50ms or seconds"
        )
    return duration_s


def size_bytes(flag: str, value: str) -> int:
    """Bytes, with k, M, G (powers of 1000) or Ki, Mi, Gi (powers of 1024).

    Raises:
        ConfigError: It is no size.
    """
    split = _SIZE.fullmatch(value)
    if not split:
        raise ConfigError(
            flag, wanted="a size in bytes", got=repr(value), fix="write 67108864 or 64Mi"
        )
    number, prefix, binary, _ = split.groups()
    return int(number) * int((1024 if binary else 1000) ** _POWER[prefix])


def boolean(flag: str, value: str) -> bool:
    """Boolean in any form that Go's ParseBool accepts.

    Raises:
        ConfigError: It is neither true nor false.
    """
    if value in _TRUE:
        return True
    if value in _FALSE:
        return False
    raise ConfigError(
        flag, wanted="true or false", got=repr(value), fix=f"write {flag}=true or {flag}=false"
    )


def whole_number(flag: str, value: str) -> int:
    """A whole number.

    Raises:
        ConfigError: It is none.
    """
    if re.fullmatch(r"-?[0-9]+", value):
        return int(value)
    raise ConfigError(flag, wanted="a whole number", got=repr(value), fix="write digits only")


def listed(_: str, value: str) -> list[str]:
    """Words between commas; empty ones do not count."""
    return [word.strip() for word in value.split(",") if word.strip()]


class Flag(msgspec.Struct, frozen=True):
    """One flag.

    Attributes:
        name: Without dashes.
        path: The setting it beats.
        read: Its text to a value; None leaves the setting alone.
    """

    name: str
    path: tuple[str, ...]
    read: Callable[[str, str], object]
    text: str
    metavar: str

    @property
    def boolean(self) -> bool:
        """True if the flag may stand without a value."""
        return self.metavar == "BOOL"


def _not(flag: str, text: str) -> bool:
    return not boolean(flag, text)


def _refresh(flag: str, text: str) -> float:
    return max(SHORTEST_REFRESH_S, seconds(flag, text))


def _size_if_any(flag: str, text: str) -> int | None:
    return size_bytes(flag, text) if text else None


def _verbosity(_: str, text: str) -> str | None:
    if not text.isdigit():
        return None
    return "debug" if int(text) >= _DEBUG_VERBOSITY else "info"


def _zap(_: str, text: str) -> str | None:
    return "debug" if text.isdigit() and int(text) else _ZAP_LEVELS.get(text)


def _zap_development(flag: str, text: str) -> str | None:
    return "debug" if boolean(flag, text) else None


def _zap_encoder(_: str, text: str) -> str | None:
    return _ZAP_ENCODERS.get(text)


def default(flag: Flag) -> str:
    """The value of a flag that is not set, as it would be written; empty for none."""
    value: Any = Settings()
    for name in flag.path:
        value = getattr(value, name)
    if flag.read is _not:
        value = not value
    if isinstance(value, bool):
        return str(value).lower()
    if value is None or value == "" or flag.read in {_verbosity, _zap_development}:
        return ""
    return f"{value:g}s" if isinstance(value, float) else str(value)


def choices(flag: Flag) -> Sequence[str]:
    """The words that a flag takes; empty where it takes any."""
    if flag.path == ("scheduling", "strategy"):
        return tuple(registry.profiles())
    if flag.read is not _text:
        return ()
    kind: Any = Settings
    for name in flag.path:
        kind = _field_types(kind)[name]
    return tuple(map(str, get_args(kind))) if get_origin(kind) is Literal else ()


@cache
def _field_types(section: type[msgspec.Struct]) -> Mapping[str, Any]:
    """Types of fields by name; to evaluate them takes a part of what a start takes."""
    return {field.name: field.type for field in msgspec.structs.fields(section)}


_SERVER = ("server",)
_text, _seconds, _boolean, _integer = (
    text,
    seconds,
    boolean,
    whole_number,
)

FLAGS: Sequence[Flag] = (
    Flag("strategy", ("scheduling", "strategy"), _text, "scheduling strategy", "NAME"),
    Flag("host", (*_SERVER, "host"), _text, "address to listen on; empty for all", "IP"),
    Flag("grpc-port", (*_SERVER, "grpc_port"), _integer, "ext_proc; 0 picks a free one", "PORT"),
    Flag("grpc-health-port", (*_SERVER, "grpc_health_port"), _integer, "gRPC health", "PORT"),
    Flag("metrics-port", (*_SERVER, "metrics_port"), _integer, "metrics and debug pages", "PORT"),
    Flag("xds", ("xds", "enabled"), _boolean, "serve the endpoints to Envoy over xDS", "BOOL"),
    Flag("xds-port", ("xds", "port"), _integer, "xDS; 0 picks a free one", "PORT"),
    Flag("secure-serving", (*_SERVER, "secure_serving"), _boolean, "ext_proc over TLS", "BOOL"),
    Flag("cert-path", (*_SERVER, "cert_path"), _text, "folder with tls.crt and tls.key", "FOLDER"),
    Flag(
        "enable-cert-reload",
        (*_SERVER, "enable_cert_reload"),
        _boolean,
        "read the certificate again when it changes",
        "BOOL",
    ),
    Flag(
        "health-checking",
        (*_SERVER, "health_checking"),
        _boolean,
        "gRPC health on the ext_proc port too",
        "BOOL",
    ),
    Flag("transport", (*_SERVER, "transport"), _text, "implementation of gRPC", "NAME"),
    Flag(
        "drain-timeout",
        (*_SERVER, "drain_timeout_s"),
        _seconds,
        "time from SIGTERM in which streams are served, in a pod in full",
        "DURATION",
    ),
    Flag("kubeconfig", ("cluster", "kubeconfig"), _text, "how to reach Kubernetes", "FILE"),
    Flag(
        "ha-enable-leader-election",
        ("cluster", "leader_election"),
        _boolean,
        "be ready only while holding a Lease",
        "BOOL",
    ),
    Flag(
        "allow-unsupported",
        ("scheduling", "allow_unsupported"),
        _boolean,
        "start although the file asks for what is missing here, such as prefill of its own",
        "BOOL",
    ),
    Flag(
        "fallback-endpoints",
        ("scheduling", "fallbacks"),
        _integer,
        "endpoints named after the chosen one",
        "N",
    ),
    Flag(
        "disable-endpoint-subset-filter",
        ("scheduling", "respect_subset"),
        _not,
        "ignore the endpoints a gateway allows",
        "BOOL",
    ),
    Flag(
        "emit-endpoint-scores",
        ("decisions", "scores"),
        _boolean,
        "tell the data plane what endpoints were compared by",
        "BOOL",
    ),
    Flag(
        "refresh-metrics-interval",
        ("scrape", "busy_interval_s"),
        _refresh,
        "between scrapes of a busy endpoint, 50ms or more",
        "DURATION",
    ),
    Flag(
        "metrics-staleness-threshold",
        ("scrape", "stale_after_s"),
        _seconds,
        "age at which a load counts as unknown",
        "DURATION",
    ),
    Flag("model-server-metrics-path", ("scrape", "path"), _text, "page to scrape", "PATH"),
    Flag(
        "model-server-metrics-scheme", ("scrape", "scheme"), _text, "scheme of that page", "SCHEME"
    ),
    Flag(
        "grpc-max-recv-msg-size",
        ("limits", "max_message_bytes"),
        _size_if_any,
        "largest gRPC message",
        "BYTES",
    ),
    Flag("conformance-testing", ("conformance",), _boolean, "obey the test headers", "BOOL"),
    Flag(
        "seed",
        ("seed",),
        _integer,
        "seed of all random draws; drawn from the system unless set",
        "N",
    ),
    # Of the flags for a setting, the last of this table wins.
    Flag(
        "zap-devel",
        ("log", "level"),
        _zap_development,
        "true is debug, unless a flag below names a level",
        "BOOL",
    ),
    Flag("v", ("log", "level"), _verbosity, "verbosity; 4 and more is debug", "N"),
    Flag("zap-log-level", ("log", "level"), _zap, "the same in words", "LEVEL"),
    Flag("log-level", ("log", "level"), _text, "least severe level that is logged", "LEVEL"),
    Flag("zap-encoder", ("log", "format"), _zap_encoder, "json, or console, which is text", "WORD"),
    Flag("log-format", ("log", "format"), _text, "format of log lines", "FORMAT"),
    Flag("log-requests", ("log", "requests"), _text, "requests with a line", "WHICH"),
    Flag(
        "tracing",
        ("tracing", "enabled"),
        _boolean,
        "send traces; by default where OTEL_EXPORTER_OTLP_ENDPOINT is set",
        "BOOL",
    ),
)


class CompatibleFlag(msgspec.Struct, frozen=True):
    """Flag of the upstream EPP.

    Attributes:
        name: Without dashes.
        accepted_values: Values that change nothing here.
        refused: Whether any other value ends the program; otherwise it is a warning.
        message: Text that says what to do instead, or why nothing has to be done.
        boolean: Whether it may stand without a value, meaning true.
    """

    name: str
    accepted_values: frozenset[str]
    refused: bool
    message: str
    boolean: bool = False


_EMPTY = frozenset({""})
_OFF = frozenset({"false", "False", "FALSE", "f", "F", "0"})
_NO_AUTH = "/metrics has no authentication; guard its port with a NetworkPolicy"

COMPATIBLE_FLAGS: Sequence[CompatibleFlag] = (
    CompatibleFlag(
        "grpc-max-send-msg-size",
        _EMPTY,
        refused=False,
        message="answers are sent in messages of 64 KiB at most",
    ),
    CompatibleFlag(
        "refresh-prometheus-metrics-interval",
        _EMPTY,
        refused=False,
        message="the metrics page is made when it is asked for",
    ),
    CompatibleFlag("metrics-endpoint-auth", _OFF, refused=True, message=_NO_AUTH, boolean=True),
    CompatibleFlag("metrics-cert-dir", _EMPTY, refused=True, message=_NO_AUTH),
    CompatibleFlag("metrics-client-ca-file", _EMPTY, refused=True, message=_NO_AUTH),
    CompatibleFlag(
        "model-server-metrics-port",
        frozenset({"", "0"}),
        refused=True,
        message="label the endpoint with metrics-port instead",
    ),
    CompatibleFlag(
        "model-server-metrics-https-insecure-skip-verify",
        frozenset({"true", "True", "TRUE", "t", "T", "1"}),
        refused=True,
        message="set scrape.verify_tls in the configuration",
        boolean=True,
    ),
    CompatibleFlag(
        "enable-pprof", _OFF, refused=False, message="there is no profiler page", boolean=True
    ),
    CompatibleFlag(
        "enable-grpc-stream-metrics",
        frozenset({*_OFF, "true", "True", "TRUE", "t", "T", "1"}),
        refused=False,
        message="streams are always counted",
        boolean=True,
    ),
    CompatibleFlag(
        "allow-experimental-plugins",
        _OFF,
        refused=False,
        message="every plugin is allowed",
        boolean=True,
    ),
    CompatibleFlag(
        "tls-min-version",
        frozenset({"", "VersionTLS12"}),
        refused=True,
        message="TLS 1.2 and 1.3 are served",
    ),
    CompatibleFlag(
        "tls-cipher-suites",
        _EMPTY,
        refused=True,
        message="set the environment variable GRPC_SSL_CIPHER_SUITES",
    ),
    *(
        CompatibleFlag(
            name,
            frozenset(),
            refused=False,
            message="engines are recognised by the metrics they export, and another name is not "
            "looked for; it is deprecated upstream, too: remove it",
        )
        for name in (
            "total-queued-requests-metric",
            "total-running-requests-metric",
            "kv-cache-usage-percentage-metric",
            "lora-info-metric",
            "cache-info-metric",
        )
    ),
)

#: Log flags of Go programs that do not have `log` or `zap` in their name.
_LOG_FLAGS = frozenset(
    {"v", "vmodule", "stderrthreshold", "add-dir-header", "skip-headers", "one-output"}
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
            yield f"{word} has no effect: logging is set with --log-level"
            value_may_follow = not equals
        elif value_may_follow and not word.startswith("-"):
            value_may_follow = False
        else:
            raise _unknown_flag_error(word, name, names)


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
