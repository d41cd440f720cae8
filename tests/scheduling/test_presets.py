"""The default profile against small fleets that serve no real time: only counts and beliefs."""

from collections import Counter, deque
from random import Random

import pytest

from extproc.endpoint import Candidate, Endpoint
from extproc.prefix_cache import blocks
from extproc.prefix_cache.index import PrefixIndex
from extproc.request import BYTES_PER_TOKEN, InferenceRequest
from extproc.scheduling import registry
from extproc.scheduling.framework import SchedulingContext


class PresetFleet:
    """Endpoints without scrapes, a prefix index, and requests that finish in order of arrival."""

    def __init__(self, size=8, *, open_requests=64, seed=5, profile="balanced"):
        self.endpoints = [Endpoint(f"10.0.0.{i}:8000") for i in range(size)]
        self.index = PrefixIndex(50_000)
        self.slots = [self.index.slot((e.address, e.incarnation)) for e in self.endpoints]
        self.in_flight = [0] * size
        self.open = deque()
        self.limit = open_requests
        self.rng = Random(seed)
        self.profile = registry.profiles()[profile]
        self.picks = Counter()

    def send(self, prompt):
        """Route one request; the place of its endpoint."""
        request = InferenceRequest(
            "chat", "m", prompt=prompt, prompt_tokens=len(prompt) // BYTES_PER_TOKEN
        )
        chain = blocks.chain(prompt, b"m")
        depths = self.index.match(chain)
        tokens = blocks.DEFAULT.tokens
        candidates = [
            Candidate(
                e, in_flight=n, estimated_requests=float(n), matched_tokens=tokens[depths[slot]]
            )
            for e, n, slot in zip(self.endpoints, self.in_flight, self.slots, strict=True)
        ]
        decision = self.profile.run(
            SchedulingContext(request, 0.0, self.rng, blocks=chain), candidates
        )
        assert decision.degraded == ""
        position = self.endpoints.index(decision.endpoints[0])
        self.index.record((decision.endpoints[0].address, 0), chain)
        self.in_flight[position] += 1
        self.picks[position] += 1
        self.open.append(position)
        if len(self.open) > self.limit:
            self.in_flight[self.open.popleft()] -= 1
        return position

    @property
    def unevenness(self):
        """Most picks of an endpoint over the mean."""
        return max(self.picks.values()) * len(self.endpoints) / self.picks.total()


def text(rng, size):
    return rng.randbytes(size)


@pytest.mark.parametrize("size", [600, 2_000, 8_000, 32_000])
def test_a_short_common_prefix_does_not_attract_all_traffic(size):
    """1000 prompts that share only their first block stay within 1.2 of an even spread."""
    store, rng = PresetFleet(), Random(3)
    common = text(rng, 256)
    for _ in range(1000):
        store.send(common + text(rng, size))
    assert len(store.picks) == 8
    assert store.unevenness <= 1.2


@pytest.mark.parametrize("share", [0.3, 0.5, 0.7, 0.9])
def test_a_long_common_prefix_spreads_under_load(share):
    """A system prompt that all requests share is learned by all endpoints under load."""
    store, rng = PresetFleet(open_requests=256), Random(3)
    common = text(rng, int(8192 * share))
    for _ in range(2000):
        store.send(common + text(rng, int(8192 * (1 - share))))
    assert len(store.picks) == 8
    assert store.unevenness <= 1.3


def test_a_burst_spreads_over_idle_endpoints_without_a_scrape():
    """100 different prompts at once, none finished, within 1.5 of an even spread."""
    store, rng = PresetFleet(open_requests=1000), Random(4)
    for _ in range(100):
        store.send(text(rng, 4000))
    assert store.unevenness <= 1.5


def test_a_burst_of_equal_prompts_spreads():
    """The same prompt 400 times at once reaches every endpoint, cached or not."""
    store, rng = PresetFleet(open_requests=1000), Random(4)
    prompt = text(rng, 8192)
    for _ in range(400):
        store.send(prompt)
    assert len(store.picks) == 8


@pytest.mark.parametrize("system", [0, 2048])
def test_conversations_stay_on_their_endpoint(system):
    """At least nine of ten follow-up turns go where the turn before went, and load stays even."""
    store, rng = PresetFleet(), Random(6)
    common = text(rng, system)
    talks = [common + text(rng, 1024) for _ in range(100)]
    homes = [store.send(talk) for talk in talks]
    stayed = turns = 0
    for _ in range(1500):
        at = rng.randrange(len(talks))
        talks[at] += text(rng, rng.randrange(300, 1500))
        position = store.send(talks[at])
        stayed += position == homes[at]
        turns += 1
        homes[at] = position
    assert stayed / turns >= 0.9
    assert store.unevenness <= 1.5


@pytest.mark.parametrize("name", ["least-request", "round-robin", "random"])
def test_plain_profiles_spread(name):
    """The one-word profiles spread identical prompts evenly."""
    store, rng = PresetFleet(profile=name), Random(6)
    prompt = text(rng, 2048)
    for _ in range(1600):
        store.send(prompt)
    assert store.unevenness <= 1.25
