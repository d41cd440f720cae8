"""Pending load: the load that queued requests will add to their preferred endpoint.

Conversations that wait for an endpoint push each other's prefixes out of its cache as much as those
that it serves. So they count as load before they are dispatched.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from extproc.pool import inflight
from extproc.pool.conversations import ConversationTracker
from extproc.pool.inflight import InflightLoad
from extproc.pool.store import PoolStore


class PendingShare(msgspec.Struct, frozen=True, gc=False):
    """The load that a queued request will add.

    Attributes:
        account: Of the endpoint it waits for.
        share: Of its cache.
    """

    account: InflightLoad
    share: inflight.ContextShare


class PendingLoad:
    """Adds the load of queued requests to the endpoints of a pool, and removes it.

    Args:
        fleet: The endpoints.
        recurrence: How conversations grow.
        tokens: Prompt tokens by depth of a chain.

    Attributes:
        counted: Whether any profile reads the pending load.
    """

    def __init__(
        self, fleet: PoolStore, recurrence: ConversationTracker, tokens: Sequence[int]
    ) -> None:
        self._fleet = fleet
        self._recurrence = recurrence
        self._tokens = tokens
        self.counted = False

    def add(self, address: str, chain: Sequence[int], *, prompt_tokens: int) -> PendingShare | None:
        """Add the load of a queued request to an endpoint.

        Args:
            address: Of the endpoint; empty for none.
            chain: The prompt's block hashes, root first.
            prompt_tokens: Of the prompt.

        Returns:
            What to take back once the request goes on or leaves; None where there is nothing.
        """
        if not (address and chain and self.counted):
            return None
        member = self._fleet.pool.find(address)
        if member is None:
            return None
        growth = self._recurrence.expected_growth_tokens(prompt_tokens)
        return PendingShare(
            member.account, member.account.add_pending(chain, self._tokens, growth=growth)
        )


def remove(promise: PendingShare | None) -> None:
    """Remove the load of a request that left the queue."""
    if promise is not None:
        promise.account.remove_pending(promise.share)
