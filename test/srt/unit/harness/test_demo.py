"""The demo's pure parts: what it refuses before starting, and how it reads an answer."""

import socket
import sys
from pathlib import Path
from xml.etree import ElementTree

import pytest

from benchmark.demo import __main__ as demo
from benchmark.demo import chat, play, preflight
from benchmark.harness import plot
from benchmark.harness.arm import Measured, Traffic
from benchmark.harness.client import Result
from benchmark.harness.report import summarize


def test_a_taken_port_is_named_before_anything_starts(tmp_path: Path) -> None:
    """Guards against a minute of start-up that ends in a bind error."""
    (tmp_path / "config.json").write_text("{}")
    with socket.create_server(("127.0.0.1", 0)) as busy:
        port = busy.getsockname()[1]
        found = list(preflight.problems(port, tmp_path))
    assert f"port {port} is taken: choose another with --port" in found


def test_a_missing_model_is_named(tmp_path: Path) -> None:
    """Guards against SGLang's own message, which talks about a model hub."""
    assert any("model is missing" in p for p in preflight.problems(None, tmp_path))


def test_conversations_need_what_was_said_before() -> None:
    """Guards against a chat in which a lost turn would go unnoticed."""
    conversations = chat.load_conversations()
    assert [len(turns) for turns in conversations] == [5] * 4
    for turns in conversations:
        assert sum(turn.question.startswith("Then ") for turn in turns) >= 2


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


@pytest.mark.parametrize("same", [True, False])
def test_the_last_line_names_the_picture(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], same: bool
) -> None:
    """Guards against a picture that nobody finds, and in a pipe against a wrapped path and a table
    that is cut."""
    out = tmp_path / "a-long-folder-name" / "another-long-folder-name" / "and-another"
    widths = []
    monkeypatch.setattr(demo, "play", lambda _, __, to: widths.append(to.width) or same)
    monkeypatch.setattr(demo, "problems", lambda *_: [])
    monkeypatch.setattr(sys, "argv", ["demo", "--out", str(out)])
    assert demo.main() == (0 if same else 1)
    assert capsys.readouterr().out.splitlines()[-1] == f"Picture: {out / 'demo.svg'}"
    assert widths == [120]
