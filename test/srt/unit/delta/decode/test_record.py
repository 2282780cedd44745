"""The stages of a request on decode: the table equals the picture in docs/design.md."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from sglang.srt.disaggregation.delta.decode.request import NEXT, Record, Stage

PAGE = Path(__file__).parents[5] / "docs/design.md"


def test_every_step_is_drawn() -> None:
    """Guards against a step that is missing in the picture, and against a drawn step that does not
    exist."""
    pictures = re.findall(r"```mermaid\n(.*?)```", PAGE.read_text(), re.DOTALL)
    (picture,) = [each for each in pictures if "handshake -->" in each]
    drawn = set(re.findall(r"^    (\w+) --> (\w+):", picture, re.MULTILINE))
    steps = {(before, after) for before, stages in NEXT.items() for after in stages}
    assert drawn == {(before.name.lower(), after.name.lower()) for before, after in steps}


@pytest.mark.parametrize("stage", Stage)
def test_another_step_is_logged(stage: Stage, caplog: pytest.LogCaptureFixture) -> None:
    """Guards against a request that silently ends twice, or runs although its KV never arrived; and
    against a scheduler that ends because of it."""
    for after in Stage:
        caplog.clear()
        record = Record(stage)
        record.enter(after)
        assert record.stage is after
        assert (after in NEXT[stage]) is (not caplog.records)
