"""Pickers: choose the endpoint among scored candidates.

A picker sees the weighted totals and the candidates, and draws chance from the context. Pickers know
neither filters nor scorers nor each other; a profile drives them.
"""
