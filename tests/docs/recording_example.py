"""The recording of the documentation: a simulated run, recorded as a picker records real ones.

    python -m tests.docs.recording_example

writes `docs/examples/decisions.jsonl`.
"""

from __future__ import annotations

from pathlib import Path

from extproc.simulator.fleet import client, scenario
from tests.simulator.fleet import builders
from tests.support import recordings

PATH = Path(__file__).parents[2] / "docs/examples/decisions.jsonl"


def render() -> bytes:
    """The recording: 112 requests of conversations to three engines, by round robin."""
    definition = builders.a_scenario(
        builders.conversations(28, prompt=builders.spread_out(250), output=builders.spread_out(50)),
        fleet=[scenario.EngineGroup(count=3, profile="l4-8b-fp8")],
        client=client.Client(users=8),
    )
    return recordings.record(definition, builders.settings("round-robin"))[0]


if __name__ == "__main__":
    PATH.write_bytes(render())
