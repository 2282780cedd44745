"""The decode-side radix cache (``--disaggregation-decode-enable-radix-cache``, sglang#19746).

A decode server keeps finished KV in its radix tree; a new request matches and locks what the tree
holds of its prompt and moves only the rest. In the order of a request's life:

``eligibility``  which requests may share a prefix at all: pure
``lease``        one match and one lock, released exactly once
``inflight``     prompts on their way here, so that a burst with one prefix moves it once
``admission``    the token budget: what running requests can still grow into: pure
``prealloc``     the prealloc queue: lease, budget, delta pages, announcement
``transfer``     the transfer queue: committed KV enters the tree
``quarantine``   pages of transfers that ended early, held until prefill cannot write to them
``prebuilt``     the prebuilt batch: continues after the lease's prefix
``tree``         the radix tree as a decode server uses it
``resume``       retracted requests: only private pages are copied back
``ranks``        agreement between the ranks of one server
``scheduler``    start-up checks, one idle predicate, metrics and log fields
``invariants``   what must hold of pool and tree at any time
"""
