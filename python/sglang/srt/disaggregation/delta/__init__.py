"""The disaggregation layer: a turn moves only the pages that decode lacks (sglang#19746).

Prefill and decode exchange prefixes, rooms that end early, and pages, over NIXL or Mooncake. What
both sides share lies here; what one of them does in ``prefill`` and ``decode``; what only a
transfer library needs in ``nixl`` and ``mooncake``.

A third transfer backend goes into a folder beside ``nixl``: a ``Backend`` of
``prefill/transfer_backend.py`` (post, ask for the state, release, complete), and thin overrides of
SGLang's manager, sender and receiver for it, as rows in ``patchset/table.py``.

``wire``            what our servers say beside SGLang's messages: frame, notes, control messages
``capability``      how decode learns that a prefill server understands the frame
``peer_messages``   reads and checks what peers send, for both backends
``pages``           arithmetic of pages and KV heads, the send cursor, the delta plan: pure
``sparse_index``    the index cache of sparse attention, which lies beside the KV
``address_pool``    threads for questions to servers, of which some hang
``rank_agreement``  what the ranks of one server agree on before a step, in one reduction
``unserved``        requests that a pair cannot serve, and grammars at which SGLang ends
``samples``         room numbers of parallel samples
``manager``         the thin overrides of SGLang's manager and bootstrap server
``metrics``         every counter, gauge and histogram, declared once; why rooms fail
``observability``   counters, durations of transfers, rate-limited log lines; what is best effort
``event_log``       one line for each step of a room, where it is on

``prefill``         rooms and their transfers on worker threads
``decode``          the radix cache: match, lock, admit, announce, commit
``nixl``, ``mooncake``
                    the backends
"""
