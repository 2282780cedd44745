"""Benchmarks and the demo: one folder a question, each a thin script over ``benchmark.harness``."""
