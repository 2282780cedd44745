"""Delta frames and control messages: accepted, of another kind, or refused; never guessed."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sglang.srt.disaggregation.delta import peer_messages, wire

STOCK = [b"5", b"10.0.0.1", b"4711", b"agent", b"\x03\0\0\0", b"9", b"1", b""]
MAGIC = b"sglang-delta:"
FRAMES = st.builds(
    wire.DeltaFrame,
    decode_prefix_len=st.integers(0, 2**31),
    num_pages=st.integers(0, 2**20),
    is_dummy=st.booleans(),
    prompt_tokens=st.integers(0, 2**31),
)
ROOMS = st.integers(-(2**63), 2**64 - 1)
TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=60)
PORTS = st.integers(-1, 2**31)
MESSAGES = st.one_of(
    st.builds(wire.Withdraw, ROOMS, TEXT, TEXT, PORTS, TEXT),
    st.builds(wire.Stopped, ROOMS, st.integers(0, 512), TEXT, st.booleans()),
    st.builds(wire.Ping, TEXT, TEXT, TEXT, PORTS),
    st.builds(wire.Pong, TEXT, st.booleans()),
    st.builds(wire.ComputedByDecode, ROOMS),
)
FOREIGN = st.binary(max_size=60).filter(
    lambda raw: not raw.startswith(MAGIC) and raw != wire.CONTROL_MAGIC
)
NESTED = b"\x91" * 5000
#: The required fields of a frame.
GOOD: dict[str, Any] = {"decode_prefix_len": 32, "num_pages": 1, "is_dummy": False}


def raw(**fields: Any) -> bytes:
    """Return a map as another version of this code, or another implementation, could send it."""
    return msgspec.msgpack.encode(fields)


@given(frame=FRAMES, message=MESSAGES, foreign=st.lists(FOREIGN, max_size=9))
def test_round_trip(frame: wire.DeltaFrame, message: wire.Message, foreign: list[bytes]) -> None:
    """Guards against one kind of message that is read as another, against fields that change
    places, and against SGLang's own messages (page lists and agent metadata are arbitrary bytes)
    that are read as the patch set's, or never reach their reader."""
    assert peer_messages.find_frame([*foreign, wire.encode_frame(frame)]) == frame
    decoded = peer_messages.decode_control(wire.encode_control(message))
    assert decoded == message and type(decoded) is type(message)
    for frames in (foreign, STOCK, [*STOCK, wire.CONTROL_MAGIC]):
        assert peer_messages.find_frame(frames) is peer_messages.decode_control(frames) is None


def test_fields_of_another_release() -> None:
    """Guards against a later release's additional field that an older peer cannot read, and against
    an earlier release's frame, which lacks the fields since, that this one cannot read."""
    fields = {"version": wire.VERSION, "num_writers": 2, "window": [1, 2], **GOOD}
    frame = peer_messages.find_frame([*STOCK, MAGIC + raw(**fields)])
    assert frame == wire.DeltaFrame(decode_prefix_len=32, num_pages=1, is_dummy=False)
    body = raw(type="stopped", room=7, writer=1, reason="x", because=[1])
    assert peer_messages.decode_control([wire.CONTROL_MAGIC, body]) == wire.Stopped(7, 1, "x")


THEIRS = wire.VERSION + 1
MALFORMED = "malformed"
BEHIND = f"protocol {THEIRS}, this prefill server {wire.VERSION}"


@pytest.mark.parametrize(
    ("frame", "complaint"),
    [
        pytest.param(b"", MALFORMED, id="empty"),
        pytest.param(b"\xc1", MALFORMED, id="no msgpack"),
        pytest.param(b"\x93\x01\x02\x03", MALFORMED, id="no map"),
        pytest.param(NESTED, MALFORMED, id="nested without end"),
        pytest.param(raw(**GOOD)[:-3], MALFORMED, id="cut off"),
        pytest.param(raw(num_pages=1, is_dummy=False), MALFORMED, id="field missing"),
        pytest.param(raw(**GOOD | {"decode_prefix_len": "x"}), MALFORMED, id="wrong type"),
        pytest.param(raw(**GOOD | {"is_dummy": None}), MALFORMED, id="null"),
        pytest.param(raw(**GOOD | {"prompt_tokens": -1}), MALFORMED, id="negative"),
        # Another version may rename and retype all fields; the error says which side is behind.
        pytest.param(raw(version=THEIRS, **GOOD), BEHIND, id="another version"),
        pytest.param(raw(version=THEIRS, prefix_pages=[2]), BEHIND, id="another version's fields"),
        pytest.param(raw(version=THEIRS, num_pages="1"), BEHIND, id="another version's types"),
    ],
)
def test_a_frame_that_cannot_be_read(frame: bytes, complaint: str) -> None:
    """Guards against a damaged announcement that counts as "no prefix": the whole prompt would be
    written into a list of delta pages; and against a changed meaning that is read as the old
    one."""
    with pytest.raises(peer_messages.DeltaFrameError, match=complaint):
        peer_messages.find_frame([*STOCK, MAGIC + frame])


@pytest.mark.parametrize(
    "frames",
    [
        [],
        [raw(type="pong", to="a:1", knows_peer=True), b""],
        [b""],
        [b"\xc1"],
        [raw(type="pong")],
        [raw(type="pong", to="a:1", knows_peer=1)],
        [raw(type="pong", to=3, knows_peer=True)],
        [raw(type="stopped", room="7", writer=0, reason="")],
        [raw(type="stopped", room=7.5, writer=0, reason="")],
        [raw(type="stopped", room=None, writer=0, reason="")],
        [raw(type="shutdown", room=7)],
        [raw(room=7, writer=0, reason="")],
        [b"\xa1\xff"],
        [b"\x81\xa4type\xa4p\xffng"],
        [NESTED],
        [b"\x81\xa4type" * 5000],
        [wire.encode_control(wire.Pong("a:1", True))[1][:-1]],
    ],
)
def test_malformed_is_one_kind_of_error(frames: list[bytes]) -> None:
    """Guards against bytes that raise an exception which the reader does not expect (wrong UTF-8,
    endless nesting), and against a wrong number of frames that is read nevertheless."""
    with pytest.raises(wire.ControlError):
        peer_messages.decode_control([wire.CONTROL_MAGIC, *frames])


@pytest.mark.parametrize("room", [2**64, -(2**63) - 1, 10**400])
def test_rooms_and_texts_that_cannot_be_written(room: int) -> None:
    """A client chooses its ``bootstrap_room``, and any integer is accepted. Guards against a number
    beyond 64 bits that ends the scheduler of either side when the room ends early: the error must
    be of a kind that every sender of messages expects."""
    for message in (
        wire.Stopped(room, 0, ""), wire.Withdraw(room, "", "", 1, ""), wire.Stopped(7, 0, "\ud800")
    ):  # fmt: skip
        with pytest.raises(wire.ControlError) as error:
            wire.encode_control(message)
        assert isinstance(error.value, ValueError)
