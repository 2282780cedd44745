"""Copies between device and stage, on the streams of SGLang's controller."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

#: SGLang's layer counter has three sets of events; one may belong to the batch that runs now.
LOADS = 2

Pair = tuple["torch.Tensor", "torch.Tensor"]


def slots_of(pages: Sequence[int], page_size: int) -> torch.Tensor:
    """Token slots of the staging pages ``pages``, in order: int64, ``(len(pages) *
    page_size,)``."""
    import torch

    starts = torch.tensor(list(pages), dtype=torch.int64) * page_size
    return (starts[:, None] + torch.arange(page_size, dtype=torch.int64)).flatten()


class Copies:
    """Launches of one direction that have not been seen to end, oldest first."""

    def __init__(self) -> None:
        self._launches: deque[tuple[Any, tuple[Any, ...]]] = deque()

    def __len__(self) -> int:
        return len(self._launches)

    @property
    def owners(self) -> list[Any]:
        """What is being copied, in order of launch."""
        return [owner for _, owners in self._launches for owner in owners]

    def add(self, finish_event: Any, owners: Iterable[Any]) -> None:
        """A copy for ``owners`` was launched, and has ended when ``finish_event`` says so."""
        self._launches.append((finish_event, tuple(owners)))

    def ended(self) -> int:
        """Launches that have ended on this rank, up to the first that has not."""
        count = 0
        for finish_event, _ in self._launches:
            if not finish_event.query():
                break
            count += 1
        return count

    def pop(self, launches: int) -> list[Any]:
        """The owners of the first ``launches`` launches, which have ended."""
        owners: list[Any] = []
        for _ in range(launches):
            finish_event, some = self._launches.popleft()
            finish_event.synchronize()
            owners.extend(some)
        return owners


class Copier:
    """Device-to-stage and stage-to-device copies, one launch for all of a step.

    Args:
        controller: SGLang's ``HiCacheController``.
        forward_stream: gives the stream of the forward passes, or None. What a request has just
            computed is complete only when that stream gets there; and a batch that is still running
            may write to a slot that a request, finished meanwhile, has given back.
    """

    def __init__(self, controller: Any, forward_stream: Callable[[], Any]) -> None:
        self._controller = controller
        self._forward_stream = forward_stream

    def to_stage(self, pairs: Sequence[Pair]) -> Any:
        """Launch a copy of ``(host slots, device slots)`` pairs; its finish event."""
        controller = self._controller
        self._after_forward(controller.write_stream)
        controller.write_queue.extend(self._operations(pairs))
        controller.start_writing()
        return controller.ack_write_queue.pop().finish_event

    def to_device(self, pairs: Sequence[Pair]) -> tuple[Any, int]:
        """The same to the device, layer by layer; finish event and the batch's consumer index."""
        controller = self._controller
        self._after_forward(controller.load_stream)
        controller.load_queue.extend(self._operations(pairs))
        consumer_index: int = controller.start_loading()
        return controller.ack_load_queue.pop().finish_event, consumer_index

    def _after_forward(self, stream: Any) -> None:
        forward = self._forward_stream()
        if forward is not None:
            stream.wait_stream(forward)

    @staticmethod
    def _operations(pairs: Sequence[Pair]) -> list[Any]:
        from sglang.srt.managers.cache_controller import CacheOperation

        return [CacheOperation(host, device, node_id=-1) for host, device in pairs]
