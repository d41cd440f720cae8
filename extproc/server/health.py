"""gRPC health service and readiness, for probes of data planes and kubelets.

Stalls of the event loop are measured by a timer that records how late it fires: while the loop is held
no stream is served and no probe answered. A hold is seen as what is left of it when the timer was due: by
up to `BUSY_S` less than it was while streams are open, and by up to `QUIET_S` while none is.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Callable, Iterable, Mapping
from typing import Final

from grpc_health.v1 import health_pb2

from extproc.pool.snapshot import Pool
from extproc.supervision import seconds_to_tick
from extproc.telemetry.counters import ProcessCounters
from extproc.telemetry.request_series import MetricHistogram
from extproc.wire import codec

#: Name of the service.
SERVICE: Final = "grpc.health.v1.Health"

#: Largest request (bytes): it has the name of a service, and a client may keep its call open.
MAX_REQUEST_BYTES: Final = 1024

#: Always serving while the process answers (EPP protocol 004, health).
LIVENESS = "liveness"

#: Names that report full readiness; the others do not depend on metrics
#: (docs/spec/protocol.md#health-service).
READINESS = frozenset({"", "readiness", codec.SERVICE})

#: HTTP/2 in plain text, as InferencePools and Services write it.
H2C = "kubernetes.io/h2c"

#: What engines may want to be spoken to (InferencePool `appProtocol`) that we can read: every
#: surface is parsed, over HTTP/1 and, with gRPC, over HTTP/2 in plain text.
SUPPORTED_APP_PROTOCOLS = frozenset({"", "http", H2C})


class InitialScrapeGate:
    """Gate that opens once every endpoint was scraped, so that first picks have data.

    An endpoint counts once it was scraped or could not be, and all do when the time is over. Endpoints
    that come later do not close it again.

    Args:
        timeout_s: Longest wait in seconds from the first call, once endpoints are known; 0 is open.
    """

    def __init__(
        self, pools: Callable[[], Mapping[str, Pool]], clock: Callable[[], float], timeout_s: float
    ) -> None:
        self._pools = pools
        self._clock = clock
        self._timeout_s = timeout_s
        self._until: float | None = None
        self._done = timeout_s <= 0.0

    def __call__(self) -> bool:
        """Check if the gate is open; called only once endpoints are known."""
        if self._done:
            return True
        now = self._clock()
        if self._until is None:
            self._until = now + self._timeout_s
        self._done = now >= self._until or all(_scrape_attempted(self._pools().values()))
        return self._done


def _scrape_attempted(pools: Iterable[Pool]) -> Iterable[bool]:
    for pool in pools:
        for member in pool.members:
            yield bool(member.failure) or math.isfinite(member.load.at)


def lines(pools: Mapping[str, Pool]) -> Iterable[str]:
    """A line per pool whose endpoints all fail; readiness stays, as other replicas fail too."""
    for name, pool in pools.items():
        if pool.members and all(member.is_ejected for member in pool.members):
            suffix = f" of pool {name}" if name else ""
            yield f"0 of {len(pool.members)} endpoints{suffix} take part: all are failing"


class Readiness:
    """Readiness of the endpoint picker for traffic.

    Args:
        is_synced: Returns True once discovery is complete.
        is_scraped: Returns True once endpoints were scraped, see `InitialScrapeGate`.
        is_protocol_supported: Returns True if the pool's protocol is one of `SUPPORTED_APP_PROTOCOLS`.
        is_leader: Returns True while this replica leads; None without an election, the default:
            then all replicas serve.
        notes: Returns lines about problems, for people; without effect on readiness.

    Attributes:
        is_probed: True once a client asked the gRPC health service.
    """

    def __init__(
        self,
        is_synced: Callable[[], bool],
        *,
        is_scraped: Callable[[], bool] = lambda: True,
        is_protocol_supported: Callable[[], bool] = lambda: True,
        is_leader: Callable[[], bool] | None = None,
        notes: Callable[[], Iterable[str]] = tuple,
    ) -> None:
        self.notes = notes
        self._synced = is_synced
        self._measured = is_scraped
        self._fits = is_protocol_supported
        self._leader = is_leader
        self.draining = False
        self.is_probed = False

    def start_draining(self) -> None:
        """Turn unready for good."""
        self.draining = True

    @property
    def electing(self) -> bool:
        """True if leader election is enabled."""
        return self._leader is not None

    @property
    def live(self) -> bool:
        """True if synced, not draining and able to parse the requests of the pool."""
        return not self.draining and self._synced() and self._fits()

    @property
    def can_serve(self) -> bool:
        """True if live and scraped; only then a follower takes part in the election."""
        return self.live and self._measured()

    @property
    def ready(self) -> bool:
        """True if able to serve, and leading where there is an election."""
        return self.can_serve and (self._leader is None or self._leader())


class HealthServicer:
    """gRPC health servicer: Check and List; no Watch, as in the reference EPP.

    The table of docs/spec/protocol.md#health-service, with one difference: `liveness` is always
    serving, as EPP protocol 004 demands, also without an election.
    """

    def __init__(self, readiness: Readiness) -> None:
        self._readiness = readiness

    def check(self, request: health_pb2.HealthCheckRequest) -> health_pb2.HealthCheckResponse:
        """Answer the status of a service name."""
        self._readiness.is_probed = True
        return health_pb2.HealthCheckResponse(status=self._status(request.service))

    def list(self) -> health_pb2.HealthListResponse:
        """Answer the status of all known service names."""
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


#: Seconds between two looks while a stream is open. 0.02 misses nothing above 20 ms, and beside
#: requests its timers come with wake-ups that are there anyway: 5 us each.
BUSY_S: Final = 0.02

#: Seconds between two looks while none is: no request waits, and a wake-up costs more than a look
#: (`python -m bench.stalls`). Whole seconds are those of other loops.
QUIET_S: Final = 1.0


class StallMeter:
    """Records stalls of the event loop on which it was started.

    Of a late timer the part that the loop's own thread computed is noted apart: on a busy machine
    the rest is time in which other processes had the core.

    Args:
        clock: Monotonic seconds, of the same kind as the event loop's.
        thread_time: Seconds of processor time of the current thread.
        count_streams: Called at each look with the number of open streams.
    """

    def __init__(
        self,
        counters: ProcessCounters,
        *,
        clock: Callable[[], float] = time.monotonic,
        thread_time: Callable[[], float] = time.thread_time,
        count_streams: Callable[[int], object] = int,
    ) -> None:
        self._stall_s: MetricHistogram = counters.event_loop_lag_s
        self._stall_cpu_s: MetricHistogram = counters.event_loop_lag_cpu_s
        self._clock = clock
        self._thread_time = thread_time
        self._counters = counters
        self._count_streams = count_streams
        self._timer: asyncio.TimerHandle | None = None
        self._quiet = False
        self._due = 0.0
        self._computed_s = 0.0

    def start(self) -> None:
        """Start the timer."""
        self._computed_s = self._thread_time()
        self._schedule()

    def stop(self) -> None:
        """Stop the timer."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        self._quiet = False

    def wake(self) -> None:
        """Switch to the busy interval. Cheap: called for every opened stream."""
        if self._quiet and self._timer is not None:
            self._timer.cancel()
            self.measure()

    def measure(self) -> None:
        """Record how late this call is; called by the timer, and in its place."""
        try:
            computed_s = self._thread_time()
            late_s = max(0.0, self._clock() - self._due)
            self._stall_s.add(late_s)
            self._stall_cpu_s.add(min(late_s, computed_s - self._computed_s))
            self._computed_s = computed_s
            self._count_streams(self._counters.streams_open)
        finally:
            # What raises here goes to the supervisor, and must not be the last look.
            self._schedule()

    def _schedule(self) -> None:
        self._quiet = not self._counters.streams_open
        wait_s = seconds_to_tick(self._clock(), QUIET_S) if self._quiet else BUSY_S
        self._due = self._clock() + wait_s
        self._timer = asyncio.get_running_loop().call_later(wait_s, self.measure)
