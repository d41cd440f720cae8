"""Readers of flags that name versions and cipher suites of TLS as Go does."""

from __future__ import annotations

from typing import Final

from extproc.config import validation
from extproc.errors import ConfigError

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
