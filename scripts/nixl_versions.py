r"""Run pairs whose servers load different versions of NIXL, and print if their requests end.

    pip install --no-deps --target /tmp/nixl-1.0.0 nixl==1.0.0 nixl-cu12==1.0.0 nixl-cu13==1.0.0
    PYTHONPATH=test/srt/standin:test/srt:. .venv/bin/python scripts/nixl_versions.py \
        /tmp/nixl-1.0.0

Each folder is one other version. Two pairs run for it: a patched prefill server with the installed
NIXL before a stock decode server with the other one, and the reverse, where decode has the radix
cache. Answers are compared with those of an aggregated server.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import tempfile
from dataclasses import replace
from pathlib import Path

from benchmark.harness.fleet import Aggregated, Pair, PairConfig
from benchmark.harness.servers import Sizes
from e2e.support import prompt_maker
from models.random_qwen3 import build

STOCK = {"SGLANG_PATCHSET": "0"}
TURNS = 2
NEW_TOKENS = 12
TELLING_LINE = re.compile(r"nixl|ucx|does not support|error|timed out|within", re.IGNORECASE)
MAX_LINES = 6
WHICH = """
import nixl._api as api, importlib.metadata as metadata
name = api.nixl_agent.__module__.partition(".")[0]
print(name, metadata.version(name))
"""
SHORT = {
    "SGLANG_DISAGGREGATION_WAITING_TIMEOUT": "30",
    "SGLANG_DISAGGREGATION_TRANSFER_TIMEOUT": "20",
}
"""Timeouts in seconds, so that a pair that cannot transfer says so soon."""


def loaded(folder: Path | None) -> str:
    """Return the name and version of NIXL that a server with ``folder`` on its path imports."""
    env = {**os.environ, "PYTHONPATH": str(folder or "")}
    done = subprocess.run([sys.executable, "-c", WHICH], env=env, capture_output=True, text=True)
    return done.stdout.strip() or done.stderr.strip().splitlines()[-1]


def outcome(config: PairConfig, prompts: list[list[int]], answers: list[list[int]]) -> str:
    """Return "works", or the first error with the telling lines of both logs."""
    with tempfile.TemporaryDirectory() as logs:
        try:
            with Pair(config, logs) as pair:
                for _ in range(TURNS):
                    if pair.generate(prompts, NEW_TOKENS) != answers:
                        return "wrong answers"
                pair.check()
                return "works"
        except Exception as error:
            texts = [str(error)[:500]]
            for log in sorted(Path(logs).glob("*.log")):
                lines = log.read_text(errors="replace").splitlines()
                telling = [line for line in lines if TELLING_LINE.search(line)]
                texts += [f"{log.stem}: {line[:300]}" for line in telling[-MAX_LINES:]]
            return "\n    ".join(texts)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", nargs="+", type=Path)
    folders = parser.parse_args().folder
    with tempfile.TemporaryDirectory() as home:
        model = build(Path(home) / "model", seed=0)
        tokens = prompt_maker(model, seed=9)
        shared = tokens(300)
        prompts = [[*shared, *tokens(10 * i + 1)] for i in range(4)]
        with Aggregated(model, home, Sizes(pool_tokens=8000)) as server:
            answers = server.generate(prompts, NEW_TOKENS)
        print("installed:", loaded(None), flush=True)
        pair = PairConfig(model=model, env=SHORT)
        for folder in folders:
            other = {"PYTHONPATH": str(folder.resolve())}
            print(f"{folder.name}: {loaded(folder.resolve())}", flush=True)
            upgraded_prefill = replace(pair, decode_env={**other, **STOCK})
            upgraded_decode = replace(pair, radix=True, stock_prefill=True, prefill_env=other)
            for name, config in (
                ("prefill upgraded, decode not", upgraded_prefill),
                ("decode upgraded, prefill not", upgraded_decode),
            ):
                print(f"  {name}: {outcome(config, prompts, answers)}", flush=True)


if __name__ == "__main__":
    main()
