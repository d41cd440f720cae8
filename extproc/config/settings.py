"""The settings: all sections of a configuration file, with defaults and units.

    apiVersion: extproc/v1alpha1      # both required in a file
    kind: ExtProcConfig
    server:        listening addresses, TLS, shutdown
    pool:          source of the endpoints of a single pool
    pools:         the same for several pools, each with the requests it serves
    cluster:       access to Kubernetes
    scrape:        scraping of metrics and model lists
    health:        outlier detection of endpoints
    scheduling:    a strategy, or a profile
    prefix:        blocks of prompts, size of the prefix index
    limits:        bytes and streams
    flow_control:  queueing of requests, limits of tenants
    autoscaling:   autoscaling settings shared by all pools
    responses:     processing of response headers and bodies
    decisions:     recording and reporting of decisions
    xds:           endpoints served over xDS
    peer_sync:     exchange of request counts between pickers
    log:           log on standard error
    conformance:   bool
    seed:          integer or null

`Settings()` is a complete default configuration without endpoints. Sections reject unknown fields.
Units are in names. Ranges are in the annotations, so that an error names the field and the bound.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Final, Literal

import msgspec

from extproc.config import constraints, pool_schema, scheduling_schema
from extproc.config.autoscaling import AutoscalingSection
from extproc.config.flow_control import FlowControlSection
from extproc.config.peer_sync import PeerSyncSection
from extproc.parsing import usage
from extproc.pool import endpoint_health
from extproc.prefix_cache import blocks
from extproc.prefix_cache.index import DEFAULT_MAX_BYTES
from extproc.xds import cluster_options

API_VERSION: Final = "extproc/v1alpha1"
KIND: Final = "ExtProcConfig"

_MIB = 1024 * 1024


class ServerSection(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Listening addresses, TLS and shutdown.

    Attributes:
        host: IP address to listen on; empty for every address of IPv4 and IPv6, because pods of
            either family must reach us without configuration.
        grpc_port: ext_proc (TCP port; 0 picks a free one). 9002 is what every InferencePool
            example points at.
        grpc_health_port: gRPC health without TLS (TCP port). 9003 is where the upstream
            manifests probe.
        metrics_port: Our own /metrics and the debug pages, HTTP (TCP port). 9090 is the upstream
            picker's.
        secure_serving: Serve ext_proc over TLS. True, because gateways connect with TLS unless
            configured otherwise.
        cert_path: Folder with tls.crt and tls.key; empty makes a self-signed certificate at
            start, because gateways do not verify it.
        enable_cert_reload: Read the certificate again when the files change. True: mounted
            secrets are renewed while we run, and looking costs one stat per connection.
        health_checking: Also answer gRPC health on `grpc_port`. True: Envoy's own gRPC health
            checks go to the port it routes to, and answering them costs nothing.
        drain_timeout_s: Seconds between SIGTERM and the end of the last stream. 30 is the default
            grace period of a pod.
        admin_token_file: File with a token that all pages of `metrics_port` but /metrics, /healthz
            and /readyz want as `Authorization: Bearer`, read again when it changes; replicas that
            ask each other need the same. Empty: those pages are for the machine (pod) of the picker
            itself, and /internal for the addresses of `autoscaling.peers` too.
    """

    host: str = ""
    grpc_port: constraints.Port = 9002
    grpc_health_port: constraints.Port = 9003
    metrics_port: constraints.Port = 9090
    secure_serving: bool = True
    cert_path: str = ""
    enable_cert_reload: bool = True
    health_checking: bool = True
    drain_timeout_s: constraints.Seconds = 30.0
    admin_token_file: str = ""

    def grpc_address(self, port: int) -> str:
        """Return the `host:port` that gRPC binds to; IPv6 hosts get brackets."""
        host = self.host or "::"
        return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


class ScrapeSection(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Scraping of metrics and model lists from engines.

    Attributes:
        enabled: Read them at all. True; without it only our own requests and prefixes are known.
        path: HTTP path of the metrics page. /metrics is where every engine has it.
        scheme: Plain `http`, because engines serve metrics on their API port without TLS; or
            `https`.
        verify_tls: Whether `https` checks certificates. False: those of engines rarely name an IP
            address, and nothing secret is sent.
        busy_interval_s: Seconds between scrapes of an endpoint that has our requests. 0.2 is
            several engine steps; our own requests are counted in between anyway.
        idle_interval_s: Seconds between scrapes of an endpoint without. 2 keeps foreign work in
            sight at a tenth of the cost.
        timeout_s: Seconds one scrape may take. 1 is far above the milliseconds a healthy engine
            needs, and short enough to notice a hung one.
        stale_after_s: Age in seconds at which a load counts as unknown. 6 allows two idle scrapes
            to fail.
        backoff_cap_s: Longest wait in seconds after repeated failures; after refused connections it
            is 2 or `idle_interval_s`, if that is shorter, as they cost the engine nothing. 10 bounds
            how late a recovery is seen.
        max_scrapes_per_s: Scrapes per second over all endpoints, beyond which intervals are
            stretched. 100 cost some 4 % of a core.
        max_page_bytes: Largest page that is read (bytes). 4 MiB is 80 times a vLLM page; more is
            something else.
        initial_scrape_timeout_s: Seconds that readiness waits after start until every endpoint was scraped once, or
            could not be; 0 does not wait. 3 are some scrapes; without them the first picks of a new
            replica are blind to the work of others.
        models: Also ask endpoints which models and adapters they serve (/v1/models), and send
            requests only where they can be served. True: one small page per endpoint, and without
            it a pool of several models is routed blindly. An endpoint that does not say stays in
            for every model. Set it to false where engines load adapters when they are asked for
            (vLLM's LoRA resolvers): an adapter then stays where it was loaded first.
        models_interval_s: Seconds between two of these pages of one endpoint; a new or restarted
            one is asked at once. 30, because only loading an adapter at run time changes them.
    """

    enabled: bool = True
    path: Annotated[str, msgspec.Meta(pattern="^/")] = "/metrics"
    scheme: Literal["http", "https"] = "http"
    verify_tls: bool = False
    busy_interval_s: constraints.PositiveSeconds = 0.2
    idle_interval_s: constraints.PositiveSeconds = 2.0
    timeout_s: constraints.PositiveSeconds = 1.0
    stale_after_s: constraints.PositiveSeconds = 6.0
    backoff_cap_s: constraints.PositiveSeconds = 10.0
    max_scrapes_per_s: constraints.PositiveRate = 100.0
    max_page_bytes: constraints.Positive = 4 * _MIB
    initial_scrape_timeout_s: constraints.Seconds = 3.0
    models: bool = True
    models_interval_s: constraints.PositiveSeconds = 30.0


class PrefixSection(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Blocks of prompts, and the size of the prefix index.

    Attributes:
        schedule: Where blocks end (bytes); its own defaults give reasons.
        capacity_blocks: Blocks remembered for one endpoint (count). 32768 are 2 to 30 million prompt
            tokens, more than the KV cache of one engine. In memory a block takes some 15 bytes in
            long prompts, up to 360 in prompts that are one block long and share it with none: at
            most 12 MB for one endpoint. Endpoints that name the size of their KV cache have no more
            blocks than fit in it.
        max_bytes: Memory for the blocks of all endpoints of a pool (bytes, as estimated). Beyond it
            what was used longest ago is forgotten, whichever endpoint held it. 512 MiB are 24
            million blocks of long prompts, or 1.5 million of those that are one block long: 45
            endpoints of `capacity_blocks` with such prompts alone.
    """

    schedule: blocks.Schedule = blocks.DEFAULT
    capacity_blocks: constraints.Count = 32768
    max_bytes: constraints.Positive = DEFAULT_MAX_BYTES


class LimitsSection(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Limits on bodies and streams.

    Attributes:
        max_body_bytes: Largest request body (bytes); above it 413. 32 MiB are what Anthropic's API
            takes: a prompt of a million tokens with a few dozen images.
        max_streams: Open exchanges above which requests are refused with 429 (count). 10000 are
            what one process holds in about 1 GiB.
        max_assembly_bytes: Bytes of bodies being assembled at once. A body above 64 KiB has at most
            a quarter of what others leave of it, and 429 beyond; smaller ones always get in. 512 MiB
            are 5000 of 100 kB, and leave room in a 1 GiB container.
        body_idle_s: Seconds in which more of a request body must come; else 408. 60 is what most
            proxies wait. A body that Envoy buffers comes in one piece, and counts from its headers.
            One that takes longer must come at 16 KiB/s, and while bodies on their way take half of
            `max_streams` or `max_assembly_bytes`, a tenth of the time is left to them.
        max_message_bytes: Largest gRPC message (bytes). 36 MiB: a buffered body comes in one
            message, with headers and attributes around it.
    """

    max_body_bytes: constraints.Positive = 32 * _MIB
    max_streams: constraints.Positive = 10_000
    max_assembly_bytes: constraints.Positive = 512 * _MIB
    body_idle_s: constraints.PositiveSeconds = 60.0
    max_message_bytes: constraints.Positive = 36 * _MIB


class ResponsesSection(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Processing of responses.

    Attributes:
        marker: Put `x-went-into-resp-headers: true` on responses. True, as the upstream picker
            does; its tests look for it.
        feedback: Ask for the bodies of unstreamed answers, for the usage they report, where the
            data plane allows it. True: one message per answer.
        stream_sample_ratio: Share of streamed answers whose body is asked for as well (0..1). 0, because
            every chunk then passes through us.
        restore_model: Put the client's name for its model back into answers to requests that were
            given another name (`rewrites`, or the gateway's header), and ask for their bodies where
            they are not shown. True, because clients hold answers against what they asked for. It
            costs those requests one message per whole answer, or one per piece of a stream.
        request_cost: Cost of an answer as dynamic metadata, for the rate limiter of the data plane:
            tokens by kind, each times its weight here, summed and at least 0. `cached` ones are
            part of `prompt`. None: no metadata is sent.
        list_models: Answer `GET /v1/models` from what all endpoints listed, in place of one of
            them. Null: where there are several pools, because one engine knows only its own.
    """

    marker: bool = True
    feedback: bool = True
    stream_sample_ratio: constraints.Share = 0.0
    restore_model: bool = True
    request_cost: Mapping[usage.UsageKind, float] = {}
    list_models: bool | None = None


class DecisionsSection(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Recording and reporting of decisions.

    Attributes:
        decisions: Decisions kept for /debug/decisions and `extproc explain --id` (count); 0 keeps
            none. 1000 of ten candidates are some 5 MB; with many candidates fewer are kept.
        header: Put the short form of the decision on answers as `x-extproc-decision`. False: it
            names endpoints, which clients need not know.
        scores: Send the scores of the endpoints to the data plane, in the dynamic metadata
            `x-gateway-destination-endpoint-scores` beside the pick. False: only an access log that
            is set up for it reads them.
    """

    decisions: constraints.Count = 1000
    header: bool = False
    scores: bool = False


class XdsSection(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Endpoints served over xDS, for an Envoy without a gateway.

    Envoy then tries the next endpoint when one fails, and goes on while no picker is up. Each pool
    is a cluster of its name, one without a name is `engines`.

    Attributes:
        enabled: Serve xDS. False: gateways configure their Envoys themselves.
        port: Aggregated discovery (TCP port; 0 picks a free one). 18000 is what most xDS servers
            take. TLS is as on the ext_proc port, with the same certificate: who answers here
            decides where requests go, as there.
        health_check: How Envoys ask engines whether they live; its own defaults give reasons. Like
            `outliers`, it counts where Envoy chooses itself: endpoints that extproc names are tried
            whatever Envoy thinks of them.
        outliers: When Envoys leave out engines that fail; its own defaults give reasons.
    """

    enabled: bool = False
    port: constraints.Port = 18000
    health_check: cluster_options.HealthCheck = cluster_options.HealthCheck()
    outliers: cluster_options.OutlierDetection = cluster_options.OutlierDetection()


class LogSection(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The log on standard error.

    Attributes:
        level: Least severe level shown. `info` writes a few lines at start and end and none per
            request.
    """

    level: Literal["debug", "info", "warning", "error"] = "info"


_SERVER = ServerSection()
_SOURCE = pool_schema.PoolSource()
_CLUSTER = pool_schema.ClusterSection()
_SCRAPE = ScrapeSection()
_HEALTH = endpoint_health.OutlierDetectionSettings()
_SCHEDULING = scheduling_schema.SchedulingSection()
_PREFIX = PrefixSection()
_LIMITS = LimitsSection()
_FLOW_CONTROL = FlowControlSection()
_AUTOSCALING = AutoscalingSection()
_RESPONSES = ResponsesSection()
_DECISIONS = DecisionsSection()
_XDS = XdsSection()
_PEER_SYNC = PeerSyncSection()
_LOG = LogSection()


class Settings(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A complete configuration.

    Attributes:
        api_version: `apiVersion` in a file: which fields exist and what they mean. There is one.
        kind: What the file is, so that another program's file is not taken for ours. There is one.
        server: Listening addresses, TLS and shutdown.
        pool: Source of the endpoints of a single pool.
        pools: The same for several pools, each with the requests it serves. None: `pool` counts.
        cluster: Access to Kubernetes.
        scrape: Scraping of engines.
        health: Outlier detection of endpoints.
        scheduling: Choice of the endpoint.
        prefix: Size of the prefix index.
        limits: Limits on bodies and streams.
        flow_control: Queueing of requests.
        autoscaling: Autoscaling settings shared by all pools.
        responses: Processing of responses.
        decisions: Recording of decisions.
        xds: Endpoints served over xDS.
        peer_sync: Exchange of request counts between pickers.
        log: The log on standard error.
        conformance: Obey the header `test-epp-endpoint-selection` and report who served. False:
            a client must not choose its endpoint outside of conformance tests.
        seed: Start of all chance (integer); null draws one from the system, because pickers that
            share a seed herd.
    """

    api_version: Literal["extproc/v1alpha1"] = msgspec.field(name="apiVersion", default=API_VERSION)
    kind: Literal["ExtProcConfig"] = KIND
    server: ServerSection = _SERVER
    pool: pool_schema.PoolSource = _SOURCE
    pools: tuple[pool_schema.PoolSection, ...] = ()
    cluster: pool_schema.ClusterSection = _CLUSTER
    scrape: ScrapeSection = _SCRAPE
    health: endpoint_health.OutlierDetectionSettings = _HEALTH
    scheduling: scheduling_schema.SchedulingSection = _SCHEDULING
    prefix: PrefixSection = _PREFIX
    limits: LimitsSection = _LIMITS
    flow_control: FlowControlSection = _FLOW_CONTROL
    autoscaling: AutoscalingSection = _AUTOSCALING
    responses: ResponsesSection = _RESPONSES
    decisions: DecisionsSection = _DECISIONS
    xds: XdsSection = _XDS
    peer_sync: PeerSyncSection = _PEER_SYNC
    log: LogSection = _LOG
    conformance: bool = False
    seed: int | None = None
