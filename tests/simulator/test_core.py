from __future__ import annotations

import math

import pytest

from extproc import errors
from extproc.simulator import core, engine_request, kv, profiles
from tests.simulator import builders
from tests.simulator.builders import A, B, C, D, a_job, drain, engine


def test_a_step_takes_a_plus_b_prompt_plus_c_batch_plus_d_context():
    """T = a + b*P + c*B + d*K, with K prompt and generated tokens of the decodes."""
    it = engine()
    it.submit(a_job(prompt=8, output=3), 0.0)
    assert it.begin(0.0) == A + 8 * B
    it.commit(it.due)
    assert it.begin(1.0, horizon=1.0) == 1.0 + A + C + 9 * D


def test_the_first_token_comes_with_the_step_that_ends_the_prefill():
    """A prompt of three budgets needs three steps before its first token."""
    it = engine()
    it.submit(a_job(prompt=80, output=1), 0.0)
    results = drain(it)
    assert [r.prefill_tokens for r in results] == [32, 32, 16]
    assert [[f.id for f in r.first_tokens] for r in results] == [[], [], ["r"]]
    assert [len(r.finished) for r in results] == [0, 0, 1]


def test_decodes_come_first_and_prefill_chunks_get_the_rest_of_the_budget():
    """A running decode keeps its token per step while a long prompt is chunked beside it."""
    it = engine()
    it.submit(a_job("old", prompt=4, output=20), 0.0)
    it.step(0.0)
    it.submit(a_job("new", prompt=60), 1.0)
    first, second = it.step(1.0), it.step(2.0)
    assert (first.decoding, first.prefill_tokens) == (1, 31)
    assert (second.decoding, second.prefill_tokens) == (1, 29)
    assert it.generated("old") == 3


def test_waiting_jobs_enter_first_come_first_served_up_to_the_batch_size():
    """The ninth job of an eight-sequence engine waits for one to leave."""
    it = engine()
    for n in range(9):
        it.submit(a_job(f"r{n}", prompt=2, output=2), 0.0)
    first = it.step(0.0)
    assert [s.id for s in first.started] == [f"r{n}" for n in range(8)]
    assert (it.running, it.waiting) == (8, 1)
    assert not it.step(1.0).started
    assert [s.id for s in it.step(2.0).started] == ["r8"]


def test_a_job_without_kv_blocks_waits_and_holds_up_those_behind_it():
    """First come first served: a small job does not overtake one that lacks blocks."""
    it = engine(kv_tokens=64, token_budget=64)
    it.submit(a_job("big", prompt=40, output=8), 0.0)
    it.submit(a_job("bigger", prompt=48, output=8), 0.0)
    it.submit(a_job("small", prompt=4, output=2), 0.0)
    assert [s.id for s in it.step(0.0).started] == ["big"]
    order = [s.id for r in drain(it) for s in r.started]
    assert order == ["bigger", "small"]


def test_a_repeated_prompt_is_cached_in_full_blocks_but_for_one_token():
    """A prompt of exactly four blocks hits three: its last token must be computed."""
    it = engine()
    it.submit(a_job("one", prompt=16, base=100), 0.0)
    it.step(0.0)
    it.submit(a_job("two", prompt=16, base=100), 1.0)
    result = it.step(1.0)
    assert result.started[0].cached_tokens == 12
    assert result.prefill_tokens == 4
    assert (it.prefix_queries, it.prefix_hits) == (32, 12)


def test_two_jobs_of_one_step_share_the_blocks_planned_for_the_first():
    """Blocks are known once planned, as in vLLM."""
    it = engine(token_budget=64)
    it.submit(a_job("one", prompt=17, base=100), 0.0)
    it.submit(a_job("two", prompt=17, base=100), 0.0)
    assert [s.cached_tokens for s in it.step(0.0).started] == [0, 16]


def test_a_cached_block_behind_a_missing_one_is_no_hit():
    """Only an unbroken run from the start counts."""
    it = engine()
    it.submit(engine_request.EngineRequest("one", 13, 1, (1, 2, 3)), 0.0)
    it.step(0.0)
    it.submit(engine_request.EngineRequest("two", 13, 1, (9, 2, 3)), 1.0)
    assert it.step(1.0).started[0].cached_tokens == 0


def test_generated_blocks_with_hashes_are_hit_by_the_next_turn():
    """A caller that knows the answer passes its hashes, and the follow-up finds them."""
    it = engine()
    it.submit(engine_request.EngineRequest("turn1", 8, 9, (1, 2, 3, 4)), 0.0)
    drain(it)
    it.submit(engine_request.EngineRequest("turn2", 25, 1, (1, 2, 3, 4, 5, 6)), 9.0)
    assert it.step(9.0).started[0].cached_tokens == 16


def test_generated_blocks_without_hashes_stay_cached_for_nobody():
    """They fill the cache, so that it holds no more than a real one would."""
    it = engine()
    it.submit(a_job("r", prompt=8, output=9, base=100), 0.0)
    drain(it)
    assert it.pool.cached == 4
    assert it.kv_usage == 0.0


def test_usage_counts_live_blocks_only():
    """A full prefix cache reads 0 when idle."""
    it = engine()
    it.submit(a_job(prompt=16, output=2, base=100), 0.0)
    it.step(0.0)
    assert it.kv_usage == 4 / 64
    drain(it, 1.0)
    assert (it.kv_usage, it.pool.cached) == (0.0, 4)


def test_the_tail_of_a_prefix_is_evicted_before_its_root():
    """Blocks are freed in reverse order."""
    it = engine(kv_tokens=64)
    it.submit(engine_request.EngineRequest("one", 32, 1, range(1, 9)), 0.0)
    drain(it)
    it.submit(a_job("filler", prompt=48), 1.0)
    drain(it, 1.0)
    assert it.pool.match(range(1, 9), 8) == 4


def test_a_decode_without_a_block_preempts_the_newest_which_is_recomputed():
    """The newest goes back to the head of the queue and finishes with all its tokens."""
    it = engine(kv_tokens=32, token_budget=64)
    it.submit(a_job("old", prompt=12, output=17), 0.0)
    it.submit(a_job("new", prompt=12, output=17), 0.0)
    results = drain(it)
    assert [p for r in results for p in r.preempted] == ["new"]
    finished = [f for r in results for f in r.finished]
    assert [(f.job.id, f.preemptions) for f in finished] == [("old", 0), ("new", 1)]
    assert it.prefix_queries == 24, "a recomputed request is not queried again"
    assert it.pool.used == 0


def test_a_job_whose_adapter_has_no_slot_is_passed_over():
    """The third adapter waits, the job behind it does not."""
    it = engine()
    for n, adapter in enumerate(("a", "b", "c", "a")):
        it.submit(a_job(f"r{n}", prompt=4, output=2, adapter=adapter), 0.0)
    assert [s.id for s in it.step(0.0).started] == ["r0", "r1", "r3"]
    assert (it.slots.active, it.waiting, it.deferred) == (("a", "b"), 1, 1)
    it.step(1.0)
    assert [s.id for s in it.step(2.0).started] == ["r2"]
    assert it.slots.resident == ("a", "c"), "the least recently used one made room"


def test_loading_an_adapter_takes_time_once():
    """The step that brings it to the device is longer; the next one is not."""
    it = engine(lora_load_s=0.5)
    it.submit(a_job("r0", prompt=4, adapter="a"), 0.0)
    assert it.step(0.0).duration_s == A + 4 * B + 0.5
    it.submit(a_job("r1", prompt=4, adapter="a"), 1.0)
    assert it.step(1.0).duration_s == A + 4 * B


def test_a_resident_adapter_takes_kv_blocks():
    """They are charged while it is resident, in use or not."""
    it = engine(lora_kv_tokens=40)
    it.submit(a_job(prompt=4, adapter="a"), 0.0)
    drain(it)
    assert it.pool.used == 10


@pytest.mark.parametrize(
    ("new", "facts", "refusal"),
    [
        (a_job(prompt=250, output=7), {}, engine_request.EngineRejection.TOO_LONG),
        (
            a_job(prompt=30, output=3),
            {"max_model_len": 32},
            engine_request.EngineRejection.TOO_LONG,
        ),
        (a_job(adapter="a"), {"max_loras": 0}, engine_request.EngineRejection.NO_LORA),
        (a_job(prompt=250, output=6), {}, None),
    ],
)
def test_what_can_never_run_is_refused(new, facts, refusal):
    """Too long for model or cache, or an adapter without LoRA; the largest fit is taken."""
    assert engine(**facts).submit(new, 0.0) is refusal


def test_max_queued_counts_waiting_and_running_jobs():
    """With two allowed in the engine, the third is refused although nothing waits."""
    it = engine(max_queued=2)
    it.submit(a_job("r0", output=9), 0.0)
    it.submit(a_job("r1", output=9), 0.0)
    it.step(0.0)
    assert it.submit(a_job("r2"), 1.0) is engine_request.EngineRejection.BUSY


def test_decoding_alone_is_one_plan_as_long_as_the_steps_one_by_one():
    """Many equal-batch steps take the sum of their times, which grow with the context."""
    stepwise, planned = engine(), engine()
    for it in (stepwise, planned):
        it.submit(a_job(prompt=8, output=40), 0.0)
        it.step(0.0)
    result = planned.step(1.0)
    assert result.steps == 39
    now = 1.0
    while (step := stepwise.step(now, horizon=now)) is not None:
        assert step.steps == 1
        now += step.duration_s
    assert math.isclose(now, 1.0 + result.duration_s, rel_tol=1e-12)


def test_no_step_of_a_plan_begins_after_the_horizon():
    """The plan ends with the step under way at the horizon."""
    it = engine(context_s_per_token=0.0)
    it.submit(a_job(prompt=8, output=40), 0.0)
    it.step(0.0)
    step_s = A + C
    assert it.begin(0.0, horizon=4 * step_s) == 4 * step_s
    assert it.commit(it.due).steps == 4
    assert it.begin(0.0, horizon=4.5 * step_s) == 5 * step_s


def test_an_arrival_cuts_the_plan_after_the_step_under_way():
    """The new job enters as if steps had been planned one by one."""
    it = engine(context_s_per_token=0.0)
    it.submit(a_job("old", prompt=8, output=40), 0.0)
    it.step(0.0)
    it.begin(0.0)
    it.submit(a_job("new", prompt=8), 2.5 * (A + C))
    assert it.due == 3 * (A + C)
    assert it.commit(it.due).steps == 3
    assert [s.id for s in it.step(1.0).started] == ["new"]


def test_between_begin_and_commit_the_batch_runs_and_its_tokens_are_not_there():
    """From outside, a step's results are visible at its end."""
    it = engine()
    it.submit(a_job(output=1), 0.0)
    it.begin(0.0)
    assert (it.running, it.waiting, it.generated("r")) == (1, 0, 0)
    assert it.commit(it.due).finished[0].job.id == "r"
    assert it.running == 0


@pytest.mark.parametrize("steps", [0, 1, 2, 5])
def test_a_cancelled_job_gives_everything_back(steps):
    """In the queue, in prefill, in decode and in mid-step: no block and no slot stays."""
    it = engine()
    it.submit(a_job("gone", prompt=50, output=9, base=100, adapter="a"), 0.0)
    for n in range(steps):
        it.step(float(n), horizon=0.0)
    it.begin(9.0, horizon=0.0)
    assert it.cancel("gone", 9.0)
    assert not it.cancel("gone", 9.0)
    result = it.commit(it.due)
    assert not result.finished
    assert (it.running, it.waiting, it.pool.used, it.slots.active) == (0, 0, 0, ())
    assert it.begin(10.0) is None


def test_times_of_a_finished_job_are_those_of_its_steps():
    """Submitted, entered, first token, last token."""
    it = engine(context_s_per_token=0.0)
    it.submit(a_job(prompt=8, output=3), 0.25)
    done = next(f for r in drain(it, 1.0) for f in r.finished)
    first = 1.0 + A + 8 * B
    assert (done.submitted_at, done.started_at) == (0.25, 1.0)
    assert (done.first_token_at, done.finished_at) == (first, first + 2 * (A + C))


@pytest.mark.parametrize("name", sorted(profiles.PROFILES))
def test_every_profile_runs_a_job(name):
    """Each row of the table is a machine the engine accepts."""
    it = core.SimulatedEngine(profiles.find(name))
    it.submit(a_job(prompt=1000, output=50), 0.0)
    assert drain(it)[-1].finished


def test_a_faster_profile_divides_every_time():
    """Speed changes nothing but times."""
    it = core.SimulatedEngine(builders.profile().faster(4))
    it.submit(a_job(prompt=8), 0.0)
    assert it.begin(0.0) == (A + 8 * B) / 4


@pytest.mark.parametrize(
    "facts", [{"token_budget": 4}, {"base_s": 0.0}, {"kv_tokens": 4}, {"lora_kv_tokens": 128}]
)
def test_numbers_an_engine_cannot_run_with_are_refused(facts):
    """Budget below batch, steps without time, no room for a block."""
    with pytest.raises(errors.ConfigError):
        engine(**facts)


def test_an_unknown_profile_is_named_with_the_known_ones():
    """The error lists what there is."""
    with pytest.raises(errors.ConfigError, match="demo"):
        profiles.find("nope")


def a_host(**facts):
    """An engine of 12 blocks, whose host holds some of those that it evicts."""
    return engine(kv_tokens=48, reload_s_per_token=2**-16, **({"host_kv_tokens": 64} | facts))


def served(it, name, *, base, prompt=24):
    """Serve a prompt of six blocks alone; returns what came of it."""
    it.submit(a_job(name, prompt=prompt, base=base), 0.0)
    (result,) = drain(it)
    return result


def test_evicted_blocks_are_loaded_from_the_host_in_less_time_than_they_are_computed():
    """They count as cached, but for the last block, of which a token is computed, and as no hits of the device."""
    it = a_host()
    first = served(it, "first", base=0)
    served(it, "second", base=100)
    served(it, "third", base=200)
    assert it.pool.match(range(6), 6) == 0
    again = served(it, "again", base=0)
    assert again.finished[0].cached_tokens == 20
    assert again.prefill_tokens == 4
    assert again.duration_s == first.duration_s - 20 * B + 20 * 2**-16
    assert (it.reloaded_tokens, it.reload_s, it.prefix_hits) == (20, 20 * 2**-16, 0)
    # They are on the device again.
    assert served(it, "once more", base=0).finished[0].cached_tokens == 20
    assert (it.reloaded_tokens, it.prefix_hits) == (20, 20)


def test_host_goes_on_where_the_device_ends():
    """A beginning that is still there is not loaded."""
    it = a_host()
    served(it, "first", base=0)
    served(it, "second", base=100, prompt=28)
    assert it.pool.match(range(6), 6) == 5
    served(it, "more", base=100, prompt=36)
    left = it.pool.match(range(6), 6)
    assert 0 < left < 5
    served(it, "again", base=0)
    assert (it.prefix_hits - 28, it.reloaded_tokens) == (4 * left, 20 - 4 * left)


def test_host_holds_what_was_used_last():
    """Beyond its size the copies that were not used for longest are removed."""
    it = a_host(host_kv_tokens=24)
    log = it.pool.log_changes()
    for n in range(5):
        served(it, str(n), base=100 * n)
        assert len(it.pool.host) <= 6
    device, host = set(), set()
    for key, _, is_stored, medium in log:
        held = device if medium == "GPU" else host
        (held.add if is_stored else held.remove)(key)
        assert is_stored or medium != "CPU" or len(host) <= 6
        # Named by its hash alone, a copy is known by what is on the device.
        assert not is_stored or medium != "CPU" or key in device
    assert (device, host) == (set(it.pool.keys), set(it.pool.host.keys))


def test_a_cleared_cache_has_no_copies_either():
    """Behind `reset_prefix_cache`, nothing is found."""
    it = a_host()
    for n in range(3):
        served(it, str(n), base=100 * n)
    assert len(it.pool.host)
    log = it.pool.log_changes()
    it.pool.clear()
    assert [change[0] for change in log] == [kv.ALL_BLOCKS]
    assert served(it, "again", base=0).finished[0].cached_tokens == 0


@pytest.mark.parametrize("facts", [{"host_kv_tokens": -1}, {"reload_s_per_token": -1e-6}])
def test_a_host_below_nothing_is_refused(facts):
    """Neither its size nor its time may be negative."""
    with pytest.raises(errors.ConfigError, match=f"{next(iter(facts))} from 0 to"):
        engine(**facts)
