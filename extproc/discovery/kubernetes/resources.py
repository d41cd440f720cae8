"""The collections of the API server we read: a literal table."""

from __future__ import annotations

import msgspec

from extproc.discovery.kubernetes import settings


class Resource(msgspec.Struct, frozen=True):
    """A resource in one version.

    Attributes:
        group: API group; empty for the core one.
        version: Version asked for.
        plural: As in the path.
        optional: Whether pools can be known without it.
    """

    group: str
    version: str
    plural: str
    optional: bool = False

    @property
    def title(self) -> str:
        """For people, in kubectl's form."""
        return f"{self.plural}.{self.group}" if self.group else self.plural


PODS = Resource("", "v1", "pods")
SLICES = Resource("discovery.k8s.io", "v1", "endpointslices")
POOLS = Resource(settings.POOL_GROUP, "v1", "inferencepools")
OLD_POOLS = Resource(settings.OLD_POOL_GROUP, "v1alpha2", "inferencepools")

_NEW = "llm-d.ai"
_OLD = settings.OLD_POOL_GROUP
OBJECTIVES = Resource(_NEW, "v1alpha2", "inferenceobjectives", optional=True)
OLD_OBJECTIVES = Resource(_OLD, "v1alpha2", "inferenceobjectives", optional=True)
REWRITES = Resource(_NEW, "v1alpha2", "inferencemodelrewrites", optional=True)
OLD_REWRITES = Resource(_OLD, "v1alpha2", "inferencemodelrewrites", optional=True)

#: Those that make a policy; the first of a kind that is installed counts, alone
#: (docs/spec/protocol.md#inferenceobjective).
DECREES = ((OBJECTIVES, OLD_OBJECTIVES), (REWRITES, OLD_REWRITES))

#: By API group of an InferencePool.
POOLS_OF = {settings.POOL_GROUP: POOLS, settings.OLD_POOL_GROUP: OLD_POOLS}
