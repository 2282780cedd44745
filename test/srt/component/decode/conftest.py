"""Real upstream queues, pools, tree and batches on the CPU; no model, no server."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from component.one_rank import one_rank
from sglang.srt.disaggregation.delta.decode import request
from sglang.srt.disaggregation.delta.decode.tree import DecodeRadixTree


@pytest.fixture(scope="session", autouse=True)
def _one_rank() -> Iterator[None]:
    """The process group of a server with one rank."""
    with one_rank():
        yield


@pytest.fixture(autouse=True)
def _steps_are_in_the_table(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fail the test at an invalid stage transition, which a server only logs."""

    def raises(text: str, *values: Any) -> None:
        raise AssertionError(text % values)

    monkeypatch.setattr(request.logger, "error", raises)


@pytest.fixture
def matches(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Lengths of all matched prompts."""
    found: list[int] = []
    original = DecodeRadixTree.match_prefix

    def counted(tree: Any, params: Any) -> Any:
        found.append(len(params.key.token_ids))
        return original(tree, params)

    monkeypatch.setattr(DecodeRadixTree, "match_prefix", counted)
    return found
