"""The disaggregation layer: a turn moves only the pages that decode lacks (sglang#19746).

Prefill and decode exchange prefixes, rooms that end early, and pages, over NIXL or Mooncake. What
both sides share lies here; what one of them does in ``prefill`` and ``decode``; what only a
transfer library needs in ``nixl`` and ``mooncake``.

``config``          deadlines, queues, threads, windows: what the environment says
``wire``            the frame that carries ``decode_prefix_len``; the notes that complete a room
``control``         what the sides tell each other beside a transfer, and the sockets that carry it
``capability``      how decode learns that a prefill server understands the frame
``peer_messages``   reads what peers send, so that no message can do harm
``pages``           arithmetic of pages and KV heads, the send cursor, the delta plan: pure
``rank_agreement``  what the ranks of one server agree on before a step, in one reduction
``manager``         the thin overrides of SGLang's manager and bootstrap server
``metrics``         counters and histograms, for Prometheus and for tests; why rooms fail
``logs``            rate-limited and best-effort logs
``event_log``       an optional event log, a JSON line for each event

``prefill``         rooms and their transfers on worker threads
``decode``          the radix cache: match, lock, admit, announce, commit
``nixl``, ``mooncake``
                    the backends
"""
