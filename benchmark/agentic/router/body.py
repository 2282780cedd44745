"""A request's body: what routing reads of it, and the fields that we add to its bytes."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import msgspec

from benchmark.agentic.router.policies import Work
from benchmark.agentic.router.prefixes import chain, text_blocks, token_blocks

_NOTHING = msgspec.Raw(b"null")
_rooms = random.SystemRandom()

GENERATE, CHAT, COMPLETIONS = "/generate", "/v1/chat/completions", "/v1/completions"
PATHS = (GENERATE, CHAT, COMPLETIONS)
SGLANG_MAX_NEW_TOKENS = 128
"""What SGLang generates at most where ``/generate`` is given no number."""


class BadRequest(ValueError):
    """The client's mistake, or what this router does not do; the text is for the client."""


class _Sampling(msgspec.Struct):
    max_new_tokens: int | None = None


class _Session(msgspec.Struct):
    id: str | None = None


class _Message(msgspec.Struct):
    role: str
    content: Any = None
    tool_calls: Any = None


class _Body(msgspec.Struct):
    """The fields of all three routes that routing reads; the decoder skips the others."""

    input_ids: msgspec.Raw = _NOTHING
    text: str | None = None
    prompt: msgspec.Raw = _NOTHING
    messages: list[_Message] | None = None
    tools: msgspec.Raw = _NOTHING
    stream: bool | None = None
    rid: str | None = None
    sampling_params: _Sampling | None = None
    max_tokens: int | None = None
    max_completion_tokens: int | None = None
    extra_key: str | None = None
    lora_path: str | None = None
    model: str | None = None
    session_params: _Session | None = None
    user: str | None = None


_decoder = msgspec.json.Decoder(_Body)


class Prompt:
    """A prompt as its blocks' hashes, and those of the session once it is answered."""

    __slots__ = ("_block_tokens", "_kind", "_last", "_rest", "hashes", "tokens")

    def __init__(self, data: bytes, kind: str, block_tokens: int, apart: object = None) -> None:
        """
        Args:
            data: text or messages as bytes; of token ids their decimals, each followed by a comma.
            kind: ``ids``, ``text`` or ``chat``.
            apart: what keeps equal prompts apart.
        """
        self._kind, self._block_tokens = kind, block_tokens
        self.tokens, ends = self._blocks(data)
        seed = hash((kind == "ids", apart))
        self.hashes = chain(data, ends, seed)
        self._last = self.hashes[-1] if self.hashes else seed
        self._rest = data[ends[-1] :] if ends else data
        """What no whole block holds yet."""

    def _blocks(self, data: bytes) -> tuple[int, Sequence[int]]:
        cut = token_blocks if self._kind == "ids" else text_blocks
        return cut(data, self._block_tokens)

    def answered(self, output_ids: list[int], text: str) -> tuple[int, ...]:
        """Hashes of prompt and answer, which is what the next turn's prompt begins with."""
        if self._kind == "ids":
            data = self._rest + b"".join(b"%d," % token for token in output_ids)
        elif self._kind == "chat":
            data = self._rest + _canonical([_Message("assistant", text)])
        else:
            data = self._rest + text.encode()
        return self.hashes + chain(data, self._blocks(data)[1], self._last)


class Ask(msgspec.Struct, frozen=True):
    """A request as routing sees it."""

    path: str
    body: bytes
    prompt: Prompt
    work: Work
    stream: bool
    rid: str
    session: str | None

    def payload(self, bootstrap: tuple[str, int | None] | None = None) -> bytes:
        """The body to send, with our ``rid`` and, given host and port, SGLang's PD fields.

        They come last in the object, where they override fields of those names that the client
        gave. A new room each time.
        """
        fields: dict[str, object] = {"rid": self.rid}
        if bootstrap is not None:
            fields |= {
                "bootstrap_host": bootstrap[0],
                "bootstrap_port": bootstrap[1],
                "bootstrap_room": _rooms.getrandbits(63),
            }
        head = self.body.rstrip()[:-1].rstrip()
        comma = b"" if head.endswith(b"{") else b","
        return head + comma + msgspec.json.encode(fields)[1:]


def read(
    path: str,
    body: bytes,
    session: str | None = None,
    *,
    block_tokens: int = 16,
    reserve_limit: int = 512,
) -> Ask:
    """Reads a request.

    Args:
        session: what the session header said; else the body's ``session_params`` or ``user`` is
            taken.
        reserve_limit: answer tokens to keep room for at most, as a decode server reserves.

    Raises:
        BadRequest: not such an object, or a batch, which cannot be routed as one.
    """
    try:
        got = _decoder.decode(body)
    except msgspec.ValidationError as error:
        raise BadRequest(
            f"cannot route this request: {error}. One prompt a request: batches are not supported"
        ) from None
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise BadRequest(f"the body is not JSON: {error}") from None
    if path == GENERATE:
        limit = got.sampling_params.max_new_tokens if got.sampling_params else None
        limit = SGLANG_MAX_NEW_TOKENS if limit is None else limit
    else:
        limit = got.max_completion_tokens or got.max_tokens or reserve_limit
    prompt = _prompt(path, got, block_tokens)
    if session is None and got.session_params is not None:
        session = got.session_params.id
    return Ask(
        path=path,
        body=body,
        prompt=prompt,
        work=Work(prompt.tokens, min(limit, reserve_limit)),
        stream=bool(got.stream),
        rid=got.rid or f"{_rooms.getrandbits(128):032x}",
        session=session or got.user,
    )


def _prompt(path: str, got: _Body, block_tokens: int) -> Prompt:
    apart = (got.extra_key, got.lora_path)
    if path == CHAT:
        data = _canonical(got.messages or [])
        return Prompt(data, "chat", block_tokens, (*apart, got.model, bytes(got.tools)))
    raw = bytes(got.prompt if path == COMPLETIONS else got.input_ids)
    if raw.startswith(b"["):
        ids = raw[1:-1].translate(None, b" \t\r\n")
        if b"[" in ids or b'"' in ids:
            raise BadRequest("cannot route a batch: one prompt a request")
        return Prompt(ids + b"," if ids else b"", "ids", block_tokens, apart)
    text = got.text if path == GENERATE else msgspec.json.decode(raw)
    if text is not None and not isinstance(text, str):
        raise BadRequest("the prompt is neither text nor a list of token ids")
    return Prompt((text or "").encode(), "text", block_tokens, apart)


def _canonical(messages: list[_Message]) -> bytes:
    """Messages as bytes of which a longer session's are a continuation."""
    parts = []
    for message in messages:
        content = message.content
        text = content.encode() if isinstance(content, str) else msgspec.json.encode(content)
        calls = msgspec.json.encode(message.tool_calls) if message.tool_calls else b""
        parts += [b"\x01", message.role.encode(), b"\x02", text, calls]
    return b"".join(parts)
