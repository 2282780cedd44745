"""The demo's pure parts: what it refuses before starting, and how it reads an answer."""

import socket
from pathlib import Path

from benchmark.demo import chat, preflight
from benchmark.harness.client import Result


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
