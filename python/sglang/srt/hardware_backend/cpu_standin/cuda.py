"""torch without CUDA: the second refusal, and the CUDA calls that SGLang makes unconditionally."""

from __future__ import annotations

from typing import Any  # Any: modules that are edited, and their objects

from . import StandinRefused


def edit(torch: Any) -> None:
    """Refuse where torch sees a device; else make waiting for the device a no-op.

    SGLang synchronizes around the CPU copy of a retracted request's KV on every device, and says
    which streams use a tensor where speculation overlaps with scheduling.
    """
    if torch.cuda.is_available():
        raise StandinRefused("torch sees a CUDA device")

    def synchronize(device: object = None) -> None:
        """Wait for no device."""

    torch.cuda.synchronize = synchronize

    def record_stream(tensor: Any, stream: object) -> None:
        """One stream only: its memory is not used again before it is read."""

    torch.Tensor.record_stream = record_stream
