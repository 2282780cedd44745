"""What the demo refuses and shows, and how a benchmark's command line ends."""

from __future__ import annotations

import io
from pathlib import Path
from unittest.mock import Mock

import pytest
from rich.console import Console

from benchmark.harness.command import RunFailed, status
from benchmark.harness.process import ServerFailed


@pytest.mark.parametrize(
    ("error", "code", "said"),
    [
        (ServerFailed("decode", "no port", Path("decode.log"), ""), 1, "decode: no port"),
        (RunFailed("the warm-up [1] failed"), 1, "the warm-up [1] failed"),
        (ValueError("--seconds must be above 0"), 2, "--seconds must be above 0"),
        (FileNotFoundError(2, "No such file", "trace"), 2, "No such file"),
        (KeyboardInterrupt(), 130, ""),
    ],
)
def test_what_ends_a_run_is_one_line_and_a_status(
    error: BaseException, code: int, said: str
) -> None:
    """Guards against a traceback for what the user can put right, and against status 0 for it."""
    text = io.StringIO()
    assert status(Mock(side_effect=error), Console(file=text, width=200)) == code
    assert said in text.getvalue() and text.getvalue().count("\n") <= 1
