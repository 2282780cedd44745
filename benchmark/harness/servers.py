"""Configuration -> command line and environment, for each role. Pure: nothing is started here."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from sglang.srt.patchset.status import installed_version
from sglang.srt.patchset.table import CURRENT_VERSION

HOST = "127.0.0.1"
LEAN = ("--skip-tokenizer-init", "--incremental-streaming-output")
"""Token ids in and out, each once: helper processes share the cores with the schedulers."""

# SGLang on a machine with no GPU; the CPU stand-in provides the names it misses there.
_CPU_ARGS = (
    *("--device", "cpu", "--dtype", "float32"),
    *("--attention-backend", "torch_native", "--sampling-backend", "pytorch"),
    "--disable-cuda-graph",
)
if installed_version() != CURRENT_VERSION:  # which has no such flag
    _CPU_ARGS += ("--disable-piecewise-cuda-graph",)


@dataclass(frozen=True)
class Sizes:
    """What decides how many requests fit; the same on every arm of a comparison."""

    pool_tokens: int = 8000
    """KV pool of the server, tokens (``--max-total-tokens``)."""
    page_size: int = 1
    """Tokens a page."""
    chunked_prefill_tokens: int | None = None
    """Tokens a prefill chunk; None leaves SGLang's choice."""
    max_running: int = 64
    """Requests a batch at most (``--max-running-requests``). It also sizes per-request tables."""
    reserved_decode_tokens: int | None = None
    """``--num-reserved-decode-tokens`` of the decode server; None leaves SGLang's 512."""

    def arguments(self) -> list[str]:
        args = ["--max-total-tokens", str(self.pool_tokens), "--page-size", str(self.page_size)]
        args += ["--max-running-requests", str(self.max_running)]
        if self.chunked_prefill_tokens is not None:
            args += ["--chunked-prefill-size", str(self.chunked_prefill_tokens)]
        return args


DEFAULT_SIZES = Sizes()


@dataclass(frozen=True)
class ServerConfig:
    """One server: its role (aggregated, prefill, decode or router) and how to run it."""

    role: str
    port: int
    command: tuple[str, ...]
    env: Mapping[str, str] = field(default_factory=dict)
    """What the process gets on top of this one's environment; see ``environment``."""
    bootstrap_port: int | None = None

    @property
    def url(self) -> str:
        return f"http://{HOST}:{self.port}"

    @property
    def ready_url(self) -> str:
        """Answers 200 once the server serves; for a router, once it has both workers."""
        return f"{self.url}/{'readiness' if self.role == 'router' else 'health'}"

    def environment(self) -> dict[str, str]:
        """The whole environment of the process."""
        env = {**os.environ, **_BASE_ENV, **self.env}
        # Without cached bytecode each of a server's processes compiles SGLang anew: +15 s of CPU.
        env.pop("PYTHONDONTWRITEBYTECODE", None)
        return env


_BASE_ENV = {
    "OMP_NUM_THREADS": "1",  # several servers share few cores
    "MKL_NUM_THREADS": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "HF_HUB_OFFLINE": "1",
    "TRANSFORMERS_OFFLINE": "1",
    "PYTHONUNBUFFERED": "1",
    "SGLANG_CPU_STANDIN": "1",
}


def patchset_env(stock: bool) -> dict[str, str]:
    """The switch of the patch set: off gives the stock release (the CPU stand-in stays)."""
    return {"SGLANG_PATCHSET": "0" if stock else "1"}


def tensor_parallel(ranks: int) -> tuple[tuple[str, ...], dict[str, str]]:
    """Arguments and environment of a server of so many tensor parallel ranks; none for one rank.

    On a CPU each rank is bound to cores of its own, as far as there are enough, and has no NCCL.
    """
    if ranks == 1:
        return (), {}
    cores = os.cpu_count() or 1
    binding = "|".join(str(rank % cores) for rank in range(ranks))
    env = {"SGLANG_CPU_OMP_THREADS_BIND": binding, "SGLANG_NCCL_SO_PATH": "none"}
    return ("--tp-size", str(ranks)), env


def engine(
    role: str,
    model: Path | str,
    ports: Sequence[int],
    sizes: Sizes = DEFAULT_SIZES,
    *,
    backend: str = "nixl",
    stock: bool = False,
    radix: bool = False,
    extra_args: tuple[str, ...] = (),
    env: Mapping[str, str] | None = None,
) -> ServerConfig:
    """A server of a role: ``prefill``, ``decode``, or ``aggregated``, which does both.

    ``ports``: HTTP, torch.distributed, and of a prefill server the bootstrap port, where decode
    asks for its addresses. ``radix`` passes the decode radix cache flag.
    """
    command = [sys.executable, "-m", "sglang.launch_server", "--model-path", str(model)]
    command += ["--host", HOST, "--port", str(ports[0])]
    if "--dp-size" not in extra_args:  # else SGLang picks one for each rank
        command += ["--nccl-port", str(ports[1])]
    command += [*_CPU_ARGS, "--enable-metrics", *sizes.arguments(), *extra_args]
    if role != "aggregated":
        command += ["--disaggregation-mode", role, "--disaggregation-transfer-backend", backend]
    if role == "prefill":
        command += ["--disaggregation-bootstrap-port", str(ports[2])]
    if role == "decode" and sizes.reserved_decode_tokens is not None:
        command += ["--num-reserved-decode-tokens", str(sizes.reserved_decode_tokens)]
    if radix:
        command.append("--disaggregation-decode-enable-radix-cache")
    bootstrap = ports[2] if role == "prefill" else None
    env = {**patchset_env(stock), **(env or {})}
    return ServerConfig(role, ports[0], tuple(command), env, bootstrap)


#: The stock release unless told: the reference for equality of output.
aggregated = partial(engine, "aggregated", stock=True)
prefill = partial(engine, "prefill")
decode = partial(engine, "decode")


def router(
    ports: Sequence[int],
    prefills: Sequence[ServerConfig] = (),
    decodes: Sequence[ServerConfig] = (),
    workers: Sequence[ServerConfig] = (),
    *,
    policy: str = "round_robin",
) -> ServerConfig:
    """SGLang's own load balancer in front of prefill and decode servers, or of aggregated workers.

    ``ports``: HTTP and its metrics. ``policy``: for every pool.
    """
    command = [sys.executable, "-m", "sglang_router.launch_router"]
    if workers:
        command += ["--worker-urls", *(worker.url for worker in workers)]
    else:
        command.append("--pd-disaggregation")
    for server in prefills:
        command += ["--prefill", server.url, str(server.bootstrap_port)]
    for server in decodes:
        command += ["--decode", server.url]
    command += ["--host", HOST, "--port", str(ports[0]), "--prometheus-port", str(ports[1])]
    command += ["--policy", policy, "--worker-startup-check-interval", "1"]
    return ServerConfig("router", ports[0], tuple(command))
