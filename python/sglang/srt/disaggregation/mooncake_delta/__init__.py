"""Mooncake: SGLang's backend with the delta protocol.

Only how bytes move is decided here: one synchronous worker a queue (``worker``), what peers send to
either side (``announcements``, ``statuses``), and the thin overrides of SGLang's classes
(``manager``, ``endpoints``).
"""
