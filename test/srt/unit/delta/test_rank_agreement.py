"""The ranks' agreement: the worst state and the smallest number of all ranks, in one vector per
step."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch.distributed as dist

from sglang.srt.disaggregation.delta import rank_agreement
from sglang.srt.disaggregation.delta.decode.admission import PRIVATE, STOP, AdmissionVote
from sglang.srt.disaggregation.delta.decode.request import QueueState
from sglang.srt.disaggregation.delta.rank_agreement import AnyVote, Checksum, RanksDiverged, agree
from sglang.srt.mem_cache.buffer_only.transfer_vote import (
    BACKUP_SLOTS,
    FETCH_SLOTS,
    PENDING,
    QUERY_SLOTS,
    TransferVote,
)

#: Of differing states the worst counts.
FAILED, EXPIRED, FINE = QueueState
ADMISSION = AdmissionVote((FINE, FINE), (64,), 5, 7, 1000, -1000)


def both(
    mine: AnyVote, other: AnyVote, checksums: tuple[Checksum, Checksum] | None = None
) -> AnyVote:
    """Return the agreed vote on the first of two ranks."""
    first, second = checksums or (Checksum(), Checksum())
    vectors: list[list[int]] = []
    agree(other, second, lambda vector: vectors.append(vector) or vector)
    return agree(mine, first, lambda v: [min(a, b) for a, b in zip(v, vectors[0], strict=True)])


@pytest.mark.parametrize("vote", [ADMISSION, TransferVote(12, 3, 4, (1, PENDING), (7,))])
def test_one_rank_agrees_with_itself(monkeypatch: pytest.MonkeyPatch, vote: AnyVote) -> None:
    """Guards against a collective, or changed values, on a server with one rank."""
    monkeypatch.setattr(dist, "get_world_size", lambda group: 1)
    assert agree(vote, Checksum(), rank_agreement.over(None)) == vote


@pytest.mark.parametrize(
    ("mine", "other", "agreed"),
    [
        pytest.param(
            replace(ADMISSION, states=(FINE, FINE, FINE, EXPIRED), rows=5, slots=7),
            replace(ADMISSION, states=(FINE, FINE, EXPIRED, FAILED), rows=6, slots=2),
            replace(ADMISSION, states=(FINE, FINE, EXPIRED, FAILED), rows=5, slots=2),
            id="the worst state and the least room",
        ),
        pytest.param(
            replace(ADMISSION, offers=(PRIVATE, 0, 64, 2**24)),
            replace(ADMISSION, offers=(STOP, PRIVATE, 32, 2**24)),
            replace(ADMISSION, offers=(STOP, PRIVATE, 32, 2**24)),
            id="the smallest offer",
        ),
        pytest.param(
            TransferVote(20, 2, 1, (5, PENDING, 3), (8, 0)),
            TransferVote(18, 3, 0, (2, 6, 3), (PENDING, 4)),
            TransferVote(18, 2, 0, (2, PENDING, 3), (PENDING, 0)),
            id="pages and operations that all ranks have",
        ),
    ],
)
def test_the_smallest_value_counts(mine: AnyVote, other: AnyVote, agreed: AnyVote) -> None:
    """Guards against values that move to a neighbour's place, and against one rank that decides."""
    assert both(mine, other) == both(other, mine) == agreed


@pytest.mark.parametrize("free", [1000, 999, 1001])
def test_pools_that_differ_are_noticed(free: int) -> None:
    """Guards against a difference that only the rank with fewer free tokens could notice."""
    agreed = both(ADMISSION, replace(ADMISSION, free=free, minus_free=-free))
    assert (agreed.free, -agreed.minus_free) == (min(free, 1000), max(free, 1000))


@pytest.mark.hazard("ranks-part-in-collective")
@pytest.mark.parametrize(("backups", "fetches"), [(0, 0), (3, 1), (BACKUP_SLOTS, FETCH_SLOTS)])
def test_the_length_is_fixed(backups: int, fetches: int) -> None:
    """A rank with an empty queue would otherwise skip a collective, and the server would hang."""
    lengths = set()
    vote = TransferVote(0, 0, 0, (1,) * backups, (1,) * fetches, (1,) * fetches)
    agree(vote, Checksum(), lambda vector: lengths.add(len(vector)) or vector)
    assert lengths == {11 + BACKUP_SLOTS + QUERY_SLOTS + FETCH_SLOTS}
    with pytest.raises(ValueError, match="at most"):
        agree(TransferVote(0, 0, 0, (1,) * (BACKUP_SLOTS + 1)), Checksum(), list)


@pytest.mark.parametrize(
    ("mine", "other", "flag"),
    [
        (ADMISSION, ADMISSION, "--disaggregation-decode-enable-radix-cache"),
        (
            ADMISSION,
            replace(ADMISSION, states=(FINE,) * 3),
            "--disaggregation-decode-enable-radix-cache",
        ),
        (TransferVote(0, 0, 0), TransferVote(0, 0, 0), "--hicache-host-memory-mode buffer_only"),
    ],
    ids=["other work on one rank", "one more request on one rank", "other transfers on one rank"],
)
def test_ranks_that_differ_are_noticed(mine: AnyVote, other: AnyVote, flag: str) -> None:
    """Diverged ranks would admit, mark, free and publish different pages. Guards also against
    vectors of different lengths, which would hang the reduction itself."""
    checksums = Checksum(), Checksum()
    for checksum in checksums:
        checksum.note("backup", 3)
    assert both(mine, mine, checksums) == mine
    checksums[0].note("fetch", "r1", 2)
    checksums[1].note("fetch", "r1", 3)
    with pytest.raises(RanksDiverged, match=f"{flag}.* ranks of this server .* different"):
        both(mine, other, checksums)
