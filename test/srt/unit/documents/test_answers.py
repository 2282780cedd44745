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


def _interval(of: list[float], digits: int = 1) -> str:
    value, low, high = (f"{x:.{digits}f}" for x in of)
    return f"{value} [{low}, {high}]"


def _worth() -> Iterator[str]:
    few, many = (
        arms for arms in _read("agentic/studies/results/worth/summary.json")["loads"].values()
    )
    for arm in ("pd-stock", "pd-radix"):
        ratios = (_interval(arms[arm]["of_first_arm"]["e2e"]["mean"]) for arms in (few, many))
        yield " and ".join(ratios)


def _agentic() -> Iterator[str]:
    yield from _worth()
    loads = _read("agentic/studies/results/worth/summary.json")["loads"].values()
    ttft = (_interval(arms["pd-radix"]["of_first_arm"]["ttft"]["mean"]) for arms in loads)
    yield " and ".join(ttft)


def _studies() -> Iterator[str]:
    yield from _agentic()
    arms = _read("agentic/studies/results/prefill_events/summary.json")["loads"]["16"]
    base, radix = (arms[arm]["prefill_events"] for arm in ("aggregated", "pd-radix"))
    yield f"{_interval(base['lost'], 2)} s"
    yield f"{_interval(radix['lost'], 2)} s"
    paid = 1e3 * (radix["ttft"][0] - base["ttft"][0])
    yield f"{1e3 * (base['lost'][0] - radix['lost'][0]):.0f} / {paid:.0f} ms"
    arms = _read("agentic/studies/results/linear_lmetric/summary.json")["loads"]["24"]
    hits = [
        f"{100 * arms[arm]['hit_rate']:.1f}" for arm in ("lmetric", "lmetric-literal", "linear")
    ]
    yield "{}, {} and {} %".format(*hits)


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


def _radix() -> Iterator[str]:
    from benchmark.decode_radix_cache import page

    rates = {
        name: page.rate(run)
        for name, run in page.medians(
            _read("decode_radix_cache/results/throughput.summary.json")
        ).items()
    }
    yield f"Stock serves {rates['stock']} requests/s, the package without a flag {rates['patched']}"
    yield f"with the flag {rates['flag']}"
    yield f"(*flag capped*) the flag gives {rates['flag capped']}"


def _local_turns() -> Iterator[str]:
    from benchmark.local_turns import page

    for clients in (4, 0):
        runs = page.medians(_read("local_turns/results/summary.json"), clients)
        both = [runs[arm] for arm in (page.REMOTE, page.CHOSEN)]
        yield "from {:,.0f} to {:,.0f} ms".format(*(1e3 * r["ttft_later_s"]["p50"] for r in both))
        yield "from {:.2f} to {:.2f}".format(*(r["requests_per_s"] for r in both))


ANSWERS = {
    "agentic/README.md": _agentic,
    "agentic/studies/README.md": _studies,
    "kv_transfer/README.md": _transfer,
    "hicache_buffer_only/README.md": _buffer_only,
    "decode_radix_cache/README.md": _radix,
    "local_turns/README.md": _local_turns,
}


@pytest.mark.parametrize("page", ANSWERS)
def test_answers_are_measured(page: str) -> None:
    """Guards against a page whose first paragraph keeps the numbers of an earlier run, and against
    numbers that were rounded twice."""
    text = " ".join((BENCHMARK / page).read_text().split())
    assert [told for told in ANSWERS[page]() if told not in text] == []
