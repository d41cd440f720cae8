"""Strict parser of endpoint lists.

The document is a mapping with a list `endpoints`, each of them `host:port` or a mapping with
`address` (or `host`), `port`, `name`, `namespace` and `labels`: the file-discovery format of the
upstream picker, and host names besides.
"""

from __future__ import annotations

import difflib
import ipaddress
import re
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Final

import msgspec

from extproc.endpoint import MAX_PORT, NO_LABELS, Endpoint, parse_port
from extproc.errors import ConfigError
from extproc.pool import inference_policy

_KEYS = ("address", "host", "port", "name", "namespace", "labels")
#: Endpoints of one list (count).
MAX_ENDPOINTS: Final = 16_384
#: Longest name, namespace, key and value of a label (characters). Kubernetes has 253, 63, 317, 63.
MAX_TEXT: Final = 512
#: Labels of one endpoint (count). An anchor of YAML can repeat them for every endpoint of the list.
MAX_LABELS: Final = 256

_HOST_NAME = re.compile(
    r"(?=.{1,253}\Z)(?:[A-Za-z0-9_](?:[A-Za-z0-9_-]{0,61}[A-Za-z0-9])?\.)*"
    r"[A-Za-z0-9](?:[A-Za-z0-9-]{0,61}[A-Za-z0-9])?\.?"
)
_BRACKETED = re.compile(r"\[([^\]]*)\](?::(.*))?", re.DOTALL)
_FORMS = "10.0.0.1:8000, [fd00::1]:8000 or engine.example:8000"


class EndpointListEntry(msgspec.Struct, frozen=True, dict=True):
    """One entry of an endpoint list.

    Attributes:
        host: IPv4 or IPv6 literal in its shortest form, without brackets, or a host name.
        port: 1..65535.
        name: Display name; empty for none.
        labels: Free labels; `namespace` is one of them.
    """

    host: str
    port: int
    name: str = ""
    labels: Mapping[str, str] = NO_LABELS

    @cached_property
    def literal(self) -> bool:
        """True if the host is an IP address, not a name to resolve."""
        return _ip(self.host) is not None


def from_document(document: object, *, where: str) -> tuple[EndpointListEntry, ...]:
    """Parses a loaded document; raises `ConfigError` with the path of a wrong value."""
    if not isinstance(document, Mapping):
        raise _wrong(
            where, "a mapping with a list `endpoints`", document, "write endpoints: [10.0.0.1:8000]"
        )
    for key in document:
        if key != "endpoints":
            raise _unknown(where, key, ("endpoints",))
    listed = document.get("endpoints")
    if not isinstance(listed, list):
        raise _wrong(f"{where}: endpoints", "a list", listed, "write one endpoint per item")
    if len(listed) > MAX_ENDPOINTS:
        wanted = f"at most {MAX_ENDPOINTS} endpoints"
        raise _wrong(f"{where}: endpoints", wanted, len(listed), "split the pool")
    first_places: dict[tuple[str, int], str] = {}
    entries: list[EndpointListEntry] = []
    for at, item in enumerate(listed):
        place = f"{where}: endpoints[{at}]"
        entry = _entry(item, place)
        first = first_places.setdefault((entry.host, entry.port), place)
        if len(first_places) == len(entries):
            raise ConfigError(
                place,
                wanted="every endpoint once",
                got=f"{entry.host} port {entry.port} again, first at {first}",
                fix="remove one of them",
            )
        entries.append(entry)
    return tuple(entries)


def _entry(item: object, where: str) -> EndpointListEntry:
    if isinstance(item, str):
        host, port = _split(item, where)
        if port is None:
            raise _wrong(where, _FORMS, item, "add the port")
        return EndpointListEntry(_host(host, where), _port(port, where))
    if not isinstance(item, Mapping):
        raise _wrong(where, f"{_FORMS}, or a mapping", item, "write an address and a port")
    for key in item:
        if key not in _KEYS:
            raise _unknown(where, key, _KEYS)
    place, port_value = _place(item, where)
    labels = _labels(item.get("labels"), f"{where}.labels")
    namespace = _text(item.get("namespace"), f"{where}.namespace")
    if namespace:
        labels = {"namespace": namespace, **labels}
    return EndpointListEntry(
        _host(place, where),
        _port(port_value, f"{where}.port"),
        name=_text(item.get("name"), f"{where}.name"),
        labels=labels,
    )


def _place(item: Mapping[object, object], where: str) -> tuple[str, object]:
    """Returns host and port; the port may be part of the address."""
    if "address" in item and "host" in item:
        raise _wrong(where, "address or host", "both", "keep one; they mean the same")
    key = "host" if "host" in item else "address"
    address = item.get(key)
    if not isinstance(address, str) or not address:
        raise _wrong(f"{where}.{key}", "an IP address or a host name", address, "write it")
    host, port = _split(address, f"{where}.{key}")
    if port is not None and "port" in item:
        raise _wrong(f"{where}.port", "one port", f"another one in {key}", "keep one of them")
    return host, item.get("port") if port is None else port


def _split(text: str, where: str) -> tuple[str, str | None]:
    """Returns the host without brackets, and the port; None without one."""
    text = text.strip()
    if text.startswith("["):
        bracketed = _BRACKETED.fullmatch(text)
        if bracketed is None or not isinstance(_ip(bracketed[1]), ipaddress.IPv6Address):
            raise _wrong(where, "an IPv6 address in the brackets", text, "write [fd00::1]:8000")
        return bracketed[1], bracketed[2]
    scheme, slashes, rest = text.partition("://")
    if slashes:
        raise _wrong(
            where, _FORMS, text, f"leave out {scheme}:// and write {rest.rpartition('@')[2]}"
        )
    if text.count(":") > 1:
        if _ip(text) is None:
            raise _wrong(where, _FORMS, text, "put IPv6 in brackets")
        return text, None
    host, colon, port = text.partition(":")
    return host, port if colon else None


def _host(text: str, where: str) -> str:
    literal = _ip(text)
    if literal is not None:
        return str(literal)
    # A last label of digits makes it a mistyped IPv4 address, not a name.
    if not _HOST_NAME.fullmatch(text) or text.rstrip(".").rpartition(".")[2].isdigit():
        raise _wrong(where, "an IP address or a host name", text, "correct it")
    return text.lower()


def _port(value: object, where: str) -> int:
    port = parse_port(value) if isinstance(value, str) else value
    if not isinstance(port, int) or isinstance(port, bool) or not 1 <= port <= MAX_PORT:
        raise _wrong(where, f"a port from 1 to {MAX_PORT}", value, "write the engine's HTTP port")
    return port


def _labels(value: object, where: str) -> dict[str, str]:
    if value is None:
        return {}
    if not isinstance(value, Mapping):
        raise _wrong(where, "a mapping of strings", value, "write key: value lines")
    if len(value) > MAX_LABELS:
        raise _wrong(where, f"at most {MAX_LABELS} labels", len(value), "remove some")
    for key, text in value.items():
        if isinstance(key, str) and len(key) > MAX_TEXT:
            raise _wrong(where, f"keys of at most {MAX_TEXT} characters", key, "shorten it")
        path = f"{where}.{key}" if isinstance(key, str) else where
        if not isinstance(key, str) or not isinstance(text, str):
            raise _wrong(path, "a string", text, "put it in quotes")
        _check_length(text, path)
    return dict(value)


def _text(value: object, where: str) -> str:
    if value is None:
        return ""
    if not isinstance(value, str):
        raise _wrong(where, "a string", value, "put it in quotes")
    _check_length(value, where)
    return value


def _check_length(text: str, where: str) -> None:
    if len(text) > MAX_TEXT:
        raise _wrong(where, f"at most {MAX_TEXT} characters", text, "shorten it")


def _ip(text: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    try:
        return ipaddress.ip_address(text)
    except ValueError:
        return None


def _unknown(where: str, key: object, known: Sequence[str]) -> ConfigError:
    near = difflib.get_close_matches(key[:80], known, n=1) if isinstance(key, str) else ()
    fix = f"did you mean `{near[0]}`?" if near else "remove it"
    return _wrong(where, "only the keys " + ", ".join(known), key, fix)


def _wrong(where: str, wanted: str, got: object, fix: str) -> ConfigError:
    return ConfigError(where, wanted=wanted, got=_shown(got), fix=fix)


def _shown(value: object) -> str:
    """Formats a value for a message: scalars as they are, containers by type."""
    if value is None:
        return "nothing"
    if isinstance(value, int) and value.bit_length() > 256:
        return "a huge number"
    if isinstance(value, str | int | float | bool):
        text = repr(value) if isinstance(value, str) else str(value)
        return text if len(text) <= 80 else text[:77] + "..."
    return f"a {type(value).__name__}"


class DiscoveredPool(msgspec.Struct, frozen=True):
    """State of one pool as discovered.

    Attributes:
        endpoints: All of it, each address once.
        exists: Whether the object that defines the pool is there; without it there are no
            endpoints, and requests are answered with 503
            (docs/reference/protocol-conformance.md#point-65).
        policy: Priorities and rewrites.
        app_protocol: Protocol of the engines: `http`, `kubernetes.io/h2c`, or empty when not
            set.
        created: Creation time of that object, RFC 3339 in UTC; empty when unknown.
    """

    endpoints: tuple[Endpoint, ...] = ()
    exists: bool = True
    policy: inference_policy.InferencePolicy = inference_policy.EMPTY_POLICY
    app_protocol: str = ""
    annotations: Mapping[str, str] = {}
    created: str = ""
