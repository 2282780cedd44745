"""The command line of the benchmarks."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from benchmark.__main__ import COMMANDS

ROOT = Path(__file__).parents[4]
#: ``--help`` of each command in turn, where nothing of an engine can be imported.
HELP = """
import sys
for name in ("torch", "sglang_router", "transformers", "nixl", "mooncake", "psutil"):
    sys.modules[name] = None
from benchmark import __main__ as commands
for name in sys.argv[1:]:
    sys.argv = ["benchmark", name, "--help"]
    try:
        ended = commands.main()
    except SystemExit as exit:
        ended = exit.code
    assert ended == 0, (name, ended)
"""


def test_help_needs_no_engine_and_writes_nothing(tmp_path: Path) -> None:
    """Guards against a first contact that ends in a traceback of torch, or in files that nobody
    asked for."""
    env = {k: v for k, v in os.environ.items() if not k.startswith("SGLANG")}
    done = subprocess.run(
        [sys.executable, "-c", HELP, *COMMANDS],
        cwd=tmp_path,
        env={**env, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("usage: ") == len(COMMANDS)
    assert list(tmp_path.iterdir()) == []
