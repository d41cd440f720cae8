import pytest

from extproc.scheduling.plugin_guard import GuardedPlugin, GuardFactory, GuardLimits
from extproc.telemetry.counters import ProcessCounters
from tests.scheduling import builders
from tests.support.metrics_pages import build_exposition, build_view
from tests.support.pool_fixture import PoolFixture


class BrokenScorer:
    kind = "broken"
    needs = frozenset()

    def score(self, turn, candidates):
        raise ValueError("a bug")


def test_external_plugins_are_counted_by_role_and_kind():
    """Counts of guards are on the metrics page."""
    counters, pool_fixture = ProcessCounters(), PoolFixture({"10.0.0.1:8000": None})
    ticks = iter(range(9))
    guards = GuardFactory(lambda: float(next(ticks)), counters.plugins, GuardLimits(max_overruns=1))
    with pytest.raises(ValueError, match="bug"):
        GuardedPlugin(BrokenScorer(), guards).score(builders.context(), [])
    page = build_exposition(counters, {"": build_view(pool_fixture.store.pool)})
    text = page.render().decode()
    for name in ("overruns", "bypasses", "exceptions"):
        assert f'extproc_plugin_{name}_total{{kind="broken",role="scorer"}} 1.0' in text
