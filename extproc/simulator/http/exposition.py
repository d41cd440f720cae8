"""The /metrics page of a simulated engine, line by line as vLLM 0.32 serves it."""

from __future__ import annotations

import gc
import itertools
import resource
from collections.abc import Iterable, Iterator, Mapping

from extproc.simulator import profiles, stats, vllm_metric_families

#: What a real server says of itself when it serves plain text.
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


def number(value: float) -> str:
    """A sample value as the Prometheus client writes it: Go's notation from 1e6 on."""
    text = repr(float(value))
    dot = text.find(".")
    if value > 0 and dot > 6 and "e" not in text:
        mantissa = f"{text[0]}.{text[1:dot]}{text[dot + 1 :]}".rstrip("0.")
        return f"{mantissa}e+{dot - 1:02d}"
    return text


def labels(pairs: Mapping[str, str]) -> str:
    """Labels in braces, sorted by name; nothing for none."""
    if not pairs:
        return ""
    escaped = (
        (name, value.replace("\\", r"\\").replace("\n", r"\n").replace('"', r"\""))
        for name, value in sorted(pairs.items())
    )
    return "{" + ",".join(f'{name}="{value}"' for name, value in escaped) + "}"


def _header(name: str, kind: str, text: str) -> str:
    return f"# HELP {name} {text}\n# TYPE {name} {kind}\n"


class _HistogramLines:
    """A histogram's samples with everything but the numbers written once."""

    def __init__(self, name: str, pairs: Mapping[str, str], bounds: Iterable[float]) -> None:
        edges = [*(number(bound) for bound in bounds), "+Inf"]
        self._buckets = [f"{name}_bucket{labels({**pairs, 'le': edge})} " for edge in edges]
        self._count = f"{name}_count{labels(pairs)} "
        self._sum = f"{name}_sum{labels(pairs)} "
        self._rendered_count = -1
        self._text = ""

    def text(self, histogram: stats.Histogram) -> str:
        """The samples; written anew only after an observation."""
        if histogram.count == self._rendered_count:
            return self._text
        totals = list(itertools.accumulate(histogram.counts))
        self._rendered_count = histogram.count
        out = [f"{at}{total}.0\n" for at, total in zip(self._buckets, totals, strict=True)]
        out.append(f"{self._count}{totals[-1]}.0\n{self._sum}{number(histogram.sum)}\n")
        self._text = "".join(out)
        return self._text


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

    def lines(self) -> Iterator[str]:
        """The `http_` part of the page."""
        born = number(self._created)
        text = "Total number of requests by method, status and handler."
        by_status = [
            (labels({"handler": handler, "method": method, "status": status}), count)
            for (handler, method, status), count in self._requests.items()
        ]
        yield _header("http_requests_total", "counter", text)
        yield from (f"http_requests_total{pairs} {count}.0\n" for pairs, count in by_status)
        if by_status:
            yield _header("http_requests_created", "gauge", text)
            yield from (f"http_requests_created{pairs} {born}\n" for pairs, _ in by_status)
        for index, which in ((1, "request"), (2, "response")):
            yield from self._size_lines(f"http_{which}_size_bytes", which, index)
        yield from self._duration_lines(born)

    def _size_lines(self, name: str, which: str, index: int) -> Iterator[str]:
        way = "incoming requests" if which == "request" else "outgoing responses"
        text = (
            f"Content length of {way} by handler. Only value of header is respected. "
            "Otherwise ignored. No percentile calculated. "
        )
        yield _header(name, "summary", text)
        for handler, moved in self._bytes.items():
            pairs = labels({"handler": handler})
            yield f"{name}_count{pairs} {moved[0]}.0\n{name}_sum{pairs} {number(moved[index])}\n"
        if self._bytes:
            yield _header(f"{name}_created", "gauge", text)
            for handler in self._bytes:
                yield f"{name}_created{labels({'handler': handler})} {number(self._created)}\n"

    def _duration_lines(self, born: str) -> Iterator[str]:
        name = "http_request_duration_highr_seconds"
        text = (
            "Latency with many buckets but no API specific labels. "
            "Made for more accurate percentile calculations. "
        )
        yield _header(name, "histogram", text)
        yield _HistogramLines(name, {}, _HTTP_S).text(self._all)
        yield _header(f"{name}_created", "gauge", text) + f"{name}_created {born}\n"
        name = "http_request_duration_seconds"
        text = (
            "Latency with only few buckets by handler. "
            "Made to be only used if aggregation by handler is important. "
        )
        yield _header(name, "histogram", text)
        keyed = [
            ({"handler": handler, "method": method}, histogram)
            for (handler, method), histogram in self._by_handler.items()
        ]
        for pairs, histogram in keyed:
            yield _HistogramLines(name, pairs, _HTTP_FEW_S).text(histogram)
        if keyed:
            yield _header(f"{name}_created", "gauge", text)
            yield from (f"{name}_created{labels(pairs)} {born}\n" for pairs, _ in keyed)


class ExpositionPage:
    """Renders the page. Everything that does not change is written once.

    Args:
        counts: The engine's statistics.
        http: The server's own.
        model: The served base model.
        profile: The machine.
        created: Unix time the engine started.
    """

    def __init__(
        self,
        counts: stats.Stats,
        http: HttpCounts,
        *,
        model: str,
        profile: profiles.EngineProfile,
        created: float,
    ) -> None:
        self._stats = counts
        self._http = http
        self._profile = profile
        self._created = created
        born = number(created)
        self._parts: list[str | tuple[str, str] | tuple[_HistogramLines, str]] = []
        for family in vllm_metric_families.FAMILIES:
            self._add(family, model, born)
        self._cache = (
            _header("vllm:cache_config_info", "gauge", "Information of the LLMEngine CacheConfig")
            + f"vllm:cache_config_info{labels(self._cache_labels())} 1.0\n"
        )

    def _add(self, family: vllm_metric_families.Family, model: str, born: str) -> None:
        """Write a family's constant text, with keys where the numbers go."""
        counter, histogram = family.kind == "counter", family.kind == "histogram"
        base = f"vllm:{family.name}"
        name = f"{base}_total" if counter else base
        common = {"model_name": model} | ({"engine": "0"} if family.engine else {})
        variants = [
            (common | ({family.label: variant} if variant else {}), variant)
            for variant in family.variants
        ]
        parts = self._parts
        parts.append(_header(name, family.kind, family.help))
        if histogram:
            bounds = self._stats.histograms[family.name].bounds
            parts.append((_HistogramLines(name, common, bounds), family.name))
        else:
            for pairs, variant in variants:
                key = f"{family.name}/{variant}" if variant else family.name
                parts.append((f"{name}{labels(pairs)} ", key))
        if counter or histogram:
            created = "".join(f"{base}_created{labels(pairs)} {born}\n" for pairs, _ in variants)
            parts.append(_header(f"{base}_created", "gauge", family.help) + created)

    def _cache_labels(self) -> dict[str, str]:
        profile = self._profile
        block = str(profile.block_tokens)
        return _CACHE_CONFIG | {
            "block_size": block,
            "effective_attention_block_size": block,
            "kv_cache_max_concurrency": str(
                profile.blocks * profile.block_tokens / profile.max_model_len
            ),
            "kv_cache_size_tokens": str(profile.blocks * profile.block_tokens),
            "num_gpu_blocks": str(profile.blocks),
            "num_gpu_blocks_override": str(profile.blocks),
        }

    def render(self) -> bytes:
        """The page as it is now."""
        values, histograms = self._stats.values(), self._stats.histograms
        out = list(self._process_lines())
        for part in self._parts:
            if isinstance(part, str):
                out.append(part)
                continue
            prefix, key = part
            if isinstance(prefix, str):
                out.append(f"{prefix}{number(values.get(key, 0.0))}\n")
            else:
                out.append(prefix.text(histograms[key]))
        out.extend(self._lora_lines())
        out.append(self._cache)
        out.extend(self._http.lines())
        return "".join(out).encode()

    def _lora_lines(self) -> Iterator[str]:
        """Every set of adapters ever reported; running and waiting carry the same one."""
        if not self._profile.max_loras:
            return
        name = "vllm:lora_requests_info"
        yield _header(name, "gauge", "Running stats on lora requests.")
        for adapters, at in self._stats.adapters.items():
            pairs = {
                "max_lora": str(self._profile.max_loras),
                "running_lora_adapters": adapters,
                "waiting_lora_adapters": adapters,
            }
            yield f"{name}{labels(pairs)} {number(at)}\n"

    def _process_lines(self) -> Iterator[str]:
        """Lines of the process collector of the Prometheus client."""
        used = resource.getrusage(resource.RUSAGE_SELF)
        generations = gc.get_stats()
        for name, text, key in (
            ("objects_collected", "Objects collected during gc", "collected"),
            ("objects_uncollectable", "Uncollectable objects found during GC", "uncollectable"),
            ("collections", "Number of times this generation was collected", "collections"),
        ):
            yield _header(f"python_gc_{name}_total", "counter", text)
            for index, generation in enumerate(generations):
                yield f'python_gc_{name}_total{{generation="{index}"}} {number(generation[key])}\n'
        info = {
            "implementation": "CPython",
            "major": "3",
            "minor": "11",
            "patchlevel": "7",
            "version": "3.11.7",
        }
        yield _header("python_info", "gauge", "Python platform information")
        yield f"python_info{labels(info)} 1.0\n"
        resident = used.ru_maxrss * 1024
        for name, kind, text, value in (
            ("virtual_memory_bytes", "gauge", "Virtual memory size in bytes.", 4 * resident),
            ("resident_memory_bytes", "gauge", "Resident memory size in bytes.", resident),
            (
                "start_time_seconds",
                "gauge",
                "Start time of the process since unix epoch in seconds.",
                self._created,
            ),
            (
                "cpu_seconds_total",
                "counter",
                "Total user and system CPU time spent in seconds.",
                used.ru_utime + used.ru_stime,
            ),
            ("open_fds", "gauge", "Number of open file descriptors.", 34),
            ("max_fds", "gauge", "Maximum number of open file descriptors.", 20000),
        ):
            yield _header(f"process_{name}", kind, text) + f"process_{name} {number(value)}\n"
