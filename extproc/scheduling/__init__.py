"""Scheduling: plugins and profiles that choose among candidates, and record the reasons.

`framework` has the plugin interfaces; the plugins are in `filters`, `scorers`, `costs` and
`pickers`, and those of several roles or of other filters beside them; `profile` runs Filter, Score
and Pick; `registry` is the table of all plugin kinds; `presets` are the profiles that need no
configuration.

Not here: where candidates come from and what happens after the pick (routing), reading YAML
(config), counting (telemetry). `routing.scheduler` calls a profile with a context and the candidates
of one pool snapshot. Nothing here waits or reads a clock; chance comes with the context.

A new scorer is a class in a module of `scorers`, or beside the filters of its concept, a line in `registry` and a case file in the
tests.
"""
