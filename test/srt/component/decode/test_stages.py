"""Events of a request at each stage of its life on a decode server, and their results.

One table for clients, operators and prefill servers. After every step ``checks.py`` checks the
owners of pages, rows, metadata slots and locks, and the KV of each readable token.
"""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest

from component.decode import stages
from component.decode.checks import check, holders
from component.decode.decoder import Decoder
from component.decode.pair import Pair, ranks_reduce
from component.decode.stages import ANSWER, COMMITTED, FROM_PREFILL, HERE, LOST, UNANNOUNCED
from component.decode.steps import PROMPT, finish, in_tree, poison_free_slots, serve, tick, turn
from sglang.srt.disaggregation.policy.memory import page_floor


class Server(NamedTuple):
    """A decode server with the first ``prefix`` tokens of the prompt in its tree."""

    page: int
    prefix: int
    options: dict[str, Any]
    ranks: int = 1


SERVERS = {
    "1": Server(1, 0, {}),
    "16": Server(16, 32, {}),
    "16 whole prompt": Server(16, 80, {}),
    "16 drafts": Server(16, 32, {"steps": 3}),
    "16 latent drafts": Server(16, 0, {"steps": 3, "latent": True}),
    "64 index": Server(64, 64, {"sparse": True}),
    "1 states": Server(1, 32, {"states": 12}),
    "16 states": Server(16, 80, {"states": 12}),
    "16 two ranks": Server(16, 32, {}, ranks=2),
}
USUAL = ("1", "16", "16 drafts")
STATES = ("1 states", "16 states")
ALL = tuple(SERVERS)
#: Such a server computes the request itself if prefill is lost.
FALLBACK = {"lost": 100, "chunk": 8}


class Row(NamedTuple):
    """The effect of ``action`` at each of ``stages`` on the request's answer: ``comes`` is its end,
    or "whole". ``held``: its pages stay allocated until prefill has stopped writing."""

    action: Callable[[Decoder, Any], None]
    stages: tuple[str, ...]
    comes: str | int
    held: bool = False
    servers: tuple[str, ...] = USUAL
    options: dict[str, Any] = {}


ANYWHERE = (*FROM_PREFILL, *HERE, LOST)
TABLE = [
    # Events of clients: one leaves, or all do.
    Row(stages.abort, (*UNANNOUNCED, *COMMITTED, *HERE, LOST), "abort"),
    Row(stages.abort, ("in transfer",), "abort", held=True, servers=ALL),
    Row(stages.abort, ("retracted",), "abort", servers=ALL),
    Row(stages.abort, ("handshake", "in line"), "abort", options=FALLBACK),
    Row(stages.abort, ("in transfer",), "abort", held=True, options=FALLBACK),
    Row(stages.abort_all, (*UNANNOUNCED, *COMMITTED, *HERE, LOST), "abort"),
    Row(stages.abort_all, ("in transfer",), "abort", held=True),
    Row(stages.abort, (*UNANNOUNCED, *COMMITTED), "abort", servers=STATES),
    # Operations of an operator.
    Row(stages.flush, ANYWHERE, "whole", servers=("16",)),
    Row(stages.new_weights, ANYWHERE, "whole"),
    Row(stages.new_weights, ("retracted",), "whole", servers=ALL),
    Row(stages.pause_in_place, ANYWHERE, "whole", servers=("16",)),
    Row(stages.pause_and_retract, ANYWHERE, "whole"),
    Row(stages.new_weights, (*FROM_PREFILL,), "whole", servers=STATES),
    # Lack of memory.
    Row(stages.retract_some, ("running", "running here"), "whole"),
    Row(stages.evict, ANYWHERE, "whole", servers=("16",)),
    Row(stages.evict, ("retracted",), "whole", servers=ALL),
    Row(stages.five_minutes, ("in line",), 503),
    Row(stages.five_minutes, ("pending",), 500),
    Row(stages.five_minutes, ("handshake", "in transfer", "retracted"), "whole"),
    # Its prefill server dies, or stalls.
    Row(stages.fail_room, ("handshake", "in line", "in transfer"), 500),
    Row(stages.freeze, ("in transfer",), 500, held=True, servers=ALL),
    Row(stages.fail_room, ("handshake", "in line", "in transfer"), "whole", options=FALLBACK),
    Row(stages.freeze, ("in transfer",), "whole", held=True, options=FALLBACK),
]


def cells() -> list[Any]:
    """Return each row at each of its stages, on each of its servers, without duplicates."""
    found = {}
    for row in TABLE:
        for stage in row.stages:
            for server in row.servers:
                where = " fallback" if row.options else ""
                name = f"{row.action.__name__} {stage} {server}{where}"
                found[name] = pytest.param(row, stage, SERVERS[server], id=name)
    return list(found.values())


@pytest.mark.hazard("lost-lock", "abort-leaves-something", "bad-kv-in-tree", "flush-while-held")
@pytest.mark.hazard("retracted-without-node", "retraction-of-shared-pages")
@pytest.mark.parametrize(("row", "stage", "server"), cells())
def test_what_comes_out(row: Row, stage: str, server: Server) -> None:
    """Guards against a lock, a row, a metadata slot, a CPU copy or an answer that is forgotten, or
    given twice; against KV of a failed transfer, of old weights or without an owner in an answer or
    in the tree; and against a request that waits for ever."""
    options = server.options | stages.options(stage) | row.options
    if server.ranks == 1:
        play(Decoder(server.page, 1024, **options), row, stage, server.prefix)
        return
    with ranks_reduce():
        pair = Pair(
            lambda rank, group: SimpleNamespace(
                decoder=Decoder(server.page, 1024, group=group, **options)
            )
        )
        try:
            pair.run(lambda side: play(side.decoder, row, stage, server.prefix))
        finally:
            pair.close()


def play(decoder: Decoder, row: Row, stage: str, prefix: int) -> None:
    """Run one cell of the table."""
    if prefix:  # with a draft model a slot is shared only with the token behind it
        serve(decoder, PROMPT[:prefix] + [7] * bool(decoder.steps))
    others = len(decoder.submitted)
    before = in_tree(decoder, PROMPT)
    req = stages.bring_to(decoder, stage)
    other, room = decoder.submitted[others], decoder.rooms[-1]
    rooms = len(decoder.rooms)
    assert not decoder.is_fully_idle()
    poison_free_slots(decoder)
    row.action(decoder, req)
    check(decoder)
    turn(decoder, 3)
    if row.held:
        assert decoder.held and not decoder.held[0].output_ids
        decoder.write_late(room)
        tick(decoder)
        assert not decoder.held
    if row.comes != "whole":
        has_ended(decoder, req, row.comes)
        assert room.clears == 1 and len(room.withdrawn) == (stage in UNANNOUNCED)
        if stage not in HERE:
            whole = page_floor(len(PROMPT) - bool(decoder.steps), decoder.page_size)
            assert in_tree(decoder, PROMPT) == (whole if stage in COMMITTED else before)
    finish(decoder)
    assert len(decoder.rooms) == rooms, "the request is sent to prefill once"
    assert not has_copies(req)
    if row.comes == "whole" and stage != "held":
        assert req.output_ids[1:] == [2] * (ANSWER - 1)
    assert (end_of(decoder, other)["type"] == "abort") == (row.action is stages.abort_all)
    if row.action in (stages.new_weights, stages.pause_in_place, stages.pause_and_retract):
        nothing_is_hit_of_before(decoder, req, is_local=stage in HERE)


def end_of(decoder: Decoder, req: Any) -> dict[str, Any]:
    """Return the client's answer; for some aborts the tokenizer makes its own message."""
    assert decoder.mailbox.ends[req.rid] == 1
    return decoder.mailbox.reasons[req.rid] or {"type": "abort"}


def has_ended(decoder: Decoder, req: Any, how: str | int) -> None:
    """Check that the client was answered so, once, and that nothing is left."""
    reason = end_of(decoder, req)
    assert reason["type"] == "abort" and how in ("abort", reason.get("status_code"))
    line = decoder.disagg_decode_prealloc_queue
    in_queues = [*decoder.queued, *(entry.req for entry in line.pending_reqs), *decoder.retracted]
    assert req not in [*holders(decoder), *in_queues] and req.req_pool_idx is None
    assert not has_copies(req)


def has_copies(req: Any) -> bool:
    """Return True if the CPU keeps the KV of a retracted request."""
    record = req.delta
    return bool(record.draft_copy or record.state_copy or hasattr(req, "kv_cache_cpu"))


def nothing_is_hit_of_before(decoder: Decoder, req: Any, *, is_local: bool) -> None:
    """Check that requests with new weights do not hit KV of old ones. ``is_local``: decode computes
    the prompt, so at least one token is computed."""
    assert in_tree(decoder, [*PROMPT, *req.output_ids]) == 0
    whole = page_floor(len(PROMPT) - (is_local or bool(decoder.steps)), decoder.page_size)
    for expected in (0, whole):
        (req,) = serve(decoder, PROMPT)
        assert req.delta.explanation.hit_tokens == expected
