"""The router as a server of the harness, like SGLang's own in ``benchmark.harness.servers``."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from benchmark.harness.models import REPOSITORY
from benchmark.harness.servers import HOST, ServerConfig


def config(
    port: int,
    prefills: Sequence[ServerConfig] = (),
    decodes: Sequence[ServerConfig] = (),
    workers: Sequence[ServerConfig] = (),
    *,
    extra_args: Sequence[str] = (),
) -> ServerConfig:
    """A router before these servers, which should be ready: it is ready when it has looked at all.

    Args:
        workers: colocated ones.
        extra_args: policies and the like, as ``("--decode-policy", "round_robin")``.
    """
    command = [sys.executable, "-m", "benchmark.agentic", "route"]
    command += ["--host", HOST, "--port", str(port)]
    for server in prefills:
        command += ["--prefill", server.url, str(server.bootstrap_port)]
    for server in decodes:
        command += ["--decode", server.url]
    for server in workers:
        command += ["--worker", server.url]
    env = {"PYTHONPATH": str(REPOSITORY)}
    return ServerConfig("router", port, (*command, *extra_args), env)
