"""Scorers: suitability of each candidate, 0 to 1, higher is better. One concept a module.

A scorer judges one thing; how much that thing matters is the profile's business. What is unknown
scores like the mean of what is known. Scorers know neither filters nor pickers nor each other; a
profile drives them.
"""
