"""Arena: random scenarios, and the default strategy beside published ones on each of them."""
