"""gRPC health: what the probes of data planes and kubelets ask."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping

import grpc
from grpc_health.v1 import health_pb2

from extproc.pool.snapshot import Pool
from extproc.wire import codec

#: Always serving while the process answers (EPP protocol 004, health).
LIVENESS = "liveness"

#: Names with the whole answer; the others are not told of missing metrics
#: (docs/spec/protocol.md#health-service).
READINESS = frozenset({"", "readiness", codec.SERVICE})

#: HTTP/2 in plain text, as InferencePools and Services write it.
H2C = "kubernetes.io/h2c"

#: What engines may want to be spoken to (InferencePool `appProtocol`) that we can read: every
#: surface is parsed, over HTTP/1 and, with gRPC, over HTTP/2 in plain text.
SUPPORTED_APP_PROTOCOLS = frozenset({"", "http", H2C})


def _always() -> bool:
    return True


class InitialScrapeGate:
    """Whether every endpoint was looked at once, so that the first picks are not blind.

    An endpoint counts once it was scraped or could not be, and all do when the time is over. What
    comes later makes nobody unready again.

    Args:
        pools: The current pools by name.
        clock: Monotonic seconds.
        most_s: Seconds from the first question, once endpoints are known; 0 does not wait.
    """

    def __init__(
        self, pools: Callable[[], Mapping[str, Pool]], clock: Callable[[], float], most_s: float
    ) -> None:
        self._pools = pools
        self._clock = clock
        self._most_s = most_s
        self._until: float | None = None
        self._done = most_s <= 0.0

    def __call__(self) -> bool:
        """Whether it is done; asked only once endpoints are known."""
        if self._done:
            return True
        now = self._clock()
        if self._until is None:
            self._until = now + self._most_s
        self._done = now >= self._until or all(_looked_at(self._pools().values()))
        return self._done


def _looked_at(pools: Iterable[Pool]) -> Iterable[bool]:
    for pool in pools:
        for member in pool.members:
            yield bool(member.failure) or math.isfinite(member.load.at)


def lines(pools: Mapping[str, Pool]) -> Iterable[str]:
    """Pools whose endpoints all fail: a picker is ready then, because nobody else is better off."""
    for name, pool in pools.items():
        if pool.members and all(member.ejected for member in pool.members):
            suffix = f" of pool {name}" if name else ""
            yield f"0 of {len(pool.members)} endpoints{suffix} take part: all are failing"


class Readiness:
    """Whether this picker wants traffic.

    Args:
        synced: Whether discovery has spoken.
        measured: Whether endpoints were looked at, see `InitialScrapeGate`.
        fits: Whether requests of the pool's protocol can be read, see `SUPPORTED_APP_PROTOCOLS`.
        leader: Whether this replica is the one that serves; None where there is no election, which
            is the usual way: all replicas serve.
        notes: What stands still and why, for people; it changes no answer.
    """

    def __init__(
        self,
        synced: Callable[[], bool],
        *,
        measured: Callable[[], bool] = _always,
        fits: Callable[[], bool] = _always,
        leader: Callable[[], bool] | None = None,
        notes: Callable[[], Iterable[str]] = tuple,
    ) -> None:
        self.notes = notes
        self._synced = synced
        self._measured = measured
        self._fits = fits
        self._leader = leader
        self.draining = False

    @property
    def electing(self) -> bool:
        """Whether one replica is elected."""
        return self._leader is not None

    @property
    def live(self) -> bool:
        """Synced and not draining, and able to read what the pool is sent."""
        return not self.draining and self._synced() and self._fits()

    @property
    def can_serve(self) -> bool:
        """Live and not blind: a follower takes part in an election only then."""
        return self.live and self._measured()

    @property
    def ready(self) -> bool:
        """Able, and elected where there is an election."""
        return self.can_serve and (self._leader is None or self._leader())


class HealthServicer:
    """Check and List; Watch is left unimplemented, as in the reference picker.

    The table of docs/spec/protocol.md#health-service, with one difference: `liveness` is always
    serving, as EPP protocol 004 demands, also without an election.
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
        names = ["", LIVENESS, "readiness", codec.SERVICE]
        if not self._readiness.electing:
            names.append("inference-extension")
        return health_pb2.HealthListResponse(
            statuses={
                name: health_pb2.HealthCheckResponse(status=self._status(name)) for name in names
            }
        )

    def _status(self, service: str) -> int:
        readiness, status = self._readiness, health_pb2.HealthCheckResponse
        if service == LIVENESS:
            return int(status.SERVING)
        if service in READINESS:
            serving = readiness.ready
        elif readiness.electing:
            return int(status.SERVICE_UNKNOWN)
        else:
            serving = readiness.live
        return int(status.SERVING if serving else status.NOT_SERVING)


def register(server: grpc.aio.Server, readiness: Readiness) -> None:
    """Serve health on a server."""
    health = HealthServicer(readiness)
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
