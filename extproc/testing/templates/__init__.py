"""Files to start a plugin from, one per role; `extproc plugin template ROLE` prints them.

They are complete plugins that keep the contract; tests run each of them. No module imports them.
"""
