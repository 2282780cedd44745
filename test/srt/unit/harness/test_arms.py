"""What the servers of a pair are started with, which decides what a comparison compares."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import cpu_standin
from benchmark.demo.serve import with_store
from benchmark.harness import servers
from benchmark.harness.fleet import PairConfig
from benchmark.harness.servers import Sizes

RADIX = "--disaggregation-decode-enable-radix-cache"
SMALL = Sizes(100, reserved_decode_tokens=64)


@pytest.mark.parametrize(
    ("changes", "stock", "radix"),
    [
        ({"stock": True}, ("1", "1"), False),
        ({}, ("0", "0"), False),
        ({"radix": True}, ("0", "0"), True),
        ({"radix": True, "stock_prefill": True}, ("1", "0"), True),
    ],
)
def test_pairs_differ_in_what_they_say(
    changes: dict[str, Any], stock: tuple[str, str], radix: bool
) -> None:
    """Guards against a pair whose servers run something else than its column says."""
    config = PairConfig(Path("m"), decode_sizes=SMALL, decode_tp=2, decode_args=("--x",), **changes)
    prefill, decode = config.layout()
    assert RADIX not in prefill.command and (RADIX in decode.command) == radix
    assert tuple(str(1 - int(s.env["SGLANG_PATCHSET"])) for s in (prefill, decode)) == stock
    for server in (prefill, decode):
        on_standin = cpu_standin.FOLDER in server.environment().get("PYTHONPATH", "")
        assert on_standin == ("cpu" in server.command)
    said = " ".join(decode.command)
    assert "--num-reserved-decode-tokens 64" in said and "--tp-size 2" in said and "--x" in said
    assert "--tp-size" not in prefill.command and "--x" not in prefill.command


def test_a_pair_over_a_store_has_one_page_size_and_one_store() -> None:
    """Guards servers that share nothing, as their keys name the page size, or that ask for another
    store; and a decode server that is asked to read."""
    master, about = servers.store()
    config = with_store(PairConfig(Path("m"), radix=True, decode_args=("--x",)), about)
    told = [dict(zip(of.command, (*of.command[1:], ""), strict=True)) for of in config.layout()]
    shared = ("--page-size", "--hicache-mem-layout", "--hicache-storage-backend-extra-config")
    assert len({tuple(of[flag] for flag in shared) for of in told}) == 1
    assert str(master.port) in told[0]["--hicache-storage-backend-extra-config"]
    reads, writes = "--enable-hierarchical-cache", servers.WRITES[0]
    assert [[flag in of for flag in (reads, writes, RADIX, "--x")] for of in told] == [
        [True, False, False, False],
        [False, True, True, True],
    ]
