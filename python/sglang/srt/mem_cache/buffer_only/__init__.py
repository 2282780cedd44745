"""``--hicache-host-memory-mode buffer_only``: host memory as a staging buffer before the store.

KV goes device -> stage -> store (backup) and store -> stage -> device (prefetch, load back); no
node of the tree has a host copy. What a node has in the store is noted on it, and a node that
leaves the device leaves the tree.
"""
