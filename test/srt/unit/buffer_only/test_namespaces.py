"""Keys of pages: one namespace never reads another's, and the empty one keeps SGLang's keys."""

from __future__ import annotations

import hashlib

from hypothesis import given
from hypothesis import strategies as st

from sglang.srt.mem_cache.buffer_only.namespaces import store_keys

HASHES = [hashlib.sha256(bytes([number])).hexdigest() for number in range(4)]


def test_without_a_namespace_the_keys_are_sglangs():
    """A store that other servers have filled stays useful."""
    assert store_keys(HASHES, None) == store_keys(HASHES, "") == HASHES


@given(st.text(min_size=1), st.text(min_size=1))
def test_namespaces_are_disjoint(one: str, other: str):
    """Tenants, adapters and salts with the same tokens."""
    mine, theirs = set(store_keys(HASHES, one)), set(store_keys(HASHES, other))
    assert len(mine) == len(HASHES) and not mine & set(HASHES)
    assert mine == theirs if one == other else not mine & theirs


def test_keys_do_not_depend_on_who_asks():
    """Another process, and another cut into nodes, must find what this one wrote."""
    keys = store_keys(HASHES, "salt")
    assert keys == store_keys(HASHES[:1], "salt") + store_keys(HASHES[1:], "salt")
