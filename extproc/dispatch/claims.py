"""Which requests a pool claims: by host, path, header or model name. Values and one test."""

from __future__ import annotations

from collections.abc import Mapping

import msgspec


class Claim(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """What a request must look like; every kind of condition that is given must hold.

    Attributes:
        hosts: One of these must be the request's host, in lower case without port; `*.a.example`
            is every host below a.example. None: any.
        paths: One of these must be the request's path or whole segments of its beginning, as
            PathPrefix of an HTTPRoute has it. None: any.
        headers: These must have exactly these values; names in lower case. None: any.
        models: One of these must be the name in the request; `llama-*` is every name that begins
            so. None: any.
    """

    hosts: tuple[str, ...] = ()
    paths: tuple[str, ...] = ()
    headers: Mapping[str, str] = {}
    models: tuple[str, ...] = ()

    @property
    def empty(self) -> bool:
        """Whether it asks for nothing."""
        return not (self.hosts or self.paths or self.headers or self.models)


def holds(claim: Claim, headers: Mapping[str, str]) -> bool:
    """Whether a request's headers are as a claim wants them; its models are another question.

    Args:
        claim: The conditions.
        headers: Of the request, names in lower case, pseudo headers included.
    """
    if claim.hosts:
        host = host_of(headers)
        if not any(_is(host, one) for one in claim.hosts):
            return False
    if claim.paths:
        path = path_of(headers)
        if not any(_below(path, one) for one in claim.paths):
            return False
    return all(headers.get(name) == value for name, value in claim.headers.items())


def names(claim: Claim, model: str) -> bool:
    """Whether a model name is one of those claimed."""
    return any(
        model.startswith(one[:-1]) if one.endswith("*") else model == one for one in claim.models
    )


def host_of(headers: Mapping[str, str]) -> str:
    """The host a request is for, in lower case without port."""
    host = (headers.get(":authority") or headers.get("host", "")).lower()
    bare, colon, port = host.rpartition(":")
    return bare if colon and port.isdigit() else host


def path_of(headers: Mapping[str, str]) -> str:
    """The path of a request without its query."""
    return headers.get(":path", "").partition("?")[0]


def _is(host: str, pattern: str) -> bool:
    return host.endswith(pattern[1:]) if pattern.startswith("*.") else host == pattern


def _below(path: str, prefix: str) -> bool:
    prefix = prefix.rstrip("/")
    return path == prefix or path.startswith(prefix + "/")
