"""Notifications of a NIXL transfer: stock texts and those of the patch set, parsed."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from effort import tries
from sglang.srt.disaggregation.delta.nixl.backend import done, stock_notes
from sglang.srt.disaggregation.delta.nixl.manager import Notification, parse
from sglang.srt.disaggregation.delta.wire import MAX_METADATA

NUMBERS = st.integers(0, 2**64 - 1)


@pytest.mark.parametrize(
    ("raw", "note"),
    [
        (b"5_kv_0_0_0", Notification(5, "kv", writer=0)),
        (b"5_kv_12_1_3", Notification(5, "kv", chunk=12, is_last=True, writer=3)),
        (b"5_kv_2_1", Notification(5, "kv", chunk=2, is_last=True, writer=0)),
        (b"18446744073709551615_aux", Notification(2**64 - 1, "aux")),
        (b"5_aux_3", Notification(5, "aux", writer=3)),
        (b"5_state_2", Notification(5, "state", writer=2)),
        (b"5_state", Notification(5, "state", writer=0)),
    ],
)
def test_parse(raw: bytes, note: Notification) -> None:
    """Guards against a text of stock SGLang, in any of its forms, that is not recognized."""
    assert parse(raw) == note


@pytest.mark.parametrize(
    "raw",
    [
        b"",
        b"5",
        b"x_kv_0_0_0",
        b"5_kv",
        b"5_kv_0",
        b"5_kv_a_0_0",
        b"5_kv_0_2_0",
        b"5_kv_0_1_0_0",
        b"5_other",
        b"5_fail_x",
        b"5_state_x",
        b"5_state_0_0",
        b"5_aux_0_0",
        b"\xff\xfe",
        b"_aux",
        b"-1_aux",
        b"5_aux_-1",
        b"5_kv_-1_1_0",
        b"5_kv_0_1_-3",
        b"1" * 10_000 + b"_aux",
        b"5_kv_" + b"1" * 10_000 + b"_1_0",
        b"5_done_",
        b"5_done_0",
        b"5_done_0_",
        b"5_done_0_\xc1",
        b"5_done_0_\x91\xa1x",
        b"-5_done_0_\x90",
        b"5_done_-1_\x90",
        b"_done_0_\x90",
        b"5_done_0_\x90\x90",
        done(5, 0, [bytes(MAX_METADATA + 1000)]),
    ],
)
def test_garbage_is_one_kind_of_error(raw: bytes) -> None:
    """Guards against an unexpected exception on the scheduler's thread, and against negative chunks
    or writers, which would count."""
    with pytest.raises(ValueError):
        parse(raw)


@given(room=NUMBERS, writer=NUMBERS, parts=st.lists(st.binary(max_size=80), max_size=12))
def test_a_note_with_metadata(room: int, writer: int, parts: list[bytes]) -> None:
    """Guards against metadata that change in transit, whatever their bytes."""
    note = parse(done(room, writer, parts))
    assert note == Notification(room, "done", writer=writer, metadata=tuple(parts))


@pytest.mark.hazard("writers-confused")
@given(room=NUMBERS, has_state=st.booleans(), writer=NUMBERS)
def test_the_writer_takes_the_place_of_the_stage(room: int, has_state: bool, writer: int) -> None:
    """Stock SGLang names the pipeline stage, which several writers share. Guards against notes that
    name another writer, and against a note that a stock decode server reads differently because it
    expects the stage in the fifth part."""
    kv, *state, aux = stock_notes(room, writer, has_state)
    assert parse(kv) == Notification(room, "kv", 0, True, writer)
    assert kv.decode().split("_", 4) == [str(room), "kv", "0", "1", str(writer)]
    assert parse(aux) == Notification(room, "aux", writer=writer)
    assert [parse(note) for note in state] == [
        Notification(room, "state", writer=writer)
    ] * has_state


GOOD = [b"5_kv_0_0_0", b"7_kv_12_1_3", b"18446744073709551615_aux_4", b"9_state_2", b"5_aux"]
PIECES = [
    b"",
    b"_",
    b"-",
    b"+1",
    b" ",
    b"9" * 30,
    b"9" * 5000,
    b"kv",
    b"aux",
    b"\xff",
    b"\0",
    b"\n",
]
PIECES += [b"\n", "\N{ARABIC-INDIC DIGIT FIVE}".encode(), b"1e3", b"0x1", b"None", b"nan"]
CHANGES = st.tuples(
    st.integers(0, 30), st.integers(0, 3), st.sampled_from(PIECES) | st.binary(max_size=4)
)


@pytest.mark.fuzz
def test_broken_texts() -> None:
    """Parsing any bytes must either raise or return valid numbers: none negative, and a known
    kind."""
    seen: Counter[str] = Counter()

    @settings(max_examples=tries(300), deadline=None)
    @given(
        text=st.sampled_from([*GOOD, done(8, 1, [b"123", b""])]),
        changes=st.lists(CHANGES, min_size=1, max_size=3),
    )
    def check(text: bytes, changes: list[tuple[int, int, bytes]]) -> None:
        for at, length, piece in changes:
            text = text[:at] + piece + text[at + length :]
        try:
            note = parse(text)
        except ValueError:
            seen["refused"] += 1
            return
        seen["taken"] += 1
        assert min(note.room, note.chunk, note.writer or 0) >= 0
        assert note.kind in ("kv", "aux", "state", "done")
        assert note.writer is not None or note.kind == "aux"

    check()
    assert min(seen.values()) > tries(300) / 20, "too few refused or too few accepted texts"
