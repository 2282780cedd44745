"""Faster later turns and fuller servers on SGLang 0.5.23's own transfer.

That release has the decode radix cache, delta transfer and deferred release itself. Each part here
wraps a few of its methods, is off by default, and is switched on by a variable (``attach``).
"""
