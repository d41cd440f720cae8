"""From files and flags to running parts.

Here live: `settings`, the frozen sections with their units and defaults; `scheduling_schema`, the section
that says how endpoints are chosen; `constraints`, ranges of fields; `validation`, plain trees to structs
with errors that name the place; `loader`, files and flags to settings; `lint`, settings that are
allowed and probably not meant; `profile_builder`, a profile as either grammar wrote it; `profiles`, a name
or an outline to a scheduling profile; `plugin_loader`, files and packages of others to kinds that
profiles may name; `factory`, the one place that builds the parts of a picker from settings.

Not here: sockets, tasks, clocks, command lines. The command line drives this room; the composition
root of the server and the simulator take what the factory built.
"""
