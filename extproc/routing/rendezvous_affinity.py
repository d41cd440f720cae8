"""Rendezvous affinity: the endpoint at which all pickers expect a conversation.

A picker behind the same Envoy as others sees some turns of a conversation, and its index knows nothing
of the rest. So all replicas expect a conversation at the same endpoint, which follows from its key and
the endpoints' addresses and speeds alone, and because all of them expect it, it is there.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Sequence
from itertools import compress, repeat
from typing import Final

import mmh3

from extproc.endpoint import StepTimeModel
from extproc.pool.snapshot import EndpointSnapshot

#: Share of others from which there are others: what pages show late is less.
MIN_PEER_SHARE = 0.1

#: Largest share of a prompt that is expected on its affinity endpoint; its last turn is new.
_MAX_EXPECTED_SHARE = 0.95

#: Where so many endpoints hold so much of a prompt, we know it better than others could tell.
_MIN_HOLDERS, _MIN_HELD_SHARE = 2, 0.9

#: Requests on an engine at whose speed engines are compared.
_REFERENCE_BATCH = 32.0

#: Members whose speed is looked at (count).
_NUM_COMPARED = 16

#: Values that a hash may have (count).
_NUM_HASHES = 1 << 32

#: Conversations whose endpoint is remembered (count); some 100 bytes each.
_MAX_CONVERSATIONS: Final = 8192


class RendezvousAffinity:
    """Finds the endpoints of conversations by weighted rendezvous hash.

    The least of -ln(u) s, with u the hash of seed and address in 0..1 and s the seconds between
    tokens (Thaler and Ravishankar 1998, with weights 1/s). Speeds are rounded to a factor of 2^0.5,
    because each picker learns them for itself. Speeds are looked at for the `_NUM_COMPARED` members of
    largest u only: a member further away would have to be several times as fast to win.

    What was found for a conversation stands until an address or a rounded speed changes.
    """

    def __init__(self) -> None:
        self._members: Sequence[EndpointSnapshot] = ()
        self._addresses: list[str] = []
        # By position; None where it was not needed yet.
        self._speeds: list[float | None] = []
        self._endpoints: dict[int, int] = {}

    def find_endpoint(self, seed: int, members: Sequence[EndpointSnapshot]) -> int:
        """Index of the member that a conversation belongs to.

        Args:
            seed: Hash of the conversation's identity, 32 bits.
            members: Candidates, at least one; must not change in place.
        """
        if members is not self._members:
            self._follow(members)
        index = self._endpoints.get(seed)
        if index is None:
            if len(self._endpoints) >= _MAX_CONVERSATIONS:
                self._endpoints.clear()
            index = self._endpoints[seed] = self._draw(seed)
        return index

    def _follow(self, members: Sequence[EndpointSnapshot]) -> None:
        """Forget what a change of the members made wrong."""
        before, self._members = self._members, members
        addresses = [member.endpoint.address for member in members]
        if addresses != self._addresses:
            self._addresses = addresses
            self._speeds = [None] * len(members)
            self._endpoints.clear()
            return
        speeds = self._speeds
        for n in compress(range(len(members)), map(operator.is_not, members, before)):
            known = speeds[n]
            if known is not None and _round_speed(members[n].rates) != known:
                speeds[n] = None
                self._endpoints.clear()

    def _draw(self, seed: int) -> int:
        hashes: list[int] = list(map(mmh3.hash, self._addresses, repeat(seed), repeat(False)))
        draws: list[tuple[int, int]] = []
        if len(hashes) > _NUM_COMPARED:
            # Half as many again lie above, on average: to sort all takes longer.
            min_hash = _NUM_HASHES - 3 * _NUM_COMPARED * _NUM_HASHES // (2 * len(hashes))
            draws = [(hashed, n) for n, hashed in enumerate(hashes) if hashed >= min_hash]
        if len(draws) < _NUM_COMPARED:
            draws = [*zip(hashes, range(len(hashes)), strict=True)]
        if len(draws) > _NUM_COMPARED:
            draws = sorted(draws, reverse=True)[:_NUM_COMPARED]
        best, least = 0, math.inf
        for hashed, index in draws:
            speed = self._speeds[index]
            if speed is None:
                speed = self._speeds[index] = _round_speed(self._members[index].rates)
            distance = -math.log((hashed + 1) / 4294967297.0) * speed
            if distance < least:
                best, least = index, distance
        return best


def _round_speed(rates: StepTimeModel) -> float:
    """Seconds between two tokens, rounded to a factor of 2^0.5."""
    return math.exp2(0.5 * round(2.0 * math.log2(rates.iteration_s(_REFERENCE_BATCH))))


def with_expected_hits(
    seed: int | None,
    tokens: int,
    members: Sequence[EndpointSnapshot],
    *,
    affinity: RendezvousAffinity,
    matched: Sequence[int],
    share: float,
) -> tuple[Sequence[int], int | None]:
    """Add the hits to expect where other replicas sent the earlier turns.

    Of what this replica did not send itself, others sent their share, if the prompt goes on from an
    earlier one. What engines find does not say how much that is: replicas that do not agree yet find
    less than they would.

    Args:
        seed: Hash of the conversation's identity, 32 bits; None without one.
        matched: Per member, prompt tokens that our own index predicts as cached there.
        share: Share of the requests that others send, times that of those that go on from an earlier
            one, 0..1.

    Returns:
        `matched`, with more at the conversation's affinity endpoint, and the index of that endpoint;
        None if it has none, or our own index knows more.
    """
    if seed is None or not share:
        return matched, None
    min_tokens = _MIN_HELD_SHARE * tokens
    # The sum takes twice as long as the maximum.
    if max(matched) >= min_tokens and (
        sum([held_tokens >= min_tokens for held_tokens in matched]) >= _MIN_HOLDERS
    ):
        return matched, None
    index = affinity.find_endpoint(seed, members)
    if not members[index].load.prefix_hits:
        return matched, None  # it does not cache prefixes, or that is unknown
    held_tokens = matched[index]
    expected_tokens = int(
        min(_MAX_EXPECTED_SHARE * tokens, held_tokens + share * (tokens - held_tokens))
    )
    if expected_tokens <= held_tokens:
        return matched, index
    expected = list(matched)
    expected[index] = expected_tokens
    return expected, index
