"""Who a request may go to: those the data plane allows, that serve its model, and that are up."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from extproc import decision as outcomes
from extproc.decision import Rejection
from extproc.endpoint import Endpoint
from extproc.pool.serving import Split
from extproc.pool.snapshot import Member, Pool
from extproc.request import Request


class Eligible(msgspec.Struct, frozen=True, gc=False):
    """Who a request may go to.

    Attributes:
        members: In pool order, at least one.
        left_out: Who may not because they do not serve the model.
        unlisted: Nobody allowed lists the model, and all of them listed theirs.
    """

    members: Sequence[Member]
    left_out: Sequence[Endpoint] = ()
    unlisted: bool = False


def find(
    pool: Pool, request: Request, *, honour_subset: bool, reject_unlisted: bool
) -> Eligible | Rejection:
    """Find out who a request may go to.

    Args:
        pool: The snapshot.
        request: Model, adapter and subset count.
        honour_subset: Keep to the endpoints the data plane allows.
        reject_unlisted: Refuse what nobody serves, where what everybody serves is known.

    Returns:
        The endpoints; 503 when none is allowed, or 404.
    """
    subset = request.subset if honour_subset else None
    split = pool.serving.who(request.model, request.adapter)
    members = pool.eligible(subset, split)
    if members:
        return Eligible(members, _left_out(pool, subset, split))
    members = pool.eligible(subset)
    if not members:
        return outcomes.no_endpoints()
    if reject_unlisted:
        return outcomes.model_not_found(request.target, pool.serving.names)
    return Eligible(members, unlisted=True)


def _left_out(pool: Pool, subset: Sequence[str] | None, split: Split | None) -> Sequence[Endpoint]:
    if split is None:
        return ()
    if subset is None:
        return split.others
    allowed = {member.endpoint.address for member in pool.eligible(subset)}
    return tuple([endpoint for endpoint in split.others if endpoint.address in allowed])
