"""The delta frame: understood, absent, or refused with a reason; never guessed."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sglang.srt.disaggregation.delta import wire

STOCK = [b"5", b"10.0.0.1", b"4711", b"agent", b"\x03\0\0\0", b"9", b"1", b""]
FRAMES = st.builds(
    wire.DeltaFrame,
    decode_prefix_len=st.integers(0, 2**31),
    num_pages=st.integers(0, 2**20),
    is_dummy=st.booleans(),
    num_writers=st.integers(1, 64),
)
MAGIC = b"sglang-delta:"


def raw(**fields: object) -> bytes:
    """A frame as another version of this code could send it."""
    return MAGIC + msgspec.msgpack.encode(fields)


@given(frame=FRAMES, before=st.lists(st.binary(max_size=40), max_size=9))
def test_round_trip_behind_arbitrary_frames(frame: wire.DeltaFrame, before: list[bytes]) -> None:
    """Guards against page lists and agent metadata, which are arbitrary bytes, being parsed."""
    assert wire.find_frame([*before, wire.encode_frame(frame)]) == frame


FOREIGN = st.binary(max_size=60).filter(lambda content: not content.startswith(MAGIC))


@given(frames=st.lists(FOREIGN, max_size=12))
def test_foreign_bytes_are_no_frame(frames: list[bytes]) -> None:
    """Guards against a stock peer's message that is taken for ours, or that raises."""
    assert wire.find_frame(frames) is None


def test_stock_message_has_no_frame() -> None:
    """Guards against an unpatched decode server being refused."""
    assert wire.find_frame(STOCK) is None
    assert wire.find_frame([]) is None


def test_fields_of_a_later_release_are_ignored() -> None:
    """Guards against a field added within one version breaking older peers."""
    frame = wire.find_frame(
        [
            *STOCK,
            raw(
                version=wire.VERSION,
                decode_prefix_len=32,
                num_pages=1,
                is_dummy=False,
                window=[1, 2],
            ),
        ]
    )
    assert frame is not None and (frame.decode_prefix_len, frame.num_writers) == (32, 1)


@pytest.mark.parametrize(
    "fields",
    [
        {"decode_prefix_len": 32, "num_pages": 1, "is_dummy": False},
        {"prefix_pages": [2]},  # another version may name and type everything anew
        {"decode_prefix_len": "32", "num_pages": 1, "is_dummy": False},
    ],
    ids=["same fields", "other fields", "other types"],
)
def test_another_version_is_refused_by_both_numbers(fields: dict[str, object]) -> None:
    """Guards against a changed meaning that is read as the old one, and against an error that does
    not say which side is behind."""
    theirs = wire.VERSION + 1
    with pytest.raises(wire.DeltaFrameError) as error:
        wire.find_frame([*STOCK, raw(version=theirs, **fields)])
    assert f"protocol {theirs}" in str(error.value)
    assert f"server {wire.VERSION}" in str(error.value)


@pytest.mark.parametrize(
    "frame",
    [
        MAGIC,
        MAGIC + b"\xc1",
        MAGIC + b"\x93\x01\x02\x03",
        raw(version=wire.VERSION, num_pages=1, is_dummy=False),
        raw(version=wire.VERSION, decode_prefix_len="x", num_pages=1, is_dummy=False),
        raw(decode_prefix_len=1, num_pages=1, is_dummy=None),
        wire.encode_frame(wire.DeltaFrame(decode_prefix_len=1, num_pages=1, is_dummy=False))[:-3],
    ],
    ids=["empty", "no msgpack", "no map", "field missing", "wrong type", "null", "cut off"],
)
def test_malformed_frame_is_an_error_of_its_room(frame: bytes) -> None:
    """Guards against a damaged announcement that counts as "no prefix": the whole prompt would be
    written into a list of delta pages."""
    with pytest.raises(wire.DeltaFrameError, match="malformed"):
        wire.find_frame([*STOCK, frame])
