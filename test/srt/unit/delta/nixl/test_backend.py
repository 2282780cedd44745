"""Bytes that a room's chunks move, and decode's notifications."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Sequence
from itertools import product
from types import SimpleNamespace
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt
import pytest

from sglang.srt.disaggregation.base.conn import KVPoll
from sglang.srt.disaggregation.delta import observability, wire
from sglang.srt.disaggregation.delta.nixl import backend, descriptors, manager
from sglang.srt.disaggregation.delta.nixl.manager import parse
from sglang.srt.disaggregation.delta.observability import STATS, Moved
from sglang.srt.disaggregation.delta.pages import heads_of, sources_of
from sglang.srt.disaggregation.nixl.conn import TransferStatus
from unit.delta.nixl.prefill_rank import PrefillRank
from unit.delta.nixl.sides import KEY_BYTES, PAGE, Side
from unit.delta.transfer.steps import ROOM, pages

MISFIT = "kv_transfer_failed", "mismatch"

#: Pages of prefill and of decode: none, one, neighbours on both sides, on one, and in any order.
PAGES: dict[str, tuple[list[int], list[int]]] = {
    "none": ([], []),
    "one": ([11], [16]),
    "a run": ([2, 3, 4, 5], [7, 8, 9, 10]),
    "a run on one side": ([2, 3, 4, 5], [9, 3, 16, 0]),
    "scattered": ([7, 0, 11, 4, 5, 1], [1, 16, 3, 8, 9, 2]),
}
#: Pages of a second chunk.
MORE = ([9, 10], [15, 12])
#: Prefill rank, ranks; decode rank, ranks; KV heads of the model. Every rank has whole latent
#: pages.
RANKS = {
    "of equal size": (0, 1, 0, 1, 2),
    "latent": (0, 1, 1, 2, 2),
    "to the first of two": (0, 1, 0, 2, 2),
    "to the last of two": (0, 1, 1, 2, 4),
    "from the last of two": (1, 2, 0, 1, 2),
    "from a rank with a replica": (1, 4, 0, 1, 2),
    "from the replica that sends": (2, 4, 0, 1, 2),
    "whole tokens": (0, 1, 1, 2, 1),
}
#: Sent with the pages: state; and the metadata in a note instead of decode's slot.
GOES = {
    "metadata": (False, False),
    "metadata in the note": (False, True),
    "state": (True, False),
    "state, metadata in the note": (True, True),
}
#: For prefill and for decode: pages of state, metadata slots.
STATE, SLOTS = ((4, 0), (1, 5)), (3, 1)
#: Lists that NIXL prepares: for both ranks, none, for this rank only, or none because the peer is a
#: stock server.
LISTS = ("prepared", "none", "ours only", "stock peer")
CASES = [
    (ranks, goes, lists)
    for ranks, goes, lists in product(RANKS, GOES, LISTS)
    if (ranks == "of equal size" or not GOES[goes][0])
    and not (lists == "stock peer" and GOES[goes][1])
]


def rank_of(
    patch: pytest.MonkeyPatch, ranks: str, form: str = "prepared", stages: int = 1
) -> PrefillRank:
    """Return a prefill rank, one of some pipeline ``stages``, with the decode rank that it
    serves."""
    if form:
        patch.setattr(descriptors, "is_selected_faster", lambda *_: form == "prepared")
    rank, size, their_rank, their_size, total = RANKS[ranks]
    is_mla = ranks == "latent"
    ours = Side(2**63 - 5000, 12, rank, size, total, is_mla)
    theirs = Side(2**40, 17, their_rank, their_size, total, is_mla)
    return PrefillRank(patch, prefill_side=ours, decode_side=theirs, stages=stages)


def started(rank: PrefillRank, to: Sequence[int], **said: Any) -> Any:
    """Start a room for these pages of decode, behind a prefix of one page; ``said``: as in
    ``announce``."""
    sender = rank.sender(ROOM)
    prefix = 0 if said.get("is_stock") else 1
    rank.announce(ROOM, to, slot=SLOTS[1], prefix=prefix * PAGE, **said)
    sender.init(prefix + len(to), SLOTS[0])
    return sender


def serve(rank: PrefillRank, ours: Sequence[int], to: Sequence[int], **said: Any) -> list[Any]:
    """Serve a room of one chunk from start to end; return its handles."""
    made = len(rank.agent.handles)
    sender = started(rank, to, **said)
    sender.send(pages(*ours))
    rank.finish()
    assert sender.poll() == KVPoll.Success
    sender.clear()
    rank.check()
    return rank.agent.handles[made:]


def expected(
    rank: PrefillRank, ours: Sequence[int], to: Sequence[int], has_state: bool, in_slot: bool
) -> list[npt.NDArray[np.uint8]]:
    """Return decode's buffers after that, by plain loops over layers, pages, tokens and heads."""
    side, theirs = rank.side, rank.decode["decode"]
    found = theirs.snapshot()
    left = iter(found)
    for _, source in side.kv:
        target = next(left)
        for page, at in zip(ours, to, strict=True):
            move_heads(side, theirs, source[page], target[at])
    for _, source in side.metadata:
        target = next(left)
        if in_slot:
            target[SLOTS[1]] = source[SLOTS[0]]
    for _, source in side.state:
        target = next(left)
        if has_state:
            target[list(STATE[1])] = source[list(STATE[0])]
    return found


def move_heads(
    ours: Side, theirs: Side, source: npt.NDArray[np.uint8], target: npt.NDArray[np.uint8]
) -> None:
    """Copy the heads of one page of one buffer."""
    from_, to = (
        page.reshape(PAGE, len(side.heads), -1) for page, side in ((source, ours), (target, theirs))
    )
    for head in set(ours.heads) & set(theirs.heads):
        holders = [
            rank
            for rank in sources_of(theirs.rank, ours.size, theirs.size)
            if head in heads_of(rank, ours.size, ours.total)
        ]
        if ours.size == theirs.size or min(holders) == ours.rank:
            to[:, head - theirs.heads.start] = from_[:, head - ours.heads.start]


@pytest.fixture
def moved(monkeypatch: pytest.MonkeyPatch) -> list[Moved]:
    """The event log's records of chunks."""
    seen: list[Any] = []

    def write(line: bytes) -> None:
        event = msgspec.json.decode(line, type=observability.RoomEvent)
        if isinstance(event, Moved):
            seen.append(event)

    log = SimpleNamespace(write=write)
    monkeypatch.setattr(observability, "event_log", lambda side: log)
    return seen


@pytest.mark.hazard(
    "metadata-tied-to-state", "lists-cut-to-fit", "false-runs", "full-hit-without-metadata"
)
@pytest.mark.parametrize("which", PAGES)
@pytest.mark.parametrize(("ranks", "goes", "lists"), CASES)
def test_a_room(
    moved: list[Moved],
    monkeypatch: pytest.MonkeyPatch,
    ranks: str,
    goes: str,
    lists: str,
    which: str,
) -> None:
    """Guards against bytes at a wrong place in any form of descriptors; against metadata that are
    sent only with state or only with KV, or into decode's slot as well as in the note; against
    state that is sent with every chunk or for a model without state; and against a full hit, which
    writes no KV, without a notification or an event."""
    rank, (has_state, in_note) = rank_of(monkeypatch, ranks), GOES[goes]
    is_stock = lists == "stock peer"
    if is_stock and which == "none":
        return  # only a dummy announces no pages
    if lists == "none":
        rank.agent.before["prep_xfer_dlist"] = lambda: 1 / 0
    elif lists == "ours only":
        rank.agent.script["prep_xfer_dlist"].extend([None, RuntimeError("no memory")] * 2)
    chunks = [PAGES[which], MORE] if which == "scattered" else [PAGES[which]]
    ours, to = ([page for chunk in chunks for page in chunk[side]] for side in (0, 1))
    was = expected(rank, ours, to, has_state, not in_note)
    sender = started(
        rank, to, in_note=in_note, state=STATE[1] if has_state else (), is_stock=is_stock
    )
    for source, _ in chunks:
        assert rank.agent.notes["decode"] == [], "no note before the last write"
        sender.send(pages(*source), list(STATE[0]) if has_state else None)
        rank.finish()
    for before, is_now in zip(was, rank.decode["decode"].snapshot(), strict=True):
        assert np.array_equal(before, is_now)
    assert_told(rank, has_state, in_note)
    assert sender.poll() == KVPoll.Success
    sender.clear()
    rank.check()
    kinds = ["kv"] * len(chunks) * (bool(ours) and ranks != "from a rank with a replica")
    kinds += ["state"] * has_state + ["aux"] * (not in_note)
    sides = rank.side.args.gpu_id, rank.decode["decode"].args.gpu_id
    for handle, kind in zip(rank.agent.handles, kinds, strict=True):
        assert handle.memory == ("DRAM" if kind == "aux" else "VRAM")
        assert handle.is_prepared == (lists == "prepared" and kind != "state")
        devices = (0, 0) if kind == "aux" else sides
        assert {device for *_, device in handle.sources} == {devices[0]}
        assert {device for *_, device in handle.destinations} == {devices[1]}
    assert [event.is_last for event in moved] == [False] * (len(chunks) - 1) + [True]
    assert bool(moved[-1].bytes) == bool(kinds)


def assert_told(rank: PrefillRank, has_state: bool, in_note: bool) -> None:
    """Assert that decode completes the room with the last note, and has its metadata then."""
    told, status = list(map(parse, rank.agent.notes["decode"])), TransferStatus()
    status.expects_state = has_state
    for note in told:
        assert not status.done_writers and note.room == ROOM
        status.take(note, 1)
    assert status.done_writers == {rank.side.rank}
    if in_note:
        (note,) = told
        assert note.kind == "done"
        assert list(note.metadata) == [bytes(buffer[SLOTS[0]]) for _, buffer in rank.side.metadata]


@pytest.mark.hazard("foreign-geometry")
@pytest.mark.parametrize("start_layer", [0, 2, 4])
@pytest.mark.parametrize("is_mla", [False, True])
def test_a_pipeline_stage(monkeypatch: pytest.MonkeyPatch, is_mla: bool, start_layer: int) -> None:
    """Guards against layers of another stage, of KV or of state, and values read at the offset of
    another number of layers: decode holds all six layers, this stage two."""
    rank = rank_of(monkeypatch, "latent" if is_mla else "of equal size", stages=3)
    args = rank.side.args
    args.prefill_start_layer, args.state_type = start_layer, "nsa" if is_mla else "mamba"
    keys, values = ([base + 2**20 * layer for layer in range(6)] for base in (2**50, 2**51))
    rank.decode["decode"].args.state_data_ptrs = keys if is_mla else keys[:2]
    rank.manager.forget_peer("decode")
    rank.register("decode", kv=keys if is_mla else keys + values)
    sender = started(rank, [0], in_note=True, state=[0])
    sender.send(pages(0), [0])
    rank.tick(0.25)
    found = [[address for address, *_ in each.destinations] for each in rank.agent.handles]
    mine = slice(start_layer, start_layer + 2)
    assert found == [
        keys[mine] + ([] if is_mla else values[mine]),
        keys[mine] if is_mla else keys[:2],
    ]


@pytest.mark.parametrize("ranks", ["to the last of two", "from the last of two"])
def test_slices_are_prepared_once(monkeypatch: pytest.MonkeyPatch, ranks: str) -> None:
    """Guards against a row per token and buffer for each chunk, a million for a long one, against a
    list for each chunk, and against lists of a peer from before it was loaded again."""
    rank = rank_of(monkeypatch, ranks)
    for first in range(3):
        own = [first, first + 5, first + 3]
        serve(rank, own, own[::-1], in_note=True)
    calls = rank.agent.calls
    assert (calls["make_prepped_xfer"], calls["prep_xfer_dlist"]) == (3, 2)
    rank.manager.forget_peer("decode")
    rank.register("decode")
    serve(rank, [1], [2], in_note=True)
    assert calls["prep_xfer_dlist"] == 3
    assert calls["get_xfer_descs"] == calls["initialize_xfer"] == 0


#: With these costs the form depends on the counted descriptors: one per run, or one per page (one
#: per token if heads are cut out of the pages), in each of 4 buffers.
CHOICES = [
    ("of equal size", (0, 1, 7.5, 0), "prepared"),
    ("of equal size", (0, 1, 8.5, 0), "ranges"),
    ("of equal size", (15.5, 0, 0, 1), "ranges"),
    ("of equal size", (16.5, 0, 0, 1), "prepared"),
    ("to the last of two", (0, 1, 63.5, 0), "prepared"),
    ("to the last of two", (0, 1, 64.5, 0), "ranges"),
    ("to the last of two", (63.5, 0, 0, 1), "ranges"),
    ("to the last of two", (64.5, 0, 0, 1), "prepared"),
]


@pytest.mark.hazard("drained-per-request")
@pytest.mark.parametrize(("ranks", "costs", "form"), CHOICES)
def test_numbers_of_a_delivery(
    monkeypatch: pytest.MonkeyPatch,
    moved: list[Moved],
    ranks: str,
    costs: tuple[float, ...],
    form: str,
) -> None:
    """Guards against a choice by other costs than this machine's, or by other numbers than the
    measured ones; a descriptor for each page although neighbours can be merged; counting pages that
    decode already had or that were not sent; and counting time on the wire as time of a post."""
    ticks = itertools.count()
    clocked = functools.partial(backend.NixlBackend, clock=lambda: float(next(ticks)))
    monkeypatch.setattr(manager, "NixlBackend", clocked)
    monkeypatch.setattr(descriptors, "RANGES_US", costs[:2])
    monkeypatch.setattr(descriptors, "SELECTED_US", costs[2:])
    rank = rank_of(monkeypatch, ranks, form="")
    before = STATS.totals.copy()
    handles = serve(rank, [2, 3, 4, 7], [4, 5, 6, 1])
    assert handles[0].is_prepared == (form == "prepared")
    whole = ranks == "of equal size"
    kv = 4 * sum(rank.side.args.kv_item_lens) // (1 if whole else 2)
    since = STATS.since(before).items()
    added = {key[0].removeprefix("kv_transfer_"): n for key, n in since if len(key) == 1}
    (event,) = moved
    assert added["sent_bytes"] == kv
    assert event.bytes == added["bytes"] == kv + sum(rank.side.args.aux_item_lens)
    sent = 4 * ((2 if form == "ranges" else 4) if whole else 4 * PAGE) + 3
    assert sum(len(handle.sources) for handle in handles) == sent
    assert event.descriptors == added["descriptors"] == sent
    # The clock advances by a second at each call: once per build, once per post.
    assert (event.build_s, event.post_s, event.wire_s) == (2.0, 2.0, 1.0)
    assert (added["build_seconds"], added["post_seconds"]) == (2.0, 2.0)


#: Ranks, this rank's fields, decode's registration, the sent fields, and the complaint.
REFUSED: list[tuple[str, dict[str, Any], dict[str, Any], dict[str, Any], str]] = [
    ("of equal size", {}, {}, {"pages": [12]}, "page 12 of a pool of 12"),
    ("to the last of two", {}, {}, {"pages": [12]}, "page 12 of a pool of 12"),
    ("of equal size", {}, {}, {"slot": 5}, "page 5 of a pool of 5"),
    ("of equal size", {}, {}, {"slot": 5, "in_note": True}, "metadata slot 5 does not exist"),
    ("of equal size", {}, {}, {"state": ((6,), (0,))}, "page 6 of a pool of 6"),
    ("of equal size", {}, {}, {"state": ((1, 2), (3,))}, "2 pages of state, .* decode listed 1"),
    ("of equal size", {}, {}, {"state": ((1,), ())}, "1 pages of state.* listed 0"),
    ("of equal size", {"state_type": "none"}, {}, {"state": STATE}, "of the kind 'none'"),
    ("latent", {"state_type": "new"}, {}, {"state": STATE}, "of the kind 'new'"),
    (
        "to the first of two", {}, {}, {"state": STATE},
        "'mamba' needs equal tensor parallel sizes, not 1 on prefill and 2",
    ),
    ("latent", {}, {}, {"state": STATE}, "'mamba' needs equal tensor parallel sizes"),
    (
        "to the last of two", {"state_type": "swa"}, {}, {"state": STATE},
        "'swa' needs equal tensor parallel sizes",
    ),
    ("of equal size", {}, {"kv": [2**64 - 8] * 4}, {}, "does not fit into 64 bits"),
    ("to the last of two", {}, {"kv": [2**64 - 8] * 4}, {}, "does not fit into 64 bits"),
    ("to the last of two", {}, {"item": PAGE * KEY_BYTES}, {}, "do not fit into decode's pages"),
    (
        "to the last of two", {}, {"item": 2 * PAGE * KEY_BYTES + 1}, {},
        "do not fit into decode's pages",
    ),
    ("to the last of three", {}, {}, {}, "4 KV heads cannot be laid out"),
]  # fmt: skip


@pytest.mark.hazard("lists-cut-to-fit")
@pytest.mark.parametrize(("ranks", "ours", "theirs", "sent", "text"), REFUSED)
def test_what_does_not_fit(
    monkeypatch: pytest.MonkeyPatch,
    ranks: str,
    ours: dict[str, Any],
    theirs: dict[str, Any],
    sent: dict[str, Any],
    text: str,
) -> None:
    """Guards against reading or writing outside a pool, a peer's numbers that wrap around into
    other memory or put heads beside its tokens, state that is cut to fit, of another kind or of
    other heads; and against sending metadata nevertheless, which would complete the room on
    decode."""
    rank = rank_of(monkeypatch, ranks.replace("three", "two"))
    if "three" in ranks:
        rank.decode["decode"].size, rank.decode["decode"].rank = 3, 0
    rank.side.args.__dict__.update(ours)
    rank.manager.forget_peer("decode")
    rank.register("decode", **theirs)
    state, failures = sent.get("state", ((), ())), STATS.totals[MISFIT]
    sender = rank.sender(ROOM)
    rank.announce(ROOM, [3], state=state[1], in_note=sent.get("in_note", False))
    sender.init(1, sent.get("slot", 0))
    sender.send(pages(*sent.get("pages", [1])), list(state[0]))
    rank.finish()
    assert sender.poll() == KVPoll.Failed and STATS.totals[MISFIT] == failures + 1
    assert rank.agent.notes["decode"] == []
    with pytest.raises(RuntimeError, match=text):
        sender.failure_exception()
    rank.check()


@pytest.mark.parametrize("why", ["too much", "not in host memory"])
def test_metadata_that_cannot_go_in_a_note(monkeypatch: pytest.MonkeyPatch, why: str) -> None:
    """Guards against hidden states of some models in a message for a few kilobytes, and against
    reading an address of the GPU, which ends the process: SGLang puts metadata there for one kind
    of memory pool."""
    if why == "too much":
        monkeypatch.setattr(wire, "MAX_METADATA", 10)
    else:
        monkeypatch.setenv("SGLANG_MOONCAKE_CUSTOM_MEM_POOL", "INTRA_NODE_NVLINK")
    rank = rank_of(monkeypatch, "of equal size")
    monkeypatch.setattr(backend, "read_memory", lambda *_: pytest.fail("read on the host"))
    handles = serve(rank, [1], [3], in_note=True)
    assert [handle.memory for handle in handles] == ["VRAM", "DRAM"]
    assert [parse(note).kind for note in rank.agent.notes["decode"]] == ["kv", "aux"]
