"""Servers with a NIXL that is too old for asynchronous transfer, as a fleet may have it pinned."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

import apart
from benchmark.harness import servers
from benchmark.harness.pair import Pair
from benchmark.harness.ports import allocate_ports
from e2e.support import Reference, pair_config, prompt_maker
from sglang.srt.disaggregation.delta.nixl.agent import NEEDED

OLD = "1.0.1"
#: Set to 1 to have the tests install it (100 MB) and run with it; else they are skipped.
SWITCH = "SGLANG_OLD_NIXL"
SAYS = f"{OLD} is installed, {NEEDED} or newer is needed"

pytestmark = pytest.mark.skipif(
    os.environ.get(SWITCH) != "1",
    reason=f"set {SWITCH}=1 to install NIXL {OLD} into .interop/ and run servers with it",
)


@pytest.fixture
def old_nixl() -> dict[str, str]:
    """What a process gets to run with it. The shim takes the one for CUDA 13 where no CUDA is."""
    names = ("nixl", "nixl-cu12", "nixl-cu13")
    return {"PYTHONPATH": str(apart.installed(*(f"{name}=={OLD}" for name in names)))}


def test_servers_without_our_flags(
    model: Path, reference: Reference, logs: Path, old_nixl: dict[str, str]
) -> None:
    """Guards against an installation of this package that breaks servers which do not use it: they
    start, say what stays stock and why, and answer as before."""
    tokens = prompt_maker(model, seed=71)
    shared = tokens(300)
    prompts = [[*shared, *tokens(20 * number + 1)] for number in range(4)]
    env = {**old_nixl, "SGLANG_DISAGGREGATION_CHECK_INVARIANTS": "0"}
    config = pair_config(
        model, logs, radix=False, page_size=16, env=env, prefill_args=(), decode_args=()
    )
    with Pair(config, logs) as pair:
        for _ in range(2):
            assert pair.generate(prompts, 12) == reference.answers(prompts, 12)
        pair.check()
        for role in ("prefill", "decode"):
            log = pair.processes[role].log_text()
            assert "nixl_async" in log and SAYS in log
            assert "Traceback" not in log


def test_a_flag_that_needs_it_is_refused(model: Path, old_nixl: dict[str, str]) -> None:
    """Guards against a decode server whose requests hang, because half of what its flag needs is
    not there."""
    http, nccl = allocate_ports(2)
    config = servers.decode(model, (http, nccl), radix=True, env=old_nixl)
    run = subprocess.run(
        config.command, env=config.environment(), capture_output=True, text=True, timeout=240
    )
    assert run.returncode != 0
    assert "nixl_async" in run.stdout + run.stderr and SAYS in run.stdout + run.stderr
