"""The arguments of a pair's servers, which decide what a comparison compares."""

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
def test_pairs_differ_only_where_declared(
    changes: dict[str, Any], stock: tuple[str, str], radix: bool
) -> None:
    """Guards against a pair whose servers do not run the variant of its column."""
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
    """Guards against servers that share no keys because their page sizes or stores differ, and
    against a decode server that reads from the store."""
    master, store_settings = servers.store()
    config = with_store(PairConfig(Path("m"), radix=True, decode_args=("--x",)), store_settings)
    flags = [
        dict(zip(server.command, (*server.command[1:], ""), strict=True))
        for server in config.layout()
    ]
    shared = ("--page-size", "--hicache-mem-layout", "--hicache-storage-backend-extra-config")
    assert len({tuple(server[flag] for flag in shared) for server in flags}) == 1
    assert str(master.port) in flags[0]["--hicache-storage-backend-extra-config"]
    reads, writes = "--enable-hierarchical-cache", servers.WRITES[0]
    assert [[flag in server for flag in (reads, writes, RADIX, "--x")] for server in flags] == [
        [True, False, False, False],
        [False, True, True, True],
    ]
