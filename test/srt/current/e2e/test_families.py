"""Families of models that fleets serve, on pairs of SGLang 0.5.23 with the group ``lead``.

Each row of ``families.RUNS`` is a test. An aggregated stock server gives the answers.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from current.e2e.support import LEAD, Talks, play, talks_of
from current.families import ARCHITECTURES, RUNS
from e2e.families import Run
from models.families import build

#: Decode leaves the first turns to prefill, so later ones begin with KV that was transferred.
TOKENS = {"SGLANG_DISAGGREGATION_DECODE_LOCAL_TOKENS": "128"}
RETRACTS = {"SGLANG_TEST_RETRACT": "1", "SGLANG_TEST_RETRACT_INTERVAL": "7"}


@pytest.fixture(scope="module")
def of_family(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Talks:
    """The talks with a model of this family."""
    folder = tmp_path_factory.mktemp(request.param)
    model = build(folder / "model", request.param)
    return talks_of(model, folder, ARCHITECTURES[request.param])


@pytest.mark.parametrize(
    ("of_family", "run"),
    [pytest.param(run.family, run, id=run.id) for run in RUNS],
    indirect=["of_family"],
)
def test_answers(of_family: Talks, tmp_path: Path, run: Run) -> None:
    """Guards against latents, or KV that chooses other experts, that are wrong behind a prefix from
    decode's tree, in a chunk that decode computes, and in the copy of a retracted request."""
    turns = play(
        of_family,
        tmp_path,
        LEAD | TOKENS,
        ranks=2 if "decode_tp2" in run.setup else 1,
        decode_env=RETRACTS if "retract" in run.parts else {},
    )
    talks = len(of_family.prompts[0])
    assert turns.get(("local", "always"), 0) >= 2 * talks, turns
    # The reasons of the first ones differ: prefill is asked what it can do meanwhile.
    assert sum(count for (where, _), count in turns.items() if where == "remote") >= talks, turns
