"""Scheduling: plugins and profiles that choose among candidates, and record the reasons.

Here live: `framework`, the plugin interfaces; the plugins themselves in `filters`,
`scorers` and `pickers`; `profile`, which runs Filter, Score and Pick; `registry`, the table of all
plugin kinds; `presets`, the profiles that need no configuration.

Not here: where candidates come from and what happens after the pick (routing), reading YAML
(config), counting (telemetry). `routing.scheduler` calls a profile with a context and the candidates
of one pool snapshot. Nothing here waits or reads a clock; chance comes with the context.

A new scorer is a file in `scorers`, a line in `registry` and a case file in the tests.
"""
