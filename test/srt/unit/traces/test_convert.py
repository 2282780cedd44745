"""Request logs become traces: lengths, shared blocks, sessions and times, and no text."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from benchmark.traces import cli
from benchmark.traces.record import BLOCK_TOKENS, Record, read
from benchmark.traces.sessions import annotate

SYSTEM = "s" * 8192
"""2,048 tokens of four bytes, and those of its header: four whole blocks."""
SECRET = "the patient's name"


def user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


def assistant(text: str) -> dict[str, str]:
    return {"role": "assistant", "content": text}


def converted(tmp_path: Path, log: str, *words: str) -> list[Record]:
    """Return the trace of a log's text."""
    (tmp_path / "log").write_text(log)
    out = tmp_path / "trace.jsonl"
    assert cli.convert([str(tmp_path / "log"), str(out), *words]) == 0
    assert SECRET not in out.read_text() and "sss" not in out.read_text()
    return list(read(out))


def lines(*entries: Any) -> str:
    return "".join(json.dumps(entry) + "\n" for entry in entries)


SYSTEM_MESSAGE = {"role": "system", "content": SYSTEM}
HISTORY = [SYSTEM_MESSAGE, user(SECRET), assistant("a" * 400), user("and?"), assistant("b" * 40)]
SHARED = 4


def check_histories(records: list[Record]) -> None:
    """Two conversations of two turns: a turn continues the one before, sessions share SYSTEM."""
    assert len(records) == 4
    by_name: dict[str | None, list[Record]] = {}
    for record in records:
        by_name.setdefault(record.session_id, []).append(record)
    assert len(by_name) == 2 and None not in by_name
    for first, second in by_name.values():
        assert (first.turn, second.turn) == (0, 1)
        assert second.timestamp - first.timestamp == pytest.approx(10_000, abs=0.01)
        assert (first.output_length, second.output_length) == (100, 10)
        assert second.input_length > first.input_length + 100, "the answer is in the next prompt"
        full = first.input_length // BLOCK_TOKENS
        assert second.hash_ids[:full] == first.hash_ids[:full]
    (one, _), (two, _) = by_name.values()
    assert one.hash_ids[:SHARED] == two.hash_ids[:SHARED]
    assert one.hash_ids[SHARED:] != two.hash_ids[SHARED:]


def test_chat_histories(tmp_path: Path) -> None:
    other = [*HISTORY[:1], user("other"), *HISTORY[2:]]
    check_histories(converted(tmp_path, lines({"messages": HISTORY}, {"messages": other})))
    check_histories(
        converted(tmp_path, json.dumps([{"messages": HISTORY}, {"messages": other}], indent=1))
    )


def test_sharegpt(tmp_path: Path) -> None:
    """Guards its own names of roles and fields, and conversations that begin with an answer."""
    names = {"user": "human", "assistant": "gpt", "system": "system"}
    turns = [{"from": names[m["role"]], "value": m["content"]} for m in HISTORY]
    other = [*turns[:1], {"from": "human", "value": "other"}, *turns[2:]]
    text = json.dumps([{"id": "x", "conversations": turns}, {"id": "y", "conversations": other}])
    check_histories(converted(tmp_path, text))
    odd = json.dumps([{"conversations": [{"from": "gpt", "value": "hi"}, *turns]}])
    assert len(converted(tmp_path, odd)) == 2


def test_a_request_log(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Guards times in several units, logged lengths of answers, the order of arrival, and sessions
    that the log does not name."""
    response = {"choices": [{"message": assistant("a" * 400)}], "usage": {"completion_tokens": 7}}
    response["usage"]["prompt_tokens"] = 2060
    first = {"timestamp": 1_700_000_010, "request": {"messages": HISTORY[:2]}, "response": response}
    second = {"timestamp": 1_700_000_012_500, "body": {"messages": HISTORY[:4]}}
    second["response"] = {"status_code": 200, "body": {"choices": [{"text": "b" * 40}]}}
    early = {"time": "2023-11-14T22:13:20Z", "messages": [user("hello")], "response": "a" * 8}
    records = converted(tmp_path, lines(first, second, early))
    assert [record.timestamp for record in records] == [0, 10_000, 12_500]
    assert [record.output_length for record in records] == [2, 7, 10]
    assert [record.session_id for record in records] == [None] * 3
    named = list(annotate(records))
    assert named[1].session_id == named[2].session_id != named[0].session_id
    assert "prompt tokens as logged, over those counted here: 1.00" in capsys.readouterr().out


def test_batch_files_are_joined(tmp_path: Path) -> None:
    """Guards an answer given to another request: the output file has its own order."""
    asked = [
        {"custom_id": name, "method": "POST", "url": "/v1/chat/completions", "body": body}
        for name, body in (
            ("a", {"messages": [user("one")], "max_tokens": 50}),
            ("b", {"messages": [user("two")]}),
        )
    ]
    answered = [
        {"custom_id": n, "response": {"body": {"choices": [{"message": assistant("x" * size)}]}}}
        for n, size in (("b", 80), ("a", 40))
    ]
    (tmp_path / "out").write_text(lines(*answered))
    records = converted(tmp_path, lines(*asked), "--answers", str(tmp_path / "out"))
    assert [record.output_length for record in records] == [10, 20]
    assert records[0].timestamp == 0 < records[1].timestamp
    records = converted(tmp_path, lines(*asked), "--answer-tokens", "33")
    assert [record.output_length for record in records] == [33, 33]


def test_invented_fields_are_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Guards against numbers of a study that are taken for measured ones: a line says for how many
    requests which option has set a field."""

    def invented(log: str, *words: str) -> list[str]:
        converted(tmp_path, log, *words)
        errors = capsys.readouterr().err.splitlines()
        return [line.removeprefix("invented for ") for line in errors]

    by_bytes = "4 bytes are a token; --tokenizer counts"
    assert invented(lines({"messages": HISTORY}, {"messages": HISTORY}), "--turn-s", "3") == [
        "2 of 4 requests: timestamp, sessions begin at random: --sessions-per-s 1",
        "2 of 4 requests: timestamp, after the turn before: --turn-s 3",
        f"4 of 4 requests: input_length, {by_bytes}",
        f"4 of 4 requests: output_length, {by_bytes}",
    ]
    logged = {"time": 5, "messages": [user("one")], "response": {"usage": {"completion_tokens": 7}}}
    unlogged = {"time": 6, "messages": [user("two")]}
    assert invented(lines(logged, unlogged), "--answer-tokens", "33") == [
        "1 of 2 requests: output_length: --answer-tokens 33",
        f"2 of 2 requests: input_length, {by_bytes}",
    ]
    write_tokenizer(tmp_path)
    assert invented(lines(logged), "--tokenizer", str(tmp_path)) == []


def write_tokenizer(folder: Path) -> None:
    """Write a tokenizer that counts words."""
    from tokenizers import Tokenizer, models, pre_tokenizers

    words = Tokenizer(models.WordLevel({"[UNK]": 0, "one": 1, "two": 2}, unk_token="[UNK]"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    words.save(str(folder / "tokenizer.json"))


def test_tools_and_parts(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Tools are the first part of a prompt, text parts are joined, and images are counted as
    missing."""
    parts = [{"type": "text", "text": "x" * 40}, {"type": "image_url", "image_url": {}}]
    call = {"messages": [{"role": "user", "content": parts}], "response": "a"}
    (plain,) = converted(tmp_path, lines(call))
    assert plain.input_length == -(-(len("<|user|>\n\n") + 40) // 4)
    assert "1 parts of messages that are no text" in capsys.readouterr().out
    (tools,) = converted(tmp_path, lines({**call, "tools": [{"name": "t" * 4000}]}))
    assert tools.input_length > plain.input_length + 1000
    assert tools.hash_ids[0] == plain.hash_ids[0] == 0, "numbers, by first use"


def test_a_tokenizer_counts(tmp_path: Path) -> None:
    write_tokenizer(tmp_path)
    call = {"messages": [user("one two one two")], "response": "two one"}
    (record,) = converted(tmp_path, lines(call), "--tokenizer", str(tmp_path))
    assert (record.input_length, record.output_length) == (5, 2), "the role is a word"


@pytest.mark.parametrize(
    ("log", "words", "message"),
    [
        (lines({"x": 1}), [], "line 1: it has neither `messages` nor `prompt`"),
        ('{"messages": \n', [], "line 1: it is no JSON object"),
        (lines({"messages": [user("a")]}), [], "give --answers, or --answer-tokens"),
        (lines({"prompt": [1, 2]}), [], "its `prompt` is no text"),
        (lines({"conversations": [{"from": "human", "value": "a"}]}), [], "has no answer behind"),
        ("", [], "has no requests"),
        (
            lines(
                {"messages": [user("a")], "response": "b", "time": 5},
                {"messages": [user("a")], "response": "b"},
            ),
            [],
            "1 of 2 requests or conversations have a time",
        ),
        (lines({"prompt": "a", "response": "b"}), ["--tokenizer", "nowhere"], "--tokenizer: there"),
        (lines({"prompt": "a", "response": "b"}), ["--sessions-per-s", "0"], "--sessions-per-s"),
    ],
)
def test_an_unreadable_log_is_named(
    log: str, words: list[str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "log").write_text(log)
    assert cli.convert([str(tmp_path / "log"), str(tmp_path / "out"), *words]) == 2
    assert message in " ".join(capsys.readouterr().err.split())


def test_invalid_entries_are_skipped_and_counted(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    log = lines({"prompt": "a", "response": "b"}, {"x": 1}) + "{\n"
    assert len(converted(tmp_path, log, "--skip-invalid")) == 1
    assert "2 invalid lines were left out; the first:" in capsys.readouterr().err
