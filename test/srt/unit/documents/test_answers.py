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
    yield f"move {pausing['ours']:.2f} GB/s, or {pausing['radix']:.2f} with decode's radix cache"
    yield f"stock {pausing['stock']:.2f}, the bare library {pausing['bare']:.2f}"
    shares = [pausing[arm] / pausing["bare"] for arm in ("ours", "radix")]
    yield "that is {:.2f} and {:.2f} of the bare library's".format(*shares)
    yield f"{spinning['ours']:.2f} GB/s instead of {spinning['stock']:.2f}"


def _buffer_only() -> Iterator[str]:
    for folder, trace in (("", "conversation"), ("unshared/", "unshared"), ("agents/", "agents")):
        arms = _read(f"hicache_buffer_only/results/{folder}summary.json")["traces"][trace]["arms"]
        both = [arms[arm] for arm in ("cache", "buffer_only")]
        found = [
            100 * sum(a["hits"][t] for t in ("device", "host", "storage")) / a["hits"]["prompt"]
            for a in both
        ]
        yield "{:.{d}f} / {:.{d}f} %".format(*found, d=0 if trace == "unshared" else 1)
        yield "{:.0f} / {:.0f} ms".format(*(1e3 * a["times"]["ttft_s"]["mean"] for a in both))


ANSWERS = {
    "kv_transfer/README.md": _transfer,
    "hicache_buffer_only/README.md": _buffer_only,
}


@pytest.mark.parametrize("page", ANSWERS)
def test_answers_are_measured(page: str) -> None:
    """Guards against a page whose first paragraph keeps the numbers of an earlier run, and against
    numbers that were rounded twice."""
    text = " ".join((BENCHMARK / page).read_text().split())
    assert [told for told in ANSWERS[page]() if told not in text] == []
