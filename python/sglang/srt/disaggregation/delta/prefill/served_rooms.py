"""Tells the bootstrap server which data-parallel rank serves a room, for decode to ask there.

That is where ranks are chosen by load (``--load-balance-method``), and not by the room's number, as
SGLang does it for prefill servers by default. SGLang tells it in the scheduler's thread, which
stands still for up to 5 s where the address that the client has named does not answer; each of the
tensor-parallel ranks does; and without data-parallel attention all say that they are rank 0.
"""

from __future__ import annotations

import logging
from concurrent.futures import Future
from functools import partial
from typing import TYPE_CHECKING

import requests

from sglang.srt.disaggregation.delta.address_pool import AddressPool

if TYPE_CHECKING:
    from sglang.srt.disaggregation.delta.rank import RankView
    from sglang.srt.server_args import ServerArgs

logger = logging.getLogger(__name__)

#: SGLang's.
_TIMEOUT_S = 5.0


class ServedRooms:
    """One for each prefill rank."""

    def __init__(self, rank: RankView, args: ServerArgs) -> None:
        self._rank = rank
        self._args = args
        self.pool = AddressPool("pd-served-rooms")

    def tell(self, address: str, room: int) -> None:
        """This rank serves ``room``: have the bootstrap server at ``address`` (host:port) know it.
        Never waits. A rank that does not speak for its data-parallel group says nothing."""
        if self._rank.writer_id == 0:
            told = self.pool.submit(address, self._tell, address, room)
            told.add_done_callback(partial(self._log, address, room))

    def why_not_found(self, room: int) -> str:
        """What may be why nobody announces ``room`` here, as the end of a sentence; empty where a
        decode server finds this rank by itself."""
        args, ours = self._args, self._rank.dp_rank
        if args.dp_size == 1 or args.load_balance_method != "follow_bootstrap_room":
            return ""
        expected = room % args.dp_size
        if expected == ours:
            return ""
        return (
            f"; this is data-parallel rank {ours}, and without disagg_prefill_dp_rank decode "
            f"looks for the room on rank {expected}, which follows from its number: check that the "
            "router sends it"
        )

    def _tell(self, address: str, room: int) -> None:
        served = {"bootstrap_room": room, "dp_rank": self._rank.dp_rank}
        url = f"http://{address}/register_dp_rank"
        requests.post(url, json=served, timeout=_TIMEOUT_S).raise_for_status()

    def _log(self, address: str, room: int, told: Future[None]) -> None:
        error = told.exception()
        if error is not None:  # the address is what the client says
            logger.error(
                "could not notify bootstrap server %s that data-parallel rank %d serves room %d "
                "(%s): the decode server of this request waits for it until its deadline",
                address,
                self._rank.dp_rank,
                room,
                error,
            )
