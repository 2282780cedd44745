"""Control messages: understood, of another kind, or refused; never guessed."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sglang.srt.disaggregation.delta import wire

ROOMS = st.integers(-(2**63), 2**64 - 1)
TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=60)
PORTS = st.integers(-1, 2**31)
MESSAGES = st.one_of(
    st.builds(wire.Withdraw, ROOMS, TEXT, TEXT, PORTS, TEXT),
    st.builds(wire.Stopped, ROOMS, st.integers(0, 512), TEXT, st.booleans()),
    st.builds(wire.Ping, TEXT, TEXT, TEXT, PORTS),
    st.builds(wire.Pong, TEXT, st.booleans()),
)


@given(message=MESSAGES)
def test_round_trip(message: wire.Message) -> None:
    """Guards against one kind that is read as another, and against fields that change places."""
    decoded = wire.decode_control(wire.encode_control(message))
    assert decoded == message and type(decoded) is type(message)


@given(frames=st.lists(st.binary(max_size=30).filter(lambda raw: raw != wire.CONTROL_MAGIC)))
def test_foreign_frames_are_none_of_ours(frames: list[bytes]) -> None:
    """Guards against SGLang's own messages, and empty ones, that never reach their reader."""
    assert wire.decode_control(frames) is None
    if frames:
        assert wire.decode_control([*frames, wire.CONTROL_MAGIC]) is None


def raw(**fields: Any) -> bytes:
    """A body as a peer of another make could send it."""
    return msgspec.msgpack.encode(fields)


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
        [b"\x91" * 5000],
        [b"\x81\xa4type" * 5000],
        [wire.encode_control(wire.Pong("a:1", True))[1][:-1]],
    ],
)
def test_malformed_is_one_kind_of_error(frames: list[bytes]) -> None:
    """Guards against bytes that raise what the reader of a message does not expect (wrong UTF-8,
    nesting without end), and against a wrong number of frames that is read all the same."""
    with pytest.raises(wire.ControlError):
        wire.decode_control([wire.CONTROL_MAGIC, *frames])


def test_later_fields_are_ignored() -> None:
    """Guards against a field that a later release adds and an older peer stumbles over."""
    body = raw(type="stopped", room=7, writer=1, reason="x", because=[1])
    assert wire.decode_control([wire.CONTROL_MAGIC, body]) == wire.Stopped(7, 1, "x")


@pytest.mark.parametrize("room", [2**64, -(2**63) - 1, 10**400])
def test_a_room_that_cannot_be_written(room: int) -> None:
    """A client chooses its ``bootstrap_room``, and any integer comes through. Guards against one
    beyond 64 bits that ends the scheduler of either side when the room ends early."""
    for message in (wire.Stopped(room, 0, ""), wire.Withdraw(room, "", "", 1, "")):
        with pytest.raises(wire.ControlError, match="cannot be sent"):
            wire.encode_control(message)
    with pytest.raises(wire.ControlError):
        wire.encode_control(wire.Stopped(7, 0, "\ud800"))
