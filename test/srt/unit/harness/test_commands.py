"""The command line of the benchmarks."""

from __future__ import annotations

import io
import os
import subprocess
import sys
from pathlib import Path
from unittest.mock import Mock

import pytest
from rich.console import Console

from benchmark.__main__ import COMMANDS
from benchmark.harness.command import RunFailed, status
from benchmark.harness.process import ServerFailed

ROOT = Path(__file__).parents[4]
#: ``--help`` of each command in turn, while no engine package can be imported.
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
    """Guards against a first contact that ends in a traceback of torch, or in unwanted files."""
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


@pytest.mark.parametrize(
    ("error", "code", "message"),
    [
        (
            ServerFailed("decode", "[a] b", Path("decode.log"), ""),
            1,
            "decode: [a] b (log: decode.log)",
        ),
        (RunFailed("the warm-up [1] failed"), 1, "the warm-up [1] failed"),
        (ValueError("--seconds must be above 0"), 2, "--seconds must be above 0"),
        (FileNotFoundError(2, "No such file", "trace"), 2, "No such file"),
        (KeyboardInterrupt(), 130, ""),
    ],
)
def test_an_error_ends_a_run_with_one_line_and_a_status(
    error: BaseException, code: int, message: str
) -> None:
    """Guards against a traceback for errors that the user can correct, and against status 0."""
    text = io.StringIO()
    assert status(Mock(side_effect=error), Console(file=text, width=200)) == code
    assert message in text.getvalue() and text.getvalue().count("\n") <= 1
