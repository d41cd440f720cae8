"""Demonstrations: Envoy, extproc and simulated engines on loopback, and the traffic on them."""
