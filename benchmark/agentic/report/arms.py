"""What is compared: which servers, behind which router."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from benchmark.agentic.report.load import Load
from benchmark.agentic.router import launch
from benchmark.harness import servers
from benchmark.harness.ports import allocate_ports
from benchmark.harness.servers import ServerConfig, Sizes
from benchmark.harness.variants import FLAG, PATCHED, SPINNING, STOCK, Variant

LEAN = ("--skip-tokenizer-init", "--incremental-streaming-output", "--decode-log-interval", "1")
"""Token ids in and out, each once: helper processes share the cores with the schedulers."""

DOZING = (*LEAN, "--sleep-on-idle")
"""What decodes gives its core away when it has nothing to do. A prefill server must not: SGLang's
would sleep up to a second on requests whose handshake is under way."""

BEHIND = ("nice", "-n", "5")
"""Servers share few cores with the client and the router, which in a fleet have their own: without
this, the client would be late in sending and in reading."""

SGLANG = "sglang-router"
DECODE_POLICIES = ("round_robin", "random", "least_tokens", "linear", "lmetric", "delta_kv")


@dataclass(frozen=True)
class Arm:
    """One column of the report."""

    group: str
    """Arms of a group are compared with each other."""
    name: str
    policy: str
    """Of our router, or ``sglang-router: POLICY``. For decode where there are pools."""
    colocated: int = 0
    decodes: int = 0
    variant: Variant = FLAG


def matrix(*, spinning: bool = False) -> list[Arm]:
    """Every arm, in the report's order; the first of a group is what others are held against.

    ``spinning`` adds the radix cache with NIXL's progress thread spinning, as it does in stock.
    """
    colocated, one, two = "2 colocated workers", "1P1D", "1P2D, decode radix cache"
    return [
        *(
            Arm(colocated, f"colocated {policy}", policy, colocated=2, variant=STOCK)
            for policy in (f"{SGLANG}: cache_aware", "round_robin", "linear", "lmetric")
        ),
        Arm(one, "1P1D stock", f"{SGLANG}: round_robin", decodes=1, variant=STOCK),
        Arm(one, "1P1D patched", f"{SGLANG}: round_robin", decodes=1, variant=PATCHED),
        Arm(one, "1P1D radix, same router", f"{SGLANG}: round_robin", decodes=1),
        *(
            [
                Arm(
                    one,
                    "1P1D radix, spinning",
                    f"{SGLANG}: round_robin",
                    decodes=1,
                    variant=SPINNING,
                )
            ]
            if spinning
            else []
        ),
        Arm(one, "1P1D radix", "delta_kv", decodes=1),
        *(
            Arm(two, f"1P2D {policy}", policy, decodes=2)
            for policy in (*DECODE_POLICIES, f"{SGLANG}: cache_aware", f"{SGLANG}: round_robin")
        ),
    ]


def layout(arm: Arm, model: Path, load: Load, chunk_tokens: int = 512) -> list[ServerConfig]:
    """Its servers on ports reserved for them now, the router last.

    ``chunk_tokens``: of a prefill chunk.
    """
    sizes = Sizes(
        pool_tokens=load.pool_tokens,
        page_size=load.block_tokens,
        chunked_prefill_tokens=chunk_tokens,
        max_running=64,
        # As SGLang's 512 to the trace's blocks of 512.
        reserved_decode_tokens=load.block_tokens,
    )
    stock, radix, env = arm.variant.stock, arm.variant.radix, arm.variant.env
    decode_args = (*DOZING, *arm.variant.decode_args)
    workers = [
        servers.aggregated(model, _two(), sizes, stock=stock, extra_args=DOZING, env=env)
        for _ in range(arm.colocated)
    ]
    prefills = [
        servers.prefill(model, _three(), sizes, stock=stock, extra_args=LEAN, env=env)
        for _ in range(1 if arm.decodes else 0)
    ]
    decodes = [
        servers.decode(
            model, _two(), sizes, stock=stock, radix=radix, extra_args=decode_args, env=env
        )
        for _ in range(arm.decodes)
    ]
    balancer = router(arm, prefills, decodes, workers, load)
    return [*map(_behind, (*prefills, *decodes, *workers)), balancer]


def router(
    arm: Arm,
    prefills: Sequence[ServerConfig],
    decodes: Sequence[ServerConfig],
    workers: Sequence[ServerConfig],
    load: Load,
) -> ServerConfig:
    """SGLang's router, or ours."""
    name, _, policy = arm.policy.partition(": ")
    if name == SGLANG:
        return servers.router(_two(), prefills, decodes, workers, policy=policy)
    flag = "--decode-policy" if decodes else "--policy"
    args = [flag, arm.policy, "--block-tokens", str(load.block_tokens)]
    args += ["--seed", str(load.seed), "--reserve-tokens", str(load.block_tokens)]
    (port,) = allocate_ports(1)
    return launch.config(port, prefills, decodes, workers, extra_args=args)


def _behind(server: ServerConfig) -> ServerConfig:
    return replace(server, command=(*BEHIND, *server.command))


def _two() -> tuple[int, int]:
    first, second = allocate_ports(2)
    return first, second


def _three() -> tuple[int, int, int]:
    first, second, third = allocate_ports(3)
    return first, second, third
