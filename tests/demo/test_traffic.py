from __future__ import annotations

import asyncio

import pytest

from extproc.demo import stack, traffic


def test_a_failure_to_show_an_answer_is_raised_alone():
    """The command line recognizes an output that is closed, as in `extproc demo | head -1`."""

    def show(_):
        raise BrokenPipeError

    talks = traffic.conversations(2, 1, model="m", adapters=("a",), seed=1)
    url = f"http://127.0.0.1:{stack.free_port()}"  # requests fail, and are shown as well
    with pytest.raises(BrokenPipeError):
        asyncio.run(traffic.play(url, talks, at_once=2, on_answer=show))
