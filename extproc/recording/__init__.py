"""Recordings of decisions: their rows, how a picker writes them, and how tools read them.

- `rows`: the lines of a recording; `parquet`: the same as a table.
- `recorder`: decisions of a running picker as lines, in bounded memory, and files of bounded size.
- `reader`: lines back into decisions with the candidates that the scheduler saw.

A recording has hashes in place of every text of a client but names of models. It holds what the
scheduler saw, so a decision can be made again, and when requests came and ended, so that a fleet can
be simulated.
"""
