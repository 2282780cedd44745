"""Traces of requests: read, generated, described, and sampled so that they share as much."""
