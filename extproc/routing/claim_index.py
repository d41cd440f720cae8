"""Index of pool claims: finds the claims that match a request by table lookups.

Claims are bits of one number, in the order in which they are looked at. Hosts, paths and models are
found in tables, at as many keys as patterns have different depths or lengths; headers are compared
last, for the claims that are left.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence

from extproc.routing import pool_match
from extproc.routing.pool_match import PoolMatch

#: Patterns and the claims that have them, as bits.
_Table = dict[str, int]


class ClaimIndex:
    """Tables of the conditions of several claims.

    Args:
        listed: The claims, in their order.

    Attributes:
        listed: The claims, in their order.
        claiming: Bits of those that ask for anything.
        without_models: Bits of those that ask for no model.
    """

    def __init__(self, listed: Sequence[PoolMatch]) -> None:
        self.listed = tuple(listed)
        bits = [(1 << position, claim) for position, claim in enumerate(self.listed)]
        self.claiming = _union(bit for bit, claim in bits if not claim.empty)
        self.without_models = _union(bit for bit, claim in bits if not claim.models)
        self._any_host = _union(bit for bit, claim in bits if not claim.hosts)
        self._any_path = _union(bit for bit, claim in bits if not claim.paths)
        self._hosts: _Table = {}
        self._below_hosts: _Table = {}
        self._paths: _Table = {}
        self._models: _Table = {}
        self._model_prefixes: _Table = {}
        pairs: dict[tuple[str, str], int] = {}
        for bit, claim in bits:
            for host in claim.hosts:
                if host.startswith("*."):
                    _add(self._below_hosts, host[1:], bit)
                else:
                    _add(self._hosts, host, bit)
            for path in claim.paths:
                _add(self._paths, path.rstrip("/"), bit)
            for model in claim.models:
                if model.endswith("*"):
                    _add(self._model_prefixes, model[:-1], bit)
                else:
                    _add(self._models, model, bit)
            for pair in claim.headers.items():
                pairs[pair] = pairs.get(pair, 0) + 1
        # What few claims ask for is compared first: it tells them apart soonest.
        self._headers = [
            sorted(claim.headers.items(), key=lambda pair: pairs[pair]) for claim in self.listed
        ]
        self._num_labels = sorted({host.count(".") for host in self._below_hosts})
        self._most_slashes = max((path.count("/") for path in self._paths), default=0)
        self._prefix_lengths = sorted({len(prefix) for prefix in self._model_prefixes})

    def find_routes(self, headers: Mapping[str, str]) -> int:
        """Bits of the claims whose hosts and paths match a request; headers are not checked."""
        bits = self._any_host
        if self._hosts or self._below_hosts:
            bits |= self._find_host(pool_match.host_of(headers))
        if bits and self._paths:
            bits &= self._any_path | self._find_path(pool_match.path_of(headers))
        return bits

    def find_models(self, model: str) -> int:
        """Bits of the claims that match a model name, including claims without models."""
        bits = self.without_models | self._models.get(model, 0)
        for length in self._prefix_lengths:
            if length > len(model):
                break
            bits |= self._model_prefixes.get(model[:length], 0)
        return bits

    def positions(self, bits: int, headers: Mapping[str, str]) -> Iterator[int]:
        """Positions of the claims in `bits` whose headers match a request, in their order."""
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
        """Bits of the claims whose path equals this one or a prefix of its segments."""
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
