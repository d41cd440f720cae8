"""gRPC health: what the probes of data planes and kubelets ask."""

from __future__ import annotations

from collections.abc import Callable

import grpc
from grpc_health.v1 import health_pb2

#: Always serving while the process answers (EPP protocol 004, health).
LIVENESS = "liveness"


class Readiness:
    """Whether this picker wants traffic.

    Args:
        synced: Whether discovery has spoken.
    """

    def __init__(self, synced: Callable[[], bool]) -> None:
        self._synced = synced
        self.draining = False

    @property
    def ready(self) -> bool:
        """Synced and not draining."""
        return not self.draining and self._synced()


class Health:
    """Check and List; Watch is left unimplemented, as in the reference picker.

    Every name but `liveness` has the answer of readiness: `readiness`, the ext_proc service, the
    empty name, `inference-extension` (EPP protocol report 7.2).
    """

    def __init__(self, readiness: Readiness) -> None:
        self._readiness = readiness

    async def check(
        self, request: health_pb2.HealthCheckRequest, _: object
    ) -> health_pb2.HealthCheckResponse:
        """Answer one name."""
        return health_pb2.HealthCheckResponse(status=self._status(request.service))

    async def list(
        self, _: health_pb2.HealthListRequest, __: object
    ) -> health_pb2.HealthListResponse:
        """Answer the names people use."""
        names = ("", LIVENESS, "readiness", "inference-extension")
        return health_pb2.HealthListResponse(
            statuses={
                name: health_pb2.HealthCheckResponse(status=self._status(name)) for name in names
            }
        )

    def _status(self, service: str) -> int:
        serving = service == LIVENESS or self._readiness.ready
        status = health_pb2.HealthCheckResponse
        return int(status.SERVING if serving else status.NOT_SERVING)


def register(server: grpc.aio.Server, readiness: Readiness) -> None:
    """Serve health on a server."""
    health = Health(readiness)
    methods = {
        "Check": grpc.unary_unary_rpc_method_handler(
            health.check,
            request_deserializer=health_pb2.HealthCheckRequest.FromString,
            response_serializer=health_pb2.HealthCheckResponse.SerializeToString,
        ),
        "List": grpc.unary_unary_rpc_method_handler(
            health.list,
            request_deserializer=health_pb2.HealthListRequest.FromString,
            response_serializer=health_pb2.HealthListResponse.SerializeToString,
        ),
    }
    server.add_generic_rpc_handlers(
        (grpc.method_handlers_generic_handler("grpc.health.v1.Health", methods),)
    )
