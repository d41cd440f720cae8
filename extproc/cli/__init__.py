"""Commands of `extproc`: argument parsing and printing.

The commands of the simulator and of the demo are in their packages, and are imported when they run.
Nothing that a server or a simulator needs belongs here.
"""
