import pytest

from extproc.config import factory, loader, profile_builder
from extproc.config.settings import ScrapeSection, Settings
from extproc.decision import Decision
from extproc.endpoint import Endpoint
from extproc.errors import ConfigError
from extproc.request import HttpRequest
from extproc.scheduling import registry
from extproc.scheduling.estimated_time import GOALS, EstimatedTime
from extproc.scheduling.framework import Signal
from extproc.server.app import EndpointPickerProcess

CHAT = HttpRequest(
    {":path": "/v1/chat/completions", ":method": "POST", "content-type": "application/json"},
    b'{"model":"m","messages":[{"role":"user","content":"' + b"word " * 400 + b'"}]}',
)


def scheduling(**tree):
    document = loader.ConfigDocument(
        "pool.yaml",
        {"apiVersion": "extproc/v1alpha1", "kind": "ExtProcConfig", **tree},
    )
    return loader.settings(document)


@pytest.mark.parametrize("strategy", registry.profiles())
def test_every_strategy_resolves(strategy):
    """Each named strategy can be had by its name."""
    settings = scheduling(scheduling={"strategy": strategy})
    assert profile_builder.build_profile(settings, where="x").name == strategy


@pytest.mark.parametrize("goal", GOALS)
def test_goal_is_one_of_the_default_cost(goal):
    """A goal reaches the cost of adaptive, whether adaptive is named or not."""
    for rules in ({"goal": goal}, {"goal": goal, "strategy": "adaptive"}):
        profile = profile_builder.build_profile(scheduling(scheduling=rules), where="x")
        assert (profile.name, profile.cost) == ("adaptive", EstimatedTime(goal=goal))


def test_goal_beside_a_strategy_without_one_is_refused():
    """Only balanced, which changes nothing, stands beside strategies and profiles of another kind."""
    profile = {"name": "mine", "picker": {"kind": "random"}}
    for rules in ({"strategy": "lmetric"}, {"profile": profile}):
        with pytest.raises(ConfigError) as raised:
            profile_builder.build_profile(
                scheduling(scheduling={"goal": "throughput", **rules}), where="pool.yaml"
            )
        assert raised.value.where == "pool.yaml: scheduling.goal"


@pytest.mark.parametrize("cost", registry.COSTS)
def test_a_draw_by_totals_beside_a_cost_is_refused(cost):
    """Totals are negated costs there, and no probability can be proportional to them."""
    profile = {"cost": {"kind": cost}, "picker": {"kind": "weighted-random"}}
    with pytest.raises(ConfigError, match="name max-score-picker") as raised:
        profile_builder.build_profile(
            scheduling(scheduling={"profile": profile}), where="pool.yaml"
        )
    assert raised.value.where == "pool.yaml: scheduling.profile"
    assert raised.value.got.startswith("weighted-random-picker")


def test_goal_keeps_the_weights_of_a_written_profile():
    """A profile of one's own with the cost of adaptive takes the goal, beside its weights."""
    cost = {"kind": "estimated-time", "params": {"own_share": 0.5}}
    profile = {"name": "mine", "cost": cost, "picker": {"kind": "rendezvous"}}
    built = profile_builder.build_profile(
        scheduling(scheduling={"goal": "throughput", "profile": profile}), where="x"
    )
    assert built.cost == EstimatedTime(own_share=0.5, goal="throughput")


def test_unknown_strategy_names_the_nearest():
    """A mistyped strategy is refused with all names and a guess."""
    with pytest.raises(ConfigError) as raised:
        profile_builder.build_profile(
            scheduling(scheduling={"strategy": "round-robbin"}), where="pool.yaml"
        )
    error = raised.value
    assert error.where == "pool.yaml: scheduling.strategy"
    assert "least-request" in error.wanted
    assert "round-robin" in error.fix


def test_written_profile_is_built_from_the_catalogue():
    """Filters, weighted scorers and the picker stand as written, with their parameters."""
    profile = profile_builder.build_profile(
        scheduling(
            scheduling={
                "profile": {
                    "name": "mine",
                    "filters": [{"kind": "max-waiting", "params": {"max_waiting_requests": 7}}],
                    "scorers": [{"kind": "queue-depth", "weight": 2}, {"kind": "in-flight"}],
                    "picker": {"kind": "weighted-random"},
                }
            }
        ),
        where="x",
    )
    assert profile.name == "mine"
    assert profile.filters == (registry.FILTERS["max-waiting"](max_waiting_requests=7),)
    assert [(scorer.kind, weight) for scorer, weight in profile.scorers] == [
        ("queue-scorer", 2.0),
        ("in-flight", 1.0),
    ]
    assert profile.picker.kind == "weighted-random-picker"


@pytest.mark.parametrize(
    ("profile", "where", "fix"),
    [
        ({"scorers": [{"kind": "que-depth"}]}, "profile.scorers[0].kind", "queue-depth"),
        ({"filters": [{"kind": "max-wating"}]}, "profile.filters[0].kind", "max-waiting"),
        ({"picker": {"kind": "max"}}, "profile.picker.kind", "max-score"),
        (
            {"scorers": [{"kind": "in-flight", "params": {"soft_request": 1}}]},
            "profile.scorers[0].params.soft_request",
            "soft_requests",
        ),
        (
            {"scorers": [{"kind": "in-flight", "params": {"soft_requests": 0}}]},
            "profile.scorers[0].params",
            "change the value",
        ),
        (
            {"scorers": [{"kind": "in-flight", "params": {"soft_requests": "8"}}]},
            "profile.scorers[0].params.soft_requests",
            "without quotes",
        ),
    ],
)
def test_plugin_errors_name_the_path(profile, where, fix):
    """A wrong kind or parameter is refused where it stands."""
    with pytest.raises(ConfigError) as raised:
        profile_builder.build_profile(
            scheduling(scheduling={"profile": profile}), where="pool.yaml"
        )
    assert where in raised.value.where
    assert fix in raised.value.fix


@pytest.mark.parametrize(
    ("tree", "plugin", "signal"),
    [
        ({"scrape": {"enabled": False}}, "estimated-time", "kv_usage"),
        ({"prefix": {"capacity_blocks": 0}}, "estimated-time", "prefix"),
    ],
)
def test_a_plugin_without_a_provider_of_its_signal_is_refused(tree, plugin, signal):
    """A plugin that reads a signal without a source is refused with its name and the signal."""
    with pytest.raises(ConfigError) as raised:
        profile_builder.build_profile(scheduling(**tree), where="pool.yaml")
    assert plugin in raised.value.got
    assert signal in raised.value.got
    assert plugin in raised.value.fix


def test_without_scraping_own_signals_remain():
    """Without scraping there are our own requests and prefixes."""
    settings = scheduling(scrape={"enabled": False}, scheduling={"strategy": "least-request"})
    scraped = {Signal.WAITING, Signal.RUNNING, Signal.KV_USAGE, Signal.ADAPTERS, Signal.EXTRA}
    assert profile_builder.provided(settings) == set(Signal) - scraped
    factory.build(settings)


def test_settings_reach_the_parts():
    """Every limit and switch arrives where it acts."""
    settings = scheduling(
        pool={"endpoints": ["10.0.0.1:8000"], "dns_refresh_s": 9},
        limits={"max_body_bytes": 10, "max_assembly_bytes": 20},
        responses={"marker": False, "feedback": False},
        scrape={"path": "/m", "timeout_s": 3, "busy_interval_s": 0.5, "idle_interval_s": 4},
        conformance=True,
    )
    exchange = factory.build_exchange_settings(settings)
    assert exchange.max_body_bytes == 10
    assert not exchange.response_marker
    assert not exchange.feedback
    assert exchange.conformance
    assert EndpointPickerProcess(settings).budget.limit_bytes == 20
    parts = factory.build(settings)
    assert (parts.scraping.path, parts.scraping.timeout_s) == ("/m", 3)
    assert (parts.scraping.schedule.fast_s, parts.scraping.schedule.slow_s) == (0.5, 4)
    assert parts.discovery.refresh_s == 9
    assert [(entry.host, entry.port) for entry in parts.flag_entries] == [("10.0.0.1", 8000)]


@pytest.mark.parametrize(
    ("scrape", "rest_s", "known_s"),
    [
        ({}, 4.0, 5.0 / 1.1),
        ({"idle_interval_s": 1}, 2.0, 5.0 / 1.1),
        ({"idle_interval_s": 10, "stale_after_s": 60}, 10.0, 59.0 / 1.1),
        ({"timeout_s": 2.7}, 3.0, 3.0),
        ({"idle_interval_s": 4, "timeout_s": 3}, 4.0, 4.0),
    ],
)
def test_resting_and_stretched_intervals_keep_loads_known(scrape, rest_s, known_s):
    """At rest scrapes are half as frequent, unless loads turned unknown or connections closed."""
    intervals = factory.build(scheduling(scrape=scrape)).scraping.schedule
    assert (intervals.rest_s, intervals.known_s) == pytest.approx((rest_s, known_s))


def test_built_parts_route():
    """The built parts route a request, with as many endpoints as fallbacks are configured."""
    parts = factory.build(scheduling(scheduling={"fallbacks": 1}, seed=1))
    parts.store.set_endpoints([Endpoint("10.0.0.1:8000"), Endpoint("10.0.0.2:8000")], 0.0)
    decision = parts.director.route(CHAT, 0.0)
    assert isinstance(decision, Decision)
    assert len(decision.endpoints) == 2


def test_subset_may_be_ignored():
    """With respect_subset off, an endpoint the hint excludes may still serve."""
    for honor, is_decided in ((True, False), (False, True)):
        parts = factory.build(scheduling(scheduling={"respect_subset": honor}))
        parts.store.set_endpoints([Endpoint("10.0.0.1:8000")], 0.0)
        raw = HttpRequest(CHAT.headers, CHAT.body, subset=("10.9.9.9",))
        assert isinstance(parts.director.route(raw, 0.0), Decision) is is_decided


def test_equal_seeds_give_equal_draws():
    """A seed fixes every draw."""
    first, second = (factory.build(Settings(seed=4)).rng.random() for _ in range(2))
    assert first == second


def test_a_removed_endpoint_loses_its_prefix_blocks():
    """At once, and not when an endpoint of its address comes."""
    parts = factory.build(scheduling())
    parts.store.set_endpoints([Endpoint("10.0.0.1:8000")], 0.0)
    decision = parts.director.route(CHAT, 0.0)
    parts.director.reserve(decision, 0.0).close(0.0)
    assert parts.index.blocks_total
    parts.store.set_endpoints([], 1.0)
    assert not parts.index.blocks_total


def test_scrape_tls():
    """Plain HTTP has no context; https checks certificates only when asked to."""
    assert factory.build_scrape_tls(ScrapeSection()) is None
    loose = factory.build_scrape_tls(ScrapeSection(scheme="https"))
    strict = factory.build_scrape_tls(ScrapeSection(scheme="https", verify_tls=True))
    assert not loose().check_hostname
    assert strict().check_hostname


@pytest.mark.parametrize(
    ("tree", "rejects", "splits", "interval_s"),
    [
        ({}, False, True, 30.0),
        ({"scheduling": {"unknown_model": "reject", "kubeai_names": False}}, True, False, 30.0),
        ({"scrape": {"models_interval_s": 5}}, False, True, 5.0),
        ({"scrape": {"models": False}}, False, True, None),
    ],
)
def test_model_lists_are_polled_as_configured(tree, rejects, splits, interval_s):
    """Unknown models, names and the interval of model lists follow the settings."""
    parts = factory.build(scheduling(**tree))
    settings = parts.director.routing.settings
    assert (settings.reject_unlisted, settings.kubeai_names) == (rejects, splits)
    assert parts.scraping.models.interval_s == interval_s
