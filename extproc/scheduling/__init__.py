"""Policy over values: which of the candidates serves a request, and why.

Here live: `framework`, what a filter, scorer and picker are; the plugins themselves in `filters`,
`scorers` and `pickers`; `profile`, which runs Filter, Score and Pick; `registry`, the table of all
plugin kinds; `presets`, the profiles that need no configuration.

Not here: where candidates come from and what happens after the pick (dispatch), reading YAML
(config), counting (telemetry). The dispatcher drives this room with a turn and the candidates of
one pool snapshot. Nothing here waits or reads a clock; chance comes with the turn.

A new scorer is a file in `scorers`, a line in `registry` and a case file in the tests.
"""
