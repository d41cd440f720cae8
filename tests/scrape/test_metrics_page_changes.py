import re

import hypothesis
import msgspec
from hypothesis import strategies as st

from extproc.endpoint import Load
from extproc.scrape import engines, metrics_page
from tests.scrape.test_metrics_page import IDLE, LORA
from tests.support.seeded import examples

#: Names of samples that are read of a page of vLLM.
NAMES = [
    b"vllm:num_requests_waiting",
    b"vllm:num_requests_running",
    b"vllm:kv_cache_usage_perc",
    b"vllm:prefix_cache_queries_total",
    b"vllm:request_success_total",
    b"vllm:request_prompt_tokens_sum",
    b"process_start_time_seconds",
]

_STEPS = st.lists(
    st.tuples(st.integers(0, len(LORA)), st.sampled_from([b"", b"1", b"\n", b"# TYPE ", b"vllm:"]))
    | st.sampled_from([LORA, IDLE, LORA + LORA]),
    min_size=2,
    max_size=6,
)


@hypothesis.given(_STEPS)
@hypothesis.settings(max_examples=examples(100), deadline=None)
def test_a_page_reads_alike_whatever_was_read_before(steps):
    """Pages of one endpoint, each damaged a bit further, read as they do on their own."""
    reader, page = metrics_page.MetricsPageReader(), LORA
    for step in steps:
        page = step if isinstance(step, bytes) else page[: step[0]] + step[1] + page[step[0] :]
        assert reader.read(page, 7.0) == metrics_page.read(page, 7.0)


def test_a_family_that_changes_is_read_again():
    """With the declarations of the last page, what changed is new and the rest is as it was."""
    reader = metrics_page.MetricsPageReader()
    before = reader.read(LORA, 7.0)
    page = LORA.replace(b"} 254591.0", b"} 300000.0")
    after = reader.read(page, 8.0)
    assert isinstance(before, Load)
    assert isinstance(after, Load)
    assert (before.prefix_queries, after.prefix_queries) == (254591.0, 300000.0)
    assert after.prefix_hits == before.prefix_hits
    assert reader.read(LORA, 7.0) == before


def test_a_page_on_which_only_other_families_change_has_the_load_of_the_last_one():
    """Its load is that of the last page at another time, unless other metrics are asked for."""
    reader = metrics_page.MetricsPageReader()
    first = reader.read_ranks(LORA, 7.0)
    page = re.sub(rb"(?m)^(process_cpu_seconds_total) .*$", rb"\1 99.5", LORA)
    assert page != LORA
    again = reader.read_ranks(page, 8.0)
    assert isinstance(first, Load)
    assert isinstance(again, Load)
    assert again == msgspec.structs.replace(first, at=8.0)
    assert again.counters is first.counters
    extra = {"cpu_s": engines.series("process_cpu_seconds_total")}
    more = reader.read_ranks(page, 9.0, extra=extra)
    assert more == msgspec.structs.replace(first, at=9.0, extra={"cpu_s": 99.5})
    changed = reader.read_ranks(page.replace(b" 99.5", b" 100.5"), 9.5, extra=extra)
    assert changed == msgspec.structs.replace(first, at=9.5, extra={"cpu_s": 100.5})


def test_a_page_that_is_too_long_to_be_cut_ends_the_comparison():
    """The pages behind it do not read as the long one, though they are as those before it."""
    reader = metrics_page.MetricsPageReader()
    long = LORA.replace(b"} 254591.0", b"} 300000.0") + b"# a comment\n" * 30_000
    for page in (LORA, LORA, long, LORA, LORA):
        assert reader.read(page, 7.0) == metrics_page.read(page, 7.0)


_VALUES = (
    b"0.0",
    b"17",
    b"2.5e+06",
    b"-1.0",
    b"NaN",
    b"+Inf",
    b"1_0",
    b"5 1700000000",
    b"",
    b"7\r",
)


@hypothesis.given(
    st.lists(st.tuples(st.sampled_from(NAMES), st.sampled_from(_VALUES)), min_size=1, max_size=12)
)
@hypothesis.settings(max_examples=examples(100), deadline=None)
def test_values_that_change_read_as_on_a_new_page(changes):
    """Whatever a value becomes, and whatever it was, the page reads as it does on its own."""
    reader, page = metrics_page.MetricsPageReader(), LORA
    for name, value in changes:
        page = re.sub(rb"(?m)^(%b(?:\{.*\})?) .*$" % re.escape(name), rb"\g<1> " + value, page)
        assert reader.read(page, 7.0) == metrics_page.read(page, 7.0)
