"""Block keys of simulated prompts, equal where prompts share a prefix."""

from __future__ import annotations

from collections.abc import Hashable, Sequence

from extproc.simulator.fleet.sim_request import KEY_TOKENS

#: Blocks of one stream; 16 M tokens.
_LONGEST = 1 << 20


class Streams:
    """Endless texts, each known by a name: keys of equal names and equal positions are equal.

    A conversation is one stream that is read further with every turn. A prompt that begins with a
    shared system prompt reads that stream first and its own from there on.
    """

    def __init__(self) -> None:
        self._bases: dict[Hashable, int] = {}

    def keys(self, name: Hashable, tokens: int) -> range:
        """Keys of the full blocks in the first `tokens` tokens of a stream."""
        base = self._bases.setdefault(name, (len(self._bases) + 1) * _LONGEST)
        return range(base, base + tokens // KEY_TOKENS)

    def joined(self, shared: Hashable, own: Hashable, *, first: int, tokens: int) -> Sequence[int]:
        """Keys of a text that reads another stream first.

        Args:
            shared: The stream it begins with.
            own: Its own stream.
            first: Tokens of `shared` it begins with; the block in which it changes is its own.
            tokens: Tokens of the whole.
        """
        keys = self.keys(own, tokens)
        common = self.keys(shared, min(first, tokens))
        return [*common, *keys[len(common) :]] if common else keys
