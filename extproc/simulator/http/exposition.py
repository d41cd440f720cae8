"""The /metrics page of a simulated engine: families, labels and order of vLLM 0.32."""

from __future__ import annotations

import gc
import itertools
import resource
from collections.abc import Iterable, Iterator, Mapping, Sequence

from prometheus_client import generate_latest
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
    SummaryMetricFamily,
)
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString

from extproc.simulator import profiles, stats, vllm_metric_families

#: Content type that vLLM states for the text format.
CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"

#: Requests to these paths are not counted, as in vLLM.
UNCOUNTED = frozenset({"/metrics", "/health", "/load", "/ping", "/version"})

_HTTP_S = (
    *(0.01, 0.025, 0.05, 0.075, 0.1, 0.25, 0.5, 0.75, 1.0, 1.5, 2.0, 2.5),
    *(3.0, 3.5, 4.0, 4.5, 5.0, 7.5, 10.0, 30.0, 60.0),
)
_HTTP_FEW_S = (0.1, 0.5, 1.0)

#: `cache_config_info` labels that do not follow from the profile.
_CACHE_CONFIG = {
    "_block_size_resolved": "True",
    "cache_dtype": "auto",
    "cache_hit_alignment_tokens": "None",
    "enable_mamba_shared_prefix_checkpoint": "False",
    "enable_prefix_caching": "True",
    "engine": "0",
    "gpu_memory_utilization": "0.92",
    "hash_block_size": "None",
    "is_attention_free": "False",
    "kv_cache_dtype_skip_layers": "[]",
    "kv_cache_layout": "None",
    "kv_cache_memory_bytes": "1073741824",
    "kv_offloading_backend": "native",
    "kv_offloading_size": "None",
    "kv_sharing_fast_prefill": "False",
    "mamba_block_size": "None",
    "mamba_cache_dtype": "auto",
    "mamba_cache_mode": "none",
    "mamba_page_size_padded": "None",
    "mamba_ssm_cache_dtype": "float32",
    "num_cpu_blocks": "None",
    "prefix_cache_retention_interval": "0",
    "prefix_caching_hash_algo": "sha256",
    "prefix_match_unit": "None",
    "replayssm_buffer_len": "16",
    "skip_page_size_padded": "None",
    "sliding_window": "None",
    "swa_bounded_replay": "True",
    "use_kda_recoverssm": "False",
    "use_replayssm": "False",
    "user_specified_block_size": "True",
}

#: Labels of `python_info`.
_PYTHON = {
    "implementation": "CPython",
    "major": "3",
    "minor": "11",
    "patchlevel": "7",
    "version": "3.11.7",
}


class HttpCounts:
    """Requests by handler, as the server's own instrumentation counts them.

    Args:
        created: Unix time.
    """

    def __init__(self, created: float) -> None:
        self._created = created
        self._requests: dict[tuple[str, str, str], int] = {}
        self._bytes: dict[str, list[int]] = {}  # handler: requests, bytes in, bytes out
        self._all = stats.Histogram(_HTTP_S)
        self._by_handler: dict[tuple[str, str], stats.Histogram] = {}

    def observe(
        self, handler: str, method: str, *, status: int, seconds: float, sizes: tuple[int, int]
    ) -> None:
        """Count one answered request; `sizes` are the content lengths in and out, 0 if unknown."""
        key = (handler, method, f"{status // 100}xx")
        self._requests[key] = self._requests.get(key, 0) + 1
        moved = self._bytes.setdefault(handler, [0, 0, 0])
        moved[0] += 1
        moved[1] += sizes[0]
        moved[2] += sizes[1]
        self._all.observe(seconds)
        self._by_handler.setdefault((handler, method), stats.Histogram(_HTTP_FEW_S)).observe(
            seconds
        )

    def families(self) -> Iterator[Metric]:
        """The `http_` families of the page."""
        requests = CounterMetricFamily(
            "http_requests",
            "Total number of requests by method, status and handler.",
            labels=["handler", "method", "status"],
        )
        for by_status, count in self._requests.items():
            requests.add_metric(by_status, count, created=self._created)
        yield requests
        yield self._sizes("request", "incoming requests", 1)
        yield self._sizes("response", "outgoing responses", 2)
        yield _histogram(
            "http_request_duration_highr_seconds",
            "Latency with many buckets but no API specific labels. "
            "Made for more accurate percentile calculations. ",
            [((), self._all)],
            created=self._created,
        )
        yield _histogram(
            "http_request_duration_seconds",
            "Latency with only few buckets by handler. "
            "Made to be only used if aggregation by handler is important. ",
            self._by_handler.items(),
            labels=("handler", "method"),
            created=self._created,
        )

    def _sizes(self, direction: str, messages: str, index: int) -> Metric:
        family = SummaryMetricFamily(
            f"http_{direction}_size_bytes",
            f"Content length of {messages} by handler. Only value of header is respected. "
            "Otherwise ignored. No percentile calculated. ",
            labels=["handler"],
        )
        for handler, moved in self._bytes.items():
            family.add_metric([handler], moved[0], moved[index])
            family.add_sample(f"{family.name}_created", {"handler": handler}, self._created)
        return family


class ExpositionPage(Collector):
    """Renders the page.

    Args:
        counts: Statistics of each data-parallel rank.
        http: The server's own.
        created: Unix time the engine started.
    """

    def __init__(
        self,
        counts: Sequence[stats.Stats],
        http: HttpCounts,
        *,
        model: str,
        profile: profiles.EngineProfile,
        created: float,
    ) -> None:
        self._ranks = counts
        self._http = http
        self._model = model
        self._profile = profile
        self._created = created

    def render(self) -> bytes:
        """Return the page as it is now."""
        return generate_latest(self)

    def collect(self) -> Iterator[Metric]:
        """Yield all families in the order of the page."""
        yield from self._process()
        values = [counts.values() for counts in self._ranks]
        totals = {
            name: sum(of_rank.get(name, 0.0) for of_rank in values)
            for name in {name for of_rank in values for name in of_rank}
        }
        for family in vllm_metric_families.FAMILIES:
            # What the server counts before a request has a rank is there once.
            yield self._family(family, values if family.engine else [totals])
        if self._profile.max_loras:
            yield self._adapters()
        if self._profile.host_blocks:
            yield self._family(vllm_metric_families.RELOAD_TIME, values)
        configs = [self._cache_config(str(rank)) for rank in range(len(self._ranks))]
        info = GaugeMetricFamily(
            "vllm:cache_config_info",
            "Information of the LLMEngine CacheConfig",
            labels=list(configs[0]),
        )
        for config in configs:
            info.add_metric(list(config.values()), 1)
        yield info
        yield from self._http.families()

    def _family(
        self, family: vllm_metric_families.Family, values: Sequence[Mapping[str, float]]
    ) -> Metric:
        name = f"vllm:{family.name}"
        commons = [
            (rank, (self._model, str(rank)) if family.engine else (self._model,))
            for rank in range(len(values))
        ]
        labels = ("model_name", "engine") if family.engine else ("model_name",)
        if family.kind == "histogram":
            histograms = [
                (common, self._ranks[rank].histograms[family.name]) for rank, common in commons
            ]
            return _histogram(name, family.help, histograms, labels=labels, created=self._created)
        if family.label:
            labels = (*labels, family.label)
        samples = [
            (
                [*common, variant] if variant else list(common),
                values[rank].get(f"{family.name}/{variant}" if variant else family.name, 0.0),
            )
            for rank, common in commons
            for variant in family.variants
        ]
        if family.kind == "gauge":
            gauge = GaugeMetricFamily(name, family.help, labels=labels)
            for texts, value in samples:
                gauge.add_metric(texts, value)
            return gauge
        counter = CounterMetricFamily(name, family.help, labels=labels)
        for texts, value in samples:
            counter.add_metric(texts, value, created=self._created)
        return counter

    def _cache_config(self, rank: str) -> dict[str, str]:
        profile = self._profile
        block = str(profile.block_tokens)
        return _CACHE_CONFIG | {
            "engine": rank,
            "block_size": block,
            "effective_attention_block_size": block,
            "kv_cache_max_concurrency": str(
                profile.blocks * profile.block_tokens / profile.max_model_len
            ),
            "kv_cache_size_tokens": str(profile.blocks * profile.block_tokens),
            "num_gpu_blocks": str(profile.blocks),
            "num_gpu_blocks_override": str(profile.blocks),
        }

    def _adapters(self) -> Metric:
        """Every set of adapters ever reported; running and waiting carry the same one."""
        family = GaugeMetricFamily(
            "vllm:lora_requests_info",
            "Running stats on lora requests.",
            labels=["max_lora", "running_lora_adapters", "waiting_lora_adapters"],
        )
        reported: dict[str, float] = {}  # a page has each label set once, whatever the rank
        for counts in self._ranks:
            for adapters, at in counts.adapters.items():
                reported[adapters] = max(at, reported.get(adapters, at))
        for adapters, at in reported.items():
            family.add_metric([str(self._profile.max_loras), adapters, adapters], at)
        return family

    def _process(self) -> Iterator[Metric]:
        """The families of the process and platform collectors of the Prometheus client."""
        used = resource.getrusage(resource.RUSAGE_SELF)
        generations = gc.get_stats()
        for name, text, key in (
            ("objects_collected", "Objects collected during gc", "collected"),
            ("objects_uncollectable", "Uncollectable objects found during GC", "uncollectable"),
            ("collections", "Number of times this generation was collected", "collections"),
        ):
            counter = CounterMetricFamily(f"python_gc_{name}", text, labels=["generation"])
            for index, generation in enumerate(generations):
                counter.add_metric([str(index)], generation[key])
            yield counter
        python = GaugeMetricFamily("python_info", "Python platform information", labels=[*_PYTHON])
        python.add_metric(list(_PYTHON.values()), 1)
        yield python
        resident = used.ru_maxrss * 1024
        yield GaugeMetricFamily(
            "process_virtual_memory_bytes", "Virtual memory size in bytes.", value=4 * resident
        )
        yield GaugeMetricFamily(
            "process_resident_memory_bytes", "Resident memory size in bytes.", value=resident
        )
        yield GaugeMetricFamily(
            "process_start_time_seconds",
            "Start time of the process since unix epoch in seconds.",
            value=self._created,
        )
        yield CounterMetricFamily(
            "process_cpu_seconds",
            "Total user and system CPU time spent in seconds.",
            value=used.ru_utime + used.ru_stime,
        )
        yield GaugeMetricFamily("process_open_fds", "Number of open file descriptors.", value=34)
        yield GaugeMetricFamily(
            "process_max_fds", "Maximum number of open file descriptors.", value=20000
        )


def _histogram(
    name: str,
    text: str,
    histograms: Iterable[tuple[tuple[str, ...], stats.Histogram]],
    *,
    labels: tuple[str, ...] = (),
    created: float,
) -> Metric:
    """Convert histograms to one family; each comes with its label values."""
    family = HistogramMetricFamily(name, text, labels=labels)
    for texts, histogram in histograms:
        bounds = [*map(floatToGoString, histogram.bounds), "+Inf"]
        buckets = list(zip(bounds, itertools.accumulate(histogram.counts), strict=True))
        family.add_metric(texts, buckets, histogram.sum)
        family.add_sample(f"{name}_created", dict(zip(labels, texts, strict=True)), created)
    return family
