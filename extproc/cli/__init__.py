"""Commands.

What lives here: argument parsing and printing, and the loopback stack the demo and the tests run.
What must not: anything a server or a simulator needs to run. Who drives it: people, Makefile, CI.
"""
