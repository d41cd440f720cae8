"""The flags of `serve` and `check`: ours, as overrides of settings.

The table is the whole truth: a flag, the setting it beats, how its value is read. Each exists with
one dash and with two, as Go programs take them. The upstream picker's other flags are in
`upstream`.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import msgspec

from extproc.cli import quantities, upstream
from extproc.config import load, profiles
from extproc.config import settings as sections
from extproc.errors import ConfigError
from extproc.scheduling.profile import Profile

#: Below this many seconds the upstream picker clamps its refresh interval; so do we.
_SHORTEST_REFRESH_S = 0.05

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
        """Whether it may stand without a value."""
        return self.metavar == "BOOL"


class Resolved(msgspec.Struct, frozen=True):
    """What a command line asks for.

    Attributes:
        settings: File and flags together.
        profile: The scheduling profile they name; its plugins have all the signals they need.
        where: The file, or the defaults, for later errors.
        warnings: One line for each flag that has no effect, or not the one it asks for.
    """

    settings: sections.Settings
    profile: Profile
    where: str
    warnings: tuple[str, ...]


def _not(flag: str, found: str) -> bool:
    return not quantities.boolean(flag, found)


def _refresh(flag: str, found: str) -> float:
    return max(_SHORTEST_REFRESH_S, quantities.seconds(flag, found))


def _size_if_any(flag: str, found: str) -> int | None:
    return quantities.size_bytes(flag, found) if found else None


def _verbosity(_: str, found: str) -> str | None:
    if not found.isdigit():
        return None
    return "debug" if int(found) >= _DEBUG_VERBOSITY else "info"


def _zap(_: str, found: str) -> str | None:
    return "debug" if found.isdigit() and int(found) else _ZAP_LEVELS.get(found)


_SERVER = ("server",)
_text, _seconds, _boolean, _whole = (
    quantities.text,
    quantities.seconds,
    quantities.boolean,
    quantities.whole,
)

FLAGS: Sequence[Flag] = (
    Flag("strategy", ("scheduling", "strategy"), _text, "how to choose, in one word", "NAME"),
    Flag("host", (*_SERVER, "host"), _text, "address to listen on; empty for all", "IP"),
    Flag("grpc-port", (*_SERVER, "grpc_port"), _whole, "ext_proc; 0 picks a free one", "PORT"),
    Flag("grpc-health-port", (*_SERVER, "grpc_health_port"), _whole, "gRPC health", "PORT"),
    Flag("metrics-port", (*_SERVER, "metrics_port"), _whole, "metrics and debug pages", "PORT"),
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
    Flag(
        "drain-timeout",
        (*_SERVER, "drain_timeout_s"),
        _seconds,
        "from SIGTERM to the end of the last stream",
        "DURATION",
    ),
    Flag("pool-name", ("pool", "name"), _text, "label of the pool", "NAME"),
    Flag(
        "fallback-endpoints",
        ("scheduling", "fallbacks"),
        _whole,
        "endpoints named after the chosen one",
        "N",
    ),
    Flag(
        "disable-endpoint-subset-filter",
        ("scheduling", "honour_subset"),
        _not,
        "ignore the endpoints a gateway allows",
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
    Flag("model-server-metrics-scheme", ("scrape", "scheme"), _text, "http or https", "SCHEME"),
    Flag(
        "grpc-max-recv-msg-size",
        ("limits", "max_message_bytes"),
        _size_if_any,
        "largest gRPC message",
        "BYTES",
    ),
    Flag("conformance-testing", ("conformance",), _boolean, "obey the test headers", "BOOL"),
    Flag("seed", ("seed",), _whole, "start of all chance", "N"),
    Flag("v", ("log", "level"), _verbosity, "verbosity; 4 and more is debug", "N"),
    Flag("zap-log-level", ("log", "level"), _zap, "the same in words", "LEVEL"),
    Flag("log-level", ("log", "level"), _text, "debug, info, warning or error", "LEVEL"),
)

#: Flags that are read here by name, because they are more than one setting.
_SOURCES = ("config-file", "config-text", "endpoints", "endpoints-file")


def add(parser: argparse.ArgumentParser) -> None:
    """Add every flag to a parser; values stay text until `resolve`."""
    parser.set_defaults(unknown_flags=[])
    source = parser.add_argument_group("what to serve")
    _add(source, "config-file", metavar="FILE", help="YAML or JSON configuration")
    _add(source, "config-text", metavar="YAML", help="the same, written out")
    _add(
        source,
        "endpoints",
        action="append",
        metavar="IP:PORT,...",
        help="endpoints; repeatable and separated by commas",
    )
    _add(source, "endpoints-file", metavar="FILE", help="file with endpoints; watched")
    ours = parser.add_argument_group("settings that beat the file")
    for flag in FLAGS:
        _add(ours, flag.name, boolean=flag.boolean, metavar=flag.metavar, help=flag.text)
    theirs = parser.add_argument_group(
        "flags of the upstream picker", "Taken so that a Deployment need not be edited."
    )
    for other in upstream.FLAGS:
        _add(theirs, other.name, boolean=other.boolean, metavar="VALUE", help=other.say)


def resolve(args: argparse.Namespace) -> Resolved:
    """Settings from parsed flags.

    Args:
        args: From a parser that `add` prepared, with what it did not know in `unknown_flags`.

    Raises:
        ConfigError: A flag or a file is wrong, or asks for what does not exist.
    """
    warnings = list(upstream.verdicts(args))
    warnings += upstream.unknown(args.unknown_flags, known=known())
    document = _document(args)
    overrides = [*_endpoints(args), *_settings(args)]
    merged = load.settings(document, overrides)
    _refuse_kubernetes(args, merged.pool)
    profile = profiles.resolve(merged, where="--strategy" if args.strategy else document.where)
    warnings += _clamped(args)
    return Resolved(merged, profile, document.where, tuple(warnings))


def known() -> tuple[str, ...]:
    """Every flag there is, without dashes."""
    return (*_SOURCES, *(flag.name for flag in FLAGS), *(flag.name for flag in upstream.FLAGS))


def given(args: argparse.Namespace, name: str) -> str | None:
    """The text of a flag; None when it was not given."""
    text: str | None = getattr(args, name.replace("-", "_"))
    return text


def _add(group: argparse._ArgumentGroup, name: str, *, boolean: bool = False, **more: str) -> None:
    dest = name.replace("-", "_")
    bare = {"nargs": "?", "const": "true"} if boolean else {}
    group.add_argument(f"--{name}", dest=dest, **bare, **more)  # type: ignore[arg-type]  # keywords come from the table
    more["help"] = argparse.SUPPRESS
    group.add_argument(f"-{name}", dest=dest, default=argparse.SUPPRESS, **bare, **more)  # type: ignore[arg-type]  # the same


def _document(args: argparse.Namespace) -> load.Document:
    file, text = args.config_file, args.config_text
    if file and text:
        raise ConfigError(
            "--config-text",
            wanted="--config-file or --config-text",
            found="both",
            fix="put everything into one of them",
        )
    if file:
        return load.read(Path(file))
    return load.parse(text, where="--config-text") if text else load.EMPTY


def _endpoints(args: argparse.Namespace) -> Iterator[load.Override]:
    """A list on the command line beats list and file of the configuration, and so does a file."""
    words, file = args.endpoints or [], args.endpoints_file
    if words and file:
        raise ConfigError(
            "--endpoints-file",
            wanted="--endpoints or --endpoints-file",
            found="both",
            fix="keep one; the file is watched, the list is not",
        )
    if words:
        listed = [word for text in words for word in quantities.listed("--endpoints", text)]
        yield load.Override(("pool", "endpoints_file"), "", "--endpoints")
        yield load.Override(("pool", "endpoints"), listed, "--endpoints")
    elif file:
        yield load.Override(("pool", "endpoints"), [], "--endpoints-file")
        yield load.Override(("pool", "endpoints_file"), file, "--endpoints-file")


def _settings(args: argparse.Namespace) -> Iterator[load.Override]:
    for flag in FLAGS:
        text = given(args, flag.name)
        value = None if text is None else flag.read(f"--{flag.name}", text)
        if value is not None:
            yield load.Override(flag.path, value, f"--{flag.name}")
    if args.strategy is not None:
        # A word on the command line also beats a profile written out in the file.
        yield load.Override(("scheduling", "profile"), None, "--strategy")


def _clamped(args: argparse.Namespace) -> Iterator[str]:
    text = given(args, "refresh-metrics-interval")
    if text is not None:
        wanted_s = quantities.seconds("--refresh-metrics-interval", text)
        if wanted_s < _SHORTEST_REFRESH_S:
            yield f"--refresh-metrics-interval: {text} is too short; 50ms is used"


def _refuse_kubernetes(args: argparse.Namespace, pool: sections.Source) -> None:
    if args.pool_name and not (pool.endpoints or pool.endpoints_file):
        raise ConfigError(
            "--pool-name",
            wanted="endpoints besides the pool's name",
            found="an InferencePool to be looked up in Kubernetes, which this version does not do",
            fix="add --endpoints or --endpoints-file; the name then is a label",
        )
