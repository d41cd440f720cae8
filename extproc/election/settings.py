"""The section `cluster.lease`: name and times of the Lease."""

from __future__ import annotations

from typing import Annotated

import msgspec

_PositiveSeconds = Annotated[float, msgspec.Meta(gt=0)]


class ElectionSettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The Lease of `leader_election`. Replicas that share it must agree on name and namespace.

    Attributes:
        name: Name of the Lease. Empty: `epp-<namespace>-<pool>.llm-d.ai`, as in the upstream EPP;
            with several pools `epp-<own namespace>-pools.llm-d.ai`, so two Deployments with several
            pools in one namespace need names.
        namespace: Namespace of the Lease. Empty: the one this process runs in, where the shipped
            manifests grant the rights.
        duration_s: Whole seconds after which others may take a Lease that is not renewed: the time
            without a leader after a crash. 15, the default of client-go.
        renew_s: Seconds without a renewal after which a leader gives up. 10, the default of
            client-go: 5 less than `duration_s`, for clocks that drift.
        retry_s: Longest pause between two attempts (seconds). 2, the default of client-go: the time
            without a leader after an orderly end, at the cost of one read in 2 seconds for each
            replica.
    """

    name: str = ""
    namespace: str = ""
    duration_s: Annotated[int, msgspec.Meta(ge=1)] = 15
    renew_s: _PositiveSeconds = 10.0
    retry_s: _PositiveSeconds = 2.0
