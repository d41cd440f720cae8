"""`extproc serve`: run the endpoint picker."""

from __future__ import annotations

import argparse
import datetime as dt
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

from extproc.cli import flags, main
from extproc.config import factory, kubernetes_plan, pools, tracing
from extproc.config.settings import ServerSection, Settings
from extproc.discovery.static_discovery import FileStamp
from extproc.errors import ConfigError
from extproc.recording import recorder
from extproc.scrape import kv_event_subscriber
from extproc.server import admin_access, peer_addresses, redis_peer_channel, reload, transport


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Add the flags of the command."""
    flags.add(parser)


def run(args: argparse.Namespace) -> int:
    """Serve until SIGTERM or SIGINT; returns the exit status.

    Raises:
        ConfigError: Flags or files are wrong.
    """
    stamps = stamp_config_file(args)
    resolved = flags.resolve(args)
    settings = resolved.settings
    if not (pools.has_source(settings.pool) or settings.pools or pools.from_kubernetes(settings)):
        raise ConfigError(
            resolved.where,
            wanted="endpoints",
            got="none",
            fix="add --endpoints ip:port,..., --endpoints-file, --pool-name or a pool section",
        )
    dates = find_invalid_certificates(settings.server)
    for warning in (*_collect_warnings(resolved), *dates):
        print(f"extproc: warning: {warning}", file=sys.stderr)

    problems = find_problems(settings)
    for problem in problems:
        main.print_error(problem)
    if problems:
        return 2

    configure_grpc_core()
    from extproc.server import lifecycle

    return lifecycle.run(settings, build_source(args, resolved, stamps))


def stamp_config_file(args: argparse.Namespace) -> Mapping[str, FileStamp]:
    """Return the stamp of the configuration file; none of a pipe, which changes as it is written."""
    name = args.config_file
    return reload.read_stamps([name]) if name and Path(name).is_file() else {}


def build_source(
    args: argparse.Namespace, resolved: flags.Resolved, stamps: Mapping[str, FileStamp]
) -> reload.ConfigSource:
    """Build the source of the configuration that flags name.

    Args:
        resolved: The configuration that the process starts with.
        stamps: Stamps of files from before they were read.
    """

    def files(settings: Settings) -> Sequence[str]:
        """The configuration file, and the plugin files it names."""
        own = [args.config_file] if args.config_file else []
        sections = pools.scheduling_sections(settings)
        return [*own, *(name for _, rules in sections for name in rules.plugin_files)]

    def read() -> reload.ReadConfiguration:
        resolved = flags.resolve(args, again=True)
        return reload.ReadConfiguration(resolved.settings, _collect_warnings(resolved))

    def check_start(settings: Settings) -> None:
        for problem in find_problems(settings):
            raise problem

    # Plugin files are executed again when the process is built, which is after this.
    stamps = {**reload.read_stamps(files(resolved.settings)), **stamps}
    return reload.ConfigSource(files, read, check_start, stamps, _collect_warnings(resolved))


def _collect_warnings(resolved: flags.Resolved) -> tuple[str, ...]:
    from extproc.config import lint

    return (*resolved.warnings, *lint.find_warnings(resolved.settings))


#: Without the listener of the event engine, the thread that waits for events reads the sockets
#: itself. With it, another thread does and wakes the first one: a hop more for every message.
#: Measured by `python -m bench.overhead`.
EXPERIMENTS = "-event_engine_listener"

_VARIABLE = "GRPC_EXPERIMENTS"


def configure_grpc_core() -> bool:
    """Set gRPC experiments, unless the environment does.

    Returns:
        False if gRPC was loaded already, so that the setting has no effect.
    """
    os.environ.setdefault(_VARIABLE, EXPERIMENTS)
    return "grpc" not in sys.modules


def find_problems(settings: Settings) -> Sequence[ConfigError]:
    """Collect the errors for which an endpoint picker with these settings would not start."""
    steps: list[Callable[[], object]] = [
        lambda: _check_ports(settings),
        lambda: admin_access.read_token(settings.server.admin_token_file),
        lambda: redis_peer_channel.require(settings.peer_sync),
        lambda: factory.build_scrape_tls(settings.scrape),
        lambda: peer_addresses.PeerDirectory(settings, str),
        lambda: kv_event_subscriber.require(settings.kv_events),
        lambda: tracing.plan_traces(settings.tracing, os.environ),
        lambda: kubernetes_plan.plan_metrics_auth(settings, environment=os.environ),
    ]
    record = settings.decisions.record
    if record is not None:
        steps.append(lambda: recorder.require(record.file))
    if settings.server.secure_serving:
        steps.append(lambda: _check_tls(settings.server))
    problems = []
    for step in steps:
        try:
            step()
        except ConfigError as error:
            problems.append(error)
    return problems


def find_taken_ports(settings: Settings) -> Iterator[str]:
    """A line per port of these settings that another process listens on."""
    for flag, port in _listening_ports(settings).items():
        if port and transport.is_taken(settings.server.host, port):
            yield f"{flag}: something on this machine listens on port {port} already"


def find_unwritable_files(settings: Settings) -> Iterator[str]:
    """A line for the recording of these settings, where this machine cannot write it."""
    record = settings.decisions.record
    obstacle = recorder.find_obstacle(record.file) if record is not None else ""
    if obstacle:
        yield f"decisions.record.file: {obstacle} on this machine: nothing would be recorded"


def _listening_ports(settings: Settings) -> Mapping[str, int]:
    """Ports to listen on, by flag or field; 0 picks a free one."""
    server = settings.server
    numbers = {
        "--grpc-port": server.grpc_port,
        "--grpc-health-port": server.grpc_health_port,
        "--metrics-port": server.metrics_port,
    }
    if settings.xds.enabled:
        numbers["--xds-port"] = settings.xds.port
    if settings.autoscaling.keda.enabled:
        numbers["autoscaling.keda.port"] = settings.autoscaling.keda.port
    return numbers


def _check_ports(settings: Settings) -> None:
    """Check that no two listeners share a port."""
    flags_by_port: dict[int, str] = {}
    for flag, port in _listening_ports(settings).items():
        if port and port in flags_by_port:
            raise ConfigError(
                flag,
                wanted=f"another port than that of {flags_by_port[port]}",
                got=str(port),
                fix="name another port (0 picks a free one)",
            )
        flags_by_port[port] = flag


def find_invalid_certificates(server: ServerSection) -> Iterator[str]:
    """A line per certificate that has expired or is not valid yet; it is served all the same."""
    from extproc.server import tls

    if server.secure_serving and server.cert_path:
        yield from tls.find_invalid_dates(Path(server.cert_path), dt.datetime.now(dt.UTC))


def _check_tls(server: ServerSection) -> None:
    """Check the certificate, and for the native transport also the choice of cipher suites."""
    from extproc.server import tls

    # grpcio takes every pair that can be read.
    build: Callable[[tuple[bytes, bytes]], object] = tuple
    if server.transport == "native":
        options = tls.TlsOptions(server.tls_min_version, server.tls_cipher_suites)

        def build(pair: tuple[bytes, bytes]) -> object:
            return tls.build_context(pair, options)

    if server.cert_path:
        tls.KeyPair(Path(server.cert_path), build).read()
    else:
        build(tls.self_signed_pair())
