"""The simulated engine behind HTTP: its server, its API and its metrics page."""
