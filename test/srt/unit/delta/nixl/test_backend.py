"""What a chunk moves, byte by byte, and what decode is told."""

from __future__ import annotations

from itertools import product
from typing import Any

import numpy as np
import pytest

from sglang.srt.disaggregation.delta import wire
from sglang.srt.disaggregation.delta.metrics import Reason
from sglang.srt.disaggregation.delta.nixl import backend, descriptors
from sglang.srt.disaggregation.delta.nixl.descriptors import Form
from sglang.srt.disaggregation.delta.observability import STATS
from sglang.srt.disaggregation.delta.prefill.transfer_backend import TransferError
from sglang.srt.disaggregation.delta.wire import parse
from sglang.srt.disaggregation.nixl.conn import TransferStatus
from sglang.srt.patchset.environment import DESCRIPTOR_COSTS
from unit.delta.nixl.prefill_rank import PrefillRank
from unit.delta.nixl.sides import PAGE, ROOM, WRITER, Bench, Side

#: Pages of prefill and of decode: none, one, neighbours on both sides, on one, and in any order.
PAGES: dict[str, tuple[list[int], list[int]]] = {
    "none": ([], []),
    "one": ([11], [16]),
    "a run": ([2, 3, 4, 5], [7, 8, 9, 10]),
    "a run on one side": ([2, 3, 4, 5], [9, 3, 16, 0]),
    "scattered": ([7, 0, 11, 4, 5, 1], [1, 16, 3, 8, 9, 2]),
}
#: Prefill rank, ranks; decode rank, ranks; KV heads of the model. Latent pages any rank has whole.
RANKS = {
    "of equal size": (0, 1, 0, 1, 2),
    "latent": (0, 1, 1, 2, 2),
    "to the first of two": (0, 1, 0, 2, 2),
    "to the last of two": (0, 1, 1, 2, 4),
    "from the last of two": (1, 2, 0, 1, 2),
    "from a rank with a replica": (1, 4, 0, 1, 2),
    "whole tokens": (0, 1, 1, 2, 1),
}
#: What goes with the pages.
STATE = ((4, 0), (1, 5))
GOES: dict[str, dict[str, Any]] = {
    "an early chunk": {"is_last": False},
    "metadata": {},
    "metadata in the note": {"in_note": True},
    "early state": {"is_last": False, "state": STATE},
    "state": {"state": STATE},
    "state, metadata in the note": {"state": STATE, "in_note": True},
}
#: Lists that NIXL prepares: of strided rows, of all rows, none, of this rank only, or none as the
#: peer is a stock one.
LISTS = ("strided", "long", "none", "ours only", "stock peer")
CASES = [
    (ranks, goes, lists)
    for ranks, goes, lists in product(RANKS, GOES, LISTS)
    if (ranks == "of equal size" or "state" not in goes)
    and (lists != "stock peer" or "in_note" not in GOES[goes])
]


def bench_of(ranks: str) -> Bench:
    """A rank and the decode rank that it serves."""
    rank, size, their_rank, their_size, total = RANKS[ranks]
    is_mla = ranks == "latent"
    return Bench(
        Side(2**63 - 5000, 12, rank, size, total, is_mla),
        Side(2**40, 17, their_rank, their_size, total, is_mla),
        is_mla,
    )


@pytest.fixture
def moved(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """What the event log gets. Prepared lists are used wherever they can be, whatever was
    measured."""
    seen: list[dict[str, Any]] = []

    def choose(*, has_prepared: bool, **_: Any) -> Form:
        return Form.PREPARED if has_prepared else Form.RANGES

    monkeypatch.setattr(descriptors, "choose", choose)
    monkeypatch.setattr(backend, "count_moved", lambda *_, **numbers: seen.append(numbers))
    return seen


def assert_moved(bench: Bench, **chunk: Any) -> list[Any]:
    """Post a chunk and compare all of decode's memory; the handles that it took."""
    made = bench.chunk(**chunk)
    expected = bench.expected(made)
    posted = bench.post(made)
    bench.finish(posted)
    assert bench.agent.notes["decode"] == [], "no write may complete a room"
    if made.is_last:
        bench.backend.complete(made)
    for was, is_now in zip(expected, bench.decode.snapshot(), strict=True):
        assert np.array_equal(was, is_now)
    bench.check()
    return [each.handle for each in posted]


def assert_told(bench: Bench, is_last: bool, has_state: bool, in_note: bool) -> None:
    """Decode takes the room as complete with the last note, and has its metadata then."""
    told, status = list(map(parse, bench.agent.notes["decode"])), TransferStatus()
    status.expects_state = has_state
    for note in told:
        assert not status.finished_writers()
        status.take(note, 1)
    assert status.finished_writers() == ({WRITER} if is_last else set())
    if in_note:
        (note,) = told
        assert (note.room, note.kind, note.writer) == (ROOM, "done", WRITER)
        assert list(note.metadata) == [bytes(buffer[3]) for _, buffer in bench.prefill.metadata]


@pytest.mark.hazard(
    "metadata-tied-to-state", "lists-cut-to-fit", "false-runs", "full-hit-without-metadata"
)
@pytest.mark.parametrize("pages", PAGES)
@pytest.mark.parametrize(("ranks", "goes", "lists"), CASES)
def test_a_chunk(
    moved: list[dict[str, Any]],
    monkeypatch: pytest.MonkeyPatch,
    ranks: str,
    goes: str,
    lists: str,
    pages: str,
) -> None:
    """Guards against bytes at a wrong place in any form of descriptors; against metadata that go
    only with state or only with KV, or into decode's slot beside the note that has them; against
    state that goes with every chunk or of a model that has none; and against a full hit, for which
    nothing is written, that tells decode or the event log nothing."""
    bench, (ours, theirs), what = bench_of(ranks), PAGES[pages], GOES[goes]
    is_last, in_note = what.get("is_last", True), what.get("in_note", False)
    has_state = is_last and "state" in what
    bench.agent.is_strided = lists != "long"
    if lists == "none":
        bench.agent.before["prep_xfer_dlist"] = lambda: 1 / 0
    elif lists == "ours only":
        bench.agent.script["prep_xfer_dlist"].extend([None, RuntimeError("no memory")] * 2)
    read = bench.prefill.memory.at
    monkeypatch.setattr(backend, "read_memory", lambda *where: read(*where).tobytes())
    handles = assert_moved(bench, pages=ours, to=theirs, is_stock=lists == "stock peer", **what)
    assert_told(bench, is_last, has_state, in_note)
    kinds = ["kv"] * (bool(ours) and ranks != "from a rank with a replica")
    kinds += ["state"] * has_state + ["aux"] * (is_last and not in_note)
    can = lists in ("strided", "long")
    sides = bench.prefill.args.gpu_id, bench.decode.args.gpu_id
    for handle, kind in zip(handles, kinds, strict=True):
        assert handle.memory == ("DRAM" if kind == "aux" else "VRAM")
        assert handle.is_prepared == (can and kind != "state")
        devices = (0, 0) if kind == "aux" else sides
        assert {device for *_, device in handle.sources} == {devices[0]}
        assert {device for *_, device in handle.destinations} == {devices[1]}
    (numbers,) = moved
    assert numbers["is_last"] == is_last and bool(numbers["moved"]) == bool(kinds)
    assert numbers["wire_s"] == 1.0, "the clock moves by a second each time it is asked"


@pytest.mark.usefixtures("moved")
@pytest.mark.parametrize("ranks", ["to the last of two", "from the last of two"])
def test_slices_are_prepared_once(ranks: str) -> None:
    """Guards against a row a token a buffer for each chunk, a million for a long one, against a
    list for each chunk, and against lists of a peer that was loaded anew."""
    bench = bench_of(ranks)
    for first in range(3):
        pages = [first, first + 5, first + 3]
        assert_moved(bench, pages=pages, to=pages[::-1], is_last=False)
    assert bench.agent.calls["make_prepped_xfer"] == 3
    assert bench.agent.calls["prep_xfer_dlist"] == 2
    bench.peers.forget("decode")
    bench.peers.add(bench.decode.info("decode"))
    assert_moved(bench, pages=[1], to=[2], is_last=False)
    assert bench.agent.calls["prep_xfer_dlist"] == 3
    assert bench.agent.calls["get_xfer_descs"] == bench.agent.calls["initialize_xfer"] == 0


@pytest.mark.hazard("drained-per-request")
@pytest.mark.parametrize("form", Form, ids=lambda form: form.value)
@pytest.mark.parametrize(
    ("ranks", "pages", "runs"),
    [("of equal size", 4, 2), ("to the last of two", 4 * PAGE, 4 * PAGE)],
    ids=["pages", "slices"],
)
def test_numbers_of_a_delivery(
    monkeypatch: pytest.MonkeyPatch, ranks: str, pages: int, runs: int, form: Form
) -> None:
    """Guards against a measured choice that is fed with something else than was measured, a
    descriptor for each page where neighbours can be merged, a delivery that is counted in pages
    where each token of them is a descriptor, counting what decode already had or what was not
    sent, and taking time on the wire for time of a post."""
    bench, asked, seen = bench_of(ranks), [], []
    monkeypatch.setattr(descriptors, "choose", lambda **numbers: asked.append(numbers) or form)
    bench.stats.posted = lambda **numbers: seen.append(numbers)  # type: ignore[method-assign]
    before = STATS.totals["kv_transfer_sent_bytes"]
    handles = assert_moved(bench, pages=[2, 3, 4, 7], to=[4, 5, 6, 1])
    of_all = {"has_prepared": True, "costs": descriptors.COSTS}
    assert asked == [
        {"buffers": 4, "pages": pages, "runs": runs, **of_all},
        {"buffers": 3, "pages": 1, "runs": 1, **of_all},
    ]
    kv = 4 * sum(bench.prefill.args.kv_item_lens) // (1 if ranks == "of equal size" else 2)
    assert STATS.totals["kv_transfer_sent_bytes"] - before == kv
    (numbers,) = seen
    assert numbers["moved"] == kv + sum(bench.prefill.args.aux_item_lens)
    sent = 4 * (runs if form is Form.RANGES else pages) + 3
    assert sum(len(handle.sources) for handle in handles) == numbers["descriptors"] == sent
    # The clock moves by a second each time it is asked: once in each build, once in each post.
    assert (numbers["build_s"], numbers["post_s"]) == (2.0, 2.0)


@pytest.mark.hazard("lists-cut-to-fit")
@pytest.mark.parametrize("is_stock", [False, True])
@pytest.mark.parametrize(
    ("ranks", "chunk", "text"),
    [
        ("of equal size", {"pages": [1, 2], "to": [3, -1]}, "page -1 of a pool of"),
        ("of equal size", {"pages": [12], "to": [3]}, "page 12 of a pool of 12"),
        ("to the last of two", {"pages": [12], "to": [3]}, "page 12 of a pool of 12"),
        ("of equal size", {"pages": [1], "to": [3], "slots": (5, 0)}, "page 5 of a pool of 5"),
        ("of equal size", {"state": ((6,), (0,))}, "page 6 of a pool of 6"),
        (
            "of equal size",
            {"state": ((1, 2), (3,))},
            "2 pages of state, and decode rank decode listed 1",
        ),
        (
            "of equal size",
            {"pages": [1], "to": [3], "state": ((1,), ())},
            "1 pages of state.* listed 0",
        ),
        (
            "to the first of two",
            {"pages": [1], "to": [3], "state": ((1,), (2,))},
            "equal tensor parallel sizes, not 1 .* 2",
        ),
        # What a stock peer does not say, NIXL refuses:
        ("of equal size", {"pages": [1], "to": [17]}, "page 17 of a pool of 17"),
        ("to the last of two", {"pages": [1], "to": [17]}, "page 17 of a pool of 17"),
        ("of equal size", {"slots": (0, 5)}, "page 5 of a pool of 5"),
    ],
)
def test_what_does_not_fit(ranks: str, chunk: dict[str, Any], text: str, is_stock: bool) -> None:
    """Guards against writing outside a pool, whole pages or heads of their tokens, against state
    that is cut to fit or of other heads; and against metadata, without which decode never takes
    the room, that go all the same."""
    if is_stock and ("17" in text or chunk.get("slots") == (0, 5)):
        return
    bench, posted = bench_of(ranks), []
    with pytest.raises(TransferError, match=text) as caught:
        for each in bench.backend.post(bench.chunk(**chunk, is_stock=is_stock), "decode"):
            posted.append(each)
    assert caught.value.reason is Reason.MISMATCH
    assert {each.handle.memory for each in posted} <= {"VRAM"}
    bench.finish(posted)
    bench.check()


@pytest.mark.parametrize("why", ["too much", "not in host memory"])
def test_metadata_that_cannot_go_in_a_note(monkeypatch: pytest.MonkeyPatch, why: str) -> None:
    """Guards against hidden states of some models in a message that is made for a few kilobytes;
    and against reading an address of the GPU, which ends the process: SGLang puts metadata there
    for one kind of memory pool."""
    monkeypatch.setattr(backend, "read_memory", lambda *_: pytest.fail("read on the host"))
    if why == "too much":
        monkeypatch.setattr(wire, "MOST_METADATA", 10)
    else:
        monkeypatch.setenv("SGLANG_MOONCAKE_CUSTOM_MEM_POOL", "INTRA_NODE_NVLINK")
    bench = Bench()
    made = bench.chunk(pages=[1], to=[3], in_note=True)
    posted = bench.post(made)
    assert [each.handle.memory for each in posted] == ["VRAM", "DRAM"]
    bench.finish(posted)
    bench.backend.complete(made)
    assert [parse(note).kind for note in bench.agent.notes["decode"]] == ["kv", "aux"]


def test_a_metadata_slot_that_cannot_be() -> None:
    """Guards against a copy from beyond the metadata buffers."""
    bench = Bench()
    with pytest.raises(TransferError, match="metadata slot 5 is not"):
        bench.backend.complete(bench.chunk(slots=(5, 1), in_note=True))
    assert bench.agent.notes["decode"] == [] and bench.users() == 0


@pytest.mark.parametrize(
    ("given", "costs"),
    [(None, descriptors.COSTS), ("10, 0.5,0,2e-3", descriptors.Costs(10.0, 0.5, 0.0, 0.002))],
)
def test_costs_of_this_machine(
    monkeypatch: pytest.MonkeyPatch, given: str | None, costs: descriptors.Costs
) -> None:
    """Guards against constants of another machine where an operator gave this one's."""
    if given is not None:
        monkeypatch.setenv(DESCRIPTOR_COSTS.name, given)
    asked: list[descriptors.Costs] = []
    rank = PrefillRank(monkeypatch)
    monkeypatch.setattr(
        descriptors, "choose", lambda **numbers: asked.append(numbers["costs"]) or Form.RANGES
    )
    rank.announce(ROOM, [10])
    sender = rank.sender(ROOM)
    sender.init(1, 3)
    sender.send(np.array([5], np.int32))
    rank.finish()
    assert set(asked) == {costs}
