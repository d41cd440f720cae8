"""From files and flags to running parts.

Here live: `settings`, the frozen sections with their units and defaults; `grammar`, the section
that says how endpoints are chosen; `bounds`, ranges of fields; `strict`, plain trees to structs
with errors that name the place; `load`, files and flags to settings; `advice`, settings that are
allowed and probably not meant; `outline`, a profile as either grammar wrote it; `profiles`, a name
or an outline to a scheduling profile; `extensions`, files and packages of others to kinds that
profiles may name; `factory`, the one place that builds the parts of a picker from settings.

Not here: sockets, tasks, clocks, command lines. The command line drives this room; the composition
root of the server and the simulator take what the factory built.
"""
