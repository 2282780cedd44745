"""Arms: what their servers run, which decides what a comparison compares."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmark.demo import play
from benchmark.harness.variants import (
    FLAG,
    PATCHED,
    SPINNING,
    STOCK,
    Variant,
    local_turns,
    variants,
)

DELAY = "SGLANG_DISAGGREGATION_NIXL_PROGRESS_DELAY"
RADIX = "--disaggregation-decode-enable-radix-cache"
LOCAL = "--disaggregation-decode-local-tokens 64"


def test_the_arm_without_a_flag_is_always_there() -> None:
    """Guards against a gain of NIXL's sleeping thread that is ascribed to the flag."""
    assert variants() == (STOCK, PATCHED, FLAG)
    assert variants(spinning=True) == (STOCK, PATCHED, FLAG, SPINNING)


@pytest.mark.parametrize(
    ("variant", "stock", "of_decode", "delay"),
    [
        (STOCK, True, set(), None),
        (PATCHED, False, set(), None),
        (FLAG, False, {RADIX}, None),
        (SPINNING, False, {RADIX}, "0"),
        (local_turns(64), False, {RADIX, LOCAL}, None),
    ],
    ids=["stock", "patched", "flag", "spinning", "local turns"],
)
def test_arms_differ_in_what_they_are_called(
    variant: Variant, stock: bool, of_decode: set[str], delay: str | None
) -> None:
    """Guards against an arm whose servers run something else than its column says."""
    prefill, decode, *_ = play.configure(Path("m"), variant).layout()
    for server, flags in ((prefill, set()), (decode, of_decode)):
        command = " ".join(server.command)
        assert {flag for flag in (RADIX, LOCAL) if flag in command} == flags
        assert server.env["SGLANG_PATCHSET"] == ("0" if stock else "1")
        assert server.env.get(DELAY) == delay
        # A stock arm needs it, too.
        assert server.environment()["SGLANG_CPU_STANDIN"] == "1"


def test_arms_have_the_same_sizes() -> None:
    """Guards against memory or batch sizes that are measured instead of the code."""
    arms = [play.configure(Path("m"), variant) for variant in variants()]
    assert len({(arm.prefill_sizes, arm.decode_sizes, arm.decode_args) for arm in arms}) == 1
