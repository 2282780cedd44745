"""Servers, clients, loads and results of the demo, the benchmarks and the end-to-end tests."""
