from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from extproc.simulator import engine_request
from tests.simulator.builders import engine
from tests.support.seeded import examples

jobs = st.lists(
    st.tuples(
        st.integers(1, 60),  # prompt tokens
        st.integers(1, 40),  # output tokens
        st.integers(0, 3),  # which prefix family
        st.sampled_from(["", "", "a", "b", "c"]),
        st.integers(0, 40),  # arrives after so many plans
        st.one_of(st.none(), st.integers(1, 30)),  # cancelled so many plans later
    ),
    min_size=1,
    max_size=25,
)


def check(it):
    """Blocks balance: every used block is registered or taken by a sequence, or an adapter's."""
    pool = it.pool
    assert pool.blank >= 0
    assert pool.used + pool.available == pool.size
    assert pool.available >= 0
    held = {key for seq in it._running.values() for key in seq.held}
    live = {key for key, count in pool._holders.items() if count}
    assert held == live
    assert len(live) <= pool.used
    assert set(pool._idle) == pool._holders.keys() - live
    assert it.running <= it.profile.max_num_seqs
    assert len(it.slots.resident) <= it.profile.max_loras
    assert it._decoding.count + len(it._prefilling) == it.running
    assert sum(it._decoding._phases) == it._decoding.count
    assert pool.host is None or len(pool.host) <= pool.host.size


def play(script, *, horizon_s, host_kv_tokens=0):
    """Run a script of arrivals and cancellations; returns everything that happened."""
    it = engine(kv_tokens=128, max_num_seqs=4, lora_kv_tokens=4, host_kv_tokens=host_kv_tokens)
    arrivals = sorted(enumerate(script), key=lambda item: item[1][4])
    leave_at, log, now, plan = {}, [], 0.0, 0
    while arrivals or it.running or it.waiting:
        while arrivals and arrivals[0][1][4] <= plan:
            n, (prompt, output, family, adapter, _, patience) = arrivals.pop(0)
            hashes = range(family * 1000, family * 1000 + (prompt + output) // 4)
            assert (
                it.submit(
                    engine_request.EngineRequest(f"r{n}", prompt, output, hashes, adapter), now
                )
                is None
            )
            if patience is not None:
                leave_at[f"r{n}"] = plan + patience
        due = it.begin(now, horizon=now + horizon_s)
        for name, when in list(leave_at.items()):
            if when <= plan:
                del leave_at[name]
                log.append((name, it.cancel(name, now)))
        check(it)
        plan += 1
        if due is None:
            assert arrivals or not it.waiting, "jobs wait and nothing runs"
            continue
        now = it.due
        result = it.commit(now)
        check(it)
        log.append(result)
        assert plan < 20_000
    return it, log


@settings(max_examples=examples(150), deadline=None)
@given(jobs, st.sampled_from([0.0, 0.1, 100.0]), st.sampled_from([0, 4, 80]))
def test_every_job_finishes_or_was_cancelled_and_all_blocks_come_back(
    script, horizon_s, host_kv_tokens
):
    """No job is lost or served twice, no block leaks, and the caches stay in their sizes."""
    it, log = play(script, horizon_s=horizon_s, host_kv_tokens=host_kv_tokens)
    ended = [f.job.id for r in log if isinstance(r, engine_request.StepResult) for f in r.finished]
    ended += [name for name, was_there in (e for e in log if isinstance(e, tuple)) if was_there]
    assert sorted(ended) == sorted(f"r{n}" for n in range(len(script)))
    assert it.pool.used == len(it.slots.resident)  # one block each, by the profile
    assert it._decoding.context == 0
    assert not it._sequences


@settings(max_examples=examples(30), deadline=None)
@given(jobs)
def test_the_same_script_gives_the_same_run(script):
    """Nothing in the core depends on chance or the clock."""
    assert play(script, horizon_s=0.1)[1] == play(script, horizon_s=0.1)[1]


@settings(max_examples=examples(60), deadline=None)
@given(jobs)
def test_finished_jobs_got_their_tokens_in_order_of_time(script):
    """Submitted, entered, first and last token never go back in time; hits stay below the prompt."""
    _, log = play(script, horizon_s=100.0)
    for done in (f for r in log if isinstance(r, engine_request.StepResult) for f in r.finished):
        assert done.submitted_at <= done.started_at < done.first_token_at <= done.finished_at
        assert 0 <= done.cached_tokens < done.job.prompt_tokens
