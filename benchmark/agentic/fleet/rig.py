"""The local rig: fresh servers for each arm on this machine's CPU or GPUs, with equal pools."""

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
from benchmark.kv_transfer import shapes

LOGGED = (*LEAN, "--decode-log-interval", "1")
DOZE = ("--sleep-on-idle",)
"""Idle servers sleep, so that the others have the core."""

LOW_PRIORITY = ("nice", "-n", "5")
"""Servers run at a lower priority than client and router, because all share few cores; otherwise
the client would send and read late. In a fleet, client and router have cores of their own."""


def layout(
    arm: Arm, rig: Rig, model: Path | str, block_tokens: int = 16, doze: bool = False
) -> list[ServerConfig]:
    """Return the configurations of the arm's servers, the store first and the router last.

    Their ports are reserved now, and with ``rig.gpus`` no two of them share a GPU.
    ``block_tokens``: tokens of a block of the trace.
    """
    page_tokens = rig.page_tokens or block_tokens
    sizes = Sizes(
        pool_tokens=rig.pool_tokens,
        page_size=page_tokens,
        chunked_prefill_tokens=rig.chunk_tokens,
        max_running=rig.max_running,
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
    roles = [role for role in args_of_role for _ in range(arm.servers[role])]
    common = (*(LEAN if rig.gpus else LOGGED), *(DOZE if doze and not rig.gpus else ()), *rig.args)
    engines = [
        servers.engine(
            role,
            model,
            sizes,
            backend=arm.backend,
            stock=arm.variant == "stock",
            radix=role == "decode" and arm.variant in ("radix", "local"),
            ranks=rig.ranks,
            extra_args=(*common, *args_of_role[role], *arm.args.get(role, ())),
            env=env,
            venv=arm.venv,
            first_gpu=number * rig.ranks if rig.gpus else None,
        )
        for number, role in enumerate(roles)
    ]
    if not rig.gpus:
        engines = [replace(engine, command=(*LOW_PRIORITY, *engine.command)) for engine in engines]
    if arm.policy == NONE:
        return [*before, *engines]
    blocks = ("--block-tokens", str(page_tokens), "--reserve-tokens", str(page_tokens))
    more = (*blocks, *arm.routing(block_tokens))
    return [*before, *engines, routed(_setup(engines), arm.policy, more)]


def gpus(rig: Rig, config: ServerConfig) -> list[int]:
    """Return the GPUs of a server of the rig."""
    if "--base-gpu-id" not in config.command:
        return []
    first = int(config.command[config.command.index("--base-gpu-id") + 1])
    return list(range(first, first + rig.ranks))


def _about(rig: Rig, model: Path | str, about: FleetFile) -> tuple[int, range]:
    """Return the KV bytes of a token of the model, 0 if unknown, and the token ids of prompts."""
    if rig.model is None:
        return kv_bytes_per_token(model), token_range(model)
    try:
        size = shapes.load(rig.model).token_bytes
    except ValueError:
        size = 0
    return size, range(*about.vocabulary)


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
    arm: Arm, about: FleetFile, rig: Rig, model: Path | str, logs: Path, doze: bool
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
    with Fleet(configs, logs, 10 * rig.start_s) as fleet:
        size, vocabulary = _about(rig, model, about)
        yield Servers(setup, about, target, vocabulary, fleet.check, via, size, owned=True)
