"""The loads, and the servers of each arm. Pure: nothing is started here."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

from benchmark.harness.models import on_current
from benchmark.harness.pair import PairConfig
from benchmark.harness.servers import LEAN, Sizes
from benchmark.harness.variants import PROGRESS_DELAY
from benchmark.lead.load import BURST_SHAPE, SHAPE, Burst, Load
from sglang.srt.patchset.environment import (
    DECODE_ADMISSION,
    LOCAL_CHUNK,
    LOCAL_MAX_ITL_MS,
    LOCAL_TOKENS,
)

_THREAD = {PROGRESS_DELAY: "1000"}
_LOCAL = {LOCAL_TOKENS.name: "256"}
_ADMISSION = {DECODE_ADMISSION.name: "remaining"}


@dataclass(frozen=True)
class Arm:
    """What differs between two pairs of servers of a load."""

    name: str
    env: Mapping[str, str] = field(default_factory=dict)
    """The variables of the group ``lead``; without any the package is switched off."""
    reserved_decode_tokens: int | None = None
    """``--num-reserved-decode-tokens``; None leaves SGLang's 512."""


SESSION_ARMS = (
    Arm("stock"),
    Arm("thread", _THREAD),
    Arm("local", _LOCAL),
    Arm("local + thread", _LOCAL | _THREAD),
)
BURST_ARMS = (
    Arm("stock"),
    Arm("stock + r64", reserved_decode_tokens=64),
    Arm("thread", _THREAD),
    Arm("thread + r64", _THREAD, 64),
    Arm("thread + admission", _THREAD | _ADMISSION),
    Arm("thread + admission + r64", _THREAD | _ADMISSION, 64),
)
#: Chunks of up to 1,024 tokens, so that a turn is one chunk without a bound.
_LARGE = _THREAD | {LOCAL_TOKENS.name: "1024", LOCAL_CHUNK.name: "1024"}
BOUND_ARMS = (
    Arm("thread", _THREAD),
    Arm("local + thread", _LARGE),
    Arm("local + thread + itl100", _LARGE | {LOCAL_MAX_ITL_MS.name: "100"}),
    Arm("local + thread + itl50", _LARGE | {LOCAL_MAX_ITL_MS.name: "50"}),
)
ARMS: Mapping[str, tuple[Arm, ...]] = {
    "sessions": SESSION_ARMS,
    "burst": BURST_ARMS,
    "bounds": BOUND_ARMS,
}
"""By kind of load: a kind has servers, a model and arms of its own."""

SHAPES = {"sessions": SHAPE, "burst": BURST_SHAPE, "bounds": SHAPE}
LOADS: Mapping[str, tuple[str, ...]] = {
    "sessions": ("alone", "beside cold prompts"),
    "burst": ("burst",),
    "bounds": ("long turns",),
}
"""Of each kind, in the order in which each pair plays them."""

SESSIONS: Mapping[str, tuple[Load, int]] = {
    "alone": (Load(talks=8, turns=5, cold_clients=(0,)), 3),
    "beside cold prompts": (Load(talks=6, turns=6, cold_clients=(2,)), 1),
    "long turns": (Load(talks=5, turns=4, turn_tokens=1000, cold_clients=(1,)), 3),
}
"""What sessions send, and how often a pair plays it in a round."""
BURST = Burst()


def plays(name: str) -> list[Load]:
    """A load of sessions with a seed for each play."""
    load, times = SESSIONS[name]
    return [replace(load, seed=seed) for seed in range(times)]


def prefill_sizes(kind: str) -> Sizes:
    """Of the prefill server, and of the aggregated server that says what the answers are."""
    if kind == "burst":
        return Sizes(
            BURST.prefill_pool,
            chunked_prefill_tokens=BURST.chunked_prefill_tokens,
            max_running=BURST.max_running,
        )
    return Sizes(Load.pool_tokens, chunked_prefill_tokens=Load.chunk_tokens)


def configure(kind: str, arm: Arm, model: Path) -> PairConfig:
    """A pair whose pools are the same on all arms of the kind."""
    prefill = decode = prefill_sizes(kind)
    if kind == "burst":
        decode = Sizes(BURST.decode_pool, max_running=BURST.max_running)
    return PairConfig(
        model,
        stock=not arm.env,
        radix=True,
        prefill_sizes=prefill,
        decode_sizes=replace(decode, reserved_decode_tokens=arm.reserved_decode_tokens),
        prefill_args=LEAN,
        # Of each second step the number of running requests is logged.
        decode_args=(*LEAN, "--decode-log-interval", "2"),
        env={**on_current(), **arm.env},
    )
