"""The summary of `docs/benchmarks/index.md`: a question, the figures that answer it, and their page.

Every figure comes from the same results as the tables of its page, which carry command, machine and
date.
"""

from __future__ import annotations

import bench.peers.report
from bench import bars, replicas, run
from bench.real_vllm import report


def block() -> str:
    """One row per question."""
    rows = (
        (
            "Does the default strategy beat published strategies on their own workloads?",
            _against_published(),
            "[adaptive](adaptive.md)",
        ),
        (
            "Do real vLLM engines confirm it?",
            (
                "Hit ratios of real and simulated engines differ by at most "
                f"{report.largest_difference(run.read('real_vllm')):.3f}."
            ),
            "[real engines](real-engines.md)",
        ),
        (
            "Does the simulator agree with real runs?",
            f"Throughput and mean TTFT within {_percent(run.read('agreement')['worst_deviation'], digits=1)}.",
            "[real runs](real-engines.md#real-runs-against-simulated-ones)",
        ),
        ("What do several replicas lose?", _of_replicas(), "[replicas](replicas.md)"),
        ("What does flow control gain and cost?", _of_flow_control(), "[overload](capacity.md)"),
        ("Does autoscaling from zero work?", _of_autoscaling(), "[autoscaling](autoscaling.md)"),
        (
            "What do hostile clients and failures do to it?",
            _of_hostile_input(),
            "[robustness](robustness.md)",
        ),
        ("What does a request cost?", _of_overhead(), "[overhead](overhead.md)"),
        ("What does it cost beside llm-d's picker in Go?", _beside_llm_d(), "[peers](peers.md)"),
    )
    return "\n".join(
        [
            "| question | result | page |",
            "|---|---|---|",
            *(f"| {question} | {answer} | {page} |" for question, answer, page in rows),
        ]
    )


def _percent(share: float, *, digits: int = 0) -> str:
    return f"{100.0 * share:.{digits}f} %"


def _against_published() -> str:
    outcomes = bars.outcomes()
    gains = [
        outcome.ratio - 1.0 if outcome.bar.at_least else 1.0 - outcome.ratio for outcome in outcomes
    ]
    missed = [outcome.bar.scenario for outcome in outcomes if not outcome.met]
    return (
        f"In {len(outcomes)} compared figures it is ahead of the strategy it is compared with by up "
        f"to {_percent(max(gains))}, and behind by {_percent(-min(gains))} at most. Our own bars, which ask for "
        f"more than a tie on most published workloads, are missed in {len(missed)} of them "
        f"({', '.join(sorted(set(missed)))}). {_slower_tokens()}"
    )


def _slower_tokens() -> str:
    """The loss in time per output token on Mooncake, which no bar is about."""
    recorded = bars.result("mooncake-70")
    if recorded is None:
        return ""
    ours, others = (recorded["columns"][name]["tpot_mean_s"][0] for name in ("adaptive", "lmetric"))
    change = ours / others - 1.0
    relation = f"is {_percent(abs(change), digits=1)} {'longer' if change > 0.0 else 'shorter'} than with LMetric"
    return f"On Mooncake its time per output token {relation}."


def _of_replicas() -> str:
    rows = [
        (
            name,
            row["told_after_s"] is not None,
            *(row["ratio"][figure] for figure in replicas.JUDGED),
        )
        for name, rows in run.read("replicas")["simulated"].items()
        for row in rows
        if row["pickers"] > 1
    ]
    loss = max(
        max(1.0 - hits[0], waits[0] - 1.0) for _, is_synced, hits, waits in rows if is_synced
    )
    hits, fewest = min((hits[0], name) for name, is_synced, hits, _ in rows if not is_synced)
    waits, slowest = max((waits[0], name) for name, is_synced, _, waits in rows if not is_synced)
    return (
        f"With peer synchronization at most {_percent(loss)} of the hits or of the p99 TTFT; without, up to "
        f"{_percent(1.0 - hits)} of the hits ({fewest}) and a p99 of up to {waits:.1f} times ({slowest})."
    )


def _of_flow_control() -> str:
    result = run.read("capacity")
    tenants, chat = result["tenants"], result["overload-chat"]["ratios"]["ttft_p99_s"]
    alone, without, with_it = (
        tenants[kind]["small"]["ttft_p95_s"] for kind in ("alone", "adaptive", "holding")
    )
    served = [result[part]["ratios"]["output_tokens_per_s"] for part in ("tenants", "overload")]
    served += [
        row["holding"]["requests_per_s"] / row["adaptive"]["requests_per_s"]
        for row in result["beside"].values()
    ]
    return (
        f"The p95 TTFT of a small tenant beside a large one is {with_it:.2f} s in place of "
        f"{without:.0f} s, alone {alone:.2f} s; up to {_percent(1.0 - min(served))} of throughput. Priority "
        f"chats have {chat:.2f} times their p99 TTFT alone at overload (bar: 1.2)."
    )


def _of_autoscaling() -> str:
    step = run.read("scaling")["step"]
    ours = step["adaptive"]
    others = [step[name] for name in ("queue-depth", "kubeai")]
    times = " and ".join(f"{row['fourth_s']:.0f}" for row in others)
    costs = sorted(ours["replica_s"] / row["replica_s"] - 1.0 for row in others)
    return (
        f"Four replicas are requested after {ours['fourth_s']:.0f} s, by the published policies after "
        f"{times} s; that takes {_percent(costs[0])} to {_percent(costs[-1])} more replica seconds."
    )


def _of_hostile_input() -> str:
    chaos, soak = run.read("chaos"), run.read("soak")
    core, envoy = soak["core"], soak["envoy"]
    return (
        f"Chaos fails {len(chaos['failed'])} of {chaos['requests']:,} requests of a well-behaved "
        f"client. In the second half of {core['requests']:,} requests through the core memory grows by "
        f"{core['mib_per_100k']:.1f} MiB for each 100,000, of {envoy['requests']:,} behind Envoy by "
        f"{envoy['mib_per_100k']:.1f} MiB."
    )


def _of_overhead() -> str:
    result = run.read("overhead")
    rows = [result["fds"], result["buffered"]]
    costs_us = sorted(row["extproc_cpu_us"] for row in rows)
    ratios = sorted(row["cpu_ratio_median"] for row in rows)
    return (
        f"{costs_us[0]} to {costs_us[-1]} µs of CPU, {ratios[0]:.2f} to {ratios[-1]:.2f} times "
        "a gRPC server with constant answers (bar: 1.35)."
    )


def _beside_llm_d() -> str:
    """Ratios of CPU per request on both transports, and the bars."""
    result = run.read("peers")
    ratios = {cell["name"]: cell["ratios"] for cell in result["cells"]}
    small, large = ratios["c32 2 kB"], ratios["c32 400 kB"]
    outcomes = list(bench.peers.report.bars(result))
    met = sum(outcome.is_met for outcome in outcomes)
    return (
        "CPU of a request with the same scorers and scrape interval, times that of llm-d's picker, 32 "
        f"connections: {small['native/go-equal']['cpu_us'][0]:.2f} (2 kB) and "
        f"{large['native/go-equal']['cpu_us'][0]:.2f} (400 kB), on grpcio "
        f"{small['grpcio/go-equal']['cpu_us'][0]:.2f} and {large['grpcio/go-equal']['cpu_us'][0]:.2f}. "
        f"{met} of {len(outcomes)} bars are met."
    )
