"""What decode servers send to a NIXL prefill rank: registrations and rooms' announcements."""

from __future__ import annotations

from typing import Any

from sglang.srt.disaggregation.delta.reader import (
    BadMessage,
    check_announcement,
    check_registration,
)

_ANNOUNCEMENT_FRAMES = 8
_REGISTRATION_FRAMES = 12


class NixlAnnouncements:
    """Feeds one NIXL manager with SGLang's own kinds of messages, from the reader thread."""

    def __init__(self, manager: Any) -> None:
        self._manager = manager

    def take(self, frames: list[bytes]) -> None:
        """Take one message.

        Raises:
            BadMessage: it cannot be served; any other exception: it cannot even be parsed.
        """
        from sglang.srt.disaggregation.nixl import conn

        if not frames or frames[0] != conn.GUARD:
            raise BadMessage("it does not start like a NIXL message of SGLang's")
        message = frames[1:]
        if len(message) < _ANNOUNCEMENT_FRAMES:
            raise BadMessage(f"{len(message)} frames, at least {_ANNOUNCEMENT_FRAMES} wanted")
        if message[0] == b"None":
            if len(message) < _REGISTRATION_FRAMES:
                raise BadMessage(
                    f"a registration of {len(message)} frames, {_REGISTRATION_FRAMES} wanted"
                )
            self._register(conn.KVArgsRegisterInfo.from_zmq(message))
        else:
            self._announce(conn.TransferInfo.from_zmq(message))

    def _register(self, info: Any) -> None:
        check_registration(
            self._manager,
            kv_buffers=len(info.dst_kv_ptrs),
            state_buffers=len(info.dst_state_data_ptrs),
            aux_buffers=len(info.dst_aux_ptrs),
            tp_size=info.decode_tp_size,
            tp_rank=info.decode_tp_rank,
            item_len=info.dst_kv_item_len,
        )
        self._manager.peers.add(info)

    def _announce(self, info: Any) -> None:
        """Record one decode rank's announcement; the last one of a room makes it ready."""
        manager = self._manager
        check_announcement(info)
        if info.agent_name not in manager.decode_kv_args_table:
            manager.rooms.refuse_stranger(info)
            raise BadMessage(f"room {info.room}: peer {info.agent_name!r} never registered")
        if info.later_prefix_len and not len(info.dst_kv_indices):
            # A full hit looks the same there. Of latent KV the first rank of a group sends all.
            theirs = manager.decode_kv_args_table[info.agent_name].decode_tp_size
            group = max(manager.attn_tp_size // theirs, 1)
            info.is_left_out = manager.is_mla_backend and manager.attn_tp_rank % group != 0
        ranks = manager.transfer_infos.setdefault(info.room, {})
        ranks[info.agent_name] = info
        if manager.rooms.announce(info.room, info.agent_name, info):
            manager.take_announcement(info.room)
