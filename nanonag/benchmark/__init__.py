"""Compares the speed and memory of models: workloads, measurements, peers, tables."""
