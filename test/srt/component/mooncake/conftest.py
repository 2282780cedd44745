"""Mooncake with real engines, on CPU memory."""

from __future__ import annotations

import pytest

from sglang.srt.hardware_backend.cpu_standin import gpu_device_node


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """SGLang's modules are imported without a GPU driver, which needs the stand-in."""
    if gpu_device_node() is None:
        return
    for item in items:
        if "component/mooncake" in str(item.path):
            item.add_marker(pytest.mark.skip(reason="the CPU stand-in is refused beside a GPU"))
