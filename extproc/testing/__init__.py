"""For people who write plugins: builders and the contract every plugin keeps.

Here live: `builders`, turns and candidates that name only the facts that matter; `contract`, one check
for each role, which the tests of the built-in plugins and `extproc plugin test` run as well.

Not here: test frameworks, files, clocks, anything a server runs. Tests and the command line drive
this room; nothing below may import it, so it stands beside the other ways to run the core outside
of a server (sim). Its names are public: they change with a note in the changelog.
"""
