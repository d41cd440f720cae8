"""Cost models: what a request costs on each candidate, in one unit. One model a module.

A cost model takes the place of the scorers: it has no weights, because its terms are of one unit.
Costs know neither filters nor scorers nor pickers nor each other; a profile drives them.
"""
