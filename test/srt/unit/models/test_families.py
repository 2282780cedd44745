"""The random models of each family: transformers reads them, and every token matters."""

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from models.families import FAMILIES, LAYERS, build

PROMPT_TOKENS = 300
NEW_TOKENS = 16
CHANGED = (0, 5, 150, 290)
"""Positions of a changed token, one in each of the other prompts."""
LEFT_OUT = (".indexer.", f".layers.{LAYERS}.")
"""Weights that transformers omits: the index of DSA, and heads that draft."""


@pytest.fixture(scope="module", params=FAMILIES)
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder: Path = build(tmp_path_factory.mktemp("families") / request.param, request.param)
    return AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, output_loading_info=True
    )


def test_names_are_those_of_the_hub(model: Any) -> None:
    """Guards against a weight that a server would not find: it would keep random values there,
    different ones on each server, or none."""
    _, report = model
    unexpected = [
        name for name in report.pop("unexpected_keys") if not any(x in name for x in LEFT_OUT)
    ]
    assert unexpected == [] and not any(report.values()), report


def test_every_token_matters(model: Any) -> None:
    """Guards against a model on which tests pass with wrong KV: a window, a decay of a state or a
    norm that suppresses early tokens."""
    generator = torch.Generator().manual_seed(1)
    prompts = torch.randint(16, 688, (1, PROMPT_TOKENS), generator=generator).repeat(5, 1)
    for row, position in enumerate(CHANGED, start=1):
        prompts[row, position] = 16 + (int(prompts[0, position]) - 15) % 672
    ids = model[0].generate(prompts, max_new_tokens=NEW_TOKENS, do_sample=False)
    answer, *others = ids[:, PROMPT_TOKENS:].tolist()
    assert len(set(answer)) > NEW_TOKENS // 2
    assert answer not in others
