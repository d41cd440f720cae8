"""Table of flags: name, path of the setting it overrides, parser of its value."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Literal, get_args, get_origin

import msgspec

from extproc.cli import flag_values
from extproc.config.settings import Settings
from extproc.scheduling import presets

#: Below this many seconds the upstream picker clamps its refresh interval; so do we.
SHORTEST_REFRESH_S = 0.05

#: Verbosity from which the upstream picker logs at its debug level.
_DEBUG_VERBOSITY = 4

_ZAP_LEVELS = {"debug": "debug", "info": "info", "warn": "warning", "error": "error"}


class Flag(msgspec.Struct, frozen=True):
    """One flag.

    Attributes:
        name: Without dashes.
        path: The setting it beats.
        read: Its text to a value; None leaves the setting alone.
        text: For --help.
        metavar: For --help.
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
    return not flag_values.boolean(flag, text)


def _refresh(flag: str, text: str) -> float:
    return max(SHORTEST_REFRESH_S, flag_values.seconds(flag, text))


def _size_if_any(flag: str, text: str) -> int | None:
    return flag_values.size_bytes(flag, text) if text else None


def _verbosity(_: str, text: str) -> str | None:
    if not text.isdigit():
        return None
    return "debug" if int(text) >= _DEBUG_VERBOSITY else "info"


def _zap(_: str, text: str) -> str | None:
    return "debug" if text.isdigit() and int(text) else _ZAP_LEVELS.get(text)


def default(flag: Flag) -> str:
    """The value of a flag that is not set, as it would be written; empty for none."""
    value: Any = Settings()
    for name in flag.path:
        value = getattr(value, name)
    if flag.read is _not:
        value = not value
    if isinstance(value, bool):
        return str(value).lower()
    if value is None or value == "" or flag.read is _verbosity:
        return ""
    return f"{value:g}s" if isinstance(value, float) else str(value)


def choices(flag: Flag) -> Sequence[str]:
    """The words that a flag takes; empty where it takes any."""
    if flag.path == ("scheduling", "strategy"):
        return tuple(presets.profiles())
    kind: Any = Settings
    for name in flag.path:
        kind = next(it.type for it in msgspec.structs.fields(kind) if it.name == name)
    is_named = get_origin(kind) is Literal and flag.read is _text
    return tuple(map(str, get_args(kind))) if is_named else ()


_SERVER = ("server",)
_text, _seconds, _boolean, _integer = (
    flag_values.text,
    flag_values.seconds,
    flag_values.boolean,
    flag_values.whole_number,
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
    Flag("transport", (*_SERVER, "transport"), _text, "gRPC by: grpcio, native", "NAME"),
    Flag(
        "drain-timeout",
        (*_SERVER, "drain_timeout_s"),
        _seconds,
        "from SIGTERM to the end of the last stream",
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
    Flag("v", ("log", "level"), _verbosity, "verbosity; 4 and more is debug", "N"),
    Flag("zap-log-level", ("log", "level"), _zap, "the same in words", "LEVEL"),
    Flag("log-level", ("log", "level"), _text, "least severe level that is logged", "LEVEL"),
)
