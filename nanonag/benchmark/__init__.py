"""Comparing speed and memory: measurements, peers, tables."""
