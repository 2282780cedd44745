"""Check of a stage's page counts against its allocations."""

from __future__ import annotations

from sglang.srt.mem_cache.buffer_only.stage import Direction, Stage


def check_books(stage: Stage) -> None:
    """Check that every page is free or lent once, and that the sums match the allocations."""
    numbers = [*stage.free, *(page for staging in stage.allocated for page in staging.pages)]
    assert sorted(numbers) == list(range(stage.pages)), "staging pages lost or allocated twice"
    for direction in Direction:
        lent = [staging for staging in stage.allocated if staging.direction is direction]
        assert stage.lent[direction] == sum(len(staging.pages) for staging in lent)
        assert stage.kept[direction] == sum(
            len(staging.pages) for staging in lent if staging.stranded
        )
