"""Flags of the upstream EPP without a setting here, and their treatment.

A value that means what we do anyway is taken without a word. Any other is either named in one
warning, where nothing a client or gateway relies on is lost, or refused with what to do instead.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Iterator, Sequence

import msgspec

from extproc.config import validation
from extproc.errors import ConfigError


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

FLAGS: Sequence[CompatibleFlag] = (
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


def warnings(args: argparse.Namespace) -> Iterator[str]:
    """A warning for each flag that has no effect.

    Raises:
        ConfigError: A flag asks for something that must not silently be missing.
    """
    for flag in FLAGS:
        value: str | None = getattr(args, flag.name.replace("-", "_"))
        if value is None or value in flag.accepted_values:
            continue
        if flag.refused:
            raise ConfigError(
                f"--{flag.name}", wanted=_accepted_text(flag), got=repr(value), fix=flag.message
            )
        yield f"--{flag.name} has no effect: {flag.message}"


def unknown(words: Sequence[str], *, known: Iterable[str]) -> Iterator[str]:
    """Warnings for log flags among unknown words.

    Args:
        words: Words that the parser did not know.
        known: Every flag there is, for the guess at what was meant.

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
    suggestion = validation.closest_name(name, known)
    return ConfigError(
        word,
        wanted="a flag of this command",
        got="an unknown one",
        fix=f"did you mean --{suggestion}?" if suggestion else "see --help",
    )
