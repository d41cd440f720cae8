"""Another replica of bench.chaos, which exchanges requests directly: its outages, and the bars on it.

The other replica has a client and an Envoy of its own. It is killed and started again, and stopped and
continued, in turn; readers connect to the first replica that read nothing. Both replicas say how many
requests they sent are open, and how many of the other replica they charge: these must become equal.
"""

from __future__ import annotations

import asyncio
import collections
import contextlib
import math
import signal
import socket
import statistics
import time
from collections.abc import Sequence

import msgspec

from bench import steady_client
from bench.chaos_site import ChaosBar, ChaosReplica
from bench.hostile_watch import WatchedPicker
from extproc.errors import ConfigError
from extproc.server import http_peer_channel

#: Requests per second of the other replica's client, and tokens of their answers: some are always open.
RATE_PER_S, TOKENS = 2.0, 1500

#: Seconds that the other replica is gone or stopped: longer than it may be silent.
TROUBLE_S = 8.0

#: Seconds after which accounts must agree, and within which requests of a killed replica must be gone:
#: as long as it may be silent, a look each second, and one more.
MOST_AGREEMENT_S, MOST_GONE_S = 5.0, 7.0

#: Seconds after which a measurement is given up.
_LIMIT_S = 30.0

#: Looks at both replicas, their largest mean difference in requests, and seconds between two looks.
_LOOKS, _EQUAL, _LOOK_S = 20, 0.5, 0.02

#: Seconds before a replica that did not start is started again.
_RESTART_S = 1.0

_OWN, _FOREIGN = "extproc_endpoint_inflight_requests", "extproc_peer_sync_inflight_requests"


class PeerOutage(msgspec.Struct):
    """Time in which the other replica was killed or stopped, in monotonic seconds."""

    what: str
    began: float
    ended: float = math.inf


class ChaosPeers:
    """Outages of the other replica, and how accounts followed.

    Attributes:
        outages: In order.
        gone_s: Seconds until requests of a killed replica were gone from the accounts, for each kill.
        agreement_s: Seconds from the end of an outage until accounts agreed, for each outage.
    """

    def __init__(self, picker: WatchedPicker, peer: ChaosReplica) -> None:
        self.outages: list[PeerOutage] = []
        self.gone_s: list[float] = []
        self.agreement_s: list[float] = []
        self._picker = picker
        self._peer = peer

    async def kill(self) -> None:
        """Kill the other replica, wait until the first one forgot its requests, and start it again."""
        outage = PeerOutage("peer killed", time.monotonic())
        self.outages.append(outage)
        self._peer.send(signal.SIGKILL)
        self.gone_s.append(await self._measure_gone())
        await self._start()
        await self._recover(outage)

    async def stop(self) -> None:
        """Stop the other replica, as a network that loses everything would, and let it continue."""
        outage = PeerOutage("peer stopped", time.monotonic())
        self.outages.append(outage)
        self._peer.send(signal.SIGSTOP)
        await asyncio.sleep(TROUBLE_S)
        self._peer.send(signal.SIGCONT)
        await self._recover(outage)

    async def read_slowly(self) -> None:
        """Connect to the first replica as a peer does, and read nothing for a while."""
        with contextlib.suppress(OSError), socket.socket() as connection:
            # The smallest buffer that the kernel gives.
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1)
            connection.setblocking(False)
            loop = asyncio.get_running_loop()
            await loop.sock_connect(connection, ("127.0.0.1", self._picker.pages))
            head = f"GET {http_peer_channel.PATH} HTTP/1.1\r\nhost: localhost\r\n\r\n"
            await loop.sock_sendall(connection, head.encode())
            await asyncio.sleep(2 * TROUBLE_S)

    def is_excused(self, outcome: steady_client.ClientOutcome) -> bool:
        """True if the other replica was killed or stopped while a request of its client was open."""
        return any(
            outcome.begun <= outage.ended and outcome.ended >= outage.began
            for outage in self.outages
        )

    async def _start(self) -> None:
        """Start the other replica, again and again while a file that it reads is broken."""
        while True:
            with contextlib.suppress(ConfigError):
                await self._peer.start()
                return
            await asyncio.sleep(_RESTART_S)

    async def _recover(self, outage: PeerOutage) -> None:
        outage.ended = time.monotonic()
        self.agreement_s.append(await self._measure_agreement())

    async def _measure_gone(self) -> float:
        """Seconds until the first replica charges nothing of the other one; infinite if it always does."""
        began = time.monotonic()
        while (now := time.monotonic()) < began + _LIMIT_S:
            if (await self._picker.metrics()).get(_FOREIGN) == 0.0:
                return now - began
            await asyncio.sleep(_LOOK_S)
        return math.inf

    async def _measure_agreement(self) -> float:
        """Seconds until each replica charges what the other has open; infinite if it never does.

        Requests begin and end between the two pages of a look, so it is the mean difference of many
        looks that is small: a request that is missing, or stays charged, makes it 1.
        """
        began = time.monotonic()
        looks: collections.deque[tuple[float, float, float]] = collections.deque(maxlen=_LOOKS)
        while (now := time.monotonic()) < began + _LIMIT_S:
            first, second = await asyncio.gather(
                self._picker.metrics(), self._peer.watched.metrics()
            )
            if not (first and second):
                looks.clear()
                continue
            there, back = second[_FOREIGN] - _own(first), first[_FOREIGN] - _own(second)
            looks.append((now, there, back))
            means = [abs(statistics.fmean(values)) for values in list(zip(*looks, strict=True))[1:]]
            if len(looks) == _LOOKS and max(means) <= _EQUAL:
                return looks[0][0] - began
            await asyncio.sleep(_LOOK_S)
        return math.inf


def _own(metrics: dict[str, float]) -> float:
    return sum(value for name, value in metrics.items() if name.startswith(_OWN))


def judge(
    peers: ChaosPeers, outcomes: Sequence[steady_client.ClientOutcome], excused: int
) -> list[ChaosBar]:
    """Hold what happened to the other replica against the bars.

    Args:
        outcomes: Of all requests of its client.
        excused: Failures on an engine that was killed under them.
    """
    failed = [outcome for outcome in outcomes if outcome.status != 200]
    under_outage = sum(map(peers.is_excused, failed))
    return [
        ChaosBar(
            "requests of the other replica's client that failed, but for those under its outages",
            f"0 of {len(outcomes)}",
            f"{len(failed) - under_outage - excused} (and {under_outage} under outages, {excused} on killed engines)",
            len(failed) == under_outage + excused,
        ),
        ChaosBar(
            "seconds until requests of a killed replica leave the accounts of the other one",
            f"<= {MOST_GONE_S:g}",
            _describe(peers.gone_s),
            max(peers.gone_s, default=0.0) <= MOST_GONE_S,
        ),
        ChaosBar(
            "seconds after an outage until each replica charges what the other one has open",
            f"<= {MOST_AGREEMENT_S:g}",
            _describe(peers.agreement_s),
            max(peers.agreement_s, default=0.0) <= MOST_AGREEMENT_S,
        ),
    ]


def _describe(seconds: Sequence[float]) -> str:
    if not seconds:
        return "not measured"
    return f"{min(seconds):.1f} to {max(seconds):.1f}, {len(seconds)} times"
