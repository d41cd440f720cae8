"""The settings: all sections of a configuration file, with defaults and units.

`Settings()` is a complete default configuration without endpoints. Sections reject unknown fields.
Units are in names. Ranges are in the annotations, so that an error names the field and the bound.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Final, Literal

import msgspec

from extproc.config import pool_sections, validation
from extproc.config.autoscaling import AutoscalingSection
from extproc.config.decisions import DecisionsSection
from extproc.config.tracing import TracingSection
from extproc.endpoint import join_host_port
from extproc.flow_control.flow_queue import Order
from extproc.flow_control.priority_band import BandSettings, Fairness, PrioritySettings
from extproc.flow_control.queue import FlowControlSettings
from extproc.flow_control.rate_limit import RateLimit
from extproc.parsing import usage
from extproc.pool import endpoint_health
from extproc.prefix_cache import blocks
from extproc.prefix_cache.index import DEFAULT_MAX_BYTES
from extproc.request import FlowHeaders
from extproc.routing.usage_limit import UsageLimit
from extproc.scrape.client_tls import TlsFiles
from extproc.scrape.kv_event_subscriber import KvEventsSection
from extproc.xds import resources

API_VERSION: Final = "extproc/v1alpha1"
KIND: Final = "ExtProcConfig"

_MIB = 1024 * 1024


class ServerSection(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Listening addresses, TLS and shutdown.

    Attributes:
        host: IP address to listen on. Empty: every IPv4 and IPv6 address, so that pods of either
            family reach it without configuration.
        grpc_port: ext_proc (TCP port; 0 picks a free one). 9002 is the port in the examples of
            InferencePool.
        grpc_health_port: gRPC health without TLS (TCP port). 9003 is the port that the upstream
            manifests probe.
        metrics_port: /metrics, health and debug endpoints over HTTP (TCP port). 9090 is that of the
            upstream EPP.
        secure_serving: Serve ext_proc over TLS. True, because gateways connect with TLS unless
            configured otherwise.
        cert_path: Folder with tls.crt and tls.key. Empty: a self-signed certificate is created at
            start, because gateways do not verify it.
        enable_cert_reload: Read the certificate again when the files change. True: mounted Secrets
            are renewed while the process runs, and the check costs one stat per connection.
        tls_min_version: Oldest version of TLS that ext_proc is served with. 1.2, because every
            gateway has it; 1.3 with the transport `native` only.
        tls_cipher_suites: Cipher suites of TLS 1.2 between colons, as OpenSSL names them, with the
            transport `native` only; without any but those of TLS 1.3, TLS 1.2 is not served. Empty:
            those of `GRPC_SSL_CIPHER_SUITES`, or else ECDHE with AES-GCM or ChaCha20.
        health_checking: Also answer gRPC health on `grpc_port`. True: Envoy's gRPC health checks
            use the port that it routes to.
        drain_timeout_s: Seconds from SIGTERM, at most, in which streams are served, new ones too. A
            pod takes all of them, as gateways learn late that it leaves; elsewhere the drain ends
            once no gRPC client is connected (`grpcio`: at once if neither a stream nor a health check
            ever came). 30 is the default grace period of a pod.
        transport: Implementation of gRPC on `grpc_port` and `grpc_health_port`: `native`, extproc's
            own, or `grpcio`. native, because it costs a fraction of the CPU per request and keeps
            no memory of streams that ended.
        admin_token_file: File with a token that every path of `metrics_port` but /metrics, /healthz
            and /readyz requires as `Authorization: Bearer`. It is read again when it changes;
            replicas that exchange requests or
            counters need the same. Empty: these paths answer the machine
            (pod) of extproc only, and /internal also the addresses of `peer_sync.peers` and
            `autoscaling.peers`.
        metrics_endpoint_auth: Let only bearer tokens read /metrics that the Kubernetes API accepts, and
            that of `admin_token_file`. Null: off, because network policies restrict the port; as
            picker of an InferencePool a line of the log says so.
        llmd_metrics: Also serve metrics under the names of the EPP of llm-d. Null: if the pool is
            an InferencePool, as with `--pool-name`, because charts for that EPP then find them.
    """

    host: str = ""
    grpc_port: validation.Port = 9002
    grpc_health_port: validation.Port = 9003
    metrics_port: validation.Port = 9090
    secure_serving: bool = True
    cert_path: str = ""
    enable_cert_reload: bool = True
    tls_min_version: Literal["1.2", "1.3"] = "1.2"
    tls_cipher_suites: str = ""
    health_checking: bool = True
    drain_timeout_s: validation.Seconds = 30.0
    transport: Literal["native", "grpcio"] = "native"
    admin_token_file: str = ""
    metrics_endpoint_auth: bool | None = None
    llmd_metrics: bool | None = None

    def grpc_address(self, port: int) -> str:
        """Return the `host:port` that gRPC binds to; IPv6 hosts get brackets."""
        return join_host_port(self.host or "::", port)


class ScrapeSection(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Scraping of metrics and model lists from engines.

    Attributes:
        enabled: Scrape engines at all. True; without it, only the requests and prefixes of this
            process are known.
        path: HTTP path of the metrics page. /metrics is the path of every supported engine.
        port: Port of the metrics page (TCP), such as that of a sidecar; the label `metrics-port` of an
            endpoint names another. Several engines at one IP address are read at their own ports. Null:
            the port of the endpoint, where engines serve it.
        scheme: `http`, because engines serve metrics on their API port without TLS; or `https`.
        verify_tls: Check certificates with `https`, by `tls.ca_file`, else by the authorities of the
            system or of the file `SSL_CERT_FILE`. False: those of engines rarely name an IP address,
            and nothing secret is sent.
        tls: Certificates for `https`; each field has the reason of its default.
        busy_interval_s: Seconds between scrapes of an endpoint with requests of this process. 0.2
            is several engine steps; own requests are counted in between.
        idle_interval_s: Seconds between scrapes of an endpoint without. 2 shows requests of others
            at a tenth of the cost. The first request of this process brings the next scrape
            forward, or the endpoint would look idle for the rest of the interval. Without any
            request for 30 s it is twice as long, as far as `stale_after_s` and 4 s allow.
        timeout_s: Time limit of a scrape (seconds). 1 is far above the milliseconds that a healthy
            engine needs, and short enough to notice a hung one.
        stale_after_s: Age at which a load counts as unknown (seconds). 6 allows two idle scrapes to
            fail.
        backoff_cap_s: Longest pause after repeated failures (seconds). After refused connections,
            which cost the engine nothing, it is 2 or `idle_interval_s`, the shorter one. 10 limits
            how late a recovery is noticed.
        max_scrapes_per_s: Scrapes per second of all endpoints; above it, intervals are stretched,
            those of busy endpoints further, up to threefold, where loads of idle ones would turn unknown.
            Endpoints that fail share as many of their own, model lists 0.4 times as many.
            100 cost about 4 % of a core.
        max_page_bytes: Largest metrics page that is read (bytes). 4 MiB is 80 times a page of vLLM; with
            LoRA adapters a page has a line for each combination of adapters since the engine started,
            some 140 bytes each.
        initial_scrape_timeout_s: Seconds that readiness waits after start until every endpoint was
            scraped, or could not be; 0 does not wait. 3 are some scrapes. Without them, the first
            decisions of a new replica would ignore the load that others cause.
        models: Also read which models and adapters an endpoint serves (/v1/models), and route
            requests only to endpoints that serve their model. True: it is one small page per
            endpoint, and without it the models of a pool are not distinguished. An endpoint whose
            list is unknown remains a candidate for every model. False suits engines that load
            adapters on first use (the LoRA resolvers of vLLM); otherwise an adapter stays where it
            was loaded first.
        models_interval_s: Seconds between two reads of the list of an endpoint; a new or restarted
            endpoint is read at once. 30, because only adapters that are loaded at run time change
            it.
        data_parallel_ranks: Make each data-parallel rank on a page an endpoint, chosen by
            `x-data-parallel-rank`. True: engines choose ranks without a look at their caches.
        extra_metrics: Further numbers of the metrics page for plugins, as `load.extra`: selector
            `METRIC`, `METRIC{LABEL=VALUE,...}` or `METRIC[LABEL]` by name. Samples that match are
            summed. At most 16. None: the built-in strategies read none.
    """

    enabled: bool = True
    path: Annotated[str, msgspec.Meta(pattern="^/")] = "/metrics"
    port: pool_sections.EnginePort | None = None
    scheme: Literal["http", "https"] = "http"
    verify_tls: bool = False
    tls: TlsFiles = TlsFiles()
    busy_interval_s: validation.PositiveSeconds = 0.2
    idle_interval_s: validation.PositiveSeconds = 2.0
    timeout_s: validation.PositiveSeconds = 1.0
    stale_after_s: validation.PositiveSeconds = 6.0
    backoff_cap_s: validation.PositiveSeconds = 10.0
    max_scrapes_per_s: validation.PositiveRate = 100.0
    max_page_bytes: validation.Positive = 4 * _MIB
    initial_scrape_timeout_s: validation.Seconds = 3.0
    models: bool = True
    models_interval_s: validation.PositiveSeconds = 30.0
    data_parallel_ranks: bool = True
    extra_metrics: Annotated[
        Mapping[validation.MetricName, validation.Name], msgspec.Meta(max_length=16)
    ] = {}


class PrefixSection(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Blocks of prompts, and the size of the prefix index.

    Attributes:
        schedule: Block sizes (bytes); each field has the reason of its default.
        capacity_blocks: Blocks remembered for an endpoint (count). 32768 are 2 to 30 million prompt
            tokens, more than the KV cache of one engine. A block takes about 22 bytes of memory in
            long prompts, and up to 360 in prompts of a single block that no other prompt shares: at
            most 12 MB per endpoint. An endpoint that reports the size of its KV cache has no more
            blocks than fit in it.
        max_bytes: Memory for the blocks of all endpoints of all pools (bytes, estimated). Above
            it, the least recently used blocks of any endpoint are evicted, of the largest pool
            first. 512 MiB are 24 million blocks of long prompts, or 1.5 million prompts of a
            single block: 45 endpoints with `capacity_blocks` of those.
    """

    schedule: blocks.Schedule = blocks.DEFAULT
    capacity_blocks: validation.Count = 32768
    max_bytes: validation.Positive = DEFAULT_MAX_BYTES


class LimitsSection(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Limits on bodies and streams.

    Attributes:
        max_body_bytes: Largest request body (bytes); above it 413. 32 MiB is the limit of
            Anthropic's API: a prompt of a million tokens with a few dozen images.
        max_streams: Open ext_proc streams; above it requests get 429 (count). 10000 take about 1
            GiB in one process.
        max_assembly_bytes: Bytes of request bodies that are being received, of all streams. A body
            above 64 KiB may take at most a quarter of what the others leave, and gets 429 beyond;
            smaller bodies are always accepted. 512 MiB are 5000 bodies of 100 kB, and leave room in
            a container of 1 GiB.
        body_idle_s: Seconds within which more of a request body must arrive; otherwise 408. 60 is
            the limit of most proxies. A body that Envoy buffers arrives as one message, and the
            time counts from its headers. A body that takes longer must arrive at 16 KiB/s; while
            bodies take half of `max_streams` or `max_assembly_bytes`, the limit is a tenth of it.
            A stream of ext_proc without any message ends after the same time, with gRPC status
            DEADLINE_EXCEEDED.
        max_message_bytes: Largest gRPC message (bytes). 36 MiB: a buffered body arrives as one
            message, with headers and attributes, which may have 1 MiB.
    """

    max_body_bytes: validation.Positive = 32 * _MIB
    max_streams: validation.Positive = 10_000
    max_assembly_bytes: validation.Positive = 512 * _MIB
    body_idle_s: validation.PositiveSeconds = 60.0
    max_message_bytes: validation.Positive = 36 * _MIB


#: Wait for which requests are evicted, as a multiple of `busy_s`: after a shorter one the endpoint has
#: capacity for priorities above 0 anyway, and what a batch loses is more than what others gain.
_EVICTION_FACTOR: Final = 5.0


class FlowControlSection(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Queueing of requests while no endpoint is ready or free, and rate limits of tenants.

    Attributes:
        enabled: Queue requests. False: requests are sent to busy engines, which queue them, and
            without endpoints they get 503 at once, as the protocol requires. Queueing needs time
            limits of the data plane that allow it; `extproc check --envoy FILE` checks them.
        timeout_s: Longest wait (seconds). 60 is the limit of upstream, and usual for clients.
        empty_timeout_s: Longest wait while the pool has no endpoint (seconds). 300 lets an engine
            start; 0 answers 503 at once.
        max_timeout_s: Longest wait that a request may ask for (seconds). 3600 is the maximum of
            Envoy's message_timeout.
        by_objective: Longest wait by objective (seconds). None: the same for all.
        timeout_header: Request header with the longest wait in milliseconds; empty reads none.
        busy_s: Estimated wait on an endpoint above which it counts as saturated (seconds); five
            times that for priorities above 0. 0.1 sends a prompt when the one before it is
            computed: engines always have work, and the order of the remaining requests is decided
            later, by priority. With 0.5, requests with priority wait a third longer at the same
            throughput.
        max_requests: Requests that may wait for a pool (count). 10000 with prompts of 2 kB take about
            60 MB.
        max_bytes: Bytes of the bodies of requests that wait for a pool. 256 MiB is half of what may
            be received at a time.
        order: Order of the requests of a tenant: `fcfs` by arrival, `edf` by deadline, or `slo` by
            arrival plus `x-llm-d-slo-ttft-ms`. `fcfs`: first come, first served.
        fairness: Order of the tenants of a priority: `least-served` by tokens attained,
            `round-robin` by requests, or `none`. `least-served`: the cost of requests differs a
            hundredfold.
        bands: Bounds, fairness and order of single priorities, which share the bounds of all. None:
            every priority is as `default_band` says.
        default_band: The same for each priority that `bands` does not have. Null: the bounds,
            fairness and order of all.
        default_negative_band: The same for each of these priorities below 0. Null: `default_band`.
        eviction: End requests of priorities below 0 that are in flight, for requests of higher
            priorities that wait longer than five times `busy_s`: 429, or a response that is cut.
            False: batches may rather finish late than begin anew.
        usage_limit: Ceilings of the saturation of the pool by priority, so that capacity is kept for
            higher priorities that come later. Null: requests wait for an endpoint only.
        half_life_s: Half-life of the service that a tenant attained (seconds). With 60, a burst is
            forgotten within minutes.
        tenant_header: Request header that names the tenant, read before
            `x-llm-d-inference-fairness-id` and its older name. Empty: only those are read.
        fallback_tenant_headers: Request headers that name the tenant where none of those does, the
            first that is there, such as the session of an agent. None: only those are read.
        by_adapter: Take the model or adapter as the tenant where no header names one. False: such
            requests are one tenant.
        limit: Rate limit of every tenant, over all pools. Each replica counts alone: for a limit of
            all together, divide it by their number. Null: no limit.
        limits: Rate limits by tenant, in place of `limit`, in each replica as well. None: all
            tenants have `limit`.
    """

    enabled: bool = False
    timeout_s: validation.Seconds = 60.0
    empty_timeout_s: validation.Seconds = 300.0
    max_timeout_s: validation.PositiveSeconds = 3600.0
    by_objective: Mapping[validation.Name, validation.Seconds] = {}
    timeout_header: str = "x-extproc-queue-timeout-ms"
    busy_s: validation.PositiveSeconds = 0.1
    max_requests: validation.Positive = 10_000
    max_bytes: validation.Positive = 256 * _MIB
    order: Order = "fcfs"
    fairness: Fairness = "least-served"
    bands: tuple[PrioritySettings, ...] = ()
    default_band: BandSettings | None = None
    default_negative_band: BandSettings | None = None
    eviction: bool = False
    usage_limit: UsageLimit | None = None
    half_life_s: validation.PositiveSeconds = 60.0
    tenant_header: str = ""
    fallback_tenant_headers: tuple[validation.Name, ...] = ()
    by_adapter: bool = False
    limit: RateLimit | None = None
    limits: Mapping[validation.Name, RateLimit] = {}

    @property
    def queue(self) -> FlowControlSettings:
        """The settings of the queue."""
        settings = msgspec.convert(self, FlowControlSettings, from_attributes=True)
        if not self.eviction:
            return settings
        return msgspec.structs.replace(settings, evict_after_s=_EVICTION_FACTOR * self.busy_s)

    @property
    def headers(self) -> FlowHeaders:
        """The request headers that flow control reads, in lower case."""
        usual = FlowHeaders()
        tenant = (self.tenant_header.lower(),) if self.tenant_header else ()
        fallbacks = tuple([name.lower() for name in self.fallback_tenant_headers])
        return FlowHeaders(
            tenant_headers=(*tenant, *usual.tenant_headers, *fallbacks),
            by_adapter=self.by_adapter,
            timeout_headers=(self.timeout_header.lower(),) if self.timeout_header else (),
        )


class ResponsesSection(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Processing of responses.

    Attributes:
        marker: Add `x-went-into-resp-headers: true` to responses. True, as the upstream EPP does;
            its conformance tests check it.
        feedback: Request the bodies of responses that are not streamed, for the usage that they
            report, where the data plane allows it and `content-length` is at most 256 KiB, which
            Envoy can buffer. True: it costs one message per response.
        stream_sample_ratio: Share of streamed responses whose body is requested as well (0..1). 0,
            because every chunk then passes through extproc. It has no effect where Envoy streams
            requests (`original-dst.yaml`), since Envoy changes no mode then.
        restore_model: Restore the client's model name in responses to requests whose model was
            rewritten (by `rewrites` or the header of the gateway), and request their bodies where
            they are not shown. True, because clients compare the name with their request. It costs
            these requests one message per complete response, or one per chunk of a stream.
        request_cost: Weights of token kinds, for the cost of a response as dynamic metadata that a
            rate limiter of the data plane reads: the sum of tokens times weight, at least 0.
            `cached` tokens are part of `prompt`. None: no metadata is sent.
        request_id: Add the request id to responses and refusals as `x-request-id`. False: Envoy
            does it in the shipped files; true for gateways that cannot.
        list_models: Answer `GET /v1/models` with the models of all endpoints, in place of one
            engine. Null: true with several pools, because an engine knows only its own models.
    """

    marker: bool = True
    feedback: bool = True
    stream_sample_ratio: validation.Share = 0.0
    restore_model: bool = True
    request_cost: Mapping[usage.UsageKind, float] = {}
    request_id: bool = False
    list_models: bool | None = None


class XdsSection(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Endpoints served over xDS, for an Envoy without a gateway.

    Envoy then tries the next endpoint when one fails, and continues while no replica of extproc is
    up. Each pool is a cluster of its name; a pool without a name is the cluster `engines`.

    Attributes:
        enabled: Serve xDS. False: gateways configure their Envoys themselves.
        port: Aggregated discovery service (TCP port; 0 picks a free one). 18000 is the usual port
            of xDS servers. TLS is as on the ext_proc port, with the same certificate, because both
            decide where requests go.
        health_check: Health checks of engines by Envoy; each field has the reason of its default.
            They and `outliers` matter where Envoy chooses itself: an endpoint that extproc names is
            tried regardless of its health in Envoy.
        outliers: Outlier detection by Envoy; each field has the reason of its default.
    """

    enabled: bool = False
    port: validation.Port = 18000
    health_check: resources.HealthCheck = resources.HealthCheck()
    outliers: resources.OutlierDetection = resources.OutlierDetection()


class PeerSyncSection(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Exchange of started and ended requests between replicas: directly, or over a Redis or Valkey.

    No request waits for it; while a peer or the server is away, replicas route without it.

    Attributes:
        peers: The other replicas of extproc, for a direct exchange: `host:port` of their metrics port
            (`server.metrics_port`). A name stands for every address that it resolves to, such as that
            of a headless Service; the own address is skipped. None: there is one replica, or `url`
            is used.
        url: In place of `peers`, where replicas cannot reach each other: address of a server, as `redis://:password@host:6379/0`, `rediss://` or `unix://`.
            Empty: none is needed.
        password_file: File with the server's password, such as a key of a mounted Secret. It is read
            at every connection, so a new password needs no restart. Empty: the password of `url`.
        stream: Key of the stream. Replicas that share endpoints use the same key. A client that can
            write to it can make endpoints look busy, so the server needs a password.
        flush_s: Shortest time between two messages (seconds). After a pause an event is sent at once;
            under load, events are collected for this time. 0.002 are at most 500 messages per second.
        beat_s: Seconds between two complete lists of open requests, which repair lost events.
        silent_s: Seconds without a message after which a replica counts as gone, at least twice
            `beat_s`. 5 are five lists.
        max_entries: Entries that the stream retains, approximately (count). 10000 are some seconds.
            A reader that is further behind misses entries; open requests among them are written again.
    """

    peers: tuple[validation.Name, ...] = ()
    url: str = ""
    password_file: str = ""
    stream: validation.Name = "extproc"
    flush_s: validation.Seconds = 0.002
    beat_s: validation.PositiveSeconds = 1.0
    silent_s: validation.PositiveSeconds = 5.0
    max_entries: validation.Positive = 10_000


class LogSection(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The log on standard error.

    Attributes:
        level: Least severe level that is written. `info` writes a few lines at start and end, and
            when something happens to endpoints, discovery or the configuration; none per request.
        format: `text`, or `json` for one object per line, which log collectors index by field.
            Text, because people read it first.
        requests: Requests that get a line of their own: `off`, `errors` for refused requests and
            responses without a status below 400, or `all`. It has the request id, model, endpoint,
            status, times, tokens and the reason of the choice, never a prompt or a header value
            besides the id. Off, because Envoy's access log has a line per request already.
    """

    level: Literal["debug", "info", "warning", "error"] = "info"
    format: Literal["text", "json"] = "text"
    requests: Literal["off", "errors", "all"] = "off"


class Settings(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A complete configuration.

    Attributes:
        api_version: `apiVersion` of the file: version of the fields. There is one.
        kind: `kind` of the file, so that a file of another program is not mistaken for one of
            extproc. There is one.
        server: Listening addresses, TLS and shutdown.
        pool: Source of the endpoints of a single pool.
        pools: The same for several pools, with the requests that each serves. None: `pool` is used.
        cluster: Access to Kubernetes.
        scrape: Scraping of engines.
        health: Outlier detection of endpoints.
        scheduling: Choice of the endpoint.
        prefix: Size of the prefix index.
        kv_events: Events of engines about their prefix caches.
        limits: Limits on bodies and streams.
        flow_control: Queueing of requests.
        autoscaling: Autoscaling settings shared by all pools.
        responses: Processing of responses.
        decisions: Recording of decisions.
        xds: Endpoints served over xDS.
        peer_sync: Exchange of requests between replicas.
        log: The log on standard error.
        tracing: OpenTelemetry traces.
        parse_bodies: Parse request bodies. True: the model and the prompt of a request stand there.
            False: a body of any form is forwarded, and requests are routed by headers and load,
            without prefixes.
        conformance: Obey the header `test-epp-endpoint-selection`, and report the endpoint that
            served. False: outside of conformance tests a client must not choose its endpoint.
        seed: Seed of all random choices (integer). Null: drawn from the system, because replicas
            with equal seeds choose the same endpoints at the same time.
    """

    api_version: Literal["extproc/v1alpha1"] = msgspec.field(name="apiVersion", default=API_VERSION)
    kind: Literal["ExtProcConfig"] = KIND
    server: ServerSection = ServerSection()
    pool: pool_sections.PoolSource = pool_sections.PoolSource()
    pools: tuple[pool_sections.PoolSection, ...] = ()
    cluster: pool_sections.ClusterSection = pool_sections.ClusterSection()
    scrape: ScrapeSection = ScrapeSection()
    health: endpoint_health.OutlierDetectionSettings = endpoint_health.OutlierDetectionSettings()
    scheduling: pool_sections.SchedulingSection = pool_sections.SchedulingSection()
    prefix: PrefixSection = PrefixSection()
    kv_events: KvEventsSection = KvEventsSection()
    limits: LimitsSection = LimitsSection()
    flow_control: FlowControlSection = FlowControlSection()
    autoscaling: AutoscalingSection = AutoscalingSection()
    responses: ResponsesSection = ResponsesSection()
    decisions: DecisionsSection = DecisionsSection()
    xds: XdsSection = XdsSection()
    peer_sync: PeerSyncSection = PeerSyncSection()
    log: LogSection = LogSection()
    tracing: TracingSection = TracingSection()
    parse_bodies: bool = True
    conformance: bool = False
    seed: int | None = None
