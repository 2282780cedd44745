"""The demo's pure parts, and how a benchmark's command line ends."""

from __future__ import annotations

import io
import socket
from collections.abc import Callable
from pathlib import Path
from xml.etree import ElementTree

import pytest
from rich.console import Console

from benchmark.demo import chat, play, preflight
from benchmark.harness import plot
from benchmark.harness.arm import Measured, Traffic
from benchmark.harness.client import Result
from benchmark.harness.command import RunFailed, status
from benchmark.harness.process import ServerFailed
from benchmark.harness.report import summarize


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


def measured(megabytes: float, **ttft_s: float) -> Measured:
    """A load of requests by label, each with its TTFT."""
    results = [Result(name[1:].replace("_", "."), 0.0) for name in ttft_s]
    for result, seconds in zip(results, ttft_s.values(), strict=True):
        result.token_times = [seconds]
    traffic = Traffic(megabytes * 1e6, 0, 0, 0, "pages sent")
    return Measured(summarize(results), traffic, 1, 0, results)


def arm(scale: float) -> play.Arm:
    chatted = measured(2 * scale, t0_0=9.0, t0_1=0.1 * scale, t1_0=9.0, t1_1=0.3 * scale)
    return play.Arm(chatted, measured(40 * scale, t0=5 * scale))


def test_the_picture_has_later_turns_and_bytes_of_each_arm(tmp_path: Path) -> None:
    """Guards against first turns, which no cache helps, among those that are compared; and a bar
    under another arm's name."""
    shown = play.quantities([arm(scale) for scale in (4, 3, 2, 1)])
    assert [list(values) for values in shown.values()] == [
        ["stock", "patched", "flag", "local turns"]
    ] * 4
    assert [list(values.values()) for values in shown.values()] == [
        pytest.approx([0.8, 0.6, 0.4, 0.2]),
        [8, 6, 4, 2],
        [20, 15, 10, 5],
        [160, 120, 80, 40],
    ]
    plot.bars(tmp_path / play.PICTURE, shown)
    assert ElementTree.parse(tmp_path / play.PICTURE).getroot().tag.endswith("svg")


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


def test_a_mistake_of_ours_is_not_hidden() -> None:
    """Guards against a bug that looks like bad input."""
    with pytest.raises(KeyError):
        status(_raises(KeyError("arm")), Console(file=io.StringIO()))
