"""Two ranks of a prefill server: real in-flight queues, trees and pools, with transfers in
numpy."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from component.one_rank import one_rank


@pytest.fixture(scope="session", autouse=True)
def _one_rank() -> Iterator[None]:
    """The process group of a server with one rank."""
    with one_rank():
        yield
