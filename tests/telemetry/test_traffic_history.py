"""Traffic of the last minutes: points for charts, and trends of endpoints."""

from __future__ import annotations

import msgspec
import pytest

from extproc.decision import NO_ENDPOINTS, Rejection
from extproc.endpoint import Endpoint, Load
from extproc.pool.store import PoolStore
from extproc.request import RequestLabels
from extproc.telemetry.counters import ProcessCounters
from extproc.telemetry.pool_state import PoolView, PrefixCacheStats
from extproc.telemetry.traffic_history import INTERVAL_S, TrafficHistory, quantile

FIRST, SECOND, THIRD, FOURTH = ADDRESSES = tuple(f"10.0.0.{number}:8000" for number in range(1, 5))
LABELS = RequestLabels("demo", "demo", "none", 0)


class HistoryFixture:
    """A history, and counters that the test moves between two samples."""

    def __init__(self):
        self.now = 0.0
        self.counters = ProcessCounters()
        self.pool = self.counters.for_pool("")
        self.store = PoolStore(lambda _: None)
        self.store.set_endpoints([Endpoint(address) for address in ADDRESSES], self.now)
        self.cache = dict.fromkeys(ADDRESSES, (0.0, 0.0))
        self.history = TrafficHistory()

    @property
    def view(self):
        def read_cache(endpoint):
            return PrefixCacheStats(*self.cache[endpoint.address], None)

        return PoolView(self.store.pool, read_cache, queue=(3, 100), queue_capacity=10)

    def sample(self, *pools):
        views = dict.fromkeys(pools or ("",), self.view)
        self.history.sample(self.counters, views, self.now)
        self.now += INTERVAL_S

    def answer(self, address, headers_s, *, status="200", count=10, is_stream=True):
        """Count requests to an endpoint that were answered after so long."""
        series = self.pool.series.find(LABELS, is_served=True)
        for _ in range(count):
            self.pool.requests_routed[address] += 1
            self.pool.routed_total += 1
            self.counters.streams["ok"] += 1
            self.pool.record_headers(address, [headers_s])
            series.record("stream_ttft" if is_stream else "complete_ttft", [headers_s])
            series.record(series.histograms.name_status(status), [headers_s])

    def report(self, address, **load):
        """Let a scrape of an endpoint read these values."""
        member = self.store.pool.find(address)
        token = self.store.begin_scrape(member.endpoint)
        self.store.observe(token, Load(at=self.now, **load), self.now)


@pytest.fixture
def scene():
    return HistoryFixture()


def test_a_point_has_rates_and_percentiles_since_the_one_before(scene):
    """Earlier counts do not count again."""
    scene.answer(FIRST, 3.0)
    scene.sample()
    scene.answer(FIRST, 0.1, count=90)
    scene.answer(SECOND, 0.7, status="500", count=10)
    scene.pool.record_rejection(NO_ENDPOINTS)
    scene.sample()
    (point,) = scene.history.points
    assert (point.routed, point.failed, point.refused) == (20.0, 2.0, 0.2)
    assert 0.05 < point.ttft_p50_s <= 0.1
    assert 0.6 < point.ttft_p95_s <= 0.8
    assert point.queued == 3


def test_answers_that_are_not_streamed_have_no_first_token(scene):
    """They take as long as all of their tokens, and have a percentile of their own."""
    scene.sample("", "other")
    scene.answer(FIRST, 3.0, count=90, is_stream=False)
    scene.sample("", "other")
    for point in (scene.history.points[-1], scene.history.points_of("")[-1]):
        assert (point.ttft_p50_s, point.ttft_p95_s) == (None, None)
        assert 2.0 < point.complete_p95_s <= 3.0
    scene.answer(FIRST, 0.1, count=10)
    scene.sample("", "other")
    for point in (scene.history.points[-1], scene.history.points_of("")[-1]):
        assert 0.05 < point.ttft_p95_s <= 0.1
        assert point.complete_p95_s is None


def test_each_pool_has_points_of_its_own(scene):
    """They begin with those of the only pool, and end with the pool."""
    scene.answer(FIRST, 0.1)
    scene.sample()
    scene.answer(FIRST, 0.1)
    scene.sample()
    assert scene.history.points_of("") is scene.history.points
    other = scene.counters.for_pool("other")
    scene.answer(FIRST, 0.1)
    other.routed_total += 20
    scene.sample("", "other")
    assert [point.routed for point in scene.history.points] == [2.0, 6.0]
    assert [point.routed for point in scene.history.points_of("")] == [2.0, 2.0]
    (point,) = scene.history.points_of("other")
    assert (point.routed, point.ttft_p50_s, point.queued) == (4.0, None, 3)
    assert scene.history.points[-1].ttft_p50_s == scene.history.points_of("")[-1].ttft_p50_s
    assert scene.history.points[-1].queued == 6
    scene.sample()
    assert not scene.history.points_of("other")


def test_a_point_without_traffic_has_no_percentiles(scene):
    """Nothing is between two samples of an idle picker."""
    scene.answer(FIRST, 1.0)
    for _ in range(3):
        scene.sample()
    for point in scene.history.points:
        assert (point.routed, point.ttft_p50_s, point.ttft_p95_s) == (0.0, None, None)


def test_points_and_trends_are_bounded(scene):
    """A quarter of an hour is kept, and trends are of one minute."""
    for _ in range(500):
        scene.sample()
    assert len(scene.history.points) == 180
    assert scene.history.window_s() == 60.0


def test_a_trend_compares_an_endpoint_with_its_pool(scene):
    """Its mean time is divided by that of the quicker quarter."""
    scene.sample()
    for address in (FIRST, SECOND, THIRD):
        scene.answer(address, 0.2)
    scene.answer(FOURTH, 1.0)
    scene.sample()
    trends = scene.history.trends("")
    assert trends[FIRST].slowness_ratio == pytest.approx(1.0)
    assert trends[FOURTH].slowness_ratio == pytest.approx(5.0)
    assert trends[FOURTH].response_headers_s == pytest.approx(1.0)
    assert trends[FOURTH].requests_per_s == pytest.approx(2.0)


def test_few_responses_make_no_trend(scene):
    """Two slow answers are an accident."""
    scene.sample()
    scene.answer(FIRST, 9.0, count=2)
    scene.sample()
    assert scene.history.trends("")[FIRST].slowness_ratio is None


def test_trends_of_the_prefix_cache(scene):
    """Observed over predicted tokens, and the engine's own hits; a restarted engine has none."""
    scene.report(FIRST, prefix_queries=100.0, prefix_hits=50.0)
    scene.report(SECOND, prefix_queries=100.0, prefix_hits=50.0)
    scene.sample()
    scene.cache[FIRST] = (4000.0, 1000.0)
    scene.cache[SECOND] = (10.0, 0.0)
    scene.report(FIRST, prefix_queries=200.0, prefix_hits=120.0)
    scene.report(SECOND, prefix_queries=5.0, prefix_hits=1.0)
    scene.sample()
    trends = scene.history.trends("")
    assert (trends[FIRST].observed_ratio, trends[FIRST].hit_ratio) == (0.25, 0.7)
    assert (trends[SECOND].observed_ratio, trends[SECOND].hit_ratio) == (None, None)


def test_refusals_of_the_window_are_counted_by_cause(scene):
    """Those before it are not."""
    full = Rejection(429, "no room", cause="queue-full")
    scene.pool.record_rejection(full)
    scene.sample()
    scene.pool.record_rejection(full)
    scene.pool.record_rejection(full)
    scene.sample()
    assert scene.history.refused("") == {(429, "queue-full"): 2}


def test_a_new_history_knows_nothing(scene):
    """Before the first sample there is neither a trend nor a refusal."""
    assert (scene.history.trends(""), scene.history.refused("")) == ({}, {})
    scene.sample()
    assert scene.history.trends("") == {}


@pytest.mark.parametrize(
    ("counts", "share", "expected"),
    [
        ([], 0.5, None),
        ([0, 0], 0.5, None),
        ([10], 0.5, 0.5),
        ([10, 10], 0.5, 1.0),
        ([10, 10], 0.75, 1.5),
        ([0, 0, 4], 0.95, 2.0),
    ],
)
def test_quantile_is_linear_within_a_bucket(counts, share, expected):
    """Beyond the last bound it is that bound."""
    assert quantile((1.0, 2.0), counts, share) == expected


def test_points_can_be_sent(scene):
    """They are plain JSON."""
    scene.sample()
    scene.sample()
    assert b'"routed":0.0' in msgspec.json.encode(list(scene.history.points))
