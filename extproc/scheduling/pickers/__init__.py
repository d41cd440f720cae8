"""Pickers: which candidate it is in the end. One picker a module.

A picker sees the weighted totals and the candidates, and draws chance from the turn. Pickers know
neither filters nor scorers nor each other; a profile drives them.
"""
