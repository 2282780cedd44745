"""The real HiRadixCache, controller and pools on the CPU; and a store in this process."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from unittest import mock

import pytest

from component.buffer_only.cache import Cache
from component.buffer_only.checks import end
from component.one_rank import one_rank
from cpu_standin import gpu_device_node
from sglang.srt.mem_cache import memory_pool_host


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip these tests beside a GPU, where the CPU stand-in of their pools is refused."""
    if gpu_device_node() is None:
        return
    for item in items:
        if "component/buffer_only" in str(item.path):
            item.add_marker(pytest.mark.skip(reason="the CPU stand-in is refused beside a GPU"))


@pytest.fixture(scope="session", autouse=True)
def _one_rank() -> Iterator[None]:
    """The process group of a server with one rank, on a machine that seems to have enough memory:
    SGLang refuses host pools, however small, with less than ten gigabytes free."""
    memory = SimpleNamespace(virtual_memory=lambda: SimpleNamespace(available=1 << 40))
    with one_rank(), mock.patch.object(memory_pool_host, "psutil", memory):
        yield


@pytest.fixture(autouse=True)
def _all_end_idle() -> Iterator[None]:
    """Check after each test that its caches are idle once their requests are gone."""
    Cache.instances.clear()
    yield
    for cache in list(Cache.instances):
        end(cache) if isinstance(cache, Cache) else cache.end()
