"""The decode-side radix cache (``--disaggregation-decode-enable-radix-cache``, sglang#19746).

A decode server keeps finished KV in its radix tree; a new request matches and locks what the tree
holds of its prompt and moves only the rest, or computes it (local turns). ``docs/request.md`` goes
with a request from file to file.
"""
