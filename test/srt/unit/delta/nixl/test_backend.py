"""What a chunk moves, byte by byte, and what decode is told."""

from __future__ import annotations

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
from unit.delta.nixl.sides import PAGE, ROOM, WRITER, Bench, Side

#: Pages of prefill and of decode: none, one, neighbours on both sides, on one, and in any order.
PAGES: dict[str, tuple[list[int], list[int]]] = {
    "none": ([], []),
    "one": ([11], [16]),
    "a run": ([2, 3, 4, 5], [7, 8, 9, 10]),
    "a run on one side": ([2, 3, 4, 5], [9, 3, 16, 0]),
    "scattered": ([7, 0, 11, 4, 5, 1], [1, 16, 3, 8, 9, 2]),
}
#: Prefill rank, ranks; decode rank, ranks; KV heads of the model.
SLICES = {
    "to the first of two": (0, 1, 0, 2, 2),
    "to the last of two": (0, 1, 1, 2, 4),
    "from the last of two": (1, 2, 0, 1, 2),
    "from a rank with a replica": (1, 4, 0, 1, 2),
    "whole tokens": (0, 1, 1, 2, 1),
}


@pytest.fixture
def prefers_lists(monkeypatch: pytest.MonkeyPatch) -> None:
    """Prepared lists are used wherever they can be, whatever was measured."""

    def choose(*, has_prepared: bool, **_: Any) -> Form:
        return Form.PREPARED if has_prepared else Form.RANGES

    monkeypatch.setattr(backend.descriptors, "choose", choose)


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


@pytest.mark.hazard("metadata-tied-to-state", "lists-cut-to-fit", "false-runs")
@pytest.mark.usefixtures("prefers_lists")
@pytest.mark.parametrize("lists", ["strided", "long", "none", "stock peer"])
@pytest.mark.parametrize("is_last", [False, True])
@pytest.mark.parametrize("has_state", [False, True])
@pytest.mark.parametrize("pages", PAGES)
def test_whole_pages(pages: str, has_state: bool, is_last: bool, lists: str) -> None:
    """Guards against metadata that go only with state or only with KV, against state that goes
    with every chunk or of a model that has none, against bytes at a wrong place in any form of
    descriptors, and against a full hit that tells decode nothing."""
    bench = Bench()
    bench.agent.is_strided = lists != "long"
    if lists == "none":
        bench.agent.before["prep_xfer_dlist"] = lambda: 1 / 0
    ours, theirs = PAGES[pages]
    state = ((4, 0), (1, 5)) if has_state else ((), ())
    handles = assert_moved(
        bench, pages=ours, to=theirs, is_last=is_last, state=state, is_stock=lists == "stock peer"
    )

    kinds = ["kv"] * bool(ours) + (["state"] * has_state + ["aux"]) * is_last
    status = TransferStatus()
    status.expects_state = has_state
    told = bench.agent.notes["decode"]
    for count, note in enumerate(told):
        assert len(status.finished_writers()) == 0, f"done after {told[:count]}"
        status.take(parse(note), 1)
    assert status.finished_writers() == ({WRITER} if is_last else set())
    assert len(handles) == len(kinds)
    assert [handle.memory for handle in handles] == [
        "DRAM" if kind == "aux" else "VRAM" for kind in kinds
    ]
    can = lists in ("strided", "long")
    assert [handle.is_prepared for handle in handles] == [can and kind != "state" for kind in kinds]
    for handle, kind in zip(handles, kinds, strict=True):
        devices = (0, 0) if kind == "aux" else (bench.prefill.args.gpu_id, bench.decode.args.gpu_id)
        assert {device for _, _, device in handle.sources} == {devices[0]}
        assert {device for _, _, device in handle.destinations} == {devices[1]}


def bench_of(ranks: str) -> Bench:
    """A rank of ``SLICES`` and the decode rank that it serves."""
    rank, size, their_rank, their_size, total = SLICES[ranks]
    return Bench(
        Side(2**63 - 5000, 12, rank, size, total), Side(2**40, 17, their_rank, their_size, total)
    )


@pytest.mark.usefixtures("prefers_lists")
@pytest.mark.parametrize("lists", ["strided", "long", "none", "stock peer"])
@pytest.mark.parametrize("is_last", [False, True])
@pytest.mark.parametrize("pages", PAGES)
@pytest.mark.parametrize("ranks", SLICES)
def test_slices_of_heads(ranks: str, pages: str, is_last: bool, lists: str) -> None:
    """Guards against heads at a wrong place where the tensor parallel sizes differ, in any form of
    descriptors, and against a rank whose completion does not come."""
    bench = bench_of(ranks)
    bench.agent.is_strided = lists != "long"
    if lists == "none":
        bench.agent.before["prep_xfer_dlist"] = lambda: 1 / 0
    ours, theirs = PAGES[pages]
    handles = assert_moved(
        bench, pages=ours, to=theirs, is_last=is_last, is_stock=lists == "stock peer"
    )
    sends = bool(ours) and ranks != "from a rank with a replica"
    assert len(handles) == sends + is_last
    assert {handle.is_prepared for handle in handles} <= {lists in ("strided", "long")}
    assert len(bench.agent.notes["decode"]) == 2 * is_last


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


def test_numbers_of_slices(form: Form, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards against a choice that is asked, or a delivery that is counted, in pages where each
    token of them is a descriptor."""
    asked: list[dict[str, Any]] = []
    monkeypatch.setattr(
        backend.descriptors, "choose", lambda **numbers: asked.append(numbers) or form
    )
    bench = bench_of("to the last of two")
    seen: list[dict[str, float]] = []
    bench.stats.posted = lambda **numbers: seen.append(numbers)  # type: ignore[method-assign]
    (handle,) = assert_moved(bench, pages=[2, 3, 7], to=[4, 5, 1], is_last=False)
    tokens = 3 * PAGE
    assert asked == [
        {
            "buffers": 4,
            "pages": tokens,
            "runs": tokens,
            "has_prepared": True,
            "costs": descriptors.COSTS,
        }
    ]
    assert seen[0]["descriptors"] == len(handle.sources) == 4 * tokens
    assert seen[0]["moved"] == sum(length for _, length, _ in handle.sources)
    assert seen[0]["moved"] == 3 * sum(bench.prefill.args.kv_item_lens) // 2


@pytest.mark.parametrize("pages", PAGES)
def test_latent_buffers(pages: str) -> None:
    """Guards against MLA pools cut into keys and values; any tensor parallel size has them all."""
    bench = Bench(
        Side(2**63 - 5000, 12, is_mla=True), Side(2**40, 17, 1, 2, is_mla=True), is_mla=True
    )
    assert_moved(bench, pages=PAGES[pages][0], to=PAGES[pages][1])


def test_the_choice_is_asked_with_the_right_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards against a measured choice that is fed with something else than was measured."""
    asked: list[dict[str, Any]] = []

    def choose(**numbers: Any) -> Form:
        asked.append(numbers)
        return Form.RANGES

    monkeypatch.setattr(descriptors, "choose", choose)
    assert_moved(Bench(), pages=[2, 3, 7], to=[4, 5, 1])
    assert asked == [
        {"buffers": 4, "pages": 3, "runs": 2, "has_prepared": True, "costs": descriptors.COSTS},
        {"buffers": 3, "pages": 1, "runs": 1, "has_prepared": True, "costs": descriptors.COSTS},
    ]


@pytest.fixture(params=list(Form), ids=lambda form: form.value)
def form(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Form:
    """The form that is chosen for everything."""
    monkeypatch.setattr(backend.descriptors, "choose", lambda **_: request.param)
    chosen: Form = request.param
    return chosen


@pytest.mark.hazard("drained-per-request")
def test_numbers_of_a_delivery(form: Form) -> None:
    """Guards against a descriptor for each page where neighbours can be merged, against counting
    pages that decode already had or descriptors that were not sent, and against taking time on the
    wire for time of a post."""
    bench = Bench()
    seen: list[dict[str, float]] = []
    bench.stats.posted = lambda **numbers: seen.append(numbers)  # type: ignore[method-assign]
    before = STATS.totals["kv_transfer_sent_bytes"]
    handles = assert_moved(bench, pages=[2, 3, 4, 7], to=[4, 5, 6, 1])
    kv = 4 * sum(bench.prefill.args.kv_item_lens)
    assert STATS.totals["kv_transfer_sent_bytes"] - before == kv
    (numbers,) = seen
    assert numbers["moved"] == kv + sum(bench.prefill.args.aux_item_lens)
    # Four buffers of KV, with two runs or four pages, and three of metadata.
    sent = 4 * (2 if form is Form.RANGES else 4) + 3
    assert sum(len(handle.sources) for handle in handles) == numbers["descriptors"] == sent
    # The clock moves by a second each time it is asked: once in each build, once in each post.
    assert (numbers["build_s"], numbers["post_s"]) == (2.0, 2.0)


@pytest.mark.parametrize("in_note", [True, False])
@pytest.mark.parametrize("pages", PAGES)
def test_every_chunk_is_in_the_event_log(
    pages: str, in_note: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Guards against a full hit, for which nothing is written, that the log does not show as
    delivered: whoever joins the logs of both servers would miss its room."""
    seen: list[dict[str, Any]] = []
    monkeypatch.setattr(backend, "count_moved", lambda *_, **numbers: seen.append(numbers))
    bench = Bench()
    read = bench.prefill.memory.at
    monkeypatch.setattr(backend, "read_memory", lambda *where: read(*where).tobytes())
    assert_moved(bench, pages=PAGES[pages][0], to=PAGES[pages][1], in_note=in_note)
    (numbers,) = seen
    assert numbers["is_last"] and (numbers["moved"] > 0) == (bool(PAGES[pages][0]) or not in_note)


@pytest.mark.hazard("lists-cut-to-fit")
@pytest.mark.parametrize("has_sizes", [True, False])
@pytest.mark.parametrize(
    ("chunk", "text"),
    [
        ({"pages": [1], "to": [17]}, "page 17 of a pool of 17"),
        ({"pages": [1], "to": [17], "ranks": True}, "page 17 of a pool of 17"),
        ({"pages": [12], "to": [3], "ranks": True}, "page 12 of a pool of 12"),
        ({"pages": [1, 2], "to": [3, -1]}, "page -1 of a pool of"),
        ({"pages": [12], "to": [3]}, "page 12 of a pool of 12"),
        ({"pages": [1], "to": [3], "slots": (5, 0)}, "page 5 of a pool of 5"),
        ({"pages": [1], "to": [3], "slots": (0, 5)}, "page 5 of a pool of 5"),
        ({"state": ((6,), (0,))}, "page 6 of a pool of 6"),
        ({"state": ((1, 2), (3,))}, "2 pages of state, and decode rank decode listed 1"),
        ({"pages": [1], "to": [3], "state": ((1,), ())}, "1 pages of state.* listed 0"),
    ],
)
def test_what_does_not_fit(chunk: dict[str, Any], text: str, has_sizes: bool) -> None:
    """Guards against writing outside a pool, whole pages or (``ranks``) heads of their tokens, and
    against state that is cut to fit."""
    bench = bench_of("to the last of two") if chunk.get("ranks") else Bench()
    chunk = {name: value for name, value in chunk.items() if name != "ranks"}
    posted = []
    if not has_sizes and ("17" in text or chunk.get("slots") == (0, 5)):
        pytest.skip("a stock peer does not say how large its pools are: NIXL refuses such pages")
    with pytest.raises(TransferError, match=text) as caught:
        for each in bench.backend.post(bench.chunk(**chunk, is_stock=not has_sizes), "decode"):
            posted.append(each)
    assert caught.value.reason is Reason.MISMATCH
    bench.finish(posted)
    bench.check()


def test_state_between_different_sizes() -> None:
    """Guards against state of one rank in the pool of a rank that holds other heads: metadata,
    without which decode never takes the room, must not go either."""
    bench = Bench(decode=Side(2**40, 17, 0, 2))
    posted = []
    with pytest.raises(TransferError, match="equal tensor parallel sizes, not 1 .* 2") as caught:
        for each in bench.backend.post(
            bench.chunk(pages=[1], to=[3], state=((1,), (2,))), "decode"
        ):
            posted.append(each)
    assert caught.value.reason is Reason.MISMATCH
    assert [each.handle.memory for each in posted] == ["VRAM"]
    bench.finish(posted)
    bench.check()


@pytest.mark.parametrize("pages", PAGES)
@pytest.mark.parametrize("has_state", [False, True])
def test_metadata_in_the_note(monkeypatch: pytest.MonkeyPatch, pages: str, has_state: bool) -> None:
    """Guards against a write into decode's metadata slot beside the note that has them, against
    another slot's metadata, and against more than one note for a room."""
    bench = Bench()
    read = bench.prefill.memory.at
    monkeypatch.setattr(backend, "read_memory", lambda *where: read(*where).tobytes())
    ours, theirs = PAGES[pages]
    state = ((4, 0), (1, 5)) if has_state else ((), ())
    handles = assert_moved(bench, pages=ours, to=theirs, state=state, in_note=True)
    assert {handle.memory for handle in handles} <= {"VRAM"}
    (note,) = map(parse, bench.agent.notes["decode"])
    assert (note.room, note.kind, note.writer) == (ROOM, "done", WRITER)
    assert list(note.metadata) == [bytes(buffer[3]) for _, buffer in bench.prefill.metadata]


def test_metadata_that_are_too_much_for_a_note(monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards against hidden states of some models in a message that is made for a few kilobytes."""
    monkeypatch.setattr(wire, "MOST_METADATA", 10)
    bench = Bench()
    made = bench.chunk(pages=[1], to=[3], in_note=True)
    posted = bench.post(made)
    assert [each.handle.memory for each in posted] == ["VRAM", "DRAM"]
    bench.finish(posted)
    bench.backend.complete(made)
    assert [parse(note).kind for note in bench.agent.notes["decode"]] == ["kv", "aux"]


def test_metadata_that_are_not_in_host_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards against reading an address of the GPU, which ends the process: SGLang puts them there
    for one kind of memory pool."""
    monkeypatch.setenv("SGLANG_MOONCAKE_CUSTOM_MEM_POOL", "INTRA_NODE_NVLINK")
    monkeypatch.setattr(backend, "read_memory", lambda *_: pytest.fail("read on the host"))
    bench = Bench()
    made = bench.chunk(pages=[1], to=[3], in_note=True)
    bench.finish(bench.post(made))
    bench.backend.complete(made)
    assert [parse(note).kind for note in bench.agent.notes["decode"]] == ["kv", "aux"]


def test_a_metadata_slot_that_cannot_be() -> None:
    """Guards against a copy from beyond the metadata buffers."""
    bench = Bench()
    with pytest.raises(TransferError, match="metadata slot 5 is not"):
        bench.backend.complete(bench.chunk(slots=(5, 1), in_note=True))
    assert bench.agent.notes["decode"] == [] and bench.users() == 0
