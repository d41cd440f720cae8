"""Commands.

What lives here: the command line, argument parsing and printing. The commands of the simulator and
of the demo live with them, and are imported when they are run. What must not: anything that a server
or a simulator needs to run. Who drives it: people, Makefile, CI.
"""
