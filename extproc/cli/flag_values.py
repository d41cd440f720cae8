"""Parsers of flag values: durations, sizes, booleans, lists.

Every reader takes the flag, for its errors, and the text. The forms are Go's, because the upstream
picker's flags are.
"""

from __future__ import annotations

import re

from extproc.errors import ConfigError

_UNIT_S = {"ns": 1e-9, "us": 1e-6, "µs": 1e-6, "ms": 1e-3, "s": 1.0, "m": 60.0, "h": 3600.0}
_DURATION_PART = re.compile(r"(\d+(?:\.\d*)?|\.\d+)(ns|us|µs|ms|s|m|h)")
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
    parts = _DURATION_PART.findall(value)
    if not parts or "".join(number + unit for number, unit in parts) != value:
        raise ConfigError(
            flag, wanted="a duration", got=repr(value), fix="write 30s, 1m30s, 50ms or seconds"
        )
    return sum(float(number) * _UNIT_S[unit] for number, unit in parts)


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
