import itertools
import random

import pytest

from extproc.simulator.fleet import workloads
from extproc.simulator.fleet.sim_request import RequestSpec, SimSession
from tests.simulator.fleet.builders import conversations, exactly, independent, sessions, spread_out


def shared(**facts):
    defaults = {
        "requests": 300,
        "groups": 3,
        "prefix": exactly(160),
        "prompt": exactly(40),
        "output": exactly(10),
    }
    return workloads.SharedPrefix(**(defaults | facts))


def repeated(**facts):
    defaults = {
        "requests": 100,
        "conversations": 5,
        "turns": 4,
        "prompt": spread_out(100),
        "mean_prompt_tokens": 800,
        "output": exactly(10),
    }
    return workloads.Repeated(**(defaults | facts))


@pytest.mark.parametrize(
    "workload",
    [independent(prompt=spread_out(100)), shared(), conversations(), repeated()],
    ids=lambda workload: type(workload).__name__,
)
def test_a_seed_says_everything(workload):
    """The same seed asks for the same, and another one for something else."""
    assert sessions(workload, seed=3) == sessions(workload, seed=3)
    assert sessions(workload, seed=3) != sessions(workload, seed=4)


def test_independent_prompts_share_nothing():
    """As many requests as said, and no block twice."""
    drawn = sessions(independent(50))
    assert len(drawn) == 50
    keys = [set(session.specs[0].keys) for session in drawn]
    assert not any(first & second for first, second in itertools.combinations(keys, 2))


def test_shared_prefixes_are_shared_within_a_group_only():
    """Every prompt begins with the blocks of one of the texts, and goes on with its own."""
    specs = [session.specs[0] for session in sessions(shared())]
    beginnings = {tuple(work.keys[:10]) for work in specs}
    assert len(beginnings) == 3
    assert len({work.keys[10] for work in specs}) == 300
    assert all(work.prompt_tokens == 200 for work in specs)


def test_a_hot_share_of_prompts_begins_with_the_first_text():
    """Half are hot, and a third of the rest hits the first text by chance: two thirds."""
    specs = [session.specs[0] for session in sessions(shared(requests=3000, hot_share=0.5))]
    hot = sum(work.opening.endswith("group 0") for work in specs)
    assert hot / 3000 == pytest.approx(2 / 3, abs=0.03)


def test_turns_repeat_all_that_was_said():
    """A turn's prompt begins with the last prompt and its answer."""
    for session in sessions(conversations(5)):
        assert len(session.specs) == 4
        for before, after in itertools.pairwise(session.specs):
            tokens = before.prompt_tokens + before.output_tokens
            assert after.prompt_tokens == tokens + 100
            assert list(after.keys[: tokens // 16]) == list(before.keys[: tokens // 16])


def test_conversations_share_their_system_prompt_only():
    """The first 320 tokens are common, the rest is not."""
    session, other, *_ = sessions(conversations(5))
    keys, other_keys = session.specs[-1].keys, other.specs[-1].keys
    assert list(keys[:20]) == list(other_keys[:20])
    assert not set(keys[20:]) & set(other_keys[20:])


def test_a_conversation_ends_before_it_is_too_long():
    """No turn after the first exceeds the bound."""
    drawn = sessions(conversations(5, turns=exactly(50), longest_tokens=1000))
    longest = max(w.prompt_tokens + w.output_tokens for s in drawn for w in s.specs)
    assert 900 < longest <= 1000


def test_pauses_lie_between_turns():
    """One pause fewer than turns."""
    for session in sessions(conversations(3, think_s=exactly(5))):
        assert list(session.think_s) == [5.0] * 3


def test_repeated_prompts_are_cycled_at_their_mean():
    """20 prompts are sent five times each, 800 tokens in the mean."""
    specs = [session.specs[0] for session in sessions(repeated())]
    counts = {}
    for work in specs:
        identity = (work.session, work.prompt_tokens)
        counts[identity] = counts.get(identity, 0) + 1
    assert set(counts.values()) == {5}
    mean = sum(work.prompt_tokens for work in specs) / len(specs)
    assert mean == pytest.approx(800, rel=0.01)


def test_adapters_share_no_blocks():
    """The same prompt for another adapter is another prompt to the cache."""
    (session,) = sessions(independent(1))
    first, second = (workloads.adapted(session.specs, n)[0] for n in (0, 1))
    assert (first.adapter, second.adapter) == ("adapter-0", "adapter-1")
    assert not set(first.keys) & set(second.keys)
    assert not set(first.keys) & set(session.specs[0].keys)
    assert first.prompt_tokens == session.specs[0].prompt_tokens


def test_only_some_workloads_have_adapters():
    """Traces and repeated prompts ask for the base model."""
    assert workloads.adapters(independent(adapters=3)) == 3
    assert workloads.adapters(repeated()) == 0
    assert workloads.adapters(workloads.TraceWorkload(format="azure", file="t")) == 0


def test_a_source_is_drawn_as_it_is_read():
    """A hundred thousand sessions are not made before the first is sent."""
    source = workloads.sessions(independent(10**9), random.Random(1))
    assert next(source).specs[0].prompt_tokens == 200


def test_groups_ask_the_same_whoever_else_is_there():
    """Each has its own rate, tenant and priority, and shares no blocks with others."""
    small = workloads.Group(tenant="small", priority=1, rate_per_s=2.0, workload=independent(20))
    big = workloads.Group(
        tenant="big", rate_per_s=20.0, from_s=1.0, until_s=4.0, workload=independent(200)
    )
    alone = sessions(workloads.Groups(groups=[small]))
    both = sessions(workloads.Groups(groups=[small, big]))
    times = [session.at for session in both]
    assert times == sorted(times)
    mine = [session for session in both if session.specs[0].tenant == "small"]
    assert [session.at for session in mine] == [session.at for session in alone]
    assert [session.specs for session in mine] == [session.specs for session in alone]
    assert all(session.specs[0].priority == 1 for session in mine)
    others = [session for session in both if session.specs[0].tenant == "big"]
    assert 40 <= len(others) <= 80
    assert all(1.0 < session.at < 4.0 for session in others)
    keys = {key for session in mine for key in session.specs[0].keys}
    assert not keys & {key for session in others for key in session.specs[0].keys}


def test_groups_ask_for_adapters_in_turns():
    """The sessions of a group ask for one adapter after another, and groups without stay with the base."""
    tuned = workloads.Group(tenant="tuned", rate_per_s=2.0, workload=independent(6, adapters=3))
    plain = workloads.Group(tenant="plain", rate_per_s=2.0, workload=independent(6))
    both = workloads.Groups(groups=[tuned, plain])
    specs = [session.specs[0] for session in sessions(both)]
    assert [spec.adapter for spec in specs if spec.tenant == "tuned"] == [
        f"adapter-{n}" for n in (0, 1, 2, 0, 1, 2)
    ]
    assert not any(spec.adapter for spec in specs if spec.tenant == "plain")
    assert workloads.named(both) == {"adapter-0", "adapter-1", "adapter-2"}
    assert workloads.adapters(both) == 0


def test_base_models_are_those_that_requests_name():
    """A name that is an adapter is none, and requests without a name are for the same model."""
    specs = [
        RequestSpec(16, 1, [], adapter=adapter, model=model)
        for model, adapter in (("llama", ""), ("qwen", "sql"), ("math", "math"), ("", "tools"))
    ]
    fixed = workloads.FixedWorkload([SimSession(specs, at=0.0)])
    assert workloads.base_models(fixed) == {"llama", "qwen"}
    assert workloads.base_models(shared()) == frozenset()
