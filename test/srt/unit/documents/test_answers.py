"""The answer at the head of a benchmark's page, against its committed results."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest

from unit.documents.pages import ROOT

BENCHMARK = ROOT / "benchmark"


def _read(path: str) -> Any:
    return json.loads((BENCHMARK / path).read_text())


def _transfer() -> Iterator[str]:
    pausing, spinning = (
        {each["arm"]: each["gb_per_s"] for each in _read(f"kv_transfer/results/{file}")["results"]}
        for file in ("fleet-nixl.json", "spinning/fleet-nixl.json")
    )
    yield f"move {pausing['ours']:.2f} GB/s, or {pausing['radix']:.2f} GB/s with decode's radix"
    yield f"Stock moves {pausing['stock']:.2f} GB/s, and the bare library {pausing['bare']:.2f}"
    times = [pausing[arm] / pausing["stock"] for arm in ("ours", "radix")]
    yield "({:.2f} times stock's, and {:.2f} times with decode's radix cache)".format(*times)
    yield f"this package moves {spinning['ours']:.2f} GB/s and stock {spinning['stock']:.2f}"
    times = [spinning[arm] / spinning["stock"] for arm in ("ours", "radix")]
    yield "{:.2f} of stock's throughput, and {:.2f} with decode's radix cache".format(*times)


ANSWERS = {
    "kv_transfer/README.md": _transfer,
}


@pytest.mark.parametrize("page", ANSWERS)
def test_answers_are_measured(page: str) -> None:
    """Guards against a page whose first paragraph keeps the numbers of an earlier run, and against
    numbers that were rounded twice."""
    text = " ".join((BENCHMARK / page).read_text().split())
    assert [told for told in ANSWERS[page]() if told not in text] == []
