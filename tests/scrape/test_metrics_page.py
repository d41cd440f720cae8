"""Reading one page: points 112 to 116 of the protocol checklist, and arbitrary bytes."""

import pathlib
import random

import hypothesis
import pytest
from hypothesis import strategies as st

from extproc.endpoint import EngineCounters, Load
from extproc.scrape import engines, metrics_page
from tests.support.seeded import examples

DATA = pathlib.Path(__file__).parents[1] / "data"
LORA = (DATA / "vllm-0.32-after-lora-load.txt").read_bytes()
IDLE = (DATA / "vllm-0.32-idle.txt").read_bytes()


def read(*lines, **options) -> Load:
    """The load of a page of these lines."""
    load = metrics_page.read("\n".join(lines).encode() + b"\n", 7.0, **options)
    assert isinstance(load, Load), load
    return load


def test_a_real_page_is_read_completely():
    """Every field of a real vLLM 0.32 page is found."""
    assert metrics_page.read(LORA, 7.0) == Load(
        at=7.0,
        engine="vllm",
        waiting=0.0,
        running=0.0,
        kv_usage=0.0,
        adapters=frozenset(),
        waiting_adapters=frozenset(),
        adapter_slots=2,
        kv_blocks=256,
        block_tokens=32,
        prefix_queries=254591.0,
        prefix_hits=46944.0,
        started_at=1.79518724195e09,
        counters=EngineCounters(
            steps=2141.0,
            step_tokens=215327.0,
            prompt_tokens=254591.0,
            generated_tokens=7680.0,
            finished=120.0,
            finished_prompt_tokens=254591.0,
            preemptions=5.0,
            reloaded_tokens=0.0,
            gaps=7560.0,
            gaps_s=32.41322159499896,
            prefill_s=6.04624703799891,
            prefill_tokens=207647.0,
            first_tokens=120.0,
        ),
    )


def test_113_a_page_without_adapters_is_no_error():
    """Checklist 113: the lora family without samples leaves adapters unknown, the rest known."""
    load = metrics_page.read(IDLE, 7.0)
    assert isinstance(load, Load)
    assert (load.adapters, load.waiting_adapters, load.adapter_slots) == (None, None, None)
    assert (load.running, load.kv_blocks) == (0.0, 256)


@pytest.mark.parametrize("seed", range(5))
def test_families_may_come_in_any_order(seed):
    """A real page with its families shuffled reads the same."""
    head, *families = LORA.split(b"# HELP ")
    random.Random(seed).shuffle(families)
    shuffled = head + b"".join(b"# HELP " + family for family in families)
    assert metrics_page.read(shuffled, 7.0) == metrics_page.read(LORA, 7.0)


def test_lines_may_come_in_any_order_without_comments():
    """A page without any comment, its lines shuffled, reads the same."""
    lines = [line for line in LORA.splitlines() if not line.startswith(b"#")]
    random.Random(1).shuffle(lines)
    assert metrics_page.read(b"\n".join(lines), 7.0) == metrics_page.read(LORA, 7.0)


def test_112_gauges_with_and_without_labels_are_read():
    """Checklist 112: vLLM names are read, whatever labels they carry."""
    load = read("vllm:num_requests_waiting 4", 'vllm:num_requests_running{a="b"}\t3.0')
    assert (load.engine, load.waiting, load.running) == ("vllm", 4.0, 3.0)


def test_112_a_label_filter_is_honored():
    """Checklist 112: name{label=value} reads only the samples that carry the label."""
    load = read(
        'nv_trt_llm_request_metrics{model="m",request_type="waiting",version="1"} 3',
        'nv_trt_llm_request_metrics{model="m",request_type="context",version="1"} 9',
        'nv_trt_llm_request_metrics{model="m",request_type="scheduled",version="1"} 4',
        'nv_trt_llm_kv_cache_block_metrics{kv_cache_block_type="fraction",model="m"} 0.25',
        'nv_trt_llm_kv_cache_block_metrics{kv_cache_block_type="max",model="m"} 5000',
        'nv_trt_llm_kv_cache_block_metrics{kv_cache_block_type="tokens_per",model="m"} 64',
    )
    assert (load.engine, load.waiting, load.running, load.kv_usage) == ("triton", 3.0, 4.0, 0.25)
    assert (load.kv_blocks, load.block_tokens) == (5000, 64)


def test_113_the_newest_adapter_set_wins():
    """Checklist 113: of several label sets the one with the highest value counts."""
    load = read(
        'vllm:lora_requests_info{max_lora="2",running_lora_adapters="a,b",'
        'waiting_lora_adapters=""} 1.79e9',
        'vllm:lora_requests_info{max_lora="4",running_lora_adapters="c",'
        'waiting_lora_adapters="d"} 1.795187350704317e+09',
        'vllm:lora_requests_info{max_lora="2",running_lora_adapters="",'
        'waiting_lora_adapters=""} 1.7951873538e+08',
    )
    assert (load.adapters, load.waiting_adapters) == (frozenset("c"), frozenset("d"))
    assert load.adapter_slots == 4


def test_113_of_equally_new_adapter_sets_the_later_line_wins():
    """A tie goes to the later line; a set whose value is garbage never wins."""
    load = read(
        'vllm:lora_requests_info{running_lora_adapters="a"} 5',
        'vllm:lora_requests_info{running_lora_adapters="b"} 5',
        'vllm:lora_requests_info{running_lora_adapters="c"} +Inf',
        'vllm:lora_requests_info{running_lora_adapters="d"} soon',
    )
    assert (load.adapters, load.waiting_adapters) == (frozenset("b"), None)


def test_114_adapter_lists_are_split_and_trimmed():
    """Checklist 114: comma lists are trimmed, empty entries dropped, max_lora is an int."""
    load = read(
        'vllm:lora_requests_info{max_lora="8",running_lora_adapters=" a , b,,",'
        'waiting_lora_adapters=" "} 1.0'
    )
    assert (load.adapters, load.waiting_adapters) == (frozenset("ab"), frozenset())
    assert load.adapter_slots == 8


def test_label_values_may_contain_any_text():
    """Braces, commas, quotes, hashes and spaces inside label values do not mislead."""
    nasty = r"x} 9 # {y=\"1\"},num_gpu_blocks=\"7\", max_lora=\\"
    load = read(
        f'vllm:num_requests_waiting{{model_name="{nasty}",engine="0"}} 5',
        f'vllm:num_requests_running{{engine="0",model_name="{nasty}"}} 6 1795187350704',
        f'vllm:cache_config_info{{a="{nasty}",block_size="16",num_gpu_blocks="256"}} 1.0',
        r'vllm:lora_requests_info{running_lora_adapters="a\"b\\,\nc"} 1',
    )
    assert (load.waiting, load.running) == (5.0, 6.0)
    assert (load.block_tokens, load.kv_blocks) == (16, 256)
    assert load.adapters == {'a"b\\', "c"}


@pytest.mark.parametrize(
    ("lines", "expected"),
    [
        (
            ["sglang:num_queue_reqs 3", "sglang:num_running_reqs 2", "sglang:token_usage 0.5"],
            ("sglang", 3.0, 2.0, 0.5),
        ),
        (
            [
                "trtllm_num_requests_waiting 3",
                "trtllm_num_requests_running 2",
                "trtllm_kv_cache_utilization 0.5",
            ],
            ("trtllm", 3.0, 2.0, 0.5),
        ),
        (
            [
                'nv_inference_pending_request_count{model="a",version="1"} 3',
                'nv_inference_pending_request_count{model="b",version="1"} 4',
                'nv_inference_exec_count{model="a",version="1"} 123456',
            ],
            ("triton", 7.0, None, None),
        ),
        (
            ["vllm:num_requests_waiting 3", "vllm:gpu_cache_usage_perc 0.5"],
            ("vllm", 3.0, None, 0.5),
        ),
    ],
)
def test_115_engines_are_recognized_by_metric_names(lines, expected):
    """Checklist 115: SGLang, TensorRT-LLM, Triton and older vLLM names work without a label."""
    load = read(*lines)
    assert (load.engine, load.waiting, load.running, load.kv_usage) == expected


def test_115_the_engine_label_is_tried_first():
    """Checklist 115: on a page with names of two engines the label decides."""
    lines = ("vllm:num_requests_waiting 1", "sglang:num_queue_reqs 2")
    assert read(*lines).waiting == 1.0
    assert read(*lines, engine_type="sglang").waiting == 2.0


def test_115_a_wrong_engine_label_falls_back():
    """A label whose names the page does not have falls back to what it has."""
    load = read("sglang:num_queue_reqs 2", engine_type="vllm")
    assert (load.engine, load.waiting) == ("sglang", 2.0)


def test_sglang_tokens_are_counted_by_mode():
    """Tokens computed and decoded so far are one family; prompt tokens are of finished requests."""
    totals = read(
        "sglang:prompt_tokens_total 900",
        "sglang:num_requests_total 3",
        'sglang:realtime_tokens_total{mode="prefill_compute",tp_rank="0"} 700',
        'sglang:realtime_tokens_total{mode="prefill_cache",tp_rank="0"} 300',
        'sglang:realtime_tokens_total{mode="decode",tp_rank="0"} 50',
    ).counters
    assert (totals.finished, totals.finished_prompt_tokens) == (3.0, 900.0)
    assert (totals.computed_tokens, totals.decoded_tokens) == (700.0, 50.0)


def test_sglang_capacity_is_read_from_labels_or_gauges():
    """SGLang named its ranks by labels before 0.5.11 and by gauges since."""
    old = read("sglang:token_usage 0", 'sglang:cache_config_info{num_pages="9",page_size="4"} 1')
    new = read("sglang:token_usage 0", "sglang:num_pages 9", "sglang:page_size 4")
    assert (old.kv_blocks, old.block_tokens) == (new.kv_blocks, new.block_tokens) == (9, 4)


def test_116_a_missing_metric_does_not_affect_others():
    """Checklist 116: what is missing is None, what is there is read."""
    load = read("vllm:kv_cache_usage_perc 0.5")
    assert (load.kv_usage, load.waiting, load.running) == (0.5, None, None)


@pytest.mark.parametrize("garbage", ["NaN", "+Inf", "-1", "1_0", "0x1", "many", '{a="b', "1e999"])
def test_116_garbage_on_a_line_affects_only_its_value(garbage):
    """A value that is no count is unknown; its neighbors are read."""
    load = read(f"vllm:num_requests_waiting {garbage}", "vllm:num_requests_running 2")
    assert (load.waiting, load.running) == (None, 2.0)


@pytest.mark.parametrize(("value", "usage"), [("1.0000001", 1.0), ("1.5", None), ("37", None)])
def test_a_share_over_one_is_unknown(value, usage):
    """A share that is no share, perhaps a percentage, is not trusted."""
    assert read(f"vllm:kv_cache_usage_perc {value}").kv_usage == usage


def test_data_parallel_counts_are_summed_and_shares_averaged():
    """Several engine="n" series: counts add up, usage is the mean, capacity adds up."""
    load = read(
        "# TYPE vllm:num_requests_waiting gauge",
        'vllm:num_requests_waiting{engine="0"} 3',
        'vllm:num_requests_waiting{engine="1"} 4',
        "# TYPE vllm:kv_cache_usage_perc gauge",
        'vllm:kv_cache_usage_perc{engine="0"} 0.2',
        'vllm:kv_cache_usage_perc{engine="1"} 0.4',
        "# TYPE vllm:cache_config_info gauge",
        'vllm:cache_config_info{block_size="16",engine="0",num_gpu_blocks="100"} 1',
        'vllm:cache_config_info{block_size="16",engine="1",num_gpu_blocks="50"} 1',
    )
    assert (load.waiting, load.kv_usage) == (7.0, pytest.approx(0.3))
    assert (load.kv_blocks, load.block_tokens) == (150, 16)


def test_a_garbled_rank_makes_the_sum_unknown():
    """A sum with an unknown addend is unknown, not smaller."""
    load = read(
        'vllm:num_requests_waiting{engine="0"} 3', 'vllm:num_requests_waiting{engine="1"} ?'
    )
    assert load.waiting is None


def test_joined_pages_of_ranks_are_summed():
    """A proxy that joins the pages of its ranks loses none of them."""
    twice = metrics_page.read(LORA + LORA, 7.0)
    assert isinstance(twice, Load)
    assert (twice.prefix_hits, twice.kv_blocks) == (2 * 46944.0, 512)


def test_a_joined_page_is_searched_from_its_beginning():
    """Copies of a family may be on both sides of all copies of another one."""
    ranks = [
        f'# TYPE vllm:{name} gauge\nvllm:{name}{{engine="{rank}"}} {rank + 1}\n'
        for rank in range(2)
        for name in ("num_requests_waiting", "num_requests_running")
    ]
    page = "".join([*ranks[:2], ranks[3], ranks[2]]).encode()
    load = metrics_page.read(page, 7.0)
    assert isinstance(load, Load)
    assert (load.waiting, load.running) == (3.0, 3.0)


@pytest.mark.parametrize(
    "lines",
    [
        (
            'vllm:prompt_tokens_cached_by_source_total{source="device"} 9',
            'vllm:prompt_tokens_cached_by_source_total{source="host"} 5',
            "vllm:kv_offload_load_time_total 2",
        ),
        (
            "vllm:external_prefix_cache_hits_total 5",
            'vllm:kv_offload_total_time_total{transfer_type="GPU_to_CPU"} 7',
            'vllm:kv_offload_total_time_total{transfer_type="CPU_to_GPU"} 2',
        ),
    ],
)
def test_the_time_to_reload_tokens_is_read(lines):
    """By the names of different versions, and only where any was reloaded."""
    load = read("vllm:num_requests_waiting 1", *lines)
    assert (load.counters.reloaded_tokens, load.counters.reload_s) == (5.0, 2.0)
    none = [line.replace(" 5", " 0") for line in lines]
    load = read("vllm:num_requests_waiting 1", *none)
    assert (load.counters.reloaded_tokens, load.counters.reload_s) == (0.0, None)


def test_names_with_a_common_prefix_are_distinct():
    """num_requests_waiting_by_reason is not num_requests_waiting."""
    load = read(
        'vllm:num_requests_waiting_by_reason{reason="capacity"} 8',
        "vllm:num_requests_waiting 1",
        'vllm:num_requests_waiting_by_reason{reason="deferred"} 9',
    )
    assert load.waiting == 1.0


def test_line_ends_exemplars_and_timestamps_are_ignored():
    """Carriage returns, OpenMetrics exemplars and time stamps do not spoil a value."""
    load = read(
        "vllm:num_requests_waiting 1\r",
        'vllm:prefix_cache_hits_total{engine="0"} 5 # {trace_id="x"} 1.0 1.6e9',
        "vllm:num_requests_running 2 1.5e9",
    )
    assert (load.waiting, load.prefix_hits, load.running) == (1.0, 5.0, 2.0)


def test_a_page_of_an_unknown_engine_gives_an_unknown_load():
    """Valid text of no known engine is a load that knows nothing."""
    assert metrics_page.read(b"# HELP go x\ngo_goroutines 7\n", 7.0) == Load(at=7.0)


@pytest.mark.parametrize(
    "body", [b"", b"\n\n", b"# HELP a b\n", b"<html>404</html>", b"\x00\xff\x89PNG", b'{"a": 1}']
)
def test_invalid_pages_have_a_reason(body):
    """Empty, HTML, JSON and binary bodies are a value with a reason."""
    result = metrics_page.read(body, 7.0)
    assert isinstance(result, metrics_page.UnreadablePage)
    assert result.reason


def _pieces():
    words = (
        b'vllm:num_requests_waiting|vllm:lora_requests_info|sglang:token_usage|# TYPE |{|}|"|\\'
        b"|=|,| |\n|#|1.0|NaN|max_lora|running_lora_adapters|vllm:cache_config_info{num_gpu_blocks="
    )
    names = st.sampled_from(words.split(b"|"))
    return st.lists(names | st.binary(max_size=4), max_size=40).map(b"".join)


@hypothesis.given(_pieces())
@hypothesis.settings(max_examples=examples(400), deadline=None)
def test_any_bytes_give_a_load_or_a_reason(body):
    """Arbitrary bytes never raise, and a load never holds a number that is none."""
    result = metrics_page.read(body, 7.0)
    if isinstance(result, Load):
        for value in (result.waiting, result.running, result.prefix_hits):
            assert value is None or 0 <= value < float("inf")
        assert result.kv_usage is None or 0 <= result.kv_usage <= 1


@hypothesis.given(st.integers(0, len(LORA)), st.binary(max_size=20), st.integers(0, 200))
@hypothesis.settings(max_examples=examples(200), deadline=None)
def test_a_damaged_real_page_never_raises(at, noise, gap):
    """A real page cut, patched and spliced anywhere is read or refused."""
    damaged = LORA[:at] + noise + LORA[at + gap :]
    assert isinstance(metrics_page.read(damaged, 7.0), Load | metrics_page.UnreadablePage)


def search(page: bytes) -> Load | metrics_page.UnreadablePage:
    """The load of a page that has a line of no declared family, and is searched for that."""
    return metrics_page.read(page + b"\nundeclared 1\n", 7.0)


@hypothesis.given(st.integers(0, len(LORA)), st.binary(max_size=20), st.integers(0, 200))
@hypothesis.settings(max_examples=examples(200), deadline=None)
def test_looking_up_families_reads_what_searching_them_reads(at, noise, gap):
    """A damaged page reads alike whether it is cut at its declarations or searched."""
    damaged = LORA[:at] + noise + LORA[at + gap :]
    assert metrics_page.read(damaged, 7.0) == search(damaged)


def test_a_searched_histogram_has_the_sum_of_every_rank():
    """Also where the sum of a rank comes before its count, as clients of Go and Rust write them."""
    lines = ["# TYPE vllm:iteration_tokens_total histogram"]
    for rank in range(4):
        labels = f'{{engine="{rank}"}}'
        lines.append(f"vllm:iteration_tokens_total_sum{labels} 1000")
        lines.append(f"vllm:iteration_tokens_total_count{labels} 100")
    load = search("\n".join(lines).encode())
    assert isinstance(load, Load)
    assert (load.counters.steps, load.counters.step_tokens) == (400.0, 4000.0)


@hypothesis.given(
    counts=st.lists(st.integers(0, 10**6), min_size=1, max_size=5),
    text=st.text(st.characters(codec="utf-8", exclude_categories=["Cs"]), max_size=12),
)
@hypothesis.settings(max_examples=examples(200), deadline=None)
def test_any_label_value_round_trips(counts, text):
    """Whatever a model is called, its counts add up and its adapter keeps its name."""
    label = text.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")
    lines = [
        f'vllm:num_requests_waiting{{engine="{rank}",model_name="{label}"}} {count}.0'
        for rank, count in enumerate(counts)
    ]
    lines.append(f'vllm:lora_requests_info{{running_lora_adapters="{label}"}} 1.0')
    load = read(*lines)
    assert load.waiting == sum(counts)
    assert load.adapters == {name for part in text.split(",") if (name := part.strip())}


def test_the_table_lists_every_engine_once():
    """Every type label of the checklist has its row."""
    labels = [engine.type_label for engine in engines.TABLE]
    assert sorted(labels) == ["sglang", "triton", "triton-tensorrt-llm", "trtllm-serve", "vllm"]
