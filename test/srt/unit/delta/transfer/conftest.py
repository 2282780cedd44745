"""A prefill rank of each backend."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest


@pytest.fixture(params=["nixl", "mooncake"])
def rank(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    from unit.delta.transfer.ranks import RANKS

    rank_ = RANKS[request.param](monkeypatch)
    yield rank_
    rank_.close()
