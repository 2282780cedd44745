"""The local CPU rig: fresh servers for each arm, equal pools for all."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from benchmark.agentic.fleet.servers import ROUTED, Servers
from benchmark.agentic.fleet.spec import FleetFile, Prefill, Rig, Setup
from benchmark.agentic.router import launch
from benchmark.harness import servers
from benchmark.harness.client import Target
from benchmark.harness.fleet import Fleet
from benchmark.harness.ports import allocate_ports
from benchmark.harness.servers import ServerConfig, Sizes
from benchmark.harness.variants import FLAG, PATCHED, SPINNING, STOCK, Variant, local_turns
from benchmark.harness.workload import token_range

LEAN = ("--skip-tokenizer-init", "--incremental-streaming-output", "--decode-log-interval", "1")
"""Token ids in and out, each once: helper processes share the cores with the schedulers."""

DOZING = (*LEAN, "--sleep-on-idle")
"""What decodes gives its core away when it has nothing to do. A prefill server must not: SGLang's
would sleep up to a second on requests whose handshake is under way."""

BEHIND = ("nice", "-n", "5")
"""Servers share few cores with the client and the router, which in a fleet have their own: without
this, the client would be late in sending and in reading."""

SGLANG = "sglang-router"
NONE = "none"
VARIANTS: Mapping[str, Variant] = {
    "stock": STOCK,
    "patched": PATCHED,
    "radix": FLAG,
    "spinning": SPINNING,
}
LOCAL = ("local", "local-always")


@dataclass(frozen=True)
class Arm:
    """Servers behind a router."""

    name: str
    policy: str
    """Of our router, or ``sglang-router: POLICY``; ``none`` sends to the only server or pair. For
    decode where there are pools only."""
    colocated: int = 0
    decodes: int = 0
    variant: Variant = FLAG
    prefills: int = 1
    """Where there are decodes."""
    router_args: tuple[str, ...] = ()


def variant(name: str, local_tokens: int) -> Variant:
    """Of ``VARIANTS`` or ``LOCAL``, the latter with turns of up to ``local_tokens``."""
    if name in LOCAL:
        return local_turns(local_tokens, always=name == "local-always")
    return VARIANTS[name]


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
    stock, radix, env = arm.variant.stock, arm.variant.radix, arm.variant.env
    decode_args = (*DOZING, *arm.variant.decode_args)
    workers = [
        servers.aggregated(model, _two(), sizes, stock=stock, extra_args=DOZING, env=env)
        for _ in range(arm.colocated)
    ]
    prefills = [
        servers.prefill(model, _three(), sizes, stock=stock, extra_args=LEAN, env=env)
        for _ in range(arm.prefills if arm.decodes else 0)
    ]
    decodes = [
        servers.decode(
            model, _two(), sizes, stock=stock, radix=radix, extra_args=decode_args, env=env
        )
        for _ in range(arm.decodes)
    ]
    engines = [_behind(server) for server in (*prefills, *decodes, *workers)]
    return [*engines, *_router(arm, prefills, decodes, workers, page_tokens)]


def _router(
    arm: Arm,
    prefills: Sequence[ServerConfig],
    decodes: Sequence[ServerConfig],
    workers: Sequence[ServerConfig],
    block_tokens: int,
) -> list[ServerConfig]:
    """SGLang's router, ours, or none."""
    name, _, policy = arm.policy.partition(": ")
    if name == NONE:
        return []
    if name == SGLANG:
        return [servers.router(_two(), prefills, decodes, workers, policy=policy)]
    flag = "--decode-policy" if decodes and not workers else "--policy"
    blocks = str(block_tokens)
    args = [flag, arm.policy, "--block-tokens", blocks, "--reserve-tokens", blocks]
    pairs = [(server.url, server.bootstrap_port or 0) for server in prefills]
    urls = [server.url for server in decodes], [server.url for server in workers]
    return [launch.config(allocate_ports(1)[0], pairs, *urls, extra_args=[*args, *arm.router_args])]


@contextmanager
def started(arm: Arm, about: FleetFile, rig: Rig, model: Path, logs: Path) -> Iterator[Servers]:
    """An arm's servers, which end with the context.

    Raises:
        ServerFailed: a server did not start, died, or failed SGLang's memory check after a load.
    """
    configs = layout(arm, model, rig.pool_tokens, rig.chunk_tokens, about.block_tokens)
    of = {
        role: [config for config in configs if config.role == role]
        for role in ("prefill", "decode", "aggregated", "router")
    }
    setup = Setup(
        aggregated=tuple(config.url for config in of["aggregated"]),
        prefill=tuple(Prefill(c.url, c.bootstrap_port or 0) for c in of["prefill"]),
        decode=tuple(config.url for config in of["decode"]),
    )
    target = Target(configs[-1].url)
    if not of["router"] and of["prefill"]:
        first = of["prefill"][0]
        target = Target(target.url, first.url, servers.HOST, first.bootstrap_port)
    via = arm.policy if ":" in arm.policy else f"{ROUTED}, {arm.policy}"
    via = via if of["router"] else "directly"
    with Fleet(configs, logs) as fleet:
        yield Servers(setup, about, target, token_range(model), fleet.check, via)


def _behind(server: ServerConfig) -> ServerConfig:
    return replace(server, command=(*BEHIND, *server.command))


def _two() -> tuple[int, int]:
    first, second = allocate_ports(2)
    return first, second


def _three() -> tuple[int, int, int]:
    first, second, third = allocate_ports(3)
    return first, second, third
