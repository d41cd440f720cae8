"""The composition root: starts the servers and the loops, and ends them in order."""

from __future__ import annotations

import asyncio
import gc
import logging
import signal
import sys
import time
from collections.abc import Callable, Coroutine

import grpc
import uvloop
from aiohttp import web

from extproc.config import factory
from extproc.config.settings import Server, Settings
from extproc.discovery import follow
from extproc.dispatch.switchboard import Claimant, Switchboard
from extproc.endpoint import Endpoint
from extproc.scheduling import guard
from extproc.scrape import client, scraper
from extproc.server import admin, health, ports, reload, servicer
from extproc.telemetry.exposition import Exposition
from extproc.telemetry.pool_series import Cache, Watched
from extproc.telemetry.ring import Ring
from extproc.telemetry.tallies import Tallies

_log = logging.getLogger("extproc.server")

#: Seconds that streams have to end once they were told to.
_RELEASE_S = 2.0


def run(settings: Settings, source: reload.Source) -> int:
    """Serve until SIGTERM or SIGINT; returns the exit status.

    Args:
        settings: The whole configuration.
        source: Where it comes from, for reading it again.

    Raises:
        ConfigError: A port is taken, a certificate or an endpoint file cannot be read.
    """
    logging.basicConfig(
        stream=sys.stderr,
        format="%(asctime)s %(levelname)s %(name)s %(message)s",
    )
    # Ours only: gRPC and aiohttp have debug lines of their own.
    logging.getLogger("extproc").setLevel(settings.log.level.upper())
    uvloop.run(serve(settings, source, on_ready=_announce))
    return 0


async def serve(
    settings: Settings, source: reload.Source, *, on_ready: Callable[[ports.Addresses], None]
) -> None:
    """Serve until a signal arrives.

    SIGTERM drains: readiness turns false at once, streams are served for `drain_timeout_s`, then
    those still open end with OK, which leaves their answers running. SIGINT, or a second signal,
    does not wait.

    Args:
        settings: The whole configuration.
        source: Where it comes from; SIGHUP and changed files make it be read again.
        on_ready: Called once everything listens and the endpoints are known.
    """
    stop: asyncio.Event = asyncio.Event()
    hurry: asyncio.Event = asyncio.Event()
    picker = Picker(settings)
    reloader = reload.Reloader(
        source, settings, adopt=picker.adopt, on_reload=picker.tell_of_reload
    )
    _on_signals(stop, hurry, reloader.ask)
    try:
        addresses = await picker.start()
        await picker.sync()
        # What lives now lives to the end: keep the collector from walking it again and again.
        gc.collect()
        gc.freeze()
        gc.set_threshold(20_000, 20, 50)
        async with asyncio.TaskGroup() as tasks:
            running = {**picker.loops(), "reload": reloader.run()}
            loops = [tasks.create_task(loop, name=name) for name, loop in running.items()]
            on_ready(addresses)
            await stop.wait()
            await picker.drain(hurry)
            for loop in loops:
                loop.cancel()
    finally:
        await picker.stop()


class Picker:
    """Everything one process runs.

    Args:
        settings: The whole configuration.
        clock: Monotonic seconds.
    """

    def __init__(self, settings: Settings, clock: Callable[[], float] = time.monotonic) -> None:
        self._settings = settings
        self._clock = clock
        self.tallies = Tallies()
        self._counts = self.tallies.of(settings.pool.name)
        self._about = {"pool": settings.pool.name}
        self.ring = Ring(settings.explain.decisions)
        self.parts = factory.build(
            settings,
            on_gone=self._gone,
            guards=guard.Guards(time.perf_counter, self.tallies.plugins),
        )
        self._about["profile"] = self.parts.profile.name
        self.readiness = health.Readiness(lambda: self.parts.fleet.synced)
        self.servicer = servicer.Servicer(
            switchboard=Switchboard([Claimant(settings.pool.name, self.parts.dispatcher)]),
            exchange_settings=self.parts.exchange,
            budget=self.parts.budget,
            tallies=self.tallies,
            clock=clock,
            rng=self.parts.rng,
            ring=self.ring,
            settings=_stream_settings(settings),
        )
        self._discovery = factory.discovery(self.parts, clock=clock, on_fact=self._discovered)
        self._http = client.Client(
            timeout_s=settings.scrape.timeout_s,
            cap_bytes=settings.scrape.max_page_bytes,
            tls=factory.scrape_tls(settings.scrape),
        )
        self._grpc: list[grpc.aio.Server] = []
        self._pages: web.AppRunner | None = None

    async def start(self) -> ports.Addresses:
        """Listen on all ports; not ready before `sync`.

        Raises:
            ConfigError: A port is taken, or a certificate cannot be read.
        """
        server = self._settings.server
        main = ports.listener(self._settings.limits.max_message_bytes)
        servicer.register(main, self.servicer)
        if server.health_checking:
            health.register(main, self.readiness)
        probes = ports.listener(self._settings.limits.max_message_bytes)
        health.register(probes, self.readiness)
        self._grpc = [main, probes]
        grpc_port = ports.bind(
            main,
            server.grpc_address(server.grpc_port),
            flag="--grpc-port",
            identity=ports.credentials(server),
        )
        health_port = ports.bind(
            probes, server.grpc_address(server.grpc_health_port), flag="--grpc-health-port"
        )
        pages_port = await self._start_pages(server)
        for one in self._grpc:
            await one.start()
        return ports.Addresses(grpc_port, health_port, pages_port)

    async def sync(self) -> None:
        """Learn the endpoints.

        Raises:
            ConfigError: The endpoints file cannot be read.
        """
        await self._discovery.start()

    def loops(self) -> dict[str, Coroutine[None, None, None]]:
        """The loops beside the servers, by name."""
        loops = {"discovery": self._discovery.run()}
        if self._settings.scrape.enabled:
            loops["scrape"] = scraper.Scraper(
                self.parts.scraping,
                self.parts.fleet,
                client=self._http,
                clock=self._clock,
                rng=self.parts.rng,
                on_fact=self._scraped,
                missed=lambda: self._counts.unlisted,
            ).run()
        return loops

    def adopt(self, settings: Settings) -> None:
        """Put other settings in force, as far as a running picker can.

        Raises:
            ConfigError: A profile cannot be built; nothing was changed.
        """
        routing = factory.reroute(settings, where="the configuration", guards=self.parts.guards)
        self.parts.dispatcher.adopt(routing)
        self.servicer.exchange_settings = factory.exchange(settings)
        self.servicer.settings = _stream_settings(settings)
        self.ring.capacity = settings.explain.decisions
        self._about["profile"] = routing.profile.name
        logging.getLogger("extproc").setLevel(settings.log.level.upper())

    def tell_of_reload(self, reloaded: reload.Reloaded) -> None:
        """Count and log one attempt to read the configuration again."""
        self.tallies.reloaded(ok=not reloaded.error, restart=bool(reloaded.restart))
        if reloaded.error:
            _log.error("the configuration stays as it was: %s", reloaded.error)
            return
        _log.info("the configuration was read again")
        if reloaded.restart:
            _log.warning("only a restart changes %s", ", ".join(reloaded.restart))

    async def drain(self, hurry: asyncio.Event) -> None:
        """Turn unready, serve on for the drain time, then let every stream go."""
        self.readiness.draining = True
        _log.info("draining, %d streams are open", self.tallies.streams_open)
        try:
            await asyncio.wait_for(hurry.wait(), self._settings.server.drain_timeout_s)
        except TimeoutError:
            _log.info("drain time is over, %d streams are open", self.tallies.streams_open)
        await self.servicer.release()

    async def stop(self) -> None:
        """Close everything."""
        for one in self._grpc:
            await one.stop(_RELEASE_S)
        if self._pages is not None:
            await self._pages.cleanup()
        self._http.close()

    async def _start_pages(self, server: Server) -> int:
        pages = admin.Pages(
            exposition=Exposition(
                self.tallies,
                self._watched,
                clock=self._clock,
                gauges={
                    "extproc_gathered_bytes": (
                        "Bytes of request bodies held.",
                        lambda: self.parts.budget.held_bytes,
                    ),
                    "extproc_prefix_blocks": (
                        "Prefix blocks believed held by endpoints.",
                        lambda: self.parts.index.blocks_total,
                    ),
                    "extproc_prefix_index_bytes": (
                        "Estimated memory of the prefix index.",
                        self.parts.index.bytes_estimate,
                    ),
                },
                about=self._about,
            ),
            readiness=self.readiness,
            pool=lambda: self.parts.fleet.pool,
            dry_run=self.parts.dispatcher.route,
            decisions=self.ring,
            clock=self._clock,
            max_body_bytes=self._settings.limits.max_body_bytes,
        )
        self._pages = web.AppRunner(pages.application(), access_log=None)
        await self._pages.setup()
        try:
            await web.TCPSite(self._pages, server.host or None, server.metrics_port).start()
        except OSError as error:
            why = error.strerror or ""
            raise ports.taken("--metrics-port", server.metrics_port, why=why) from error
        return int(self._pages.addresses[0][1])

    def _watched(self) -> dict[str, Watched]:
        fleet = self.parts.fleet
        return {self._settings.pool.name: Watched(fleet.pool, self._cache, fleet.tokenisers.learnt)}

    def _cache(self, endpoint: Endpoint) -> Cache:
        known = self.parts.belief.of(endpoint)
        calibration = known.calibration
        return Cache(calibration.predicted, calibration.observed, known.capacity_tokens)

    def _gone(self, endpoint: Endpoint) -> None:
        self._counts.forget(endpoint.address)

    def _discovered(self, fact: follow.DiscoveryFact) -> None:
        level = logging.INFO if fact.kind == "replaced" else logging.WARNING
        _log.log(level, "%s: %s, %d endpoints", fact.kind, fact.detail, fact.endpoints)

    def _scraped(self, fact: scraper.ScrapeFact) -> None:
        if fact.listing:
            self._counts.listings[fact.address, fact.outcome] += 1
            return
        self._counts.scrapes[fact.address, fact.outcome] += 1
        self.tallies.scrape_s.add(fact.seconds)


def _stream_settings(settings: Settings) -> servicer.StreamSettings:
    return servicer.StreamSettings(
        max_streams=settings.limits.max_streams,
        stream_share=settings.answers.stream_share,
        explain_header=settings.explain.header,
    )


def _on_signals(stop: asyncio.Event, hurry: asyncio.Event, again: Callable[[], None]) -> None:
    loop = asyncio.get_running_loop()

    def terminate() -> None:
        if stop.is_set():
            hurry.set()
        stop.set()

    def interrupt() -> None:
        hurry.set()
        stop.set()

    loop.add_signal_handler(signal.SIGTERM, terminate)
    loop.add_signal_handler(signal.SIGINT, interrupt)
    loop.add_signal_handler(signal.SIGHUP, again)


def _announce(addresses: ports.Addresses) -> None:
    print(  # noqa: T201  the line that supervisors and tests wait for
        f"extproc is ready: ext_proc on port {addresses.grpc}, gRPC health on {addresses.health}, "
        f"pages on {addresses.pages}",
        flush=True,
    )
