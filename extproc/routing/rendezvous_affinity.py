"""Rendezvous affinity: the endpoint of a conversation among unsynchronized replicas.

A picker behind the same Envoy as others sees some turns of a conversation, and its index knows
nothing of the rest. So all of them believe that a conversation is cached at its home, which follows
from its key and the endpoints' addresses and speeds alone, and because all of them believe it, it is.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterable, Sequence

import mmh3

from extproc.pool.foreign_traffic import ForeignTraffic
from extproc.pool.snapshot import EndpointSnapshot

#: Share of others from which there are others: what pages show late is less.
LEAST_SHARE = 0.1

#: Share of a prompt believed at home at most; its last turn is new.
_MOST = 0.95

#: Times the fleet's hit ratio that is believed. Pickers that do not agree yet find half of what they
#: will find; prompts that share nothing with any other have no home.
_HIT_RATIO_FACTOR = 2.0

#: Where so many endpoints hold so much of a prompt, we know it better than others could tell.
_ENOUGH_HOLDERS, _ENOUGH_SHARE = 2, 0.9

#: Requests on an engine at whose speed engines are compared.
_BATCH = 32.0

#: Members whose speed is looked at (count).
_DRAWN = 16


def with_expected_hits(
    key: str,
    tokens: int,
    members: Sequence[EndpointSnapshot],
    *,
    matched: Sequence[int],
    peers: ForeignTraffic,
) -> tuple[Sequence[int], int | None]:
    """Add the hits to expect where other replicas sent the earlier turns.

    Args:
        key: Identity of the conversation; empty for none.
        tokens: Of the prompt.
        members: Candidates.
        matched: Per member, prompt tokens that our own index believes cached there.
        peers: Load of other replicas.

    Returns:
        `matched`, with more at the conversation's affinity endpoint, and the index of that endpoint;
        None if it has none, or our own index knows more.
    """
    if not key or peers.share < LEAST_SHARE:
        return matched, None
    much = _ENOUGH_SHARE * tokens
    if sum([known >= much for known in matched]) >= _ENOUGH_HOLDERS:
        return matched, None
    believed = int(min(_MOST, _HIT_RATIO_FACTOR * peers.hit_ratio) * tokens)
    if not believed:
        return matched, None
    at = rendezvous_endpoint(key, members)
    if not members[at].load.prefix_hits:
        return matched, None  # it does not cache prefixes, or that is unknown
    if believed <= matched[at]:
        return matched, at
    expected = list(matched)
    expected[at] = believed
    return expected, at


def rendezvous_endpoint(key: str, members: Sequence[EndpointSnapshot]) -> int:
    """Index of the member a key belongs to, by weighted rendezvous hash.

    The least of -ln(u) s, with u the hash of key and address in 0..1 and s the seconds between
    tokens (Thaler and Ravishankar 1998, with weights 1/s). Speeds are rounded to a factor of 2^0.5,
    because each picker learns them for itself. Speeds are looked at for the `_DRAWN` members of
    largest u only: a member further away would have to be several times as fast to win.

    Args:
        key: Not empty.
        members: At least one.
    """
    seed = mmh3.hash(key, 0, signed=False)
    draws = [mmh3.hash(member.endpoint.address, seed, False) for member in members]
    near: Iterable[int] = range(len(draws))
    if len(draws) > _DRAWN:
        near = heapq.nlargest(_DRAWN, near, key=draws.__getitem__)
    best, least = 0, math.inf
    for at in near:
        speed = round(2.0 * math.log2(members[at].rates.iteration_s(_BATCH)))
        distance = -math.log((draws[at] + 1) / 4294967297.0) * 2.0 ** (0.5 * speed)
        if distance < least:
            best, least = at, distance
    return best
