"""Faster later turns and full servers on SGLang 0.5.23's own transfer.

That release has the decode radix cache, delta transfer and deferred release itself. Each part here
wraps a few methods of SGLang, is off by default, and is switched on by a variable (``attach``).
"""
