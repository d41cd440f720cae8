"""The builders of `extproc.testing`, where the tests of this folder look for them."""

from extproc.testing.builders import candidate, candidates, names, turn

__all__ = ["candidate", "candidates", "names", "turn"]
