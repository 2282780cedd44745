"""Patched and stock servers together, and a patched server without the flag."""

from __future__ import annotations

import json
import re
import urllib.request
from collections.abc import Mapping
from pathlib import Path

import pytest

from benchmark.harness import metrics
from benchmark.harness.fleet import Pair
from e2e.support import Ids, Reference, pair_config, prompt_maker, settle, take_turns
from sglang.srt.disaggregation.delta.metrics import METRICS
from sglang.srt.patchset import __version__

TRANSFERS = (
    *(
        f"sglang:kv_transfer_{name}_{part}"
        for name in (
            *("queue_seconds", "build_seconds", "post_seconds", "wire_seconds"),
            *("descriptors", "bytes"),
        )
        for part in ("sum", "count")
    ),
    *(f"sglang:kv_transfer_{name}" for name in ("waiting", "in_flight", "overdue")),
)
"""Metrics of the package's transfer workers: histograms, and gauges of their queues."""
NEW_METRICS = {
    *TRANSFERS,
    *(
        metric.exported_name
        for metric in METRICS.values()
        if metric.kind == "counter" and metric.side in ("prefill", "both")
    ),
}
INFO = "sglang:disagg_patchset_info"
"""Metric of every server with this package."""


def two_turns(pair: Pair, reference: Reference, prompts: list[Ids]) -> None:
    """Run two rounds with a common prefix; check the answers and that both servers settle."""
    take_turns(pair, reference, prompts, 2, 12, lambda: prompts[0][:9])
    settle(pair)


def some_prompts(model: Path) -> list[Ids]:
    tokens = prompt_maker(model, seed=9)
    shared = tokens(300)
    return [[*shared, *tokens(10 * i + 1)] for i in range(4)]


def log_shapes(pair: Pair) -> Mapping[str, set[str]]:
    """Return the different lines that the schedulers logged, with numbers replaced."""
    shapes = {}
    for role in ("prefill", "decode"):
        lines = re.findall(r"(?:Prefill|Decode) batch.*", pair.processes[role].log_text())
        shapes[role] = {re.sub(r"[\d.]+|True|False", "N", line) for line in lines}
    return shapes


def metric_names(pair: Pair) -> tuple[set[str], set[str]]:
    """Return both servers' metric names, without the one that SGLang adds with a delay."""
    late = {"sglang:process_cpu_seconds_total"}
    prefill, decode = pair.metrics()
    return set(prefill) - late, set(decode) - late


def check_identity(pair: Pair) -> None:
    """Check that both servers report the package in their logs and in ``/server_info``."""
    for role, url in (("prefill", pair.prefill_url), ("decode", pair.decode_url)):
        (logged,) = re.findall(rf"patchset {__version__}: .*", pair.processes[role].log_text())
        assert logged.endswith("flags none")
        with urllib.request.urlopen(f"{url}/server_info", timeout=60) as answer:
            (state,) = json.load(answer)["internal_states"]
        about = state["disagg_patchset"]
        assert about == about | {"version": __version__, "flags": ""}
        assert f"{about['version']}: feature groups {about['groups']};" in logged


@pytest.mark.hazard("peer-ignores-prefix")
def test_stock_and_patched_servers_serve_each_other(
    model: Path, reference: Reference, logs: Path
) -> None:
    """Guards against a prefix length for a stock prefill server, which cannot read it and would
    write the prompt's start into pages for its end; and against a stock decode server that does not
    get whole prompts. A patched server without flags must have stock's log lines and metrics,
    except those that identify the package."""
    prompts = some_prompts(model)
    interval = ("--decode-log-interval", "1")
    mixed = pair_config(model, logs, stock_prefill=True, page_size=16, decode_args=interval)
    with Pair(mixed, logs / "stock-prefill") as pair:
        two_turns(pair, reference, prompts)
        counters = pair.metrics()[1]
        assert counters[metrics.PROMPT_TOKENS] > 0
        assert counters[metrics.HIT_TOKENS] == 0
        log = pair.processes["decode"].log_text()
        assert "does not support decode_prefix_len" in log
        stock_prefill_names = metric_names(pair)[0]
        stock_prefill_lines = log_shapes(pair)["prefill"]

    mixed = pair_config(model, logs, page_size=16, stock=False, radix=False, decode_args=interval)
    with Pair(mixed, logs / "no-flag") as pair:
        two_turns(pair, reference, prompts)
        patched_names = metric_names(pair)
        patched_lines = log_shapes(pair)
        check_identity(pair)

    stock_decode = pair_config(
        model, logs, page_size=16, radix=False, decode_args=interval,
        decode_env={"SGLANG_PATCHSET": "0"},
    )  # fmt: skip
    with Pair(stock_decode, logs / "stock-decode") as pair:
        two_turns(pair, reference, prompts)
        stock_decode_names = metric_names(pair)[1]
        stock_decode_lines = log_shapes(pair)["decode"]

    assert {INFO, *TRANSFERS} <= patched_names[0] - stock_prefill_names <= {INFO, *NEW_METRICS}
    assert patched_names[1] - stock_decode_names == {INFO}
    assert stock_decode_names <= patched_names[1]
    assert stock_prefill_lines and stock_decode_lines
    assert patched_lines["prefill"] == stock_prefill_lines
    assert patched_lines["decode"] == stock_decode_lines
