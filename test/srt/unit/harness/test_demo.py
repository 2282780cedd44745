"""The demo's pure parts, and how a benchmark's command line ends."""

from __future__ import annotations

import io
import socket
from collections.abc import Callable
from pathlib import Path

import pytest
from rich.console import Console

from benchmark.demo import chat, preflight
from benchmark.harness.client import Result
from benchmark.harness.command import RunFailed, status
from benchmark.harness.process import ServerFailed


def test_a_taken_port_is_named_before_anything_starts(tmp_path: Path) -> None:
    """Guards against a minute of start-up that ends in a bind error."""
    (tmp_path / "config.json").write_text("{}")
    with socket.create_server(("127.0.0.1", 0)) as busy:
        port = busy.getsockname()[1]
        found = list(preflight.problems(port, tmp_path))
    assert f"port {port} is taken: choose another with --port" in found


def test_right_answers_are_counted_by_their_number() -> None:
    """Guards against an answer counted right for a number in its working."""
    turns = [[chat.Turn("?", 5), chat.Turn("?", 6)]]
    results = [Result("0.0", 0.0, text="2+3 = 5\n#### 5"), Result("0.1", 0.0, text="6\n#### 7")]
    assert chat.right_answers(turns, results) == 1
    assert chat.number_of("6") is None


def _raises(error: BaseException) -> Callable[[], int]:
    def run() -> int:
        raise error

    return run


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
    assert status(_raises(error), Console(file=text, width=200)) == code
    assert said in text.getvalue() and text.getvalue().count("\n") <= 1
