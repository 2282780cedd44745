"""A request's body: the parts that routing reads, and the fields that the router appends."""

from __future__ import annotations

import random
from collections.abc import Sequence

import msgspec
import numpy as np

from benchmark.agentic.router.policies import Work

_NOTHING = msgspec.Raw(b"null")
_rooms = random.SystemRandom()

GENERATE = "/generate"
CHAT = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"
SGLANG_MAX_NEW_TOKENS = 128
"""SGLang's default output limit for ``/generate``."""
TEXT_TOKEN_BYTES = 4
"""Bytes of text that count as one token, about right for English. The exact ratio hardly matters,
because scores compare workers for the same prompt."""


class BadRequest(ValueError):
    """The request is wrong or not supported by this router; the text is for the client."""


class _Sampling(msgspec.Struct):
    max_new_tokens: int | None = None


class _Body(msgspec.Struct):
    """The fields of all three routes that routing reads; the decoder skips all other fields."""

    input_ids: msgspec.Raw = _NOTHING
    text: msgspec.Raw = _NOTHING
    prompt: msgspec.Raw = _NOTHING
    messages: msgspec.Raw = _NOTHING
    tools: msgspec.Raw = _NOTHING
    rid: str | None = None
    sampling_params: _Sampling | None = None
    max_tokens: int | None = None
    max_completion_tokens: int | None = None
    extra_key: str | None = None
    lora_path: str | None = None
    model: str | None = None
    user: str | None = None


_decoder = msgspec.json.Decoder(_Body)


def chain(data: bytes, ids: bool, block_tokens: int, apart: object) -> tuple[int, tuple[int, ...]]:
    """Return the number of tokens of a prompt, and the hashes of its whole blocks.

    Each hash covers all earlier blocks too, so the hashes are the prompt's path through the
    worker's radix tree. They use Python's ``hash``, which differs between processes; they never
    leave the router.

    Args:
        data: JSON text, or, with ``ids``, token ids as in the request: decimals, each followed by a
            comma. They are not parsed, because that would take longer than the rest of routing.
        apart: distinguishes equal prompts that share no KV.
    """
    ends: Sequence[int]
    if ids:
        commas = np.flatnonzero(np.frombuffer(data, np.uint8) == ord(",")) + 1
        tokens, ends = len(commas), commas[block_tokens - 1 :: block_tokens].tolist()
    else:
        size = block_tokens * TEXT_TOKEN_BYTES
        tokens, ends = -(-len(data) // TEXT_TOKEN_BYTES), range(size, len(data) + 1, size)
    hashes = []
    last, start = hash((ids, apart)), 0
    for end in ends:
        last = hash((last, data[start:end]))
        hashes.append(last)
        start = end
    return tokens, tuple(hashes)


class Ask(msgspec.Struct, frozen=True):
    """A request as routing sees it."""

    path: str
    body: bytes
    hashes: tuple[int, ...]
    """Hashes of the prompt's blocks."""
    work: Work
    rid: str
    session: str | None

    def payload(self, bootstrap: tuple[str, int] | None = None) -> bytes:
        """Return the body to send, with our ``rid`` and, given host and port, SGLang's PD fields.

        They are the last fields of the object, so that they override the client's fields of the
        same names. Each call makes a new room.
        """
        fields: dict[str, object] = {"rid": self.rid}
        if bootstrap is not None:
            names = ("bootstrap_host", "bootstrap_port", "bootstrap_room")
            fields |= zip(names, (*bootstrap, _rooms.getrandbits(63)), strict=True)
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
    """Parse a request for routing.

    Args:
        session: the session header's value; without it the body's ``user`` is used.
        reserve_limit: maximum answer tokens to reserve, as a decode server does.

    Raises:
        BadRequest: the body is no such object, or a batch, which cannot be routed as one request.
    """
    try:
        parsed = _decoder.decode(body)
    except msgspec.ValidationError as error:
        raise BadRequest(
            f"cannot route this request: {error}. One prompt a request: batches are not supported"
        ) from None
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise BadRequest(f"the body is not JSON: {error}") from None
    if path == GENERATE:
        raw = bytes(parsed.text if bytes(parsed.input_ids) == b"null" else parsed.input_ids)
        limit = parsed.sampling_params.max_new_tokens if parsed.sampling_params else None
        limit = SGLANG_MAX_NEW_TOKENS if limit is None else limit
    else:
        raw = bytes(parsed.messages if path == CHAT else parsed.prompt)
        limit = parsed.max_completion_tokens or parsed.max_tokens or reserve_limit
    # Keep text and messages as JSON: the JSON of a longer session continues that of a shorter one.
    data = b"" if raw == b"null" else raw[1:-1]
    ids = path != CHAT and raw.startswith(b"[")
    if ids:
        data = data.translate(None, b" \t\r\n")
        if b"[" in data or b'"' in data:
            raise BadRequest("cannot route a batch: one prompt a request")
        data += b"," if data else b""
    apart = (parsed.extra_key, parsed.lora_path, parsed.model, bytes(parsed.tools))
    tokens, hashes = chain(data, ids, block_tokens, apart)
    return Ask(
        path=path,
        body=body,
        hashes=hashes,
        work=Work(tokens, min(limit, reserve_limit)),
        rid=parsed.rid or f"{_rooms.getrandbits(128):032x}",
        session=session or parsed.user,
    )
