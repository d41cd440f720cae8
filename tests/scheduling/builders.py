"""The builders of `extproc.testing`, where the tests of this folder look for them."""

from extproc.testing.builders import candidate, candidates, context, names

__all__ = ["candidate", "candidates", "context", "names"]
