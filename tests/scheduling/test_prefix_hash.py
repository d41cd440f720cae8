"""The ring against a re-computation that shares nothing with it, hash function included."""

from bisect import bisect_left
from random import Random

import msgspec
import pytest
import xxhash

from extproc.scheduling import pickers
from extproc.scheduling.pickers import PrefixHash
from tests.scheduling import builders

MASK = (1 << 64) - 1
P1, P2, P3, P4, P5 = (
    0x9E3779B185EBCA87,
    0xC2B2AE3D27D4EB4F,
    0x165667B19E3779F9,
    0x85EBCA77C2B2AE63,
    0x27D4EB2F165667C5,
)
LETTERS = "abcxyz 0189_/éß漢字😀"


def rotl(value, by):
    return (value << by | value >> 64 - by) & MASK


def fed(queue, word):
    return rotl((queue + word * P2) & MASK, 31) * P1 & MASK


def xxh64(data):
    """XXH64 with seed 0, from its specification."""
    words = [int.from_bytes(data[i : i + 8], "little") for i in range(0, len(data) - 7, 8)]
    stripes = len(data) // 32
    if stripes:
        queues = [(P1 + P2) & MASK, P2, 0, -P1 & MASK]
        for at in range(4 * stripes):
            queues[at % 4] = fed(queues[at % 4], words[at])
        acc = sum(map(rotl, queues, (1, 7, 12, 18))) & MASK
        for queue in queues:
            acc = ((acc ^ fed(0, queue)) * P1 + P4) & MASK
    else:
        acc = P5
    acc = (acc + len(data)) & MASK
    for word in words[4 * stripes :]:
        acc = (rotl(acc ^ fed(0, word), 27) * P1 + P4) & MASK
    rest = data[8 * len(words) :]
    if len(rest) >= 4:
        acc ^= int.from_bytes(rest[:4], "little") * P1 & MASK
        acc = (rotl(acc, 23) * P2 + P3) & MASK
        rest = rest[4:]
    for byte in rest:
        acc = rotl(acc ^ byte * P5 & MASK, 11) * P1 & MASK
    acc = (acc ^ acc >> 33) * P2 & MASK
    acc = (acc ^ acc >> 29) * P3 & MASK
    return acc ^ acc >> 32


@pytest.mark.parametrize(
    ("text", "digest"),
    [("", 0xEF46DB3751D8E999), ("a", 0xD24EC4F1A98C6E5B), ("abc", 0x44BC2CF5AD770999)],
)
def test_the_reference_hash_is_xxhash64(text, digest):
    """Published digests; and the library agrees on every length up to three stripes."""
    assert xxh64(text.encode()) == digest
    for size in range(100):
        data = Random(size).randbytes(size)
        assert xxh64(data) == xxhash.xxh64_intdigest(data)


class Places(dict):
    """Hashes of the replicas of a name, computed once."""

    def __missing__(self, name):
        self[name] = [xxh64(f"{name}{i}".encode()) for i in range(256)]
        return self[name]


PLACES = Places()


def straightforward(ring, loads, adapters, adapter, text, floor):
    """KubeAI's choice (docs/spec/prior-systems.md#prefixhash), by a scan of places from the key's on.

    Args:
        ring: Every place and its name, sorted.
        loads: Name to requests in flight.
        adapters: Name to the adapters loaded there.
        adapter: Empty for the base model.
        text: Of the first user message.
        floor: Load that is never too much.
    """
    key = xxh64((adapter + text[:100]).encode())
    start = bisect_left(ring, (key,))
    total = sum(loads.values())
    default = None
    for at in range(start, start + len(ring)):
        _, name = ring[at % len(ring)]
        if adapter and adapter not in adapters[name]:
            continue
        default = default or name
        limit = max(floor, 1.25 * (total + 1) / len(loads))
        if total == 0 or loads[name] <= limit:
            return name
    return default


def test_ten_thousand_choices_agree():
    """Random rings, loads, texts, adapters and floors: the same endpoint each time."""
    rng = Random(11)
    names = [f"models/engine-{i}" for i in range(30)] + [f"10.0.0.{i}:8000" for i in range(10)]
    agreed = 0
    for _ in range(250):
        there = rng.sample(names, rng.randint(1, 12))
        queued = {name: [a for a in ("x", "y") if rng.random() < 0.5] for name in there}
        queued[rng.choice(there)] = ["x", "y"]
        ring = sorted((position, name) for name in there for position in PLACES[name])
        floor = rng.choice((0, 0, 2))
        picker = PrefixHash(min_load_requests=floor)
        for _ in range(40):
            most = rng.choice((0, 1, 4, 40))
            loads = {name: rng.randint(0, most) for name in there}
            text = "".join(rng.choices(LETTERS, k=rng.choice((0, 5, 99, 100, 101, 150))))
            adapter = rng.choice(("", "x", "y"))
            candidates = [
                builders.candidate(
                    name,
                    in_flight=loads[name],
                    labels={f"adapter.kubeai.org/{a}": "" for a in queued[name]},
                )
                for name in there
            ]
            context = builders.context(model=adapter or "base", first_user_message=text)
            chosen = picker.pick(context, candidates, [0.0] * len(there), count=1)
            wanted = straightforward(ring, loads, queued, adapter, text, floor)
            assert [there[i] for i in chosen] == [wanted]
            agreed += 1
    assert agreed == 10_000


def test_a_new_endpoint_takes_only_its_share():
    """Of 2000 keys those that move all move to the newcomer, about a ninth of them."""
    picker = PrefixHash()
    few = [builders.candidate(f"pod-{i}") for i in range(8)]
    many = [*few, builders.candidate("pod-8")]
    moved = 0
    for i in range(2000):
        context = builders.context(first_user_message=f"question {i}")
        before = picker.pick(context, few, [0.0] * 8, count=1)
        after = picker.pick(context, many, [0.0] * 9, count=1)
        if before != after:
            assert after == [8]
            moved += 1
    assert 0.07 < moved / 2000 < 0.16


def test_ring_positions_are_computed_once():
    """Loads, order and time do not matter, nor which profile asks."""
    picker, other = PrefixHash(replication=251), PrefixHash(replication=251, prefix_chars=7)
    rings = pickers._rings(251)
    candidates = [builders.candidate(f"pod-{i}", in_flight=i) for i in range(5)]
    picker.pick(builders.context(), candidates, [0.0] * 5, count=1)
    before = dict(rings)
    other.pick(builders.context(), candidates[::-1], [0.0] * 5, count=1)
    assert all(rings[name] is ring for name, ring in before.items())
    assert len(rings) == 5


def test_removed_endpoints_are_forgotten(monkeypatch):
    """The number of rings is bounded, however many endpoint names come and go."""
    monkeypatch.setattr(pickers, "_MAX_PLACES", 4096)
    picker = PrefixHash(replication=1)
    for start in range(0, 10_000, 500):
        candidates = [builders.candidate(f"pod-{i}") for i in range(start, start + 500)]
        picker.pick(builders.context(), candidates, [0.0] * 500, count=1)
        assert len(pickers._rings(1)) <= 4096 + 500


def test_endpoints_with_equal_names_both_serve():
    """Two ports of one pod are two endpoints."""
    first = builders.candidate("pod")
    other = msgspec.structs.replace(
        first, endpoint=msgspec.structs.replace(first.endpoint, address="pod:8001")
    )
    picker = PrefixHash()
    chosen = {
        picker.pick(
            builders.context(first_user_message=str(i)), [first, other], [0.0, 0.0], count=1
        )[0]
        for i in range(50)
    }
    assert chosen == {0, 1}
