"""Requests from logs: OpenAI's batch files and request logs, ShareGPT, and chat histories.

A file is JSON lines or one JSON list. An entry is one of

- a request, alone or under ``body`` or ``request``: ``messages`` or ``prompt``, perhaps with a
  ``response`` and a time;
- a history: ``messages`` that end with an answer, or ShareGPT's ``conversations``. Each answer of
  it is a request, whose prompt is all that is before it.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import msgspec

TIMES = ("timestamp", "time", "created", "created_at", "start_time", "request_time")
SESSIONS = ("session_id", "conversation_id", "chat_id")
ROLES = {"human": "user", "gpt": "assistant", "chatgpt": "assistant", "bing": "assistant"}
"""ShareGPT's names of roles."""
Entry = Mapping[str, Any]


@dataclass(frozen=True)
class Message:
    """A part of a prompt, as text."""

    role: str
    text: str


@dataclass
class Call:
    """A request of a log."""

    messages: list[Message]
    answer: str | None = None
    time_s: float | None = None
    session: str | None = None
    turn: int | None = None
    max_tokens: int | None = None
    prompt_tokens: int | None = None
    """As logged."""
    answer_tokens: int | None = None
    """As logged."""


@dataclass
class Log:
    """The calls of a file in its order, and what was left out."""

    calls: list[Call] = field(default_factory=list)
    skipped: list[str] = field(default_factory=list)
    """Error texts of entries that cannot be read."""
    other_parts: int = 0
    """Parts of messages that are no text, such as images."""


def read(path: Path, answers: Path | None = None, skip_invalid: bool = False) -> Log:
    """Return the calls of a log.

    ``answers``: output file of OpenAI's batches, joined by ``custom_id``.

    Raises:
        ValueError: an entry is none of the known ones; the message names file and entry. Or no
            entry is one.
    """
    known = {}
    if answers is not None:
        known = {str(entry.get("custom_id")): entry for _, entry in _entries(answers)}
    log = Log()
    for where, entry in _entries(path):
        try:
            if not isinstance(entry, dict):
                raise ValueError("it is no JSON object")
            response = _response(known.get(str(entry.get("custom_id")), entry))
            log.calls += _calls(entry, response, log, len(log.calls))
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            text = f"{path}, {where}: {error}"
            if not skip_invalid:
                raise ValueError(text) from error
            log.skipped.append(text)
    if not log.calls:
        raise ValueError("; ".join([f"{path} has no requests", *log.skipped[:1]]))
    return log


def _entries(path: Path) -> Iterator[tuple[str, Any]]:
    """Yield each entry with its place in the file."""
    text = path.read_bytes()
    if text.lstrip()[:1] == b"[":
        try:
            entries = msgspec.json.decode(text)
        except msgspec.DecodeError as error:
            raise ValueError(f"{path}: {error}") from error
        yield from ((f"entry {number}", entry) for number, entry in enumerate(entries, start=1))
        return
    for number, line in enumerate(text.splitlines(), start=1):
        if line.strip():
            try:
                yield f"line {number}", msgspec.json.decode(line)
            except msgspec.DecodeError as error:
                yield f"line {number}", f"{error}"


def _calls(entry: Entry, response: Entry, log: Log, number: int) -> list[Call]:
    time_s = _time(entry)
    session = next((str(entry[key]) for key in SESSIONS if entry.get(key) is not None), None)
    if "conversations" in entry:
        return _history(_messages(entry["conversations"], log), time_s, session, number)
    request = _request(entry)
    messages = _messages(request["messages"], log) if "messages" in request else []
    if "prompt" in request:
        messages = [Message("prompt", _prompt(request["prompt"]))]
    if not messages:
        raise ValueError("it has neither `messages` nor `prompt` nor `conversations`")
    if not response and messages[-1].role == "assistant":
        return _history(messages, time_s, session, number)
    if tools := request.get("tools"):  # a chat template puts them first
        messages.insert(0, Message("tools", json.dumps(tools)))
    usage = response.get("usage") or {}
    limit = request.get("max_completion_tokens") or request.get("max_tokens")
    return [
        Call(
            messages,
            _answer(response, log),
            _time(response) if time_s is None else time_s,
            session,
            max_tokens=limit,
            prompt_tokens=usage.get("prompt_tokens"),
            answer_tokens=usage.get("completion_tokens"),
        )
    ]


def _history(
    messages: list[Message], time_s: float | None, session: str | None, number: int
) -> list[Call]:
    """Return a call for each answer of a conversation."""
    ends = [i for i, message in enumerate(messages) if message.role == "assistant" and i]
    if not ends:
        raise ValueError("the conversation has no answer behind a message")
    name = session or f"history-{number}"
    return [
        Call(messages[:end], messages[end].text, time_s if turn == 0 else None, name, turn)
        for turn, end in enumerate(ends)
    ]


def _request(entry: Entry) -> Entry:
    for key in ("body", "request"):
        if isinstance(inner := entry.get(key), dict):
            return _request(inner)
    return entry


def _response(entry: Entry) -> Entry:
    """Return the answer's body, empty if there is none."""
    found = entry.get("response") or (entry if "choices" in entry else {})
    if isinstance(found, str):
        return {"choices": [{"text": found}]}
    inner = found.get("body")
    return inner if isinstance(inner, dict) else found


def _answer(response: Entry, log: Log) -> str | None:
    for choice in response.get("choices") or ():
        if isinstance(message := choice.get("message"), dict):
            (read_message,) = _messages([message], log)
            return read_message.text
        if "text" in choice:
            return str(choice["text"])
    return None


def _messages(messages: Any, log: Log) -> list[Message]:
    read_messages = []
    for message in messages:
        role = str(message.get("role") or message.get("from"))
        content = message.get("content", message.get("value", message.get("text")))
        text = content if isinstance(content, str) else ""
        for part in content if isinstance(content, list) else ():
            if isinstance(part, dict) and isinstance(part.get("text"), str):
                text += part["text"]
            else:
                log.other_parts += 1
        if calls := message.get("tool_calls"):
            text += json.dumps(calls)
        read_messages.append(Message(ROLES.get(role, role), text))
    return read_messages


def _prompt(prompt: Any) -> str:
    if isinstance(prompt, list) and len(prompt) == 1:
        (prompt,) = prompt
    if not isinstance(prompt, str):
        raise ValueError("its `prompt` is no text")
    return prompt


def _time(entry: Entry) -> float | None:
    """Return the time of an entry in seconds, from numbers of s to ns or a date."""
    value = next((entry[key] for key in TIMES if entry.get(key) is not None), None)
    if value is None:
        return None
    if isinstance(value, str):
        try:
            value = float(value)
        except ValueError:
            # Python 3.10 does not read a Z.
            moment = datetime.fromisoformat(value.replace("Z", "+00:00"))
            zone = moment.tzinfo or timezone.utc
            return moment.replace(tzinfo=zone).timestamp()
    for unit in (1e18, 1e15, 1e12):  # of dates since 2001: ns, us, ms
        if value > unit * 0.9:
            return float(value) / (unit / 1e9)
    return float(value)
