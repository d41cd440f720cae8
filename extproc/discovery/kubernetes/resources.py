"""Table of the API resources that discovery reads."""

from __future__ import annotations

import msgspec

from extproc.discovery.kubernetes import settings


class ResourceType(msgspec.Struct, frozen=True):
    """A resource in one version.

    Attributes:
        group: API group; empty for the core one.
        version: API version to request.
        plural: As in the path.
        optional: Whether pools can be known without it.
    """

    group: str
    version: str
    plural: str
    optional: bool = False

    @property
    def title(self) -> str:
        """Display name, in the form of kubectl."""
        return f"{self.plural}.{self.group}" if self.group else self.plural


PODS = ResourceType("", "v1", "pods")
SLICES = ResourceType("discovery.k8s.io", "v1", "endpointslices")
POOLS = ResourceType(settings.POOL_GROUP, "v1", "inferencepools")
OLD_POOLS = ResourceType(settings.OLD_POOL_GROUP, "v1alpha2", "inferencepools")

_NEW = "llm-d.ai"
_OLD = settings.OLD_POOL_GROUP
OBJECTIVES = ResourceType(_NEW, "v1alpha2", "inferenceobjectives", optional=True)
OLD_OBJECTIVES = ResourceType(_OLD, "v1alpha2", "inferenceobjectives", optional=True)
REWRITES = ResourceType(_NEW, "v1alpha2", "inferencemodelrewrites", optional=True)
OLD_REWRITES = ResourceType(_OLD, "v1alpha2", "inferencemodelrewrites", optional=True)

#: Those that make a policy; the first of a kind that is installed counts, alone
#: (docs/spec/protocol.md#inferenceobjective).
POLICY_RESOURCES = ((OBJECTIVES, OLD_OBJECTIVES), (REWRITES, OLD_REWRITES))

#: By API group of an InferencePool.
POOLS_OF = {settings.POOL_GROUP: POOLS, settings.OLD_POOL_GROUP: OLD_POOLS}
