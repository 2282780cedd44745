"""NIXL on top of the delta protocol and the transfer workers."""
