"""Pages of engines with several data-parallel ranks: a load for each, or one for the engine."""

from __future__ import annotations

import asyncio

import pytest

from extproc.endpoint import Load
from extproc.scrape import engines, metrics_page
from extproc.scrape.metrics_page import MAX_RANKS, RankedLoad
from extproc.simulator.http import server
from tests.scrape.test_rank_scraping import vllm_page
from tests.simulator import engine_server


def read(page: bytes) -> Load | RankedLoad | metrics_page.UnreadablePage:
    return metrics_page.MetricsPageReader().read_ranks(page, 5.0)


async def test_each_rank_of_a_whole_page_has_its_own_load():
    """Counters, cache sizes and the start are those of the rank; the engine is one process."""
    settings = {"ranks": 3, "speed": 100_000.0}
    async with engine_server.engine(**settings) as (_, client):
        for rank, count in ((0, 1), (2, 2)):
            for n in range(count):
                body = engine_server.chat(f"rank {rank} {n} " * 40, max_tokens=3)
                headers = {"x-data-parallel-rank": str(rank)}
                assert (
                    await client.post("/v1/chat/completions", json=body, headers=headers)
                ).status == 200
        page = await (await client.get("/metrics")).read()
    ranked = read(page)
    assert isinstance(ranked, RankedLoad)
    assert ranked.numbers == (0, 1, 2)
    finished = [load.counters.finished for load in ranked.loads]
    assert finished == [1.0, 0.0, 2.0]
    assert all((load.prefix_queries or 0) > 0 for load in (ranked.loads[0], ranked.loads[2]))
    assert len({(load.kv_blocks, load.block_tokens, load.started_at) for load in ranked.loads}) == 1
    joined = metrics_page.read(page, 5.0)
    assert isinstance(joined, Load)
    assert joined.counters.finished == sum(finished)
    assert joined.counters.rank_steps == tuple(load.counters.steps for load in ranked.loads)
    assert joined.counters.steps == sum(joined.counters.rank_steps)
    assert all(not load.counters.rank_steps for load in ranked.loads)
    assert joined.kv_blocks == 3 * (ranked.loads[0].kv_blocks or 0)


async def test_the_page_of_a_single_rank_reads_as_before():
    """An engine without ranks is one load, whatever number its samples carry."""
    async with engine_server.engine() as (_, client):
        page = await (await client.get("/metrics")).read()
    assert read(page) == metrics_page.read(page, 5.0)
    assert read(vllm_page({3: (1, 2)})) == metrics_page.read(vllm_page({3: (1, 2)}), 5.0)


async def test_a_server_without_a_rank_header_balances_by_itself():
    """Of two ranks the second request goes to the one with less to do; unknown ranks get 400."""
    async with engine_server.engine(ranks=2, speed=0.001) as (subject, client):
        assert isinstance(subject, server.EngineServer)
        tasks = []
        for expected in ([1, 0], [1, 1]):
            body = engine_server.chat("hello " * 30, max_tokens=50)
            tasks.append(asyncio.ensure_future(client.post("/v1/chat/completions", json=body)))
            await engine_server.until(
                lambda expected=expected: [rank.received for rank in subject.ranks] == expected
            )
            await engine_server.until(
                lambda expected=expected: (
                    [min(1, rank.engine.running + rank.engine.waiting) for rank in subject.ranks]
                    == expected
                )
            )
        for rank in ("2", "-1", "x", "10000"):
            answer = await client.post(
                "/v1/chat/completions",
                json=engine_server.chat("hello"),
                headers={"x-data-parallel-rank": rank},
            )
            assert answer.status == 400
        await engine_server.leave(*tasks)


def test_ranks_of_a_group_that_spans_ports_are_numbered_by_position():
    """Numbers that begin above 0 are ranks as well: the header counts those behind the port."""
    ranked = read(vllm_page({4: (1, 0), 5: (2, 7)}))
    assert isinstance(ranked, RankedLoad)
    assert ranked.numbers == (4, 5)
    assert [load.waiting for load in ranked.loads] == [0.0, 7.0]


@pytest.mark.parametrize(
    "numbers",
    [
        ("0", "2"),
        ("0", "01"),
        ("0", "x"),
        ("0", "-1"),
        ("0", "9" * 5000),
        ("0", "\u0661"),
        ("4095", "4096"),
        tuple(str(n) for n in range(MAX_RANKS + 1)),
    ],
)
def test_pages_with_other_numbers_are_one_endpoint(numbers: tuple[str, ...]):
    """A gap, garbage or too many of them make no endpoints; the sum of all counts."""
    page = "".join(
        f'vllm:num_requests_running{{engine="{n}"}} 1\nvllm:num_requests_waiting{{engine="{n}"}} 2\n'
        for n in numbers
    ).encode()
    load = read(page)
    assert isinstance(load, Load)
    assert load.running == len(numbers)


def test_samples_without_a_rank_make_no_endpoints():
    """A page on which only some samples name a rank is read as one engine."""
    page = vllm_page({0: (1, 2)}) + b'vllm:num_requests_running{model_name="m"} 1\n'
    assert isinstance(read(page), Load)


def test_models_of_an_engine_are_summed_within_a_rank():
    """Two series of the same rank are no further rank."""
    page = b"".join(
        b'vllm:num_requests_running{engine="%d",model_name="%s"} %d\n' % (rank, model, value)
        for rank, model, value in ((0, b"a", 1), (0, b"b", 2), (1, b"a", 4))
    )
    ranked = read(page)
    assert isinstance(ranked, RankedLoad)
    assert [load.running for load in ranked.loads] == [3.0, 4.0]


def test_ranks_of_sglang_leave_out_what_its_front_end_counts_for_all():
    """`dp_rank` names the rank of SGLang; a counter of the whole engine is of no rank."""
    page = (
        b'sglang:num_running_reqs{dp_rank="0"} 1\nsglang:num_running_reqs{dp_rank="1"} 2\n'
        b'sglang:num_queue_reqs{dp_rank="0"} 3\nsglang:num_queue_reqs{dp_rank="1"} 0\n'
        b'sglang:token_usage{dp_rank="0"} 0.5\nsglang:token_usage{dp_rank="1"} 0.25\n'
        b"sglang:prompt_tokens_total 100\nsglang:page_size 16\nsglang:num_pages 100\n"
    )
    ranked = read(page)
    assert isinstance(ranked, RankedLoad)
    assert [(load.running, load.waiting, load.kv_usage) for load in ranked.loads] == [
        (1.0, 3.0, 0.5),
        (2.0, 0.0, 0.25),
    ]
    assert [load.prefix_queries for load in ranked.loads] == [None, None]
    assert [load.kv_tokens for load in ranked.loads] == [1600, 1600]


def sglang_page(*labels: str) -> bytes:
    """Gauges and counters as a scheduler exports them, once for each set of labels."""
    values = {
        "num_running_reqs": 5.0,
        "num_queue_reqs": 2.0,
        "token_usage": 0.5,
        "num_pages": 1000.0,
        "page_size": 16.0,
        "realtime_tokens_total": 300.0,
    }
    lines = [f"# TYPE sglang:{name} gauge\n" for name in values]
    for at, (name, value) in enumerate(values.items()):
        mode = ',mode="decode"' if name == "realtime_tokens_total" else ""
        lines[at] += "".join(f"sglang:{name}{{{label}{mode}}} {value}\n" for label in labels)
    return "".join(lines).encode()


#: The sample of a scheduler without repetition.
ALONE = 'pp_rank="0",tp_rank="0"'


@pytest.mark.parametrize(
    "labels",
    [
        [f'pp_rank="0",tp_rank="{rank}"' for rank in range(8)],
        [f'pp_rank="0",tp_rank="{rank}"' for rank in (10, 11, 8, 9)],
        ['pp_rank="1",tp_rank="0"', 'pp_rank="0",tp_rank="0"', 'pp_rank="0",tp_rank="1"'],
    ],
)
def test_workers_of_an_sglang_engine_count_once(labels):
    """Ranks of tensor parallelism and stages of a pipeline have the same requests and blocks."""
    load = read(sglang_page(*labels))
    assert load == read(sglang_page(ALONE))
    assert isinstance(load, Load)
    assert (load.running, load.waiting, load.kv_blocks) == (5.0, 2.0, 1000)
    assert load.counters.decoded_tokens == 300.0


def test_workers_count_once_within_each_rank():
    """With attention by data parallelism, the ranks of tensor parallelism are divided among them."""
    page = sglang_page(*[f'dp_rank="{n // 2}",pp_rank="0",tp_rank="{n}"' for n in range(4)])
    ranked = read(page)
    assert isinstance(ranked, RankedLoad)
    assert ranked.loads == (read(sglang_page(ALONE)),) * 2
    joined = metrics_page.read(page, 5.0)
    assert isinstance(joined, Load)
    assert (joined.running, joined.waiting, joined.kv_blocks) == (10.0, 4.0, 2000)


@pytest.mark.parametrize("ranks", [("",), ('dp_rank="0",', 'dp_rank="1",')])
def test_priorities_of_sglang_are_parts_of_a_total(ranks):
    """The total has an empty priority; counters of finished requests have none."""
    lines = [
        f'sglang:num_running_reqs{{{rank}priority="{priority}"}} {count}\n'
        f'sglang:num_queue_reqs{{{rank}priority="{priority}"}} {count / 2}\n'
        for rank in ranks
        for priority, count in (("0", 4), ("", 6), ("10", 2))
    ]
    lines += [f'sglang:num_requests_total{{priority="{label}"}} 7\n' for label in ("", "0", "10")]
    page = "".join(lines).encode()
    joined = metrics_page.read(page, 5.0)
    assert isinstance(joined, Load)
    assert (joined.running, joined.waiting) == (6.0 * len(ranks), 3.0 * len(ranks))
    assert joined.counters.finished == 21.0
    ranked = read(page)
    if isinstance(ranked, RankedLoad):
        assert [(load.running, load.waiting) for load in ranked.loads] == [(6.0, 3.0)] * 2


def test_extra_metrics_are_read_of_all_workers():
    """A selector may name any of them."""
    page = sglang_page(*[f'tp_rank="{rank}"' for rank in range(2)])
    extra = {"usage": engines.series("sglang:token_usage{tp_rank=1}")}
    load = metrics_page.read(page, 5.0, extra=extra)
    assert isinstance(load, Load)
    assert load.extra == {"usage": 0.5}
