"""The local CPU rig: fresh servers for each arm, equal pools for all."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from benchmark.agentic.fleet.servers import ENGINES, ROUTED, Servers, direct, routed
from benchmark.agentic.fleet.spec import NONE, SGLANG, Arm, FleetFile, Prefill, Rig, Setup
from benchmark.harness import servers
from benchmark.harness.client import Target
from benchmark.harness.fleet import Fleet
from benchmark.harness.ports import allocate_ports
from benchmark.harness.servers import LEAN, ServerConfig, Sizes
from benchmark.harness.variants import VARIANTS
from benchmark.harness.workload import token_range

LOGGED = (*LEAN, "--decode-log-interval", "1")

DOZING = (*LOGGED, "--sleep-on-idle")
"""What decodes gives its core away when it has nothing to do. A prefill server must not: SGLang's
would sleep up to a second on requests whose handshake is under way."""

BEHIND = ("nice", "-n", "5")
"""Servers share few cores with the client and the router, which in a fleet have their own: without
this, the client would be late in sending and in reading."""


def layout(
    arm: Arm, model: Path, pool_tokens: int, chunk_tokens: int = 512, page_tokens: int = 16
) -> list[ServerConfig]:
    """Its servers on ports reserved for them now; the router, if it has one, last.

    Args:
        pool_tokens: KV pool of each server.
        chunk_tokens: of a prefill chunk.
        page_tokens: of a page, which is a block of the trace.
    """
    sizes = Sizes(
        pool_tokens=pool_tokens,
        page_size=page_tokens,
        chunked_prefill_tokens=chunk_tokens,
        max_running=64,
        # As SGLang's 512 to the trace's blocks of 512.
        reserved_decode_tokens=page_tokens,
    )
    variant = VARIANTS[arm.variant](arm.local_tokens)
    common: dict[str, Any] = {"stock": variant.stock, "env": variant.env}
    workers = [
        servers.aggregated(model, allocate_ports(2), sizes, extra_args=DOZING, **common)
        for _ in range(arm.aggregated)
    ]
    prefills = [
        servers.prefill(model, allocate_ports(3), sizes, extra_args=LOGGED, **common)
        for _ in range(arm.prefill)
    ]
    decodes = [
        servers.decode(
            model,
            allocate_ports(2),
            sizes,
            radix=variant.radix,
            extra_args=(*DOZING, *variant.decode_args),
            **common,
        )
        for _ in range(arm.decode)
    ]
    engines = [
        replace(server, command=(*BEHIND, *server.command))
        for server in (*prefills, *decodes, *workers)
    ]
    name, _, policy = arm.policy.partition(": ")
    if name == NONE:
        return engines
    if name == SGLANG:
        ports = allocate_ports(2)
        return [*engines, servers.router(ports, prefills, decodes, workers, policy=policy)]
    blocks = ("--block-tokens", str(page_tokens), "--reserve-tokens", str(page_tokens))
    return [*engines, routed(_setup(engines), arm.policy, (*blocks, *arm.routing(page_tokens)))]


def _setup(configs: Sequence[ServerConfig]) -> Setup:
    of = {role: [c for c in configs if c.role == role] for role in ENGINES}
    return Setup(
        aggregated=tuple(config.url for config in of["aggregated"]),
        prefill=tuple(Prefill(c.url, c.bootstrap_port or 0) for c in of["prefill"]),
        decode=tuple(config.url for config in of["decode"]),
    )


@contextmanager
def started(arm: Arm, about: FleetFile, rig: Rig, model: Path, logs: Path) -> Iterator[Servers]:
    """An arm's servers, which end with the context.

    Raises:
        ServerFailed: a server did not start, died, or failed SGLang's memory check after a load.
    """
    configs = layout(arm, model, rig.pool_tokens, rig.chunk_tokens, about.block_tokens)
    setup, last = _setup(configs), configs[-1]
    target, via = direct(setup), "directly"
    if last.role == "router":
        target = Target(last.url)
        via = arm.policy if ":" in arm.policy else f"{ROUTED}, {arm.policy}"
    assert target is not None, "several servers of a role and no router"
    with Fleet(configs, logs) as fleet:
        yield Servers(setup, about, target, token_range(model), fleet.check, via)
