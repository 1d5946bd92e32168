"""Benchmarks: run by hand, each prints one JSON object."""
