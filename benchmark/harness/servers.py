"""Command line and environment of each server of an arm. Nothing is started here."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import cpu_standin
from benchmark.harness.models import REPOSITORY, on_current
from benchmark.harness.ports import allocate_ports
from sglang.srt.patchset.status import installed_version
from sglang.srt.patchset.table import CURRENT_VERSION

HOST = "127.0.0.1"
LEAN = ("--skip-tokenizer-init", "--incremental-streaming-output")
"""Token ids in and out, each once, because helper processes would share the schedulers' cores."""

_ON_GPU = cpu_standin.gpu_device_node() is not None
# Without a GPU the CPU stand-in provides the names that SGLang lacks. Several servers share a GPU.
_DEVICE_ARGS = (
    ("--device", "cuda", "--attention-backend", "triton", "--mem-fraction-static", "0.2")
    if _ON_GPU
    else ("--device", "cpu", "--attention-backend", "torch_native", "--disable-cuda-graph")
)
_LAYOUT = ("--hicache-io-backend", "direct", "--hicache-mem-layout", "page_first_direct")
HICACHE = (
    *("--enable-hierarchical-cache", "--hicache-write-policy", "write_through", *_LAYOUT),
    *("--hicache-storage-prefetch-policy", "wait_complete"),
)
"""For aggregated and prefill servers that read and write host memory, and a store behind it."""
WRITES = ("--disaggregation-decode-enable-offload-kvcache", *_LAYOUT)
"""For decode servers with the radix cache that write to that store."""


@dataclass(frozen=True)
class Sizes:
    """Sizes that limit how many requests fit; equal in all arms of a comparison."""

    pool_tokens: int = 8000
    """KV pool of the server, tokens (``--max-total-tokens``)."""
    page_size: int = 1
    """Tokens of a page."""
    chunked_prefill_tokens: int | None = None
    """Tokens of a prefill chunk; None: SGLang's default."""
    max_running: int = 64
    """Maximum requests of a batch (``--max-running-requests``); also sizes per-request tables."""
    reserved_decode_tokens: int | None = None
    """``--num-reserved-decode-tokens`` of the decode server; None: SGLang's 512."""

    def arguments(self) -> list[str]:
        args = ["--max-total-tokens", str(self.pool_tokens), "--page-size", str(self.page_size)]
        args += ["--max-running-requests", str(self.max_running)]
        if self.chunked_prefill_tokens is not None:
            args += ["--chunked-prefill-size", str(self.chunked_prefill_tokens)]
        return args


@dataclass(frozen=True)
class ServerConfig:
    """One server: its role (aggregated, prefill, decode, router or store) and how to start it."""

    role: str
    port: int
    command: tuple[str, ...]
    env: Mapping[str, str] = field(default_factory=dict)
    """Variables that replace those of this process; see ``environment``."""
    bootstrap_port: int | None = None

    @property
    def url(self) -> str:
        return f"http://{HOST}:{self.port}"

    @property
    def ready_url(self) -> str:
        """Answers 200 once the server is ready; for a router, once it has both workers."""
        paths = {"router": "readiness", "store": "metrics"}
        return f"{self.url}/{paths.get(self.role, 'health')}"

    def environment(self) -> dict[str, str]:
        """Return the complete environment of the process."""
        env = cpu_standin.environment({**os.environ, **_BASE_ENV, **self.env})
        # Without cached bytecode each of a server's processes compiles SGLang again: +15 s of CPU.
        env.pop("PYTHONDONTWRITEBYTECODE", None)
        return env


_BASE_ENV = {
    "OMP_NUM_THREADS": "1",  # several servers share few cores
    "MKL_NUM_THREADS": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "HF_HUB_OFFLINE": "1",
    "TRANSFORMERS_OFFLINE": "1",
    "PYTHONUNBUFFERED": "1",
}


def patchset_env(stock: bool) -> dict[str, str]:
    """Return the switch of the patch set: off gives the stock release (with the CPU stand-in)."""
    return {"SGLANG_PATCHSET": "0" if stock else "1"}


def engine(
    role: str,
    model: Path | str,
    sizes: Sizes = Sizes(),  # noqa: B008
    *,
    backend: str = "nixl",
    stock: bool = False,
    radix: bool = False,
    ranks: int = 1,
    extra_args: tuple[str, ...] = (),
    env: Mapping[str, str] | None = None,
    venv: str | None = None,
    first_gpu: int | None = None,
) -> ServerConfig:
    """Return a server with a role, ``prefill``, ``decode``, or ``aggregated``, which does both, on
    ports reserved for it now.

    Args:
        backend: transfer backend.
        stock: run the stock release, even if the package is installed.
        radix: pass the decode radix cache flag.
        ranks: tensor parallel ranks. On a CPU each is bound to its own cores, if there are enough,
            and has no NCCL.
        venv: folder of another environment, of SGLang 0.5.23, in the repository.
        first_gpu: the first of ``ranks`` GPUs that only this server uses, with SGLang's defaults.
            None: settings for small test models, on a GPU that all servers share, or on a CPU.
    """
    # Ports of HTTP, torch.distributed, and the bootstrap server.
    http, nccl, bootstrap = allocate_ports(3)
    python = str(REPOSITORY / venv / "bin/python") if venv else sys.executable
    command = [python, "-m", "sglang.launch_server", "--model-path", str(model)]
    command += ["--host", HOST, "--port", str(http)]
    if "--dp-size" not in extra_args:  # else SGLang picks one for each rank
        command += ["--nccl-port", str(nccl)]
    if first_gpu is None:
        command += [*_DEVICE_ARGS, "--dtype", "float32", "--sampling-backend", "pytorch"]
    else:  # all GPUs stay visible, because CUDA IPC between servers needs it
        command += ["--device", "cuda", "--base-gpu-id", str(first_gpu)]
    command += ["--enable-metrics", *sizes.arguments()]
    if role == "decode" and sizes.reserved_decode_tokens is not None:
        command += ["--num-reserved-decode-tokens", str(sizes.reserved_decode_tokens)]
    command += extra_args
    process_env = {**patchset_env(stock), **(on_current(REPOSITORY / venv) if venv else {})}
    small = first_gpu is None and venv is None
    if small and installed_version() != CURRENT_VERSION:  # 0.5.23 has no such flag
        command.append("--disable-piecewise-cuda-graph")
    if ranks > 1:
        command += ["--tp-size", str(ranks)]
    if ranks > 1 and first_gpu is None and not _ON_GPU:
        binding = "|".join(str(rank % (os.cpu_count() or 1)) for rank in range(ranks))
        process_env |= {"SGLANG_CPU_OMP_THREADS_BIND": binding, "SGLANG_NCCL_SO_PATH": "none"}
    if role != "aggregated":
        command += ["--disaggregation-mode", role, "--disaggregation-transfer-backend", backend]
    if role == "prefill":
        command += ["--disaggregation-bootstrap-port", str(bootstrap)]
    if radix:
        command.append("--disaggregation-decode-enable-radix-cache")
    bootstrap_port = bootstrap if role == "prefill" else None
    return ServerConfig(role, http, tuple(command), {**process_env, **(env or {})}, bootstrap_port)


#: Runs the stock release by default, as the reference for equality of output.
aggregated = partial(engine, "aggregated", stock=True)


def of_role(layout: Sequence[ServerConfig], role: str) -> list[ServerConfig]:
    return [config for config in layout if config.role == role]


def router(engines: Sequence[ServerConfig], *, port: int | None = None) -> ServerConfig:
    """Return SGLang's own load balancer in front of prefill and decode servers.

    ``port``: None: a free one.
    """
    free, metrics_port = allocate_ports(2)
    command = [sys.executable, "-m", "sglang_router.launch_router", "--pd-disaggregation"]
    for server in of_role(engines, "prefill"):
        command += ["--prefill", server.url, str(server.bootstrap_port)]
    for server in of_role(engines, "decode"):
        command += ["--decode", server.url]
    command += ["--host", HOST, "--port", str(port or free), "--prometheus-port", str(metrics_port)]
    command += ["--policy", "round_robin", "--worker-startup-check-interval", "1"]
    # Otherwise a server that was killed gets no request for a minute after it serves again.
    command += ["--cb-timeout-duration-secs", "10"]
    return ServerConfig("router", port or free, tuple(command))


def staged(pages: int) -> tuple[str, ...]:
    """Return the arguments of a server whose host memory is a staging buffer of ``pages``."""
    return ("--hicache-host-memory-mode", "buffer_only", "--hicache-buffer-pages", str(pages))


def stored(about: Mapping[str, object], segment: int, page_tokens: int) -> tuple[str, ...]:
    """Return the arguments of a client of the store that ``about`` describes.

    ``segment``: bytes that this client gives to the store. ``page_tokens``: its page size, which is
    also its smallest read.
    """
    config = {**about, "global_segment_size": segment, "prefetch_threshold": page_tokens}
    extra = ("--hicache-storage-backend-extra-config", json.dumps(config))
    return ("--hicache-storage-backend", "mooncake", *extra)


def store() -> tuple[ServerConfig, dict[str, object]]:
    """Return Mooncake's master with its metadata server, and its addresses for ``stored``. The
    clients provide the store's memory.

    A queried key cannot be evicted for one second. Mooncake's default of 10 s suits a store whose
    content turns over in minutes; a small store turns over in seconds.
    """
    rpc, http, metrics_port = allocate_ports(3)
    command = (
        str(Path(sys.executable).with_name("mooncake_master")),
        *(f"--rpc_port={rpc}", f"--rpc_address={HOST}"),
        *("--enable_http_metadata_server=true", f"--http_metadata_server_host={HOST}"),
        *(f"--http_metadata_server_port={http}", f"--metrics_port={metrics_port}"),
        *(f"--metrics_host={HOST}", "--default_kv_lease_ttl=1000"),
    )
    about = {
        "master_server_address": f"{HOST}:{rpc}",
        "metadata_server": f"http://{HOST}:{http}/metadata",
        "master_metrics_port": metrics_port,
        "local_hostname": HOST,
        "protocol": "tcp",
    }
    return ServerConfig("store", metrics_port, command), about
