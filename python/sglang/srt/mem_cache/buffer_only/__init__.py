"""``--hicache-host-memory-mode buffer_only``: host memory as a transient stage before the store."""
