"""Request bodies as the router reads and extends them."""

import json
from typing import Any

import pytest

from benchmark.agentic.router.body import CHAT, COMPLETIONS, GENERATE, Ask, BadRequest, read


def ask(body: object, path: str = GENERATE, session: str | None = None) -> Ask:
    return read(path, json.dumps(body).encode(), session, block_tokens=4)


def test_a_body_is_forwarded_unchanged_with_the_routers_fields_last() -> None:
    """Guards the client's fields, except those that the router sets, and against two attempts that
    use one room."""
    body = {"input_ids": [1, 2], "stream": True, "extra": [1.5, "ä"], "bootstrap_room": 7}
    request = ask(body)
    sent, again = (json.loads(request.payload(("h", 8998))) for _ in range(2))
    rooms = {sent.pop("bootstrap_room"), again["bootstrap_room"], 7}
    assert len(rooms) == 3 and all(0 <= room < 2**63 for room in rooms)
    assert sent.pop("rid") and sent.pop("bootstrap_host") == "h"
    assert sent.pop("bootstrap_port") == 8998
    assert sent == {k: v for k, v in body.items() if k != "bootstrap_room"}


@pytest.mark.parametrize(
    ("path", "body", "message"),
    [
        (GENERATE, b'{"input_ids": [[1], [2]]}', "batch"),
        (GENERATE, b'{"text": ["a", "b"]}', "batch"),
        (COMPLETIONS, b'{"prompt": ["a", "b"]}', "batch"),
        (COMPLETIONS, b'{"prompt": [[1], [2]]}', "batch"),
        (GENERATE, b'{"rid": ["a"], "text": "x"}', "batch"),
        (GENERATE, b"[1]", "batch"),
        (GENERATE, b'{"text": "a"', "not JSON"),
    ],
)
def test_refused_bodies(path: str, body: bytes, message: str) -> None:
    """Guards against routing half of a batch, and the server against bytes that the splice would
    corrupt."""
    with pytest.raises(BadRequest, match=message):
        read(path, body)


def test_session_tokens_and_reserve() -> None:
    """Guards the session name and the sizes behind the scores; the answer's share is capped as on
    decode."""
    assert ask({"text": "a", "user": "u"}, session="h").session == "h"
    assert ask({"text": "a", "user": "u"}).session == "u"
    sampling = {"max_new_tokens": 7}
    assert tuple(ask({"input_ids": [5] * 9, "sampling_params": sampling}).work) == (9, 7)
    assert tuple(ask({"input_ids": [5] * 9}).work) == (9, 128)
    assert tuple(ask({"messages": [], "max_tokens": 9999}, CHAT).work) == (0, 512)
    assert tuple(ask({"input_ids": []}).work) == (0, 128)
    assert ask({"text": "abcde"}).work.tokens == 2


def shared(first: Ask, second: Ask) -> int:
    same = [a == b for a, b in zip(first.hashes, second.hashes, strict=False)]
    return [*same, False].index(False)


def test_prompts_share_their_whole_leading_blocks() -> None:
    """Guards the chain: a block counts only if all blocks before it are equal too. Whitespace in
    the client's JSON does not matter; fields that keep prompts apart on the server do."""
    reference = ask({"input_ids": [1] * 4 + [2] * 4 + [3] * 4})
    assert len(reference.hashes) == 3
    assert shared(reference, ask({"input_ids": [1] * 4 + [2] * 4 + [9] * 4})) == 2
    assert shared(reference, ask({"input_ids": [9] * 4 + [2] * 4 + [3] * 4})) == 0
    assert shared(reference, ask({"input_ids": [1] * 4 + [2] * 3})) == 1
    # 1,11 and 11,1 are different tokens, although the digits are the same.
    assert shared(ask({"input_ids": [1, 11, 1, 1]}), ask({"input_ids": [11, 1, 1, 1]})) == 0
    loose = read(GENERATE, b'{"input_ids": [1, 1,1,\n 1 , 2,2,2,2, 3,3,3,3]}', block_tokens=4)
    assert loose.hashes == reference.hashes and loose.work == reference.work
    for apart in ({"extra_key": "k"}, {"lora_path": "l"}):
        assert shared(reference, ask({"input_ids": [1] * 12, **apart})) == 0


HOW_MANY = {"role": "user", "content": "how many pens are left?"}


@pytest.mark.parametrize(
    ("path", "first", "second"),
    [
        (GENERATE, {"input_ids": [1] * 6}, {"input_ids": [1] * 6 + [2] * 6 + [3]}),
        (GENERATE, {"text": "question " * 4}, {"text": "question " * 4 + "and what of it now?"}),
        (
            COMPLETIONS,
            {"prompt": "question " * 4},
            {"prompt": "question " * 4 + "and what of it now?"},
        ),
        (
            CHAT,
            {"messages": [HOW_MANY]},
            {"messages": [HOW_MANY, {"role": "assistant", "content": "twenty"}, HOW_MANY]},
        ),
    ],
)
def test_the_next_turn_begins_with_the_prompt(
    path: str, first: dict[str, Any], second: dict[str, Any]
) -> None:
    """Guards the prefix that a worker's index learns from a request: the next turn must match all
    of it."""
    first_turn, second_turn = ask(first, path), ask(second, path)
    assert shared(first_turn, second_turn) == len(first_turn.hashes) > 0
    assert len(second_turn.hashes) > len(first_turn.hashes)
