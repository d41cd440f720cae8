"""Near ties go where hashes say, in proportion."""

from collections import Counter

import pytest

from extproc.scheduling.pickers import Rendezvous
from extproc.testing.builders import candidate, context


def picks(in_flight, *, others, matched=(0, 0, 0)):
    """Endpoints of a thousand conversations that cost the same everywhere."""
    store = [
        candidate(f"e{n}", in_flight=count, matched_tokens=tokens)
        for n, (count, tokens) in enumerate(zip(in_flight, matched, strict=True))
    ]
    picks_by_position = Counter()
    for number in range(1000):
        turn = context(session=f"talk {number}", foreign_share=others)
        picks_by_position[Rendezvous().pick(turn, store, [-1.0, -1.01, -1.02], count=1)[0]] += 1
    return [picks_by_position[n] for n in range(3)]


def test_overloaded_equal_candidates_are_skipped_beside_peers():
    """With 4 on average, an equal takes no more than 6 of ours."""
    first, second, third = picks([4, 6, 2], others=0.5)
    assert min(first, second, third) > 250
    first, second, third = picks([3, 7, 2], others=0.5)
    assert (second, first + third) == (0, 1000)


def test_the_best_candidate_is_never_skipped():
    """However many it has."""
    first, second, third = picks([30, 32, 1], others=0.5)
    assert second == 0
    assert min(first, third) > 400


@pytest.mark.parametrize(
    "facts", [{"others": 0.0}, {"others": 0.5, "matched": (0, 64, 0)}], ids=["alone", "cached"]
)
def test_equal_candidates_are_kept_without_peers_or_with_cached_prompts(facts):
    """Without peers, and with cached prompts, equal candidates get similar numbers of requests."""
    assert min(picks([3, 9, 2], **facts)) > 250
