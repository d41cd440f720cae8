import hypothesis
import pytest
from hypothesis import strategies as st

from extproc.endpoint import Load
from extproc.scrape import metric_families, metrics_page
from tests.scrape.test_metrics_page import read
from tests.support.seeded import examples


@pytest.mark.parametrize(
    "body",
    [
        b"vllm:cache_config_info{" + b"a" * 1_000_000 + b"} 1\n",
        b"vllm:cache_config_info{" + b'a="' * 300_000 + b"} 1\n",
        b"vllm:lora_requests_info{" + b'"' * 1_000_000,
        b'vllm:num_requests_waiting{engine="0"} 1 2\n' * 20_000,
        b"vllm:num_requests_waiting_x 1\n" * 30_000,
        b" \n" * 300_000,
        b"a" * 1_000_000,
        b"vllm:x 1\n# TYPE " * 14_000,
        b"vllm:x 1" + b"\n# TYPE a b" * 20_000,
        b"# TYPE vllm:x gauge\nvllm:x 1\n" + b"#\n" * 100_000,
    ],
)
def test_hostile_pages_are_read_in_linear_time(body):
    """Time grows with the length of a page, not with its square: these would take minutes."""
    assert isinstance(metrics_page.read(body, 7.0), Load | metrics_page.UnreadablePage)


_NUMBERS = st.one_of(
    st.floats(allow_nan=True, allow_infinity=True).map(str),
    st.integers(-(10**400), 10**400).map(str),
    st.sampled_from(["1e308", "1e300", "-1", "NaN", "+Inf", "-Inf", "9" * 400, "1_0", "0x1", ""]),
)


@hypothesis.given(st.lists(_NUMBERS, min_size=8, max_size=8))
@hypothesis.settings(max_examples=examples(300), deadline=None)
def test_numbers_of_any_size_read_as_bounded_ones_or_none(numbers):
    """Whatever numbers a page holds, what is read can be summed and multiplied over a fleet."""
    a, b, c, d, e, f, g, h = numbers
    load = read(
        f"vllm:num_requests_waiting {a}",
        f"vllm:num_requests_running {b}",
        f"vllm:prefix_cache_queries_total {c}",
        f"vllm:kv_cache_usage_perc {d}",
        f'vllm:cache_config_info{{block_size="{e}",num_gpu_blocks="{f}"}} 1',
        f'vllm:lora_requests_info{{max_lora="{g}"}} 5',
        f"process_start_time_seconds {h}",
    )
    ranges = (
        (load.waiting, metrics_page.MAX_REQUESTS),
        (load.running, metrics_page.MAX_REQUESTS),
        (load.prefix_queries, metrics_page.MAX_TOTAL),
        (load.kv_usage, 1.0),
        (load.block_tokens, metrics_page.MAX_BLOCK_TOKENS),
        (load.kv_blocks, metrics_page.MAX_KV_BLOCKS),
        (load.adapter_slots, metrics_page.MAX_ADAPTER_SLOTS),
        (load.started_at, metrics_page.MAX_STARTED_AT),
    )
    assert all(value is None or 0 <= value <= most for value, most in ranges)
    assert load.kv_tokens is None or float(load.kv_tokens) <= 2.0**50


def test_a_sum_beyond_its_range_is_unknown():
    """Two ranks within the range that are beyond it together count as no number."""
    half = metrics_page.MAX_REQUESTS * 0.75
    load = read(
        f'vllm:num_requests_waiting{{engine="0"}} {half}',
        f'vllm:num_requests_waiting{{engine="1"}} {half}',
    )
    assert load.waiting is None


def test_long_and_numerous_adapter_names_are_dropped():
    """An adapter name has at most 512 bytes, and a label at most 4096 names."""
    load = read('vllm:lora_requests_info{running_lora_adapters="a,' + "b" * 513 + '"} 1')
    assert load.adapters == {"a"}
    names = ",".join(map(str, range(5000)))
    load = read(f'vllm:lora_requests_info{{running_lora_adapters="{names}"}} 1')
    assert load.adapters is not None
    assert len(load.adapters) == metrics_page.MAX_NAMES


def test_many_combinations_of_adapters_hide_nothing():
    """The newest of 20,000 combinations is found, and what is behind them on the page is read."""
    combinations = [
        f'vllm:lora_requests_info{{max_lora="8",running_lora_adapters="{number}"}} {number}'
        for number in range(20_000)
    ]
    known = 'vllm:cache_config_info{block_size="16",num_gpu_blocks="1000"} 1'
    load = read(*reversed(combinations), known)
    assert (load.adapters, load.adapter_slots) == ({"19999"}, 8)
    assert (load.kv_blocks, load.block_tokens) == (1000, 16)


def test_too_many_combinations_of_adapters_are_unknown_alone():
    """Adapters beyond the bound are unknown; what is behind them is read."""
    line = b'vllm:lora_requests_info{running_lora_adapters="a"} 1\n'
    waiting = b"vllm:num_requests_waiting 3\n"
    cache = b'vllm:cache_config_info{block_size="16"} 1\n'
    page = waiting + line * (metric_families.MAX_ADAPTER_SAMPLES + 1) + cache
    load = metrics_page.read(page, 7.0)
    assert isinstance(load, Load)
    assert (load.waiting, load.adapters, load.block_tokens) == (3.0, None, 16)


def test_a_family_of_too_many_samples_is_unknown():
    """The lines that are read of one page are counted, so its size bounds the work."""
    line = b'vllm:num_requests_waiting{engine="0"} 1\n'
    within = metrics_page.read(line * metric_families.MAX_SAMPLES, 7.0)
    beyond = metrics_page.read(line * (metric_families.MAX_SAMPLES + 1), 7.0)
    assert isinstance(within, Load)
    assert isinstance(beyond, Load)
    assert (within.waiting, beyond.waiting) == (float(metric_families.MAX_SAMPLES), None)
