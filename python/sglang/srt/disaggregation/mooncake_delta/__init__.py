"""Mooncake: SGLang's backend with the delta protocol.

Only how bytes move is decided here: one synchronous worker a queue (``worker``; with SGLang's
staging buffer its own, ``staging``), how long a chunk may take (``chunk_deadlines``), what peers
send to either side (``announcements``, ``statuses``), what has arrived of a room (``arrivals``),
and the thin overrides of SGLang's classes (``manager``, ``endpoints``).
"""
