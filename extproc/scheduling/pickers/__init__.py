"""Pickers: choose the endpoint among scored candidates. One picker a module.

A picker sees the weighted totals and the candidates, and draws chance from the turn. Pickers know
neither filters nor scorers nor each other; a profile drives them.
"""
