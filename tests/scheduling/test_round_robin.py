from extproc.decision import Decision
from extproc.scheduling.pickers import RoundRobin
from tests.scheduling import builders


def walk(picker, candidates, steps, model="m"):
    context, names = builders.context(model=model), ""
    for _ in range(steps):
        chosen = candidates[picker.pick(context, candidates, [], count=1)[0]].endpoint
        picker.on_committed(Decision(context.request, [chosen]), context.now)
        names += chosen.name
    return names


def commit(picker, candidate, model="m"):
    """A request of a model went to a candidate."""
    request = builders.context(model=model).request
    picker.on_committed(Decision(request, [candidate.endpoint]), 0.0)


def has_place(picker, candidates, model):
    """True if the next endpoint of a model is determined."""
    context = builders.context(model=model)
    return len({picker.pick(context, candidates, [], count=1)[0] for _ in range(20)}) == 1


def test_round_robin_follows_addresses():
    """The order is that of the addresses, however the candidates are listed."""
    forth = builders.candidates({"a": {}, "b": {}, "c": {}})
    picker = RoundRobin()
    first = walk(picker, forth, 1)
    assert first + walk(picker, forth[::-1], 5) in "abcabcabc"


def test_round_robin_continues_when_endpoints_change():
    """Losing an endpoint skips it; a new one is met in its place."""
    picker = RoundRobin()
    commit(picker, builders.candidate("b"))
    assert walk(picker, builders.candidates({"a": {}, "b": {}, "d": {}}), 2) == "da"
    assert walk(picker, builders.candidates({"b": {}, "c": {}, "d": {}}), 3) == "bcd"


def test_models_have_separate_round_robin():
    """A request for one model does not move the walk of another."""
    picker, candidates = RoundRobin(), builders.candidates({"a": {}, "b": {}})
    first = walk(picker, candidates, 1, model="x")
    walk(picker, candidates, 1, model="y")
    assert walk(picker, candidates, 1, model="x") != first


def test_fallbacks_do_not_advance_round_robin():
    """Naming two endpoints still advances by one."""
    picker, candidates = RoundRobin(), builders.candidates({"a": {}, "b": {}, "c": {}})
    commit(picker, candidates[0])
    context = builders.context(model="m")
    assert picker.pick(context, candidates, [], count=2) == [1, 2]
    picker.on_committed(
        Decision(context.request, [candidates[1].endpoint, candidates[2].endpoint]), 0.0
    )
    assert walk(picker, candidates, 1) == "c"


def test_unknown_models_are_forgotten():
    """Memory of walks is bounded, whatever names clients make up."""
    picker, candidates = RoundRobin(max_models=3), builders.candidates({"a": {}, "b": {}, "c": {}})
    models = [str(number) for number in range(10)]
    for model in models:
        walk(picker, candidates, 1, model=model)
    # A walk that is remembered has one next place; any other begins at a random one.
    assert [has_place(picker, candidates, model) for model in models] == [False] * 7 + [True] * 3


def test_a_dry_run_does_not_advance_round_robin():
    """Only a request that was sent counts."""
    picker, candidates = RoundRobin(), builders.candidates({"a": {}, "b": {}})
    first = walk(picker, candidates, 1, model="x")
    context = builders.context(model="x")
    places = {picker.pick(context, candidates, [], count=1)[0] for _ in range(5)}
    assert builders.names(candidates[at] for at in places) != [first]
    assert len(places) == 1
