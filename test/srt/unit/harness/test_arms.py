"""Arms: what their servers run, which decides what a comparison compares."""

from __future__ import annotations

from pathlib import Path

from benchmark.decode_radix_cache import throughput
from benchmark.demo import play
from benchmark.harness import servers
from benchmark.harness.pair import PairConfig
from benchmark.harness.servers import Sizes
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


def test_the_arm_without_a_flag_is_always_there() -> None:
    """Guards against a gain of NIXL's sleeping thread that is ascribed to the flag."""
    assert variants() == (STOCK, PATCHED, FLAG)
    assert variants(spinning=True) == (STOCK, PATCHED, FLAG, SPINNING)


def started(variant: Variant, of: str) -> list[tuple[bool, bool, str | None]]:
    """Stock or not, with the flag or not, pause of the thread: of prefill and of decode."""
    configure = {
        "throughput": lambda: throughput.configure(Path("m"), throughput.Load(), variant, 32),
        "demo": lambda: play.configure(Path("m"), variant),
    }[of]
    engines = [each for each in configure().layout() if each.role in ("prefill", "decode")]
    return [
        (each.env["SGLANG_PATCHSET"] == "0", RADIX in each.command, each.env.get(DELAY))
        for each in engines
    ]


def test_arms_differ_in_what_they_are_called() -> None:
    """Guards against an arm whose servers run something else than its column says."""
    for of in ("throughput", "demo"):
        assert started(STOCK, of) == [(True, False, None)] * 2
        assert started(PATCHED, of) == [(False, False, None)] * 2
        assert started(FLAG, of) == [(False, False, None), (False, True, None)]
        assert started(SPINNING, of) == [(False, False, "0"), (False, True, "0")]


def test_arms_have_the_same_sizes() -> None:
    """Guards against memory or batch sizes that are measured instead of the code."""
    of = [throughput.configure(Path("m"), throughput.Load(), v, 32) for v in variants()]
    assert len({(each.prefill_sizes, each.decode_sizes, each.decode_args) for each in of}) == 1
    demo = [play.configure(Path("m"), v) for v in variants()]
    assert len({(each.prefill_sizes, each.decode_sizes, each.decode_args) for each in demo}) == 1


def test_local_turns_are_asked_of_decode_only() -> None:
    """Guards against a column of local turns whose decode server was not told of them."""
    for configure in (
        lambda variant: throughput.configure(Path("m"), throughput.Load(), variant, 32),
        lambda variant: play.configure(Path("m"), variant),
    ):
        prefill, decode, *_ = configure(local_turns(64)).layout()
        wanted = "--disaggregation-decode-local-tokens 64"
        assert wanted in " ".join(decode.command) and RADIX in decode.command
        assert wanted not in " ".join(prefill.command)


def value(command: tuple[str, ...], option: str) -> str:
    return command[command.index(option) + 1]


def test_decode_with_and_without_the_flag_differs_in_the_flag_only() -> None:
    """Guards against an arm that differs in something else than what is measured."""
    sizes = Sizes(pool_tokens=8000, reserved_decode_tokens=64)
    on = servers.decode("m", (1, 2), sizes, radix=True)
    off = servers.decode("m", (1, 2), sizes, radix=False)
    assert set(on.command) - set(off.command) == {RADIX}
    assert on.env == off.env


def test_stock_turns_the_patch_set_off_and_keeps_the_cpu_standin() -> None:
    """Guards against a baseline that is not the stock release, or that cannot start on a CPU."""
    stock = servers.decode("m", (1, 2), stock=True).environment()
    assert (stock["SGLANG_PATCHSET"], stock["SGLANG_CPU_STANDIN"]) == ("0", "1")
    assert servers.decode("m", (1, 2)).environment()["SGLANG_PATCHSET"] == "1"


def test_stock_prefill_alone() -> None:
    """Guards the interoperability arm: only the prefill server runs the stock release."""
    prefill, decode = PairConfig("m", radix=True, stock_prefill=True).layout()
    assert prefill.env["SGLANG_PATCHSET"] == "0"
    assert decode.env["SGLANG_PATCHSET"] == "1"
