"""The router as a server of the harness, like SGLang's own in ``benchmark.harness.servers``."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from benchmark.harness.models import REPOSITORY
from benchmark.harness.servers import HOST, ServerConfig


def config(
    port: int,
    prefills: Sequence[tuple[str, int]] = (),
    decodes: Sequence[str] = (),
    workers: Sequence[str] = (),
    *,
    extra_args: Sequence[str] = (),
) -> ServerConfig:
    """A router before these servers, which should be ready: it is ready when it has looked at all.

    Args:
        prefills: URL and bootstrap port of each.
        decodes: URLs.
        workers: URLs of colocated ones.
        extra_args: policies and the like, as ``("--decode-policy", "round_robin")``.
    """
    command = [sys.executable, "-m", "benchmark.agentic", "route"]
    command += ["--host", HOST, "--port", str(port)]
    for url, bootstrap_port in prefills:
        command += ["--prefill", url, str(bootstrap_port)]
    for url in decodes:
        command += ["--decode", url]
    for url in workers:
        command += ["--worker", url]
    env = {"PYTHONPATH": str(REPOSITORY)}
    return ServerConfig("router", port, (*command, *extra_args), env)
