"""Readers of the values of flags, as Go programs write them: durations, sizes, versions of TLS."""

from __future__ import annotations

import re
from typing import Final

from extproc.config import validation
from extproc.errors import ConfigError

_PLAIN = re.compile(r"\d+(\.\d*)?|\.\d+")
_SIZE = re.compile(r"(\d{1,19})\s*([kKMG]?)(i?)(B?)")
_POWER = {"": 0, "k": 1, "K": 1, "M": 2, "G": 3}
#: Texts that Go's ParseBool accepts.
TRUE = frozenset({"1", "t", "T", "true", "TRUE", "True"})
FALSE = frozenset({"0", "f", "F", "false", "FALSE", "False"})

#: Names of versions, and the values of `server.tls_min_version`.
_VERSIONS: Final = {"VersionTLS12": "1.2", "VersionTLS13": "1.3"}

#: Suites that Go and OpenSSL have, and their names in OpenSSL.
SUITES: Final = {
    "TLS_ECDHE_ECDSA_WITH_AES_128_GCM_SHA256": "ECDHE-ECDSA-AES128-GCM-SHA256",
    "TLS_ECDHE_ECDSA_WITH_AES_256_GCM_SHA384": "ECDHE-ECDSA-AES256-GCM-SHA384",
    "TLS_ECDHE_ECDSA_WITH_CHACHA20_POLY1305_SHA256": "ECDHE-ECDSA-CHACHA20-POLY1305",
    "TLS_ECDHE_RSA_WITH_AES_128_GCM_SHA256": "ECDHE-RSA-AES128-GCM-SHA256",
    "TLS_ECDHE_RSA_WITH_AES_256_GCM_SHA384": "ECDHE-RSA-AES256-GCM-SHA384",
    "TLS_ECDHE_RSA_WITH_CHACHA20_POLY1305_SHA256": "ECDHE-RSA-CHACHA20-POLY1305",
    "TLS_ECDHE_ECDSA_WITH_AES_128_CBC_SHA": "ECDHE-ECDSA-AES128-SHA",
    "TLS_ECDHE_ECDSA_WITH_AES_256_CBC_SHA": "ECDHE-ECDSA-AES256-SHA",
    "TLS_ECDHE_ECDSA_WITH_AES_128_CBC_SHA256": "ECDHE-ECDSA-AES128-SHA256",
    "TLS_ECDHE_RSA_WITH_AES_128_CBC_SHA": "ECDHE-RSA-AES128-SHA",
    "TLS_ECDHE_RSA_WITH_AES_256_CBC_SHA": "ECDHE-RSA-AES256-SHA",
    "TLS_ECDHE_RSA_WITH_AES_128_CBC_SHA256": "ECDHE-RSA-AES128-SHA256",
    "TLS_RSA_WITH_AES_128_GCM_SHA256": "AES128-GCM-SHA256",
    "TLS_RSA_WITH_AES_256_GCM_SHA384": "AES256-GCM-SHA384",
    "TLS_RSA_WITH_AES_128_CBC_SHA": "AES128-SHA",
    "TLS_RSA_WITH_AES_256_CBC_SHA": "AES256-SHA",
    "TLS_RSA_WITH_AES_128_CBC_SHA256": "AES128-SHA256",
    # Of TLS 1.3.
    "TLS_AES_128_GCM_SHA256": "TLS_AES_128_GCM_SHA256",
    "TLS_AES_256_GCM_SHA384": "TLS_AES_256_GCM_SHA384",
    "TLS_CHACHA20_POLY1305_SHA256": "TLS_CHACHA20_POLY1305_SHA256",
}


def text(_: str, value: str) -> str:
    """The text itself."""
    return value


def seconds(flag: str, value: str) -> float:
    """A Go duration such as `1m30s` or `50ms`, or plain seconds.

    Raises:
        ConfigError: It is neither.
    """
    duration_s = validation.parse_duration(f"{value}s" if _PLAIN.fullmatch(value) else value)
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
    if value in TRUE:
        return True
    if value in FALSE:
        return False
    raise ConfigError(
        flag, wanted="true or false", got=repr(value), fix=f"write {flag}=true or {flag}=false"
    )


def whole_number(flag: str, value: str) -> int:
    """A whole number.

    Raises:
        ConfigError: It is none.
    """
    if re.fullmatch(r"-?[0-9]{1,19}", value):
        return int(value)
    fix = "write digits only, 19 at most"
    raise ConfigError(flag, wanted="a whole number", got=validation.show(value), fix=fix)


def listed(_: str, value: str) -> list[str]:
    """Words between commas; empty ones do not count."""
    return [word.strip() for word in value.split(",") if word.strip()]


def read_version(flag: str, value: str) -> str | None:
    """The version; None for an empty value.

    Raises:
        ConfigError: It is unknown, or earlier than HTTP/2 allows.
    """
    if value and value not in _VERSIONS:
        raise ConfigError(
            flag,
            wanted=" or ".join(_VERSIONS),
            got=repr(value),
            fix="write one of them; HTTP/2 needs TLS 1.2 or later",
        )
    return _VERSIONS.get(value)


def read_suites(flag: str, value: str) -> str:
    """Names between commas as OpenSSL's between colons, in the same order.

    Raises:
        ConfigError: A name is unknown, or of a suite that OpenSSL does not serve.
    """
    names = [name.strip() for name in value.split(",") if name.strip()]
    suites = [SUITES.get(name, "") for name in names]
    if "" in suites:
        name = names[suites.index("")]
        raise ConfigError(
            flag,
            wanted="cipher suites as Go names them, without RC4 and 3DES",
            got=repr(name),
            fix=validation.suggest(name, SUITES, "such as TLS_ECDHE_RSA_WITH_AES_128_GCM_SHA256"),
        )
    return ":".join(suites)
