"""``python -m benchmark convert``: other formats as a trace in Mooncake's.

Ids are numbered anew in the order in which blocks appear, so that nothing of a text is left in the
trace. An id stands for its block and all before it. The whole file is held in memory, since
requests are brought into the order of their times. README.md says what each format must look like.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterable, Iterator, Sequence
from hashlib import blake2b
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from benchmark.agentic.traces.formats import (
    ROLES,
    Bailian,
    Completion,
    Logged,
    Message,
    ShareGpt,
)
from benchmark.harness.command import reported
from benchmark.traces.invalid import Invalid
from benchmark.traces.read import read, write
from benchmark.traces.record import BLOCK_TOKENS, Record, blocks, check
from benchmark.traces.sessions import annotate
from benchmark.traces.units import SECONDS, UnitCheck

FINE = 16
"""Tokens of a block while sessions are looked for; Bailian's. 32 of them are one of the trace."""
UNITS = {"bailian": "s", "openai": "s", "sharegpt": "ms", "mooncake": "ms"}
"""Of the times, where nothing else is said."""

T = TypeVar("T")


class Tokenizer:
    """Token ids of texts, of a folder with a tokenizer or of a name whose files are here."""

    def __init__(self, name: str) -> None:
        try:
            from transformers import AutoTokenizer
        except ImportError as error:
            raise ValueError("text needs a tokenizer: pip install transformers") from error
        self._made = AutoTokenizer.from_pretrained(name, local_files_only=True)

    def text(self, text: str) -> list[int]:
        return list(self._made.encode(text, add_special_tokens=False))

    def prompt(self, messages: Sequence[Message], tools: list[Any] | None = None) -> list[int]:
        """As a server makes it; without a chat template, roles and texts line by line."""
        if not getattr(self._made, "chat_template", None):
            return self.text("".join(f"{m.role}: {m.text()}\n" for m in messages) + "assistant:")
        plain = [
            {"role": m.role, "content": m.text()}
            | ({"tool_calls": m.tool_calls} if m.tool_calls else {})
            for m in messages
        ]
        try:
            ids = self._made.apply_chat_template(
                plain, tools=tools, add_generation_prompt=True, tokenize=True, return_dict=False
            )
        except Exception as error:  # of the template's own language
            raise ValueError(f"the tokenizer's chat template refuses it: {error}") from error
        return list(ids)


class Chain:
    """Numbers for blocks, each of which stands for its values and all those before it."""

    def __init__(self, size: int) -> None:
        self._size = size
        self._numbers: dict[tuple[int, bytes], int] = {}

    def ids(self, values: Sequence[int]) -> tuple[int, ...]:
        found, before = [], -1
        for start in range(0, len(values), self._size):
            text = ",".join(map(str, values[start : start + self._size])).encode()
            key = (before, blake2b(text, digest_size=16).digest())
            before = self._numbers.setdefault(key, len(self._numbers))
            found.append(before)
        return tuple(found)


def entries(path: Path, shape: type[T], invalid: Invalid) -> Iterator[tuple[str, T]]:
    """Of a file of JSON lines or of one JSON array, each with its place."""
    content = path.read_bytes()
    if content.lstrip()[:1] == b"[":
        try:
            parts: list[bytes] = [
                bytes(x) for x in msgspec.json.decode(content, type=list[msgspec.Raw])
            ]
        except msgspec.DecodeError as error:
            raise ValueError(f"{path}: {error}") from error
        what = "entry"
    else:
        parts, what = content.splitlines(), "line"
    decoder = msgspec.json.Decoder(shape)
    for number, part in enumerate(parts, start=1):
        if part.strip():
            place = f"{what} {number}"
            with invalid.at(path, place):
                yield place, decoder.decode(part)


def bailian(path: Path, invalid: Invalid, second: float) -> list[Record]:
    """A session is a chain of parents; its second branch and later ones are new ones."""
    chats = sorted(entries(path, Bailian, invalid), key=lambda entry: entry[1].timestamp)
    found: list[Record] = []
    latest: dict[int | str, tuple[str, int]] = {}  # chats that no other one has continued
    for place, chat in chats:
        with invalid.at(path, place):
            ids, full = list(chat.hash_ids), chat.input_length // FINE
            if len(ids) == full and chat.input_length % FINE:
                ids.append(-1 - len(found))  # its last block is not full and was not hashed
            record = Record(
                chat.timestamp * second, chat.input_length, chat.output_length, tuple(ids)
            )
            check(record, FINE)  # ids of blocks alone: `coarse` makes them stand for a prefix
            name, turn = latest.pop(chat.parent_chat_id, (f"chat-{chat.chat_id}", 0))
            latest[chat.chat_id] = (name, turn + 1)
            found.append(msgspec.structs.replace(record, session_id=name, turn=turn))
    return found


def sharegpt(
    path: Path, invalid: Invalid, tokenizer: Tokenizer, rate: float, pause_s: float
) -> list[Record]:
    """A request for each turn of a person that has an answer; no times are in the file."""
    chain, found, sessions = Chain(FINE), [], 0
    for place, entry in entries(path, ShareGpt, invalid):
        with invalid.at(path, place):
            said: list[Message] = []
            session: list[Record] = []
            for turn in entry.conversations:
                message = Message(ROLES.get(turn.sender, ""), turn.value)
                if not message.role:
                    raise ValueError(f"{turn.sender!r} is none of {', '.join(ROLES)}")
                if message.role == "assistant" and said and said[-1].role == "user":
                    ids = tokenizer.prompt(said)
                    at = (sessions / rate + len(session) * pause_s) * 1000
                    answer = len(tokenizer.text(turn.value))
                    record = Record(
                        at, len(ids), answer, chain.ids(ids), f"sharegpt-{sessions}", len(session)
                    )
                    check(record, FINE)
                    session.append(record)
                said.append(message)
            if not session:
                raise ValueError("no user message has an answer")
            found += session
            sessions += 1
    return found


def openai(path: Path, invalid: Invalid, tokenizer: Tokenizer, second: float) -> list[Record]:
    """Lengths are those of ``usage``, where it is there; blocks tell who goes on with what."""
    chain = Chain(FINE)
    found: list[tuple[Record, int]] = []  # as long as we count it, and as the server did
    for place, line in entries(path, Logged, invalid):
        with invalid.at(path, place):
            asked, answer = line.asked(), line.answer()
            at = line.timestamp if line.timestamp is not None else answer.created
            if at is None:
                raise ValueError("neither `timestamp` nor the answer's `created`")
            ids = tokenizer.prompt(asked.messages, asked.tools)
            tokens_in, tokens_out = _lengths(answer, len(ids), tokenizer)
            record = Record(at * second, len(ids), tokens_out, chain.ids(ids))
            check(_fitted(record, tokens_in), FINE)
            found.append((record, tokens_in))
    found.sort(key=lambda entry: entry[0].timestamp)
    named = annotate((record for record, _ in found), FINE, prefix="openai-")
    return [_fitted(record, tokens) for record, (_, tokens) in zip(named, found, strict=True)]


def _fitted(record: Record, tokens: int) -> Record:
    """Cut or lengthened behind: what a server adds to a prompt, its log does not have."""
    count = blocks(tokens, FINE)
    ids = (record.hash_ids + (-1,) * (count - len(record.hash_ids)))[:count]
    return msgspec.structs.replace(record, input_length=tokens, hash_ids=ids)


def _lengths(answer: Completion, prompt: int, tokenizer: Tokenizer) -> tuple[int, int]:
    if answer.usage is not None:
        return answer.usage.prompt_tokens, answer.usage.completion_tokens
    said = "".join(choice.message.text() for choice in answer.choices)
    return prompt, len(tokenizer.text(said))


def coarse(records: Iterable[Record]) -> Iterator[Record]:
    """Blocks of ``BLOCK_TOKENS`` instead of ``FINE``; the first request is at 0."""
    chain = Chain(BLOCK_TOKENS // FINE)
    first = None
    for record in records:
        first = record.timestamp if first is None else first
        ids = chain.ids(record.hash_ids)
        assert len(ids) == blocks(record.input_length)
        at = round(record.timestamp - first, 3)
        yield msgspec.structs.replace(record, timestamp=at, hash_ids=ids)


@reported
def convert(argv: list[str]) -> int:
    """``convert FILE OUT --format NAME``."""
    args = _arguments(argv)
    if args.out.resolve() == args.file.resolve():
        raise ValueError(f"{args.out} would overwrite the input file")
    invalid, units = Invalid(args.skip_invalid), UnitCheck()
    unit = args.timestamps_in or UNITS[args.format]
    found = _records(args, invalid, SECONDS[unit] * 1000)
    found.sort(key=lambda record: record.timestamp)
    if not found:
        raise ValueError("; ".join([f"{args.file} holds no request", *invalid.told()]))
    records = found if args.format == "mooncake" else coarse(found)
    print(f"{args.out}: {write(args.out, units.watch(records)):,} requests")
    timed = args.format != "sharegpt"  # whose times are ours
    for note in invalid.told() + (units.told(args.file, unit) if timed else []):
        print(note, file=sys.stderr)
    return 0


def _records(args: argparse.Namespace, invalid: Invalid, scale: float) -> list[Record]:
    """``scale``: ms of the file's unit of time."""
    if args.format == "mooncake":
        return [
            msgspec.structs.replace(r, timestamp=round(r.timestamp * scale, 3))
            for r in annotate(read(args.file, invalid=invalid))
        ]
    if args.format == "bailian":
        return bailian(args.file, invalid, scale)
    if not args.tokenizer:
        raise ValueError(f"--format {args.format} is text: --tokenizer FOLDER counts its tokens")
    tokenizer = Tokenizer(args.tokenizer)
    if args.format == "openai":
        return openai(args.file, invalid, tokenizer, scale)
    if not args.rate > 0 or not args.pause >= 0:
        raise ValueError("--rate must be more than 0, and --pause 0 or more")
    return sharegpt(args.file, invalid, tokenizer, args.rate, args.pause)


def _arguments(argv: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmark convert")
    add = parser.add_argument
    add("file", type=Path)
    add("out", type=Path, help="file for the trace, in Mooncake's format")
    add("--format", choices=UNITS, required=True, help="format of the file")
    add("--tokenizer", help="folder, or a name whose files are cached; for sharegpt and openai")
    add("--timestamps-in", choices=SECONDS, help="unit of the timestamps (default: the format's)")
    add("--rate", type=float, default=1.0, help="sharegpt: sessions/s, as the format has no times")
    add("--pause", type=float, default=10.0, help="sharegpt: seconds between turns")
    add(
        "--skip-invalid",
        action="store_true",
        help="skip what cannot be read, and print its number",
    )
    return parser.parse_args(argv)
