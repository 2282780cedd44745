"""Two real NIXL agents in one process, from announcement to completion.

The program runs in an interpreter of its own, for NIXL may crash one at its exit where there is no
GPU driver; what it printed is judged.
"""

from __future__ import annotations

import pytest

from component.programs import passed, run


@pytest.fixture(scope="module")
def output() -> str:
    """What the program printed, all scenarios run once."""
    return run(__file__, "program_transfers.py")


def test_partial_delta(output: str) -> None:
    """Guards against KV at other places than the announced pages, against bytes counted that were
    not moved, and against rooms that end before their last chunk."""
    passed(output, "partial_delta")


@pytest.mark.hazard("full-hit-without-metadata", "full-hit-over-waiting-backend")
def test_full_prefix_hit(output: str) -> None:
    """Guards against a room without pages that never completes: its metadata arrives alone, and it
    is complete once."""
    passed(output, "full_hit")


def test_peer_without_a_frame(output: str) -> None:
    """Guards against an unpatched decode server that is not served any more."""
    passed(output, "stock_peer")


@pytest.mark.hazard("peer-ignores-prefix")
def test_page_counts_that_differ(output: str) -> None:
    """Guards against a list cut to fit: nothing is posted, and both sides name both numbers."""
    passed(output, "mismatch")


def test_frame_of_another_version(output: str) -> None:
    """Guards against a frame that ends the thread which reads every room's announcement, and
    against a decode server that learns of it by its timeout only."""
    passed(output, "unreadable_frame")


def test_abort_on_prefill(output: str) -> None:
    """Guards against a decode server that holds its pages until the timeout, and against pages
    posted for a room that was aborted."""
    passed(output, "abort_on_prefill")


@pytest.mark.hazard("poll-raises")
def test_post_that_raises(output: str) -> None:
    """Guards against one room's error ending the scheduler, and against a status that changes with
    every look at it."""
    passed(output, "post_raises")


@pytest.mark.hazard("late-notification", "room-number-reused")
def test_late_notification(output: str) -> None:
    """Guards against entries of rooms that were aborted and cleared, and against such a room's
    completion counting for the next one."""
    passed(output, "late_notification")


@pytest.mark.hazard("pages-written-after-release", "other-side-not-told")
def test_a_room_given_up_while_it_is_written(output: str) -> None:
    """Guards against pages of an aborted room that are given to others while prefill still writes
    to them, and against a prefill server that goes on sending what nobody wants."""
    passed(output, "withdrawn_while_written")


def test_a_room_given_up_when_all_was_sent(output: str) -> None:
    """Guards against pages held for their whole bound though nothing can be written any more."""
    passed(output, "withdrawn_when_all_was_sent")


def test_a_room_given_up_before_its_request_came(output: str) -> None:
    """Guards against a prefill request that waits for a decode server that does not want it."""
    passed(output, "withdrawn_before_the_request_came")


def test_a_room_given_up_and_refused(output: str) -> None:
    """Guards against a failure notice that overtakes a write: it comes after what was posted."""
    passed(output, "given_up_and_refused")


@pytest.mark.hazard("late-notification")
def test_room_number_still_in_use(output: str) -> None:
    """Guards against a new request whose pages get what was sent for the one before."""
    passed(output, "room_number_still_in_use")


def test_prefill_rank_is_a_new_one(output: str) -> None:
    """Guards against a decode server that waits for a prefill rank which does not know it, and
    never registers again."""
    passed(output, "prefill_rank_is_a_new_one")


@pytest.mark.hazard("dead-peer-leftovers")
def test_prefill_is_gone(output: str) -> None:
    """Guards against pages released because a prefill server is silent, which proves nothing, and
    against pages held when it is certainly gone."""
    passed(output, "prefill_is_gone")


@pytest.mark.hazard("source-given-away")
def test_transfer_that_never_settles(output: str) -> None:
    """Guards against a request that waits for ever for a decode server that hangs, against decode
    being told that all is quiet before it is, and against a write that lands later and completes
    the room, from pages that belong to another request."""
    passed(output, "transfer_that_never_settles")


def test_transfer_to_a_stock_peer_that_never_settles(output: str) -> None:
    """Guards against the same at a decode server that is told nothing of failures."""
    passed(output, "given_up_by_a_stock_peer")


@pytest.mark.hazard("full-hit-without-metadata")
def test_one_transfer_a_room(output: str) -> None:
    """Guards against a transfer of its own for the metadata of a decode rank that takes them in the
    note, and against one of an older version that does not get them."""
    passed(output, "one_transfer_a_room")


def test_metadata_of_other_sizes(output: str) -> None:
    """Guards against metadata written over the slots beside theirs, where versions differ."""
    passed(output, "metadata_of_other_sizes")


def test_decode_is_gone(output: str) -> None:
    """Guards against a decode server that dies and takes the prefill scheduler along: NIXL raises
    when it is asked for the state of a transfer to it."""
    passed(output, "decode_is_gone")


def test_a_room_announced_after_it_failed(output: str) -> None:
    """Guards against a decode server that waits for its timeout, and a table entry that stays,
    when prefill aborts a request first."""
    passed(output, "announced_after_the_failure")


def test_a_room_that_is_never_announced(output: str) -> None:
    """Guards against a prefill request that waits for ever for a decode server that is gone."""
    passed(output, "never_announced")


def test_no_prepared_lists(output: str) -> None:
    """Guards against a NIXL that prepares no lists, or knows no strided ones, failing every room:
    ranges are built, with the same result."""
    passed(output, "no_prepared_lists")


@pytest.mark.hazard("source-given-away")
def test_source_is_kept_until_it_was_read(output: str) -> None:
    """Guards against pages and a metadata slot given to the next request while a worker still reads
    them, and against a queued chunk that changes with the scheduler's own table."""
    passed(output, "source_is_kept_until_it_was_read")


@pytest.mark.hazard("drained-per-request")
def test_many_rooms_drain_once(output: str) -> None:
    """Guards against one call of the agent for each of a decode server's rooms in every step."""
    passed(output, "many_rooms_drain_once")


def test_decode_rank_was_forgotten(output: str) -> None:
    """Guards against a room sent to a decode rank that is gone, and against one that registers
    again and is not served."""
    passed(output, "decode_rank_was_forgotten")
