"""Counters of this process and of its replicas for a pool, as input of demand estimation.

Replicas exchange theirs: read at every step, pushed when a request waits.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Annotated

import msgspec
from aiohttp import web

from extproc.autoscaling.demand_estimator import PickerCounters, TargetObservation
from extproc.pool import step_time_values
from extproc.pool.snapshot import EndpointSnapshot, Pool
from extproc.scrape import client
from extproc.server.peer_addresses import PeerAddresses
from extproc.server.pool_runtime import PoolRuntime
from extproc.telemetry.counters import PoolCounters

#: Refusals of requests that wanted capacity, and will come again.
_WANTED = frozenset({429, 503})

#: Those that more replicas would not serve, by status and cause.
_LIMITED = (429, "rate-limited")


class DemandCounters:
    """Reads the counters of a pool. Totals never decrease, even if a part of them does.

    They are sums over all readings: a pool keeps a single instance.
    """

    def __init__(self, runtime: PoolRuntime, counters: PoolCounters) -> None:
        self.runtime = runtime
        self._counters = counters
        self._arrived = 0.0
        self._prompt_tokens = 0.0
        self._answered = 0
        self._reports = 0
        self._reported_tokens = 0
        self._answer_tokens = 0.0

    @property
    def available(self) -> int:
        """Ready replicas (count)."""
        return available(self.runtime.parts.store.pool)

    def observe_target(self, spec: int, now: float) -> TargetObservation:
        """Replicas, scraped load and engine speed of the scale target."""
        pool = self.runtime.parts.store.pool
        stale_after_s = self.runtime.parts.director.routing.settings.stale_after_s
        scraped = [member for member in pool.members if now - member.load.at < stale_after_s]
        fresh = [member.load for member in scraped]
        # The first page of an endpoint shows its ranks.
        engines = Counter(map(_replica, scraped))
        rates = [member.rates for member in pool.members]
        return TargetObservation(
            spec=spec,
            available=available(pool),
            waiting=math.fsum(load.waiting or 0.0 for load in fresh),
            running=math.fsum(load.running or 0.0 for load in fresh),
            rates=step_time_values.pool_mean(rates)
            if any(model.evidence for model in rates)
            else None,
            engines=max(engines.values(), default=0),
        )

    def read(self) -> PickerCounters:
        """Current counters of this process."""
        self._counters.settle()
        counters, pool = self._counters, self.runtime.parts.store.pool
        flow_controller = self.runtime.flow_controller
        held = left = queue_tokens = 0
        if flow_controller is not None:
            held, left = flow_controller.queue.count, flow_controller.outcomes["cancelled"]
            # Also of those that left: what comes after them must add to the total.
            queue_tokens = flow_controller.queue.tokens + flow_controller.unserved_tokens
        refused = sum(
            count for (status, _), count in counters.rejections.items() if status in _WANTED
        )
        refused -= counters.rejection_causes[_LIMITED]
        # A request that stops waiting is counted elsewhere a moment later.
        self._arrived = max(self._arrived, float(counters.routed_total + refused + held + left))
        tokens = counters.prompt_tokens - counters.matched_tokens + queue_tokens
        self._prompt_tokens = max(self._prompt_tokens, float(tokens))
        self._read_answers(pool)
        return PickerCounters(
            held=held,
            in_flight=sum(
                member.account.own - member.account.count_parts(own=True) for member in pool.members
            ),
            arrived=self._arrived,
            prompt_tokens=self._prompt_tokens,
            answered=float(self._answered),
            answer_tokens=self._answer_tokens,
        )

    def _read_answers(self, pool: Pool) -> None:
        """Add answer tokens; an answer without usage counts with the mean of the engines."""
        counters = self._counters
        answered = counters.answered_total - self._answered
        reports = counters.reported_total - self._reports
        total = counters.usage["completion"]
        reported_tokens = total - self._reported_tokens
        self._answered, self._reports = counters.answered_total, counters.reported_total
        self._reported_tokens = total
        usual = step_time_values.pool_mean([member.rates for member in pool.members]).output_tokens
        self._answer_tokens += reported_tokens + max(0, answered - reports) * usual


def available(pool: Pool) -> int:
    """Ready replicas (count); a replica with several ports or ranks counts once."""
    return len({_replica(member) for member in pool.members if member.is_up})


def _replica(member: EndpointSnapshot) -> str:
    """Replica that an endpoint is a port or a rank of."""
    return member.endpoint.uid or member.endpoint.host_port


_log = logging.getLogger("extproc.server")

#: Path by which replicas exchange counters.
PATH = "/internal/load"

#: Longest page (bytes): a thousand pools.
_MAX_BYTES = 1 << 20

#: Seconds for which the answers of all peers serve further pools. Each answer has all pools, so
#: exchanges for each pool alone would cost the square of their number.
_SHARED_S = 1.0

#: What decoding raises on bytes that are no such page: no JSON or numbers out of range, text that
#: is no UTF-8, and nesting without end.
_DECODE_ERRORS = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)


class PeerReport(msgspec.Struct, frozen=True):
    """Counters of a replica of the endpoint picker; JSON."""

    picker: Annotated[str, msgspec.Meta(max_length=256)]
    pools: Annotated[
        Mapping[Annotated[str, msgspec.Meta(max_length=512)], PickerCounters],
        msgspec.Meta(max_length=4096),
    ]


_REPORT_DECODER = msgspec.json.Decoder(PeerReport)


def read_report(page: bytes) -> PeerReport | None:
    """Decode a report; None for malformed bytes or a number out of its range."""
    try:
        return _REPORT_DECODER.decode(page)
    except _DECODE_ERRORS:
        return None


class _PolledPeer(msgspec.Struct):
    """A peer, by its address before the first answer, and its report; None if the last read failed.

    Attributes:
        misses: Reports in a row without a pool (count), by pool.
    """

    name: str
    report: PeerReport | None = None
    is_reported: bool = False
    misses: Counter[str] = msgspec.field(default_factory=Counter)


class PeerCounterClient:
    """Client of the other replicas of the endpoint picker.

    Args:
        own_counters: Returns the counters of this process by pool.
        on_waiting: Called with the names of pools in which a request waits elsewhere.
    """

    def __init__(
        self,
        identity: str,
        addresses: PeerAddresses,
        *,
        timeout_s: float,
        own_counters: Callable[[], Mapping[str, PickerCounters]],
        clock: Callable[[], float],
        on_waiting: Callable[[Iterable[str]], None] = lambda _: None,
    ) -> None:
        self.identity = identity
        self._on_waiting = on_waiting
        self._addresses = addresses
        self._own_counters = own_counters
        self._clock = clock
        self._client = client.ScrapeClient(timeout_s=timeout_s, cap_bytes=_MAX_BYTES)
        self._peers: dict[str, _PolledPeer] = {}
        self._unresolved: frozenset[str] = frozenset()
        self._polling = asyncio.Lock()
        #: Time of the last answers of all peers, and pools that had them.
        self._polled_at = -math.inf
        self._served: set[str] = set()

    def last(self, pool: str) -> dict[str, PickerCounters | None]:
        """Last counters of all peers for a pool, without a request; None where a read failed."""
        counters: dict[str, PickerCounters | None] = dict.fromkeys(self._unresolved)
        for peer in self._peers.values():
            counters[peer.name] = None if peer.report is None else peer.report.pools.get(pool)
        return counters

    async def read(self, pool: str) -> dict[str, PickerCounters | None]:
        """Read the counters of all peers at once; None for a peer that cannot be read.

        Answers to a read for another pool are used, once and while they are new.
        """
        if self._addresses:
            async with self._polling:
                if pool in self._served or self._clock() - self._polled_at >= _SHARED_S:
                    await self._poll_all()
                self._served.add(pool)
            for peer in self._peers.values():
                _log_missing_pool(peer, pool)
        return self.last(pool)

    async def _poll_all(self) -> None:
        await self.resolve()
        await asyncio.gather(*map(self._poll, list(self._peers)))
        self._polled_at = self._clock()
        self._served.clear()

    async def push(self) -> None:
        """Send our counters to all peers, so that the leader can act at once."""
        targets = [self._target(address, method="POST") for address in self._peers]
        if targets:
            body = msgspec.json.encode(PeerReport(self.identity, self._own_counters()))
            await asyncio.gather(*[self._client.post(target, body) for target in targets])

    def close(self) -> None:
        """Close all connections."""
        self._client.close()

    def routes(self) -> Sequence[web.AbstractRouteDef]:
        """HTTP routes by which peers read and push counters."""
        return (web.get(PATH, self._serve), web.post(PATH, self._on_pushed))

    async def _serve(self, _: web.Request) -> web.Response:
        body = msgspec.json.encode(PeerReport(self.identity, self._own_counters()))
        return web.Response(body=body, content_type="application/json")

    async def _on_pushed(self, request: web.Request) -> web.Response:
        report = read_report(await request.read())
        if report is None:
            return web.Response(status=400, text="not what pickers tell each other\n")
        peers = [peer for peer in self._peers.values() if peer.name == report.picker]
        for peer in peers:
            peer.report = report
        # The report of an unknown sender has no effect but to wake the loops.
        self._on_waiting([name for name, counters in report.pools.items() if counters.held])
        return web.Response(text="ok\n")

    async def resolve(self) -> None:
        """Look up the addresses of the peers."""
        peers = {
            address: self._peers.get(address) or _PolledPeer(address)
            for address in await self._addresses.resolve()
        }
        unresolved = self._addresses.unresolved
        for name in unresolved - self._unresolved:
            _log.warning("autoscaling: peers %s cannot be resolved: nothing is scaled down", name)
        for address in self._peers.keys() - peers.keys():
            self._client.forget(self._target(address))
        self._peers, self._unresolved = peers, unresolved

    def _target(self, address: str, *, method: str = "GET") -> client.ScrapeTarget:
        """Page of a peer, to read or to push to."""
        more = "content-type: application/json\r\n" if method == "POST" else ""
        return self._addresses.target(
            address, path=PATH, method=method, accept="application/json", more=more
        )

    async def _poll(self, address: str) -> None:
        answer = await self._client.get(self._target(address))
        peer = self._peers.get(address)
        if peer is None:
            return
        reason = answer.reason if isinstance(answer, client.FetchFailed) else ""
        report: PeerReport | None = None
        if isinstance(answer, bytes):
            report = read_report(answer)
            reason = "" if report else "unreadable"
        if report is not None and report.picker == self.identity:
            self._addresses.record_own(address)
            del self._peers[address]
            return
        if reason and not peer.is_reported:
            _log.warning("autoscaling: peer %s: %s: nothing is scaled down", address, reason)
        peer.report, peer.is_reported = report, bool(reason)
        if report is not None:
            peer.name = report.picker


def _log_missing_pool(peer: _PolledPeer, pool: str) -> None:
    """Log once that a peer does not scale a pool: at its second report, as pools are found in turn."""
    if peer.report is None:
        return
    if pool in peer.report.pools:
        del peer.misses[pool]
        return
    peer.misses[pool] += 1
    if peer.misses[pool] == 2:
        _log.warning(
            "autoscaling: peer %s has no counters of pool %s, as it does not scale it: the pool is not "
            "scaled down; give all replicas the same configuration",
            peer.name,
            pool or "(unnamed)",
        )
