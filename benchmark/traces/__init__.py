"""Traces of requests: reading, generation, description, and sampling that keeps the sharing."""
