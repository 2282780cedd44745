"""Mooncake: SGLang's backend with the delta protocol.

Only how bytes move is decided here: one synchronous worker a queue (``worker``; with SGLang's
staging buffer its own, ``staging``), what peers send to either side and what has arrived of a room
(``messages``), and the thin overrides of SGLang's classes with how long a chunk may take
(``manager``, ``endpoints``).
"""
