"""Random lengths: tokens of prompts and answers, turns of conversations, pauses."""

from __future__ import annotations

import math
import random
from typing import Annotated, Literal

import msgspec

Count = Annotated[float, msgspec.Meta(ge=0)]


class Lengths(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A distribution of lengths.

    Attributes:
        mean: Of the distribution before it is cut to its bounds. No default: it says what the
            length is.
        deviation: Standard deviation; 0 always gives the mean. For `exponential` it is the mean
            above `lowest`, whatever is said here.
        shape: `normal`, `lognormal` (long tail, as real prompts have) or `exponential`. Normal,
            because load generators (llmperf) draw from it.
        lowest: Smallest value; smaller draws become it. 1: empty prompts do not exist.
        highest: Largest value; larger draws become it. None: no bound.
    """

    mean: Count
    deviation: Count = 0.0
    shape: Literal["normal", "lognormal", "exponential"] = "normal"
    lowest: Count = 1.0
    highest: Count | None = None

    def draw(self, rng: random.Random) -> float:
        """One value."""
        if self.shape == "exponential":
            value = self.lowest + rng.expovariate(1.0) * max(0.0, self.mean - self.lowest)
        elif not self.deviation or not self.mean:
            value = self.mean
        elif self.shape == "normal":
            value = rng.gauss(self.mean, self.deviation)
        else:
            spread = math.log1p((self.deviation / self.mean) ** 2)
            value = rng.lognormvariate(math.log(self.mean) - spread / 2, math.sqrt(spread))
        value = max(value, self.lowest)
        return value if self.highest is None else min(value, self.highest)

    def integer(self, rng: random.Random) -> int:
        """One value, rounded; at least 1."""
        return max(1, round(self.draw(rng)))
