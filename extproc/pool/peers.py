"""What other pickers do, as far as the engines' pages show it.

Pickers of the same fleet do not talk. Each knows from scrapes how much of the engines' work is not
its own, and how much of all prompts the engines find in their caches.
"""

from __future__ import annotations

from extproc.endpoint import Load

#: Weight of a scrape in the share of others. At 0.02 a fleet of eight shows a picker that came or
#: went within some two seconds.
_ALPHA = 0.02

#: Weight of a scrape in the hit ratio. Slow, because caches that are still cold say nothing of how
#: well pickers agree.
_ALPHA_HITS = 0.002

#: Hit ratio believed before anything was seen.
_HIT_RATIO = 0.5


class Peers:
    """The work of others. Mutable; the fleet owns it.

    Attributes:
        hit_ratio: Share of all prompt tokens that engines find in their caches, 0..1.
    """

    __slots__ = ("_others", "_ours", "hit_ratio")

    def __init__(self) -> None:
        self._ours = 0.0
        self._others = 0.0
        self.hit_ratio = _HIT_RATIO

    @property
    def share(self) -> float:
        """Share of the requests in the engines that others sent, 0..1."""
        together = self._ours + self._others
        return self._others / together if together else 0.0

    def saw(self, own: float, foreign: float, *, before: Load, after: Load) -> None:
        """A scrape was taken in.

        Args:
            own: Our requests there (count).
            foreign: Those of others.
            before: The load until then.
            after: The load from now on.
        """
        self._ours += _ALPHA * (own - self._ours)
        self._others += _ALPHA * (foreign - self._others)
        asked = (after.prefix_queries or 0.0) - (before.prefix_queries or 0.0)
        found = (after.prefix_hits or 0.0) - (before.prefix_hits or 0.0)
        if before.prefix_queries is not None and asked > 0.0 <= found <= asked:
            self.hit_ratio += _ALPHA_HITS * (found / asked - self.hit_ratio)
