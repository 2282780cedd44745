"""Families of models that fleets serve, on pairs of SGLang 0.5.23 with the group ``lead``.

Each row of ``families.RUNS`` is a test. An aggregated stock server gives the answers.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest

from benchmark.harness import metrics
from current.e2e.support import LEAD, PAGE, Talks, play, talks_of, turns
from current.families import ARCHITECTURES, ARGUMENTS, PAGES, RUNS
from e2e.families import Run
from models.families import build

#: Too small for first turns, so that later turns begin with KV that was transferred.
TOKENS = {"SGLANG_DISAGGREGATION_DECODE_LOCAL_TOKENS": "128"}
RETRACTED = "sglang:num_retracted_requests_total"
RETRACTS = {"SGLANG_TEST_RETRACT": "1", "SGLANG_TEST_RETRACT_INTERVAL": "7"}


@pytest.fixture(scope="module")
def talks_of_family(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Talks]:
    """The talks with the model of a family, computed once a family."""

    @cache
    def ask(family: str) -> Talks:
        folder = tmp_path_factory.mktemp(family)
        model, page = build(folder / "model", family), PAGES.get(family, PAGE)
        arguments = ARGUMENTS.get(family, ())
        return talks_of(model, folder, ARCHITECTURES[family], page, arguments)

    return ask


@pytest.mark.parametrize("run", [pytest.param(run, id=run.id) for run in RUNS])
def test_answers(talks_of_family: Callable[[str], Talks], tmp_path: Path, run: Run) -> None:
    """Guards against latents, windows, indices, states or expert-routed KV that are wrong behind a
    prefix from decode's tree, in a chunk that decode computes, or in the copy of a retracted
    request; and (data parallel attention) against a rank that misses a step in which the other one
    computes a chunk, or whose chunk reaches experts with tokens of the other one."""
    talks, is_parallel = talks_of_family(run.family), "decode_dp" in run.setup
    page = play(
        talks,
        tmp_path,
        LEAD | TOKENS,
        ranks=2 if "decode_tp2" in run.setup or is_parallel else 1,
        attention_ranks=2 if is_parallel else 1,
        arguments=("--ep-size", "2") if "ep" in run.setup else (),
        decode_env=RETRACTS if "retract" in run.parts else {},
        backend=run.backend,
    )
    count, counts = len(talks.prompts[0]), turns(page)
    if is_parallel:  # some later turns reach the rank without their session
        ranks = metrics.by_labels(page, metrics.TURNS, "where", "dp_rank")
        assert ranks["local", "0"] and ranks["local", "1"], ranks
    else:
        assert counts.get(("local", "short"), 0) >= 2 * count, counts
    # First turns may be remote for different reasons.
    assert sum(counts[key] for key in counts if key[0] == "remote") >= count, counts
    assert any(metrics.by_labels(page, RETRACTED).values()) == ("retract" in run.parts)
