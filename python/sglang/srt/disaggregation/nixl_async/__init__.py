"""NIXL on top of the delta protocol.

``notifications``  the texts that ride on NIXL transfers, parsed and applied: pure
``announcements``  what decode servers send to prefill, read so that no message can do harm
``manager``        the thin override of SGLang's NIXL manager
``endpoints``      its transfer info, sender and receiver

Transfers are still posted on the prefill scheduler's thread, as in stock SGLang.
"""
