from collections import Counter
from pathlib import Path

import msgspec
import pytest
import yaml

from extproc.config import filter_tree_syntax
from extproc.config.validation import Place
from extproc.decision import Decision
from extproc.scheduling import registry
from tests.scheduling import builders

FOLDER = Path(__file__).parent.parent / "cases"
TABLES = {
    "filter": registry.FILTERS,
    "scorer": registry.SCORERS,
    "cost": registry.COSTS,
    "picker": registry.PICKERS,
}
KEYS = {
    "filter": {"keeps"},
    "scorer": {"scores"},
    "cost": {"costs", "terms"},
    "picker": {"totals", "order", "frequencies", "sequence"},
    "profile": {"order", "frequencies"},
}
PICKS = 4000

#: The C reader, where there is one: every worker reads all cases.
LOADER = getattr(yaml, "CSafeLoader", yaml.SafeLoader)


def load():
    for path in sorted(FOLDER.glob("*.yaml")):
        role, _, kind = path.stem.partition("-")
        if role in KEYS:
            for case in yaml.load(path.read_text(), LOADER):
                yield pytest.param(role, kind, case, id=f"{path.stem}: {case['name']}")


def wanted_files():
    files = {f"{role}-{kind}" for role, table in TABLES.items() for kind in table}
    return files | {f"profile-{name}" for name in registry.profiles()}


def test_every_kind_has_a_case_file():
    """A plugin or named profile without a case file fails here, and so does a file without one."""
    result = {path.stem for path in FOLDER.glob("*.yaml") if path.stem.partition("-")[0] in KEYS}
    assert result == wanted_files()


@pytest.mark.parametrize(("role", "kind", "case"), list(load()))
def test_case(role, kind, case):
    """A plugin or profile answers as its case file says."""
    outcomes = KEYS[role] - {"totals"}
    assert set(case) <= {"name", "params", "request", "endpoints"} | KEYS[role]
    assert outcomes & set(case)
    candidates = builders.candidates(case["endpoints"])
    context = builders.context(**case.get("request", {}))
    if role == "profile":
        for store in (candidates, blind(candidates)):
            check_picks(case, lambda count, fleet_=store: choose(kind, context, fleet_, count))
        return
    plugin = build_plugin(TABLES[role], kind, case.get("params", {}))
    if role == "filter":
        assert builders.names(plugin.filter(context, candidates)) == case["keeps"]
    elif role == "scorer":
        scores = dict(
            zip(builders.names(candidates), plugin.score(context, candidates), strict=True)
        )
        assert scores == pytest.approx(case["scores"], abs=1e-4)
    elif role == "cost":
        check_costs(case, plugin.cost(context, candidates))
    else:
        totals = [float(case.get("totals", {}).get(name, 0)) for name in case["endpoints"]]
        check_picks(case, lambda count: pick(plugin, context, candidates, totals, count))


def build_plugin(table, kind, params):
    """A plugin of its parameters; a tree has plugins of its own in them."""
    if kind == "tree":
        params = filter_tree_syntax.build_tree_params(
            params, lambda node, _: build_plugin(table, node.kind, node.params), Place("case")
        )
    return msgspec.convert(params, table[kind])


def check_costs(case, priced):
    """Hold costs and those terms that a case names against what it wants of them."""
    names = list(case["endpoints"])
    costs = dict(zip(names, priced.costs, strict=True))
    assert costs == pytest.approx(case.get("costs", costs))
    terms = {name: dict(zip(names, values, strict=True)) for name, values in priced.terms}
    for endpoint, wanted in case.get("terms", {}).items():
        result = {name: terms[name][endpoint] for name in wanted}
        assert result == pytest.approx(wanted)


PROFILES = registry.profiles()


def blind(candidates):
    """The same candidates without dead reckoning."""
    return [msgspec.structs.replace(c, estimated_requests=float(c.in_flight)) for c in candidates]


def choose(name, context, candidates, count):
    decision = PROFILES[name].run(context, candidates, count=count)
    assert decision.degraded == ""
    for observer in PROFILES[name].observers:
        observer.on_committed(decision, context.now)
    return builders.names(decision.endpoints)


def pick(plugin, context, candidates, totals, count):
    chosen = [candidates[i].endpoint for i in plugin.pick(context, candidates, totals, count=count)]
    # Not with isinstance: of a protocol that takes longer than thousands of picks should.
    if hasattr(plugin, "on_committed"):
        plugin.on_committed(Decision(context.request, chosen), context.now)
    return builders.names(chosen)


def check_picks(case, choose):
    """Hold a function from count to chosen names against what a case wants of it."""
    if "order" in case:
        assert choose(len(case["order"])) == case["order"]
    if "sequence" in case:
        assert [choose(1)[0] for _ in case["sequence"]] == case["sequence"]
    if "frequencies" in case:
        counts = Counter(choose(1)[0] for _ in range(PICKS))
        shares = {name: counts[name] / PICKS for name in case["frequencies"]}
        assert shares == pytest.approx(case["frequencies"], abs=0.03)
        assert all(shares[name] == 0 for name, share in case["frequencies"].items() if share == 0)
