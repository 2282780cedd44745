"""Two ranks of a prefill server: real in-flight queues, trees and pools; transfers of numpy."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from component.one_rank import one_rank
from sglang.srt.hardware_backend.cpu_standin import gpu_device_node


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """These build CPU pools under the stand-in, which is refused beside a GPU."""
    if gpu_device_node() is None:
        return
    for item in items:
        if "component/prefill_ranks" in str(item.path):
            item.add_marker(pytest.mark.skip(reason="the CPU stand-in is refused beside a GPU"))


@pytest.fixture(scope="session", autouse=True)
def _one_rank() -> Iterator[None]:
    """The process group of a server with one rank."""
    with one_rank():
        yield
