"""Filters: remove endpoints that must not serve. One concept a module.

A filter answers a yes-or-no question for each candidate and keeps the order. What is a matter of
degree is a scorer. Filters know neither scorers nor pickers nor each other; a profile drives them.
"""
