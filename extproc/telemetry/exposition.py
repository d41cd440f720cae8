"""Tallies and pool state as Prometheus text."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

import msgspec
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    InfoMetricFamily,
    Metric,
)
from prometheus_client.registry import Collector

from extproc.endpoint import Endpoint
from extproc.pool.snapshot import Pool
from extproc.telemetry.tallies import Distribution, Tallies


class Cache(msgspec.Struct, frozen=True):
    """What is believed of one endpoint's prefix cache.

    Attributes:
        predicted_tokens: Prompt tokens predicted to be found there, ever.
        observed_tokens: Prompt tokens its engine found, as far as they were ours.
        capacity_tokens: Prompt tokens it is believed to keep; None while nobody knows.
    """

    predicted_tokens: float
    observed_tokens: float
    capacity_tokens: int | None


class Exposition(Collector):
    """Renders on demand.

    Args:
        tallies: What was counted.
        pool: Gives the current pool.
        clock: Monotonic seconds, for ages.
        gauges: Further gauges by name: (help text, reader).
        about: Labels of `extproc_info`: which pool and profile this is.
        cache: What is believed of an endpoint's prefix cache.
        bytes_per_token: What was learnt of tokenisers, by model.
    """

    def __init__(
        self,
        tallies: Tallies,
        pool: Callable[[], Pool],
        *,
        clock: Callable[[], float],
        gauges: Mapping[str, tuple[str, Callable[[], float]]],
        about: Mapping[str, str],
        cache: Callable[[Endpoint], Cache],
        bytes_per_token: Callable[[], Mapping[str, float]] = dict,
    ) -> None:
        self._tallies = tallies
        self._pool = pool
        self._clock = clock
        self._gauges = gauges
        self._about = about
        self._cache = cache
        self._bytes_per_token = bytes_per_token
        self._registry = CollectorRegistry()
        self._registry.register(self)

    def render(self) -> bytes:
        """The page, in the Prometheus text format."""
        return generate_latest(self._registry)

    def describe(self) -> Iterator[Metric]:
        """Nothing in advance: families are read when asked for."""
        return iter(())

    def collect(self) -> Iterator[Metric]:
        """All families."""
        yield InfoMetricFamily("extproc", "What this picker is.", value=dict(self._about))
        yield from self._counters()
        yield from self._distributions()
        yield from self._endpoints()
        yield from self._learnt()
        for name, (text, read) in self._gauges.items():
            yield GaugeMetricFamily(name, text, value=read())

    def _counters(self) -> Iterator[Metric]:
        tallies = self._tallies
        streams = CounterMetricFamily(
            "extproc_streams", "ext_proc streams by how they ended.", labels=["end"]
        )
        for end, count in tallies.streams.items():
            streams.add_metric([end], count)
        yield streams
        yield GaugeMetricFamily(
            "extproc_streams_open", "Open ext_proc streams.", value=tallies.streams_open
        )
        picks = CounterMetricFamily(
            "extproc_picks", "Requests routed, by endpoint.", labels=["endpoint"]
        )
        for address, count in tallies.picks.items():
            picks.add_metric([address], count)
        yield picks
        rejections = CounterMetricFamily(
            "extproc_rejections", "Requests refused.", labels=["status", "reason"]
        )
        for (code, reason), count in tallies.rejections.items():
            rejections.add_metric([str(code), reason], count)
        yield rejections
        degraded = CounterMetricFamily(
            "extproc_degraded_decisions", "Decisions not taken the ordinary way.", labels=["why"]
        )
        for why, count in tallies.degraded.items():
            degraded.add_metric([why], count)
        yield degraded
        yield from self._plugins()
        yield from self._configuration()
        yield from self._answers()

    def _configuration(self) -> Iterator[Metric]:
        tallies = self._tallies
        reloads = CounterMetricFamily(
            "extproc_config_reloads", "Attempts to read the configuration again.", labels=["result"]
        )
        for result, count in tallies.reloads.items():
            reloads.add_metric([result], count)
        yield reloads
        yield GaugeMetricFamily(
            "extproc_config_reload_failed",
            "1 while an older configuration is in force because the last one is wrong.",
            value=float(tallies.reload_failed),
        )
        yield GaugeMetricFamily(
            "extproc_config_restart_needed",
            "1 while the configuration differs in what only a restart changes.",
            value=float(tallies.restart_needed),
        )

    def _plugins(self) -> Iterator[Metric]:
        counts = self._tallies.plugins
        for name, text, counter in (
            ("overruns", "Calls of plugins of others above their time budget.", counts.overruns),
            ("bypasses", "Times a plugin of others was put aside for a while.", counts.bypasses),
            (
                "exceptions",
                "Calls of plugins of others that raised, and of any plugin told of its decision.",
                counts.exceptions,
            ),
        ):
            family = CounterMetricFamily(f"extproc_plugin_{name}", text, labels=["role", "kind"])
            for key, count in counter.items():
                family.add_metric(key, count)
            yield family

    def _answers(self) -> Iterator[Metric]:
        tallies = self._tallies
        responses = CounterMetricFamily(
            "extproc_responses", "Answers seen, by status.", labels=["endpoint", "status"]
        )
        for (address, code), count in tallies.responses.items():
            responses.add_metric([address, code], count)
        yield responses
        unanswered = CounterMetricFamily(
            "extproc_unanswered",
            "Routed requests that ended without an answer.",
            labels=["endpoint"],
        )
        for address, count in tallies.unanswered.items():
            unanswered.add_metric([address], count)
        yield unanswered
        yield CounterMetricFamily(
            "extproc_prompt_tokens", "Estimated prompt tokens routed.", value=tallies.prompt_tokens
        )
        yield CounterMetricFamily(
            "extproc_matched_tokens",
            "Prompt tokens believed cached on the chosen endpoint.",
            value=tallies.matched_tokens,
        )
        usage = CounterMetricFamily(
            "extproc_usage_tokens", "Tokens the engines reported.", labels=["kind"]
        )
        for kind, count in tallies.usage.items():
            usage.add_metric([kind], count)
        yield usage
        scrapes = CounterMetricFamily(
            "extproc_scrapes", "Scrapes of engines.", labels=["endpoint", "result"]
        )
        for (address, result), count in tallies.scrapes.items():
            scrapes.add_metric([address, result], count)
        yield scrapes
        yield from self._models()

    def _models(self) -> Iterator[Metric]:
        tallies = self._tallies
        listings = CounterMetricFamily(
            "extproc_models_scrapes",
            "Times endpoints were asked which models they serve.",
            labels=["endpoint", "result"],
        )
        for key, count in tallies.listings.items():
            listings.add_metric(key, count)
        yield listings
        known = GaugeMetricFamily(
            "extproc_endpoint_models",
            "Models and adapters an endpoint listed; absent while nobody knows.",
            labels=["endpoint"],
        )
        for member in self._pool().members:
            if member.models is not None:
                count = len(member.models.bases) + len(member.models.adapters)
                known.add_metric([member.endpoint.address], count)
        yield known
        rewrites = CounterMetricFamily(
            "extproc_model_rewrites",
            "Requests whose model got another name, by whether the body could be edited.",
            labels=["result"],
        )
        for result, count in tallies.rewrites.items():
            rewrites.add_metric([result], count)
        yield rewrites
        yield CounterMetricFamily(
            "extproc_unlisted_models",
            "Requests for models that no endpoint lists.",
            value=tallies.unlisted,
        )

    def _distributions(self) -> Iterator[Metric]:
        tallies = self._tallies
        for name, text, distribution in (
            ("extproc_route_seconds", "Time one decision took.", tallies.route_s),
            ("extproc_headers_seconds", "From pick to response headers.", tallies.headers_s),
            ("extproc_exchange_seconds", "From first event to end.", tallies.exchange_s),
            ("extproc_scrape_seconds", "Time one scrape took.", tallies.scrape_s),
        ):
            yield _histogram(name, text, distribution)

    def _endpoints(self) -> Iterator[Metric]:
        labels = ["endpoint"]
        in_flight = GaugeMetricFamily(
            "extproc_endpoint_in_flight", "Requests this picker has open.", labels=labels
        )
        foreign = GaugeMetricFamily(
            "extproc_endpoint_foreign", "Requests of others at the last scrape.", labels=labels
        )
        up = GaugeMetricFamily(
            "extproc_endpoint_up", "1 unless its scrapes cannot connect.", labels=labels
        )
        age = GaugeMetricFamily(
            "extproc_endpoint_load_age_seconds", "Age of the last scrape.", labels=labels
        )
        now = self._clock()
        for member in self._pool().members:
            key = [member.endpoint.address]
            in_flight.add_metric(key, member.account.in_flight)
            foreign.add_metric(key, member.foreign)
            up.add_metric(key, 1.0 if member.up else 0.0)
            age.add_metric(key, now - member.load.at)
        yield from (in_flight, foreign, up, age)

    def _learnt(self) -> Iterator[Metric]:
        """What was learnt of each endpoint: its speed, its queue, and its prefix cache."""
        labels = ["endpoint"]
        queued = GaugeMetricFamily(
            "extproc_endpoint_queued_tokens",
            "Uncached prompt tokens sent and believed not yet computed.",
            labels=labels,
        )
        prefill = GaugeMetricFamily(
            "extproc_endpoint_prefill_seconds_per_token", "Learnt prefill time.", labels=labels
        )
        step = GaugeMetricFamily(
            "extproc_endpoint_step_seconds", "Learnt time of an iteration.", labels=labels
        )
        decode = GaugeMetricFamily(
            "extproc_endpoint_decode_seconds_per_sequence",
            "Learnt time that a decoding sequence adds to an iteration.",
            labels=labels,
        )
        context = GaugeMetricFamily(
            "extproc_endpoint_context_seconds_per_token",
            "Learnt time that a token of context adds to an iteration.",
            labels=labels,
        )
        adapter = GaugeMetricFamily(
            "extproc_endpoint_adapter_load_seconds",
            "Learnt time of an adapter load.",
            labels=labels,
        )
        answer = GaugeMetricFamily(
            "extproc_endpoint_output_tokens", "Learnt tokens of an answer.", labels=labels
        )
        predicted = CounterMetricFamily(
            "extproc_prefix_predicted_tokens",
            "Prompt tokens predicted to be cached, of requests that were looked up.",
            labels=labels,
        )
        observed = CounterMetricFamily(
            "extproc_prefix_observed_tokens", "Of these, found by the engine.", labels=labels
        )
        capacity = GaugeMetricFamily(
            "extproc_prefix_capacity_tokens",
            "Prompt tokens an endpoint is believed to keep.",
            labels=labels,
        )
        now = self._clock()
        for member in self._pool().members:
            key = [member.endpoint.address]
            queued.add_metric(key, member.account.queued(now) + member.foreign_tokens)
            prefill.add_metric(key, member.rates.prefill_s)
            step.add_metric(key, member.rates.step_s)
            decode.add_metric(key, member.rates.decode_s)
            context.add_metric(key, member.rates.context_s)
            adapter.add_metric(key, member.rates.adapter_load_s)
            answer.add_metric(key, member.rates.output_tokens)
            cache = self._cache(member.endpoint)
            predicted.add_metric(key, cache.predicted_tokens)
            observed.add_metric(key, cache.observed_tokens)
            if cache.capacity_tokens is not None:
                capacity.add_metric(key, cache.capacity_tokens)
        yield from (
            queued,
            prefill,
            step,
            decode,
            context,
            adapter,
            answer,
            predicted,
            observed,
            capacity,
        )
        ratio = GaugeMetricFamily(
            "extproc_bytes_per_token", "Learnt bytes of a prompt token.", labels=["model"]
        )
        for model, value in self._bytes_per_token().items():
            ratio.add_metric([model], value)
        yield ratio


def _histogram(name: str, text: str, distribution: Distribution) -> Metric:
    buckets = []
    running = 0
    bounds = [*map(str, distribution.bounds), "+Inf"]
    for bound, count in zip(bounds, distribution.counts, strict=True):
        running += count
        buckets.append((bound, float(running)))
    return HistogramMetricFamily(name, text, buckets=buckets, sum_value=distribution.total)
