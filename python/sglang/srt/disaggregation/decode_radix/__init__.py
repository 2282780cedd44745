"""The decode-side radix cache (``--disaggregation-decode-enable-radix-cache``, sglang#19746).

A decode server keeps finished KV in its radix tree; a new request matches and locks what the tree
holds of its prompt and moves only the rest. In the order of a request's life:

``tokenizer``    requests with ``input_embeds`` are refused by the name of the flag
``handshakes``   requests whose prefill rank is not connected yet
``eligibility``  which requests may share a prefix at all: pure
``lease``        one match and one lock, released exactly once
``inflight``     prompts on their way here, so that a burst with one prefix moves it once
``admission``    the token budget: what running requests can still grow into: pure
``growth``       the sum of what running requests can still grow into, a step at a time: pure
``claims``       what admitted requests hold and may still need, as sums with one owner
``budget``       whether a request fits; evicts and allocates
``agreement``    what the ranks of one server agree on before a step, in one reduction
``candidates``   the first requests in line, with their leases
``plan``         who of them would get in on this rank alone; who was stopped is not matched again
``step``         leases, agreement, trimmed leases: the start of every step
``prealloc``     the prealloc queue: who is admitted, resumed, or leaves without pages
``announce``     row, destination pages, announcement
``step_writes``  announcements wait for a step that may still use their pages
``waiting``      how long a request may wait for memory, and what is said meanwhile
``giveup``       one way out for a request without pages
``metadata``     metadata slots: when a room's metadata have landed
``transfer``     the transfer queue: committed KV enters the tree
``quarantine``   pages of transfers that ended early, held until prefill cannot write to them
``prebuilt``     the prebuilt batch: continues after the lease's prefix
``tree``         the radix tree as a decode server uses it
``resume``       retracted requests: only private pages are copied back
``aborts``       what SGLang's way of aborting a request leaves undone
``flush``        flushes, weight updates and release of memory while pages are owned
``scheduler``    start-up checks, one idle predicate, metrics and log fields
``metrics``      gauges and counted refusals
``invariants``   what must hold of pool and tree at any time
"""
