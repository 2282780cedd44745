"""SGLang's host pools and storage backends on CPU memory."""

from __future__ import annotations

import pytest

from sglang.srt.hardware_backend.cpu_standin import gpu_device_node


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The host pools are made under the stand-in, which is refused beside a GPU."""
    if gpu_device_node() is None:
        return
    for item in items:
        if "component/store_parts" in str(item.path):
            item.add_marker(pytest.mark.skip(reason="the CPU stand-in is refused beside a GPU"))
