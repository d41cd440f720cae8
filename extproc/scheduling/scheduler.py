"""The profiles of a configuration, by name."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from difflib import get_close_matches
from typing import Final

from extproc.decision import Outcome
from extproc.endpoint import Candidate
from extproc.errors import ConfigError
from extproc.scheduling.plugins import Signal
from extproc.scheduling.profile import Profile
from extproc.scheduling.turn import Turn


class Scheduler:
    """The profiles of a configuration, by name.

    Args:
        profiles: Under different names.
        default: Name of the profile for requests that ask for none.

    Raises:
        ConfigError: Two profiles share a name, or the default is none of them.
    """

    def __init__(self, profiles: Iterable[Profile], *, default: str = "default") -> None:
        by_name: dict[str, Profile] = {}
        for profile in profiles:
            if profile.name in by_name:
                raise ConfigError(
                    "profiles",
                    wanted="different names",
                    found=f"{profile.name} twice",
                    fix="rename one of them",
                )
            by_name[profile.name] = profile
        if default not in by_name:
            near = get_close_matches(default, by_name, n=1, cutoff=0.0)
            raise ConfigError(
                "profiles",
                wanted=f"the default profile among {', '.join(by_name) or 'at least one'}",
                found=default,
                fix=f"did you mean {near[0]}?" if near else "name a profile",
            )
        self.profiles: Final[Mapping[str, Profile]] = by_name
        self.default: Final = by_name[default]

    @property
    def needs(self) -> frozenset[Signal]:
        """Every signal a plugin of any profile reads."""
        return frozenset().union(*(profile.needs for profile in self.profiles.values()))

    def run(
        self,
        turn: Turn,
        candidates: Sequence[Candidate],
        *,
        profile: str = "",
        count: int = 1,
        blocks: Sequence[int] = (),
    ) -> Outcome:
        """Choose with a profile; with the default one when the name is empty or unknown.

        Args:
            turn: The turn.
            candidates: Who is in play; may be empty.
            profile: A profile's name.
            count: How many endpoints to name at most.
            blocks: The prompt's chain, handed through to the decision.

        Returns:
            See `Profile.run`.
        """
        chosen = self.profiles.get(profile, self.default)
        return chosen.run(turn, candidates, count=count, blocks=blocks)
