"""Two real Mooncake engines in one process, from announcement to completion.

The program runs in an interpreter of its own, whose engines end with it; what it printed is judged.
After every scenario, no per-room table of either side may hold an entry.
"""

from __future__ import annotations

import pytest

from component.programs import passed, run

pytest.importorskip("mooncake.engine", reason="needs Mooncake's transfer engine")


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
    """Guards against a room without pages that never completes: its metadata arrive alone, and it
    is complete for good."""
    passed(output, "full_hit")


def test_peer_without_a_frame(output: str) -> None:
    """Guards against an unpatched decode server that is not served any more, or is not told that
    its transfer failed."""
    passed(output, "stock_peer", "stock_peer_of_a_failed_transfer")


def test_rank_that_sends_nothing(output: str) -> None:
    """Guards against writes from a dummy rank, against its request that never ends, and against
    its word on a withdrawal, which counted as that of the rank that writes."""
    passed(output, "dummy")


def test_ranks_of_another_size(output: str) -> None:
    """Guards against another head than the decode rank holds, against bytes outside its half, and
    against bytes counted that went to nobody."""
    passed(output, "heads_of_another_size")


@pytest.mark.hazard("peer-ignores-prefix")
def test_page_counts_that_differ(output: str) -> None:
    """Guards against a list cut to fit: nothing is sent, and both sides name both numbers."""
    passed(output, "mismatch", "chunk_of_another_length")


def test_frame_of_another_version(output: str) -> None:
    """Guards against a frame that ends the thread which reads every room's announcement, and
    against a decode server that learns of it by its timeout only."""
    passed(output, "unreadable_frame")


def test_abort_on_prefill(output: str) -> None:
    """Guards against a decode server that holds its pages until the timeout, against pages sent for
    a room that was aborted, and against pages freed or given back while one is being written."""
    passed(output, "abort_on_prefill", "abort_while_written")


def test_worker_that_raises(output: str) -> None:
    """Guards against one room's error ending the thread that sends for all, and against a status
    that changes with every look at it."""
    passed(output, "worker_raises")


def test_engine_that_refuses(output: str) -> None:
    """Guards against pages given to others while writes of a failed batch may still arrive, against
    clients that wait as long as the pages, and against a decode rank that stays shut out."""
    passed(output, "engine_refuses")


@pytest.mark.hazard("pages-written-after-release")
def test_withdrawn_by_decode(output: str) -> None:
    """Guards against pages of a room that decode gave up, at any stage, that are given to others
    while prefill may write to them, or that are held although it never will again."""
    passed(
        output,
        "withdrawn_before_the_request_came",
        "withdrawn_before_it_is_written",
        "withdrawn_while_written",
        "withdrawn_when_all_was_sent",
    )


@pytest.mark.hazard("slow-peer")
def test_a_chunk_that_is_never_over(output: str) -> None:
    """Guards against a call of the engine that does not return holding its client, its decode
    server and what waits behind it until their own, longer deadlines; against its pages being
    given away while it reads and writes them; and against a failure that is not counted."""
    passed(output, "chunk_that_is_never_over")


def test_given_up_and_completed(output: str) -> None:
    """Guards against pages held for the whole bound although a stock prefill, which takes no
    withdrawal, said that everything has arrived."""
    passed(output, "completion_of_a_room_that_is_watched")


def test_announced_before_the_request_came(output: str) -> None:
    """Guards against a request that waits for an announcement that is already here, and against
    entries of rooms whose request never comes."""
    passed(output, "announced_before_the_request_came")


def test_late_words(output: str) -> None:
    """Guards against entries of rooms that were cleared, against metadata written for one of them,
    and against its completion counting for the next room."""
    passed(output, "late_words")


def test_metadata_over_tcp(output: str) -> None:
    """Guards against metadata that stock sends beside the engine and that no longer arrive."""
    passed(output, "metadata_over_tcp")


@pytest.mark.hazard("room-number-reused")
def test_room_number_still_in_use(output: str) -> None:
    """Guards against a new request whose room number another one's writes still go to."""
    passed(output, "room_number_still_in_use")


def test_decode_rank_that_went_silent(output: str) -> None:
    """Guards against rooms and buffers of a dead decode server that are kept for ever."""
    passed(output, "decode_rank_that_went_silent")


def test_a_room_announced_after_it_failed(output: str) -> None:
    """Guards against a decode server that waits for its timeout, and a table entry that stays,
    when prefill aborts a request first."""
    passed(output, "announced_after_the_failure")


def test_deadlines(output: str) -> None:
    """Guards against a request that waits for ever for the other side, and against an error that
    does not name the variable that sets how long."""
    passed(output, "never_announced", "never_delivered")


def test_failure_of_another_rank(output: str) -> None:
    """Guards against a rank that goes on writing for a room that failed on its neighbour."""
    passed(output, "failed_on_another_rank")
