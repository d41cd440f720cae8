"""Demonstrations: Envoy, a picker and simulated engines on loopback, and the traffic on them."""
