"""Recordings for tests: simulated runs, recorded as a picker records real ones."""

from __future__ import annotations

import bisect
import math
from collections import Counter
from collections.abc import Sequence

import msgspec

from extproc.config.settings import Settings
from extproc.prefix_cache import blocks
from extproc.recording import rows
from extproc.recording.recorder import Recordings
from extproc.simulator.fleet import run_metrics, simulation
from extproc.simulator.fleet.scenario import Scenario
from extproc.simulator.fleet.sim_request import KEY_TOKENS, RequestSpec


def header(settings: Settings | None = None) -> rows.HeaderRow:
    """A header that names the strategy."""
    strategy = (settings or Settings()).scheduling.strategy
    return rows.HeaderRow(
        version=rows.VERSION,
        unix_s=1_000_000.0,
        clock_s=0.0,
        settings={"scheduling": {"strategy": strategy}},
    )


def recordings(settings: Settings | None = None, counts: Counter[str] | None = None) -> Recordings:
    """Recordings without a process around them."""
    return Recordings(
        Counter() if counts is None else counts,
        lambda: header(settings),
        schedule=blocks.DEFAULT,
        on_change=lambda _: None,
    )


def block_hashes(work: RequestSpec, cuts: Sequence[int]) -> list[int]:
    """Block hashes of a prompt, also for strategies that read none.

    Args:
        cuts: Tokens of the first blocks of the index.
    """
    full = bisect.bisect_right(cuts, min(work.prompt_tokens, len(work.keys) * KEY_TOKENS))
    return [work.keys[tokens // KEY_TOKENS - 1] for tokens in cuts[:full]]


def record(
    definition: Scenario, settings: Settings, *, seed: int = 1, shows_usage: bool = True
) -> tuple[bytes, run_metrics.RunMetrics]:
    """Simulate a scenario and record what its picker decides.

    Args:
        shows_usage: Whether the lengths of answers are recorded.

    Returns:
        The recording, and what the run measured.
    """
    run = simulation.Simulation(definition, settings, seed=seed)
    active = recordings(settings)
    recording = active.start()
    picker, timeline, lines = run.pickers[0], run.timeline, bytearray()
    commit, end, numbers = picker.commit, picker.ended, {}

    def committed(sim_request, outcome):
        waited_s = timeline.now - sim_request.sent_at
        chain = block_hashes(sim_request.work, picker.cuts)
        full = msgspec.structs.replace(outcome, block_hashes=chain)
        numbers[sim_request.id] = active.add_routed(
            full.without_prompt(), active.hash_prompt(full), now=timeline.now, queued_s=waited_s
        )
        lines.extend(recording.take(1000))
        return commit(sim_request, outcome)

    def ended(sim_request):
        row = rows.EndRow(
            numbers[sim_request.id],
            "503" if sim_request.failure else "200",
            None if math.isnan(sim_request.first_s) else sim_request.first_s,
            timeline.now - sim_request.sent_at,
            output_tokens=sim_request.work.output_tokens if shows_usage else None,
        )
        active.add_ends([row])
        end(sim_request)

    picker.commit, picker.ended = committed, ended
    metrics = run.run()
    lines.extend(recording.take(1000))
    return bytes(lines), metrics
