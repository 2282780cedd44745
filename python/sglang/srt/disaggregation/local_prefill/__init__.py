"""Local prefill on a decode server: its choice of turns, and time and size of their chunks.

Arithmetic without SGLang, for both releases: ``delta.decode`` and ``lead`` are its adapters.
"""
