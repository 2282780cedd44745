"""NIXL with real agents, on CPU memory."""

from __future__ import annotations

import pytest

from sglang.srt.hardware_backend.cpu_standin import gpu_device_node


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The agents describe CPU memory as VRAM, which needs the stand-in."""
    if gpu_device_node() is None:
        return
    for item in items:
        if "component/nixl" in str(item.path):
            item.add_marker(pytest.mark.skip(reason="the CPU stand-in is refused beside a GPU"))
