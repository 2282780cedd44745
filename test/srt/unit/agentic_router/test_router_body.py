"""Request bodies as the router reads and extends them, and answers as it understands them."""

import json
from typing import Any

import pytest

from benchmark.agentic.router.body import CHAT, COMPLETIONS, GENERATE, Ask, BadRequest, read
from benchmark.agentic.router.half import Answer


def ask(body: object, path: str = GENERATE, session: str | None = None) -> Ask:
    return read(path, json.dumps(body).encode(), session, block_tokens=4)


def test_a_body_is_sent_on_as_it_came_with_our_fields_last() -> None:
    """Guards every field of the client's but those that are the router's to set."""
    body = {"input_ids": [1, 2], "stream": True, "extra": [1.5, "ä"], "bootstrap_room": 7}
    sent = json.loads(ask(body).payload(("h", 8998)))
    room = sent.pop("bootstrap_room")
    assert 0 <= room < 2**63 and room != 7
    assert sent.pop("rid") and sent.pop("bootstrap_host") == "h"
    assert sent.pop("bootstrap_port") == 8998
    assert sent == {k: v for k, v in body.items() if k != "bootstrap_room"}


def test_each_send_has_a_room_of_its_own() -> None:
    """Guards against two attempts that meet in one room."""
    one = ask({"text": "x"})
    rooms = {json.loads(one.payload(("h", 1)))["bootstrap_room"] for _ in range(2)}
    assert len(rooms) == 2


@pytest.mark.parametrize("body", [b"{}", b' { "text" : "a" } \n', b'{"rid":"mine"}'])
def test_odd_spacing_and_empty_bodies_stay_json(body: bytes) -> None:
    """Guards the seam between the client's bytes and ours; a rid of the client's own is kept."""
    sent = json.loads(read(GENERATE, body).payload())
    assert sent["rid"] == json.loads(body).get("rid", sent["rid"])


@pytest.mark.parametrize(
    ("path", "body"),
    [
        (GENERATE, {"input_ids": [[1], [2]]}),
        (GENERATE, {"text": ["a", "b"]}),
        (COMPLETIONS, {"prompt": ["a", "b"]}),
        (COMPLETIONS, {"prompt": [[1], [2]]}),
        (GENERATE, {"rid": ["a"], "text": "x"}),
        (GENERATE, [1]),
    ],
)
def test_batches_are_refused(path: str, body: object) -> None:
    """Guards against half of a batch being routed."""
    with pytest.raises(BadRequest, match="batch"):
        ask(body, path)


def test_what_is_not_json_is_refused() -> None:
    """Guards the server against bytes that the splice would make into something else."""
    with pytest.raises(BadRequest, match="not JSON"):
        read(GENERATE, b'{"text": "a"')


def test_session_comes_from_the_header_or_the_body() -> None:
    """Guards the order: header, session_params, user, none."""
    body = {"text": "a", "session_params": {"id": "p"}, "user": "u"}
    assert ask(body, session="h").session == "h"
    assert ask(body).session == "p"
    assert ask({"text": "a", "user": "u"}).session == "u"
    assert ask({"text": "a"}).session is None


def test_tokens_and_reserve() -> None:
    """Guards the sizes that scores are made of: the answer's share is capped as on decode."""
    sampling = {"max_new_tokens": 7}
    assert tuple(ask({"input_ids": [5] * 9, "sampling_params": sampling}).work) == (9, 7)
    assert tuple(ask({"input_ids": [5] * 9}).work) == (9, 128)
    assert tuple(ask({"messages": [], "max_tokens": 9999}, CHAT).work) == (0, 512)
    assert tuple(ask({"input_ids": []}).work) == (0, 128)
    assert ask({"text": "abcde"}).work.tokens == 2


def shared(one: Ask, other: Ask) -> int:
    count = 0
    for a, b in zip(one.prompt.hashes, other.prompt.hashes, strict=False):
        if a != b:
            break
        count += 1
    return count


def test_prompts_share_their_whole_leading_blocks() -> None:
    """Guards the chain: a block counts only if all before it are equal too."""
    one = ask({"input_ids": [1] * 4 + [2] * 4 + [3] * 4})
    assert len(one.prompt.hashes) == 3
    assert shared(one, ask({"input_ids": [1] * 4 + [2] * 4 + [9] * 4})) == 2
    assert shared(one, ask({"input_ids": [9] * 4 + [2] * 4 + [3] * 4})) == 0
    assert shared(one, ask({"input_ids": [1] * 4 + [2] * 3})) == 1
    # 1,11 and 11,1 are other tokens, although the digits are the same.
    assert shared(ask({"input_ids": [1, 11, 1, 1]}), ask({"input_ids": [11, 1, 1, 1]})) == 0


def test_spacing_of_token_ids_does_not_matter() -> None:
    """Guards against clients whose JSON writers differ sharing nothing."""
    tight = read(GENERATE, b'{"input_ids":[1,2,3,4,5]}', block_tokens=4)
    loose = read(GENERATE, b'{"input_ids": [1, 2,\n 3 , 4, 5]}', block_tokens=4)
    assert tight.prompt.hashes == loose.prompt.hashes and tight.work == loose.work


@pytest.mark.parametrize("apart", [{"extra_key": "k"}, {"lora_path": "l"}])
def test_what_keeps_prompts_apart_on_the_server_does_so_here(apart: dict[str, Any]) -> None:
    """Guards against a hit that the server's radix tree would not give."""
    body = {"input_ids": [1] * 8}
    assert shared(ask(body), ask({**body, **apart})) == 0


@pytest.mark.parametrize(
    ("path", "first", "ids", "text", "second"),
    [
        (GENERATE, {"input_ids": [1] * 6}, [2] * 6, "", {"input_ids": [1] * 6 + [2] * 6 + [3]}),
        (GENERATE, {"text": "question " * 4}, [], "answer " * 4, None),
        (COMPLETIONS, {"prompt": "question " * 4}, [], "answer " * 4, None),
        (
            CHAT,
            {"messages": [{"role": "user", "content": "how many pens are left?"}]},
            [],
            "twenty-six pens",
            {
                "messages": [
                    {"role": "user", "content": "how many pens are left?"},
                    {"role": "assistant", "content": "twenty-six pens"},
                    {"role": "user", "content": "and now?"},
                ]
            },
        ),
    ],
)
def test_the_next_turn_begins_with_prompt_and_answer(
    path: str, first: dict[str, Any], ids: list[int], text: str, second: dict[str, Any] | None
) -> None:
    """Guards what the worker's index learns from an answer: the next turn must match all of it."""
    if second is None:
        key = "text" if path == GENERATE else "prompt"
        second = {key: first[key] + text + " and now?"}
    one = ask(first, path)
    learned = one.prompt.answered(ids, text)
    assert learned[: len(one.prompt.hashes)] == one.prompt.hashes
    assert len(learned) > len(one.prompt.hashes)
    assert ask(second, path).prompt.hashes[: len(learned)] == learned


def stream(*events: object) -> bytes:
    return b"".join(b"data: %s\n\n" % json.dumps(event).encode() for event in events)


def generated(ids: list[int], made: int, text: str = "", **meta: object) -> dict[str, Any]:
    known = {"completion_tokens": made, "prompt_tokens": 8, "cached_tokens": 2, **meta}
    return {"text": text, "output_ids": ids, "meta_info": known}


@pytest.mark.parametrize("cumulative", [True, False])
def test_output_ids_of_either_stream_mode(cumulative: bool) -> None:
    """Guards against tokens learned twice, or only the last ones."""
    ids = [[4], [4, 5], [4, 5, 6]] if cumulative else [[4], [5], [6]]
    texts = ["a", "ab", "abc"] if cumulative else ["a", "b", "c"]
    answer = Answer()
    for made, (some, text) in enumerate(zip(ids, texts, strict=True), 1):
        answer.take_stream(stream(generated(some, made, text)))
    assert (answer.got.output_ids, answer.got.text, answer.held_share) == ([4, 5, 6], "abc", 0.25)
    assert not answer.done
    answer.take_stream(b"data: [DONE]\n\n")
    assert answer.done and answer.got.error is None


def test_chat_pieces_and_usage() -> None:
    """Guards the OpenAI routes, streamed or not."""
    usage = {"prompt_tokens": 8, "prompt_tokens_details": {"cached_tokens": 4}}
    streamed, whole = Answer(), Answer()
    streamed.take_stream(stream({"choices": [{"delta": {"role": "assistant", "content": "a"}}]}))
    streamed.take_stream(stream({"choices": [{"delta": {"content": "b"}}]}, {"usage": usage}))
    whole.take(json.dumps({"choices": [{"message": {"content": "ab"}}], "usage": usage}).encode())
    for answer in (streamed, whole):
        assert (answer.got.text, answer.held_share) == ("ab", 0.5)


def test_errors_in_a_stream_are_seen() -> None:
    """Guards against learning a prompt that was not computed."""
    aborted, failed, odd = Answer(), Answer(), Answer()
    reason = {"type": "abort", "message": "no memory"}
    aborted.take_stream(stream(generated([], 0, finish_reason=reason)))
    failed.take_stream(stream({"error": {"message": "m"}}))
    odd.take_stream(b'data: {"choices": 7}\n\n')
    assert aborted.got.error == "no memory" and "m" in (failed.got.error or "")
    assert odd.got.error is None
