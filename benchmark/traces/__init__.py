"""Traces in the format that Mooncake published, for all benchmarks."""
