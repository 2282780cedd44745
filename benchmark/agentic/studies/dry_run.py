"""The servers that a study would start, for ``--dry-run``."""

from __future__ import annotations

import os
import shlex
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory

from benchmark.agentic.fleet import rig
from benchmark.agentic.studies.run import Plan, dozes
from benchmark.harness.models import random_qwen3
from benchmark.harness.servers import ServerConfig


def planned_servers(plan: Plan) -> Iterator[str]:
    """Yield, for each arm of a rig, a line and the command of each server; for a fleet by address
    its servers. Ports are reserved as for a run, which takes others."""
    fleet = plan.fleet
    if fleet.rig is None:
        for name, arm in plan.arms.items():
            setup = fleet.named()[arm.setup or name]
            urls = [f"{role} {url}" for url, role in setup.engines.items()]
            yield f"{name}: {', '.join(urls) or f'router {setup.router}'}"
        return
    with TemporaryDirectory() as folder:
        # A random model is made here to learn its size, and shown where a run makes it.
        model = fleet.rig.model or random_qwen3(Path(folder, "model-random"), **fleet.rig.shape)
        for name, arm in plan.arms.items():
            yield f"\n{name}: {arm.shown}"
            for config in rig.layout(arm, fleet.rig, model, fleet.block_tokens, dozes(plan)):
                yield f"  {config.role}: {_where(fleet.rig, config)}"
                words = [f"{key}={value}" for key, value in config.env.items()]
                command = shlex.join(["env", *words, *config.command])
                yield f"    {command.replace(folder, os.fspath(plan.out))}"


def _where(about: rig.Rig, config: ServerConfig) -> str:
    """Return the ports of a server, and its GPUs."""
    ports = {"HTTP": str(config.port)}
    if "--nccl-port" in config.command:
        ports["NCCL"] = config.command[config.command.index("--nccl-port") + 1]
    if config.bootstrap_port is not None:
        ports["bootstrap"] = str(config.bootstrap_port)
    text = "ports " + ", ".join(f"{name} {port}" for name, port in ports.items())
    if found := rig.gpus(about, config):
        text += f"; GPUs {', '.join(map(str, found))}"
    return text
