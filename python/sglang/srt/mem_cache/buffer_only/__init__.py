"""``--hicache-host-memory-mode buffer_only``: host memory as a staging buffer before the store.

KV moves device -> staging buffer -> store (backup) and store -> staging buffer -> device (prefetch,
load back). No tree node has a host copy: each node records how much of it the store has, and a node
evicted from the device leaves the tree.
"""
