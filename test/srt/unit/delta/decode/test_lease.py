"""The prefix lease: one lock, given back or handed over exactly once."""

from __future__ import annotations

from collections import Counter
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from sglang.srt.disaggregation.delta.decode.prefix_tree import PrefixLease


class CountingTree:
    """A tree that only counts its locks."""

    device = "cpu"

    def __init__(self) -> None:
        self.root_node = object()
        self.locks: Counter[Any] = Counter()

    def inc_lock_ref(self, node: Any) -> None:
        self.locks[node] += 1

    def dec_lock_ref(self, node: Any) -> None:
        self.locks[node] -= 1
        assert self.locks[node] >= 0


INDICES = torch.tensor([4, 5, 6, 7])


@pytest.mark.hazard("lost-lock")
def test_release_is_idempotent() -> None:
    """Guards against a lock returned twice: pages in use would become evictable."""
    tree, node = CountingTree(), object()
    lease = PrefixLease(tree, node, INDICES)
    assert tree.locks[node] == 1 and lease.length == 4
    for _ in range(3):
        lease.release()
        assert tree.locks[node] == 0


def test_hand_over_keeps_the_lock() -> None:
    """Guards against the release in a ``finally`` taking the lock from the request that got it."""
    tree, node, req = CountingTree(), object(), SimpleNamespace()
    lease = PrefixLease(tree, node, INDICES)
    lease.hand_over(req)
    lease.release()
    assert tree.locks[node] == 1
    assert req.last_node is req.last_host_node is node
    assert req.prefix_indices is INDICES and req.cache_protected_len == 4


@pytest.mark.parametrize("first", ["release", "hand_over"])
def test_a_spent_lease_has_nothing_to_hand_over(first: str) -> None:
    """Guards against two owners of one lock."""
    lease = PrefixLease(CountingTree(), object(), INDICES)
    if first == "release":
        lease.release()
    else:
        lease.hand_over(SimpleNamespace())
    with pytest.raises(AssertionError):
        lease.hand_over(SimpleNamespace())


def test_each_lease_has_its_own_lock() -> None:
    """Guards against two requests with one prefix sharing one lock."""
    tree, node = CountingTree(), object()
    leases = [PrefixLease(tree, node, INDICES) for _ in range(3)]
    leases[1].release()
    assert tree.locks[node] == 2


def test_empty_lease() -> None:
    """Guards against a request without a prefix that ends with no node at all, or with a lock that
    is not symmetric."""
    tree, req = CountingTree(), SimpleNamespace()
    lease = PrefixLease.empty(tree)
    assert lease.length == 0 and lease.indices.dtype == torch.int64
    lease.hand_over(req)
    assert req.last_node is tree.root_node and req.cache_protected_len == 0
    assert tree.locks[tree.root_node] == 1
