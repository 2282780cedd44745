"""The decode-side radix cache (``--disaggregation-decode-enable-radix-cache``, sglang#19746).

A decode server keeps finished KV in its radix tree; a new request matches and locks what the tree
holds of its prompt and moves only the rest. In the order of a request's life:

``scheduler``         start-up checks, aborts, one idle predicate, metrics and log fields
``record``            what is noted of a request (``req.delta``); who may share KV; why it waits
``prealloc_queue``    a step: who is admitted, resumed, or leaves without pages
``waiting``           what is said of requests that wait, and how they leave without pages
``handshakes``        what is asked of its prefill server, in the background
``candidates``        the first requests in line, their leases, and what the ranks agree on
``admission``         whether a request fits, and the slots for it: how long it may become and wait
``claims``            what running and admitted requests hold and may still need, as sums
``speculation``       what a draft model beside the target changes
``adapters``          how many LoRA adapters a batch has room for
``prefix_tree``       one match and one lock; the radix tree; the prebuilt batch
``retraction``        the KV of retracted requests comes back, but for what the tree still shares
``turn_choice``       where a turn's new tokens are computed: here or by prefill
``itl``               how long running requests wait for tokens, and what of it a chunk may take
``local_turns``       those that are computed locally, in chunks between decode steps
``without_prefill``   those whose prefill server is lost
``local_chunk``       one chunk as SGLang's batch
``local_scheduler``   SGLang's loop around them
``turn_metrics``      where turns were computed and why, and how long that took
``receiver``          decode's end of a room: sends the announcement
``transfer_queue``    announcements, metadata slots, and committed KV entering the tree
``deferred_free``     pages of transfers that ended early, kept until prefill cannot write to them
``prefill_servers``   who they are, whether they live, what they stopped
``heartbeat``         when one counts as lost
``flush``             flushes, weight updates and release of memory while pages are owned
``invariants``        what must hold of pool and tree at any time
"""
