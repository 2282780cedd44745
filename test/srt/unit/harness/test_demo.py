"""What the demo refuses and shows, and how a benchmark's command line ends."""

from __future__ import annotations

import io
import socket
from collections.abc import Callable
from pathlib import Path

import pytest
from rich.console import Console

from benchmark.demo.__main__ import problems
from benchmark.demo.serve import told
from benchmark.harness import metrics
from benchmark.harness.command import RunFailed, status
from benchmark.harness.process import ServerFailed


def test_a_taken_port_is_named_before_anything_starts(tmp_path: Path) -> None:
    """Guards against a minute of start-up that ends in a bind error."""
    (tmp_path / "config.json").write_text("{}")
    with socket.create_server(("127.0.0.1", 0)) as busy:
        port = busy.getsockname()[1]
        found = list(problems(port, tmp_path))
    assert f"port {port} is taken: choose another with --port" in found


def test_the_live_view_counts_from_its_start_and_says_what_is_not_known() -> None:
    """Guards against what a server did before as what it does now, and against a dead server's
    zeros."""
    first = {metrics.PROMPT_TOKENS: 1000.0, metrics.HIT_TOKENS: 900.0, "local": 3.0}
    now = {
        metrics.PROMPT_TOKENS: 3000.0,
        metrics.HIT_TOKENS: 1900.0,
        metrics.REQUESTED_BYTES: 1e6,
        metrics.RUNNING: 2.0,
        "local": 5.0,
        f"{metrics.TTFT}_sum": 1.0,
        f"{metrics.TTFT}_count": 4.0,
    }
    shown = told(None, now, first, token_bytes=1000)
    assert shown["prefix hits"] == "1,000 of 2,000 tokens"
    assert shown["KV saved"] == "1.00 of 2.00 MB"
    assert shown["turns"] == "2 local, 0 remote"
    assert shown["mean TTFT"] == "250 ms"
    assert shown["waiting"] == "0 on decode, 0 in transfer, - on prefill"
    silent = told({}, None, first, token_bytes=1000)
    assert (silent["running"], silent["turns"]) == ("-", "- local, - remote")


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
