"""The transfer queue: a committed transfer makes its prompt available to everybody."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from typing_extensions import override

if TYPE_CHECKING:
    from sglang.srt.disaggregation.decode import DecodeTransferQueue
else:
    DecodeTransferQueue = object


class RadixTransferQueue(DecodeTransferQueue):
    """Puts the KV of finished transfers into the decode tree."""

    @override
    def pop_transferred(self, rids_to_check: list[str] | None = None) -> list[Any]:
        transferred: list[Any] = super().pop_transferred(rids_to_check)
        if getattr(self.tree_cache, "serves_decode", False):
            for req in transferred:
                self.tree_cache.adopt(req)
        return transferred
