"""What a prefill and a decode server share to move only the pages that decode lacks (sglang#19746).

``pages``       page arithmetic, the send cursor and the delta plan: pure functions
``wire``        the versioned frame that carries ``decode_prefix_len`` from decode to prefill
``capability``  how decode learns that a prefill server understands that frame
``common``      the thin overrides of SGLang's common sender, receiver, manager and bootstrap server
``prefill``     the thin override of the prefill scheduler's chunk sender
``stats``       counters beside the connector, for Prometheus and for tests
``events``      an optional event log: one JSON line for each admission and each send
"""
