"""The books of a stage, against what is allocated."""

from __future__ import annotations

from sglang.srt.mem_cache.buffer_only.staging import Direction, StagingPool


def check_books(stage: StagingPool) -> None:
    """Every page is free or lent once, and the sums are those of what is lent."""
    numbers = [*stage.free, *(page for one in stage.allocated for page in one.pages)]
    assert sorted(numbers) == list(range(stage.pages)), "staging pages lost or allocated twice"
    for direction in Direction:
        mine = [one for one in stage.allocated if one.direction is direction]
        assert stage.lent[direction] == sum(len(one.pages) for one in mine)
        assert stage.kept[direction] == sum(len(one.pages) for one in mine if one.stranded)
