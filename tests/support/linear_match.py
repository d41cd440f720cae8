"""Match conditions of pools, compared with a request one after the other: the oracle of the index."""

from __future__ import annotations

from collections.abc import Mapping

from extproc.routing.pool_match import PoolMatch, request_host, request_path


def matches(match: PoolMatch, headers: Mapping[str, str]) -> bool:
    """True if host, path and headers of a request match; models are not checked."""
    host, path = request_host(headers), request_path(headers)
    return (
        (not match.hosts or any(_is_host(host, pattern) for pattern in match.hosts))
        and (not match.paths or any(_is_below(path, prefix) for prefix in match.paths))
        and all(headers.get(name) == value for name, value in match.headers.items())
    )


def matches_model(match: PoolMatch, model: str) -> bool:
    """True if a model name matches."""
    return any(
        model.startswith(pattern[:-1]) if pattern.endswith("*") else model == pattern
        for pattern in match.models
    )


def _is_host(host: str, pattern: str) -> bool:
    return host.endswith(pattern[1:]) if pattern.startswith("*.") else host == pattern


def _is_below(path: str, prefix: str) -> bool:
    prefix = prefix.rstrip("/")
    return path == prefix or path.startswith(prefix + "/")
