"""Keeps what recomputed stages need for their second forward: inputs, and selectively the results of products."""
