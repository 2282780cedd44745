"""What is read of the formats that ``convert`` takes. Other fields are ignored."""

from __future__ import annotations

from typing import Any

import msgspec

ROLES = {
    "human": "user",
    "user": "user",
    "gpt": "assistant",
    "chatgpt": "assistant",
    "assistant": "assistant",
    "system": "system",
}
"""Of ShareGPT's ``from``."""


class Bailian(msgspec.Struct, frozen=True):
    """A line of Qwen-Bailian's traces (github.com/alibaba-edu/qwen-bailian-usagetraces-anon)."""

    chat_id: int | str
    timestamp: float
    """Seconds from the start of the trace."""
    input_length: int
    """Tokens."""
    output_length: int
    """Tokens."""
    hash_ids: tuple[int, ...]
    """Of blocks of 16 tokens, each by its own tokens alone."""
    parent_chat_id: int | str = -1
    """The turn before it; -1: none."""


class Said(msgspec.Struct, frozen=True):
    sender: str = msgspec.field(name="from")
    value: str


class ShareGpt(msgspec.Struct, frozen=True):
    """A conversation."""

    conversations: tuple[Said, ...]


class Message(msgspec.Struct, frozen=True):
    """Of a chat."""

    role: str
    content: str | list[dict[str, Any]] | None = None
    tool_calls: list[dict[str, Any]] | None = None

    def text(self) -> str:
        """Raises ``ValueError`` for a part that is no text."""
        if not isinstance(self.content, list):
            return self.content or ""
        parts = [part.get("text") for part in self.content]
        if not all(isinstance(part, str) for part in parts):
            raise ValueError("a message has a part that is no text")
        return "".join(map(str, parts))


class Asked(msgspec.Struct, frozen=True):
    """Body of a request for a chat completion."""

    messages: list[Message]
    tools: list[Any] | None = None


class Usage(msgspec.Struct, frozen=True):
    """Tokens."""

    prompt_tokens: int
    completion_tokens: int


class Choice(msgspec.Struct, frozen=True):
    message: Message


class Completion(msgspec.Struct, frozen=True):
    """A chat completion."""

    choices: list[Choice] = []
    created: float | None = None
    """Unix time, s."""
    usage: Usage | None = None


class Answered(msgspec.Struct, frozen=True):
    """The ``response`` of a line of a batch's output."""

    body: Completion
    status_code: int = 200


class Logged(msgspec.Struct, frozen=True):
    """A request and its answer: a line of a batch's input with the ``response`` of its output line
    (the same ``custom_id``), or a gateway's log of both bodies."""

    response: msgspec.Raw = msgspec.Raw(b"null")
    """``Answered`` or ``Completion``."""
    body: Asked | None = None
    request: Asked | None = None
    timestamp: float | None = None

    def asked(self) -> Asked:
        found = self.body or self.request
        if found is None or not found.messages:
            raise ValueError("no `body` (or `request`) with messages")
        return found

    def answer(self) -> Completion:
        if bytes(self.response) == b"null":
            raise ValueError("no `response`")
        fields = msgspec.json.decode(self.response, type=dict[str, msgspec.Raw])
        if "body" not in fields:
            return msgspec.json.decode(self.response, type=Completion)
        found = msgspec.json.decode(self.response, type=Answered)
        if found.status_code != 200:
            raise ValueError(f"the request failed with status {found.status_code}")
        return found.body
