"""Match conditions of pools: host, path, header and model name, and their index.

`MatchIndex` finds the conditions that match a request by table lookups. Matches are bits of a number,
in the order in which they are looked at. Hosts, paths and models are found in tables, at as many keys
as patterns have different depths or lengths; headers are compared last, for the matches that are left.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

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
    def is_empty(self) -> bool:
        """True if no condition is set."""
        return not (self.hosts or self.paths or self.headers or self.models)


def is_within(match: PoolMatch, limit: PoolMatch) -> bool:
    """True if every request that a match allows is within a limit.

    Args:
        match: The conditions; lower-case hosts and header names.
        limit: Conditions of the limit; a kind of condition that it lacks limits nothing.
    """
    return (
        _all_within(match.hosts, limit.hosts, _host_within)
        and _all_within(match.paths, limit.paths, _is_below)
        and _all_within(match.models, limit.models, _model_within)
        and all(match.headers.get(name) == value for name, value in limit.headers.items())
    )


def overlaps(match: PoolMatch, other: PoolMatch) -> bool:
    """True if some request can match both."""
    return (
        _any_overlap(match.hosts, other.hosts, _host_within)
        and _any_overlap(match.paths, other.paths, _is_below)
        and _any_overlap(match.models, other.models, _model_within)
        and all(other.headers.get(name, value) == value for name, value in match.headers.items())
    )


def num_comparisons(match: PoolMatch, other: PoolMatch) -> int:
    """Upper bound on the comparisons of `overlaps`, plus 1 for the call."""
    pairs = ((match.hosts, other.hosts), (match.paths, other.paths), (match.models, other.models))
    return 1 + sum(len(left) * len(right) for left, right in pairs)


def describe(match: PoolMatch) -> str:
    """Describe a match in words; an empty match is the rest of all requests."""
    if match.is_empty:
        return "models its endpoints list, and what no other pool takes"
    parts = (
        f"{word} {' or '.join(values)}"
        for word, values in (
            ("host", match.hosts),
            ("path", match.paths),
            ("header", tuple(f"{name}={value}" for name, value in match.headers.items())),
            ("model", match.models),
        )
        if values
    )
    return " and ".join(parts)


def request_host(headers: Mapping[str, str]) -> str:
    """The host a request is for, in lower case without port."""
    host = (headers.get(":authority") or headers.get("host", "")).lower()
    bare, colon, port = host.rpartition(":")
    return bare if colon and port.isdigit() else host


def request_path(headers: Mapping[str, str]) -> str:
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


def _any_overlap(patterns: Sequence[str], others: Sequence[str], is_within: _Within) -> bool:
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


def _is_below(path: str, prefix: str) -> bool:
    prefix = prefix.rstrip("/")
    return path == prefix or path.startswith(prefix + "/")


#: Patterns and the matches that have them, as bits.
_Table = dict[str, int]


class MatchIndex:
    """Tables of the conditions of several matches.

    Attributes:
        with_conditions: Bits of those that ask for anything.
        without_models: Bits of those that ask for no model.
    """

    def __init__(self, listed: Sequence[PoolMatch]) -> None:
        self.listed = tuple(listed)
        bits = [(1 << position, match) for position, match in enumerate(self.listed)]
        self.with_conditions = _union(bit for bit, match in bits if not match.is_empty)
        self.without_models = _union(bit for bit, match in bits if not match.models)
        self._any_host = _union(bit for bit, match in bits if not match.hosts)
        self._any_path = _union(bit for bit, match in bits if not match.paths)
        self._hosts: _Table = {}
        self._below_hosts: _Table = {}
        self._paths: _Table = {}
        self._models: _Table = {}
        self._model_prefixes: _Table = {}
        pairs: dict[tuple[str, str], int] = {}
        for bit, match in bits:
            for host in match.hosts:
                if host.startswith("*."):
                    _add(self._below_hosts, host[1:], bit)
                else:
                    _add(self._hosts, host, bit)
            for path in match.paths:
                _add(self._paths, path.rstrip("/"), bit)
            for model in match.models:
                if model.endswith("*"):
                    _add(self._model_prefixes, model[:-1], bit)
                else:
                    _add(self._models, model, bit)
            for pair in match.headers.items():
                pairs[pair] = pairs.get(pair, 0) + 1
        # What few matches require is compared first: it tells them apart soonest.
        self._headers = [
            sorted(match.headers.items(), key=lambda pair: pairs[pair]) for match in self.listed
        ]
        self._num_labels = sorted({host.count(".") for host in self._below_hosts})
        self._most_slashes = max((path.count("/") for path in self._paths), default=0)
        self._prefix_lengths = sorted({len(prefix) for prefix in self._model_prefixes})

    def find_routes(self, headers: Mapping[str, str]) -> int:
        """Bits of the matches whose hosts and paths match a request; headers are not checked."""
        bits = self._any_host
        if self._hosts or self._below_hosts:
            bits |= self._find_host(request_host(headers))
        if bits and self._paths:
            bits &= self._any_path | self._find_path(request_path(headers))
        return bits

    def find_models(self, model: str) -> int:
        """Bits of the matches that match a model name, including matches without models."""
        bits = self.without_models | self._models.get(model, 0)
        for length in self._prefix_lengths:
            if length > len(model):
                break
            bits |= self._model_prefixes.get(model[:length], 0)
        return bits

    def positions(self, bits: int, headers: Mapping[str, str]) -> Iterator[int]:
        """Positions of the matches in `bits` whose headers match a request, in their order."""
        while bits:
            lowest = bits & -bits
            position = lowest.bit_length() - 1
            if all(headers.get(name) == value for name, value in self._headers[position]):
                yield position
            bits ^= lowest

    def _find_host(self, host: str) -> int:
        bits = self._hosts.get(host, 0)
        if self._num_labels:
            labels = host.rsplit(".", self._num_labels[-1])
            for count in self._num_labels:
                if count >= len(labels):
                    break
                bits |= self._below_hosts.get("." + ".".join(labels[-count:]), 0)
        return bits

    def _find_path(self, path: str) -> int:
        """Bits of the matches whose path equals this one or a prefix of its segments."""
        bits, end = 0, -1
        for _ in range(self._most_slashes + 1):
            end = path.find("/", end + 1)
            if end < 0:
                return bits | self._paths.get(path, 0)
            bits |= self._paths.get(path[:end], 0)
        return bits


def _union(bits: Iterable[int]) -> int:
    union = 0
    for bit in bits:
        union |= bit
    return union


def _add(table: _Table, pattern: str, bit: int) -> None:
    table[pattern] = table.get(pattern, 0) | bit
