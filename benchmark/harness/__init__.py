"""Servers, clients, loads and results for the demo, the benchmarks and the end-to-end tests."""
