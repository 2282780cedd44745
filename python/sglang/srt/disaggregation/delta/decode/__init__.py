"""The decode-side radix cache (``--disaggregation-decode-enable-radix-cache``, sglang#19746).

A decode server keeps finished KV in its radix tree; a new request matches and locks what the tree
holds of its prompt and moves only the rest. In the order of a request's life:

``eligibility``       which requests may share a prefix at all
``handshakes``        requests whose prefill rank is not connected yet; row, pages and announcement
``waiting``           how long a request may wait, what for, and what is said meanwhile
``candidates``        the first requests in line, with their leases
``claims``            what running and admitted requests hold and may still need, as sums
``admission``         whether a request fits; who would get in on this rank alone
``step``              leases, agreement, trimmed leases: the start of every step
``prealloc_queue``    the prealloc queue: who is admitted, resumed, or leaves without pages
``receiver``          decode's end of a room: announces the prefix
``transfer_queue``    metadata slots, and committed KV entering the tree
``deferred_free``     pages of transfers that ended early, held until prefill cannot write to them
``prebuilt``          the prebuilt batch, and retracted requests that come back
``prefix_tree``       one match and one lock; the radix tree as a decode server uses it
``flush``             flushes, weight updates and release of memory while pages are owned
``scheduler``         start-up checks, one idle predicate, aborts, metrics and log fields
``invariants``        what must hold of pool and tree at any time
``prefill_servers``   who they are, whether they live, what they stopped
``prefill_connections``
                      what is asked of them in the background, and whether they are alive
"""
