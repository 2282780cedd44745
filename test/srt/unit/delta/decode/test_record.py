"""The stages of a request on decode: the table is the picture in docs/design.md."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from sglang.srt.disaggregation.delta.decode.record import NEXT, Record, Stage

PAGE = Path(__file__).parents[5] / "docs/design.md"


def test_every_step_is_drawn() -> None:
    """Guards against a step that a reader of the picture does not know, and against one that does
    not exist."""
    pictures = re.findall(r"```mermaid\n(.*?)```", PAGE.read_text(), re.DOTALL)
    (picture,) = [each for each in pictures if "handshake -->" in each]
    drawn = set(re.findall(r"^    (\w+) --> (\w+):", picture, re.MULTILINE))
    steps = {(before, after) for before, stages in NEXT.items() for after in stages}
    assert drawn == {(before.name.lower(), after.name.lower()) for before, after in steps}


@pytest.mark.parametrize("stage", Stage)
def test_no_other_step_is_taken(stage: Stage) -> None:
    """Guards against a request that ends twice, or runs although its KV never arrived."""
    for after in Stage:
        record = Record(stage)
        if after in NEXT[stage]:
            record.enter(after)
            assert record.stage is after
        else:
            with pytest.raises(AssertionError, match=str(after)):
                record.enter(after)
