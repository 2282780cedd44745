"""The local CPU rig: fresh servers for each arm, with equal pools in all arms."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

from benchmark.agentic.fleet.servers import ROUTED, Servers, direct, routed
from benchmark.agentic.fleet.spec import NONE, Arm, FleetFile, Prefill, Rig, Setup, Store
from benchmark.harness import servers
from benchmark.harness.client import Target
from benchmark.harness.fleet import Fleet
from benchmark.harness.models import kv_bytes_per_token, token_range
from benchmark.harness.servers import LEAN, ServerConfig, Sizes, of_role

LOGGED = (*LEAN, "--decode-log-interval", "1")
DOZE = ("--sleep-on-idle",)
"""Idle servers sleep, so that the others have the core."""

LOW_PRIORITY = ("nice", "-n", "5")
"""Servers run at a lower priority than client and router, because all share few cores; otherwise
the client would send and read late. In a fleet, client and router have cores of their own."""


def layout(
    arm: Arm, rig: Rig, model: Path, page_tokens: int = 16, doze: bool = False
) -> list[ServerConfig]:
    """Return the configurations of the arm's servers, the store first and the router last.

    Their ports are reserved now. ``page_tokens``: page size, and the size of a block of the trace.
    """
    sizes = Sizes(
        pool_tokens=rig.pool_tokens,
        page_size=page_tokens,
        chunked_prefill_tokens=rig.chunk_tokens,
        reserved_decode_tokens=rig.reserve_tokens or page_tokens,
    )
    before, env = [], arm.env
    hicache: tuple[str, ...] = ()
    decode: tuple[str, ...] = ()
    if arm.variant == "local":
        decode = ("--disaggregation-decode-local-tokens", str(arm.local_tokens))
    if (store := arm.store) is not None:
        memory = _memory(store, sizes)
        if store.shared_tokens:
            master, about = servers.store()
            segment = store.shared_tokens * kv_bytes_per_token(model)
            memory += servers.stored(about, segment, page_tokens)
            before, env = [master], {"MC_FORCE_TCP": "1", **env}  # else it searches RDMA devices
        hicache = (*servers.HICACHE, *memory)
        if store.writes:
            decode += (*servers.WRITES, *memory)
    args_of_role = {"prefill": hicache, "decode": decode, "aggregated": hicache}
    engines = [
        servers.engine(
            role,
            model,
            sizes,
            stock=arm.variant == "stock",
            radix=role == "decode" and arm.variant in ("radix", "local"),
            extra_args=(*LOGGED, *(DOZE if doze else ()), *args, *arm.args.get(role, ())),
            env=env,
            venv=arm.venv,
        )
        for role, args in args_of_role.items()
        for _ in range(arm.servers[role])
    ]
    engines = [replace(engine, command=(*LOW_PRIORITY, *engine.command)) for engine in engines]
    if arm.policy == NONE:
        return [*before, *engines]
    blocks = ("--block-tokens", str(page_tokens), "--reserve-tokens", str(page_tokens))
    more = (*blocks, *arm.routing(page_tokens))
    return [*before, *engines, routed(_setup(engines), arm.policy, more)]


def _memory(store: Store, sizes: Sizes) -> tuple[str, ...]:
    """Return the arguments for a server's host memory, which differs in size and mode by arm."""
    page = sizes.page_size
    if store.buffer_only:
        return servers.staged(store.host_tokens // page)
    # SGLang rounds the product down to a token and then to a page, and adds a page.
    return ("--hicache-ratio", str((store.host_tokens - page + 0.5) / sizes.pool_tokens))


def _setup(configs: Sequence[ServerConfig]) -> Setup:
    urls = {role: tuple(c.url for c in of_role(configs, role)) for role in ("aggregated", "decode")}
    prefill = (Prefill(c.url, c.bootstrap_port or 0) for c in of_role(configs, "prefill"))
    stores = of_role(configs, "store")
    return Setup(**urls, prefill=tuple(prefill), store=stores[0].url if stores else None)


@contextmanager
def started(
    arm: Arm, about: FleetFile, rig: Rig, model: Path, logs: Path, doze: bool
) -> Iterator[Servers]:
    """Run an arm's servers for as long as the context lasts. ``doze``: idle servers sleep.

    Raises:
        ServerFailed: a server did not start, died, or failed SGLang's memory check after a load.
    """
    configs = layout(arm, rig, model, about.block_tokens, doze)
    setup, last = _setup(configs), configs[-1]
    target, via = direct(setup), "directly"
    if last.role == "router":
        target, via = Target(last.url), f"{ROUTED}, {arm.policy}"
    assert target is not None, "several servers of a role and no router"
    with Fleet(configs, logs) as fleet:
        size = kv_bytes_per_token(model)
        vocabulary = token_range(model)
        yield Servers(setup, about, target, vocabulary, fleet.check, via, size, owned=True)
