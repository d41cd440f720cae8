"""Match conditions of a pool: host, path, header and model name."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import msgspec


class PoolMatch(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Conditions on a request; every condition that is set must hold.

    Attributes:
        hosts: The host of the request must be one of these, in lower case without port;
            `*.a.example` is every host below a.example. None: any.
        paths: The path of the request must be one of these, or begin with one of them at a segment
            border, like PathPrefix of an HTTPRoute. None: any.
        headers: Headers that the request must have with exactly these values; names in lower case.
            None: any.
        models: The model in the request must be one of these; `llama-*` is every name with that
            beginning. None: any.
    """

    hosts: tuple[str, ...] = ()
    paths: tuple[str, ...] = ()
    headers: Mapping[str, str] = {}
    models: tuple[str, ...] = ()

    @property
    def empty(self) -> bool:
        """True if no condition is set."""
        return not (self.hosts or self.paths or self.headers or self.models)


def matches(claim: PoolMatch, headers: Mapping[str, str]) -> bool:
    """True if a request's headers match a claim; models are not checked.

    Args:
        claim: The conditions.
        headers: Of the request, names in lower case, pseudo headers included.
    """
    if claim.hosts:
        host = host_of(headers)
        if not any(_is(host, pattern) for pattern in claim.hosts):
            return False
    if claim.paths:
        path = path_of(headers)
        if not any(_below(path, pattern) for pattern in claim.paths):
            return False
    return all(headers.get(name) == value for name, value in claim.headers.items())


def names(claim: PoolMatch, model: str) -> bool:
    """True if a model name matches a claim."""
    return any(
        model.startswith(pattern[:-1]) if pattern.endswith("*") else model == pattern
        for pattern in claim.models
    )


def within(claim: PoolMatch, limit: PoolMatch) -> bool:
    """True if every request that matches a claim also matches a limit.

    Args:
        claim: The conditions; lower-case hosts and header names.
        limit: The same; a kind of condition that it lacks limits nothing.
    """
    return (
        _all_within(claim.hosts, limit.hosts, _host_within)
        and _all_within(claim.paths, limit.paths, _below)
        and _all_within(claim.models, limit.models, _model_within)
        and all(claim.headers.get(name) == value for name, value in limit.headers.items())
    )


def overlap(match: PoolMatch, other: PoolMatch) -> bool:
    """True if some request can match both claims."""
    return (
        _any_meet(match.hosts, other.hosts, _host_within)
        and _any_meet(match.paths, other.paths, _below)
        and _any_meet(match.models, other.models, _model_within)
        and all(other.headers.get(name, value) == value for name, value in match.headers.items())
    )


def num_comparisons(match: PoolMatch, other: PoolMatch) -> int:
    """Upper bound on the comparisons of `overlap`, plus 1 for the call."""
    pairs = ((match.hosts, other.hosts), (match.paths, other.paths), (match.models, other.models))
    return 1 + sum(len(left) * len(right) for left, right in pairs)


def described(claim: PoolMatch) -> str:
    """Describe a claim in words; an empty claim is the rest of all requests."""
    if claim.empty:
        return "models its endpoints list, and what no other pool takes"
    parts = (
        f"{word} {' or '.join(values)}"
        for word, values in (
            ("host", claim.hosts),
            ("path", claim.paths),
            ("header", tuple(f"{name}={value}" for name, value in claim.headers.items())),
            ("model", claim.models),
        )
        if values
    )
    return " and ".join(parts)


def host_of(headers: Mapping[str, str]) -> str:
    """The host a request is for, in lower case without port."""
    host = (headers.get(":authority") or headers.get("host", "")).lower()
    bare, colon, port = host.rpartition(":")
    return bare if colon and port.isdigit() else host


def path_of(headers: Mapping[str, str]) -> str:
    """The path of a request without its query."""
    return headers.get(":path", "").partition("?")[0]


#: Whether the first pattern takes nothing that the second one does not.
_Within = Callable[[str, str], bool]


def _all_within(patterns: Sequence[str], limits: Sequence[str], is_within: _Within) -> bool:
    if not limits:
        return True
    # No pattern is any value at all.
    return bool(patterns) and all(
        any(is_within(pattern, limit) for limit in limits) for pattern in patterns
    )


def _any_meet(patterns: Sequence[str], others: Sequence[str], is_within: _Within) -> bool:
    # Of two patterns of these kinds one holds the other, or nothing is in both.
    return (
        not patterns
        or not others
        or any(
            is_within(pattern, other) or is_within(other, pattern)
            for pattern in patterns
            for other in others
        )
    )


def _host_within(host: str, limit: str) -> bool:
    return host == limit or (limit.startswith("*.") and host.endswith(limit[1:]))


def _model_within(model: str, limit: str) -> bool:
    return model == limit or (limit.endswith("*") and model.startswith(limit[:-1]))


def _is(host: str, pattern: str) -> bool:
    return host.endswith(pattern[1:]) if pattern.startswith("*.") else host == pattern


def _below(path: str, prefix: str) -> bool:
    prefix = prefix.rstrip("/")
    return path == prefix or path.startswith(prefix + "/")
