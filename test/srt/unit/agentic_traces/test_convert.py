"""Other formats as a trace: lengths, who shares what, conversations, times."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from benchmark.agentic.traces import cli, convert
from benchmark.agentic.traces.formats import Message
from benchmark.traces.read import read
from benchmark.traces.record import Record


class Letters:
    """A tokenizer whose tokens are letters; a message ends in a line break."""

    def __init__(self, name: str) -> None:
        assert name == "letters"

    def text(self, text: str) -> list[int]:
        return list(text.encode())

    def prompt(self, messages: Sequence[Message], tools: list[Any] | None = None) -> list[int]:
        return self.text("".join(f"{m.role[0]}{m.text()}\n" for m in messages) + "a")


@pytest.fixture(autouse=True)
def letters(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(convert, "Tokenizer", Letters)


def converted(tmp_path: Path, content: str, name: str, *options: str) -> list[Record]:
    """``content`` as a file of format ``name``, converted."""
    source, out = tmp_path / "source", tmp_path / "out"
    source.write_text(content)
    assert convert.convert([str(source), str(out), "--format", name, *options]) == 0
    return list(read(out))


def chat(chat_id: int, parent: int, at: float, tokens: int, ids: Sequence[int]) -> str:
    return json.dumps(
        {"chat_id": chat_id, "parent_chat_id": parent, "timestamp": at, "input_length": tokens}
        | {"output_length": 7, "type": "text", "turn": 1, "hash_ids": list(ids)}
    )


def test_bailian(tmp_path: Path) -> None:
    """Guards against seconds taken for milliseconds, blocks of 16 tokens for such of 512, and
    turns that lose their conversation."""
    lines = [
        chat(4, -1, 10, 600, range(38)),
        chat(5, -1, 10.5, 16, [0]),
        chat(6, 4, 72.25, 1100, [*range(37), *range(100, 132)]),
        chat(7, 6, 90, 1200, [*range(37), *range(100, 138)]),
    ]
    first, other, second, third = converted(tmp_path, "\n".join(lines), "bailian")
    assert [r.timestamp for r in (first, other, second, third)] == [0, 500, 62_250, 80_000]
    assert [(r.session_id, r.turn) for r in (first, second, third)] == [
        ("chat-4", 0),
        ("chat-4", 1),
        ("chat-4", 2),
    ]
    assert (other.session_id, other.turn) == ("chat-5", 0)
    assert (first.input_length, first.output_length) == (600, 7)
    assert first.hash_ids[0] == second.hash_ids[0] == third.hash_ids[0] != other.hash_ids[0]
    assert second.hash_ids[1] == third.hash_ids[1] != first.hash_ids[1]
    assert (len(second.hash_ids), len(third.hash_ids)) == (3, 3)
    assert second.hash_ids[2] != third.hash_ids[2]


def test_blocks_of_equal_tokens_behind_other_blocks_are_others(tmp_path: Path) -> None:
    """Guards against sharing that no cache of prefixes has: Bailian's ids are of blocks alone."""
    same = range(50, 82)
    lines = [
        chat(1, -1, 0, 1024, [*range(32), *same]),
        chat(2, -1, 1, 1024, [*range(9, 41), *same]),
    ]
    a, b = converted(tmp_path, "\n".join(lines), "bailian")
    assert not set(a.hash_ids) & set(b.hash_ids)


def test_a_conversation_that_forks(tmp_path: Path) -> None:
    """Guards against two turns with one place in a conversation; and against a parent that is not
    in the file."""
    lines = [chat(1, 0, 0, 16, [1]), chat(2, 1, 1, 32, [1, 2]), chat(3, 1, 2, 32, [1, 3])]
    found = converted(tmp_path, "\n".join(lines), "bailian")
    assert [(r.session_id, r.turn) for r in found] == [("chat-1", 0), ("chat-1", 1), ("chat-3", 0)]


def test_lines_out_of_order(tmp_path: Path) -> None:
    """Guards against a trace that nothing reads, since its requests must be in order of time."""
    found = converted(tmp_path, chat(2, 1, 9, 16, [5]) + "\n" + chat(1, -1, 4, 16, [1]), "bailian")
    assert [(r.timestamp, r.session_id, r.turn) for r in found] == [
        (0, "chat-1", 0),
        (5000, "chat-1", 1),
    ]


def test_invalid_lines(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Guards against a converted trace that is shorter than its file without a word."""
    content = "\n".join([chat(1, -1, 0, 16, [1]), chat(2, -1, 1, 999, [1]), "broken"])
    (tmp_path / "bad").write_text(content)
    assert convert.convert([str(tmp_path / "bad"), str(tmp_path / "o"), "--format", "bailian"]) == 2
    assert "line 3: " in capsys.readouterr().err
    assert not (tmp_path / "o").exists()
    assert len(converted(tmp_path, content, "bailian", "--skip-invalid")) == 1
    assert "2 invalid lines were left out; the first: " in capsys.readouterr().err


def test_the_unit_of_the_times(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Guards against a trace of milliseconds whose two minutes last for two days, and against a
    trace in Mooncake's format whose seconds cannot be put right."""
    lines = "\n".join(chat(i, -1, i * 1e5, 16, [1]) for i in range(60))
    converted(tmp_path, lines, "bailian")
    assert "read as s and seem to be ms" in capsys.readouterr().err
    found = converted(tmp_path, lines, "bailian", "--timestamps-in", "ms")
    assert found[1].timestamp == 1e5
    assert "seem to be" not in capsys.readouterr().err
    mooncake = "\n".join(
        json.dumps({"timestamp": i / 4, "input_length": 9, "output_length": 1, "hash_ids": [0]})
        for i in range(60)
    )
    (tmp_path / "seconds").write_text(mooncake)
    assert cli.describe([str(tmp_path / "seconds")]) == 0
    assert "read as ms and seem to be s " in capsys.readouterr().err
    found = converted(tmp_path, mooncake, "mooncake", "--timestamps-in", "s")
    assert found[-1].timestamp == 59 * 250


SHARED = {
    "id": "x_0",
    "conversations": [
        {"from": "system", "value": "be brief"},
        {"from": "human", "value": "a" * 600},
        {"from": "gpt", "value": "short"},
        {"from": "human", "value": "and?"},
        {"from": "gpt", "value": "that is all"},
        {"from": "human", "value": "nobody answered this"},
    ],
}


@pytest.mark.parametrize("as_lines", [False, True])
def test_sharegpt(tmp_path: Path, as_lines: bool) -> None:
    """Guards against prompts without what was said before them, answers counted as prompts, and
    turns that come before the turn they follow."""
    hello = {"conversations": [{"from": "user", "value": "hi"}, {"from": "gpt", "value": "hello"}]}
    both = [SHARED, hello]
    content = "\n".join(map(json.dumps, both)) if as_lines else json.dumps(both)
    options = ("--tokenizer", "letters", "--rate", "0.5", "--pause", "7")
    first, other, second = converted(tmp_path, content, "sharegpt", *options)
    assert [(r.session_id, r.turn, r.timestamp) for r in (first, other, second)] == [
        ("sharegpt-0", 0, 0),
        ("sharegpt-1", 0, 2000),
        ("sharegpt-0", 1, 7000),
    ]
    assert (first.input_length, first.output_length) == (len("sbe brief\nu\na") + 600, 5)
    assert (second.input_length, second.output_length) == (first.input_length + 5 + 1 + 6 + 1, 11)
    assert first.hash_ids[0] == second.hash_ids[0]
    assert (other.input_length, other.output_length) == (5, 5)


def test_text_needs_a_tokenizer(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Guards against lengths in some other unit than tokens."""
    (tmp_path / "s").write_text(json.dumps([SHARED]))
    assert convert.convert([str(tmp_path / "s"), str(tmp_path / "o"), "--format", "sharegpt"]) == 2
    assert "--tokenizer" in capsys.readouterr().err


def test_conversations_that_cannot_be_used(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Guards against half a conversation, of which a turn could not be read."""
    broken = {"conversations": [*SHARED["conversations"], {"from": "tool", "value": "1"}]}
    content = json.dumps([broken, {"conversations": []}, SHARED])
    options = ("--tokenizer", "letters", "--skip-invalid")
    assert len(converted(tmp_path, content, "sharegpt", *options)) == 2
    assert "2 invalid lines were left out; the first: " in capsys.readouterr().err


def asked(*said: str) -> dict[str, Any]:
    roles = ("user", "assistant")
    return {"messages": [{"role": roles[i % 2], "content": text} for i, text in enumerate(said)]}


def answered(at: int, text: str, *usage: int) -> dict[str, Any]:
    found: dict[str, Any] = {"object": "chat.completion", "created": at}
    found["choices"] = [{"index": 0, "message": {"role": "assistant", "content": text}}]
    if usage:
        found["usage"] = {"prompt_tokens": usage[0], "completion_tokens": usage[1]}
    return found


def test_openai(tmp_path: Path) -> None:
    """Guards against one line of a log read as another's, lengths that the server counted and that
    are counted again, and conversations taken apart."""
    long, parts = "b" * 540, [{"type": "text", "text": "one part"}]
    lines = [
        {
            "custom_id": "1",
            "method": "POST",
            "url": "/v1/chat/completions",
            "body": asked(long),
            "response": {"status_code": 200, "body": answered(1_711_652_795, "yes", 580, 4)},
            "error": None,
        },
        {"request": asked(long, "yes", "why?"), "response": answered(1_711_652_800, "so")},
        {
            "timestamp": 1_711_652_796.5,
            "body": {"messages": [{"role": "user", "content": parts}]},
            "response": answered(1_711_652_799, "fine"),
        },
    ]
    content = "\n".join(map(json.dumps, lines))
    first, other, second = converted(tmp_path, content, "openai", "--tokenizer", "letters")
    assert [r.timestamp for r in (first, other, second)] == [0, 1500, 5000]
    assert (first.input_length, first.output_length) == (580, 4)
    assert (second.input_length, second.output_length) == (543 + 5 + 6, 2)
    assert (other.input_length, other.output_length) == (len("uone part\na"), 4)
    assert (first.session_id, first.turn) == ("openai-0", 0)
    assert (second.session_id, second.turn) == ("openai-0", 1)
    assert other.session_id == "openai-1"
    assert first.hash_ids[0] == second.hash_ids[0]


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ({"response": answered(1, "x")}, "no `body`"),
        ({"body": asked("x")}, "no `response`"),
        ({"body": asked("x"), "response": {"status_code": 500, "body": {}}}, "status 500"),
        ({"body": asked("x"), "response": {"choices": []}}, "neither `timestamp`"),
        ({"body": asked("x"), "response": answered(1, "")}, "output_length 0"),
        (
            {
                "body": {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]},
                "response": answered(1, "x"),
            },
            "no text",
        ),
    ],
)
def test_lines_of_a_log_that_are_refused(
    tmp_path: Path, line: dict[str, Any], says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Guards against requests that failed, or that nobody can size, in a trace."""
    (tmp_path / "log").write_text(json.dumps(line))
    out = str(tmp_path / "o")
    arguments = [str(tmp_path / "log"), out, "--format", "openai", "--tokenizer", "letters"]
    assert convert.convert(arguments) == 2
    error = capsys.readouterr().err
    assert "line 1: " in error
    assert says in error


def test_commands_leave_out_and_count(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Guards against ``--skip-invalid`` of describe and sample that nothing reads."""
    lines = [
        json.dumps({"timestamp": i * 50, "input_length": 9, "output_length": 1, "hash_ids": [i]})
        for i in range(3)
    ]
    path = tmp_path / "t"
    path.write_text("\n".join([lines[0], "broken", *lines[1:]]))
    for command in (cli.describe, cli.sample):
        assert command([str(path)]) == 2
        assert "line 2: " in capsys.readouterr().err
        extra = [] if command is cli.describe else [str(tmp_path / "s"), "--sample-ratio", "1"]
        assert command([str(path), *extra, "--skip-invalid"]) == 0
        assert "1 invalid line was left out; the first: " in capsys.readouterr().err
    assert len(list(read(tmp_path / "s"))) == 3
