"""The random model: every token of a long context matters, and rounding noise does not."""

import random
import statistics
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import DynamicCache, Qwen3ForCausalLM

from models.random_qwen3 import build

PROMPT_TOKENS = 1000
NEW_TOKENS = 48
MAX_UNCHANGED_TOKENS = 16
"""A changed context must show within this number of new tokens."""
POSITIONS = (0, 1, 2, 3, 5, 8, 13, 21, 34, 55, 89, 144, 233, 377, 500, 610, 700, 800, 900, 990)
"""Positions of a changed token, one per trial."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build(tmp_path_factory.mktemp("random_qwen3"))


@pytest.fixture(scope="module")
def model(folder: Path) -> Any:
    return Qwen3ForCausalLM.from_pretrained(folder, dtype=torch.float32)


@pytest.fixture(scope="module")
def prompt(model: Any) -> torch.Tensor:
    """Ids [1, PROMPT_TOKENS]."""
    generator = torch.Generator().manual_seed(1)
    return torch.randint(3, model.config.vocab_size, (1, PROMPT_TOKENS), generator=generator)


@pytest.fixture(scope="module")
def continuations(model: Any, prompt: torch.Tensor) -> torch.Tensor:
    """Greedy ids [1 + trials, NEW_TOKENS] of the prompt and of each changed prompt."""
    rng = random.Random(0)
    rows = prompt.repeat(1 + len(POSITIONS), 1)
    for row, position in enumerate(POSITIONS, start=1):
        old = int(prompt[0, position])
        new = [i for i in range(3, model.config.vocab_size) if i != old]
        rows[row, position] = rng.choice(new)
    return greedy(model, rows)


def greedy(model: Any, ids: torch.Tensor, chunk: int = 0) -> torch.Tensor:
    """Return the greedy continuation [rows, NEW_TOKENS]; the prompt is run in chunks of ``chunk``
    tokens."""
    cache = DynamicCache(config=model.config)
    written: list[torch.Tensor] = []
    with torch.no_grad():
        for part in ids.split(chunk or ids.shape[1], dim=1):
            logits = model(part, past_key_values=cache, logits_to_keep=1).logits
        while len(written) < NEW_TOKENS:
            written.append(logits[:, -1].argmax(-1, keepdim=True))
            logits = model(written[-1], past_key_values=cache).logits
    return torch.cat(written, dim=1)


def test_every_token_matters(continuations: torch.Tensor) -> None:
    """Guards against a model on which tests pass with wrong KV: one changed token anywhere in a
    prompt of 1,000 must lead to another text."""
    same = (
        continuations[1:, :MAX_UNCHANGED_TOKENS] == continuations[0, :MAX_UNCHANGED_TOKENS]
    ).all(dim=1)
    assert [POSITIONS[i] for i in same.nonzero().flatten().tolist()] == []


def test_output_is_no_cycle_and_does_not_stop(model: Any, continuations: torch.Tensor) -> None:
    """Guards against output that falls into one token or a short cycle, which would hide errors
    after the first few tokens, and against early stops, since tests rely on the number of tokens
    that they request."""
    ends = {model.config.eos_token_id, model.config.pad_token_id}
    for row in continuations.tolist():
        assert len(set(row)) > NEW_TOKENS // 2 and not ends & set(row)
        tail = row[-24:]
        assert all(tail[period:] != tail[:-period] for period in range(1, 13))


def test_summation_order_does_not_matter(
    model: Any, prompt: torch.Tensor, continuations: torch.Tensor
) -> None:
    """Guards against ties that rounding decides: alone or in a batch, whole or in chunks, the text
    must be the same, as in a server with any batching."""
    assert greedy(model, prompt).tolist() == continuations[:1].tolist()
    assert greedy(model, prompt, chunk=272).tolist() == continuations[:1].tolist()


def test_short_prompts_lead_apart(model: Any) -> None:
    """Guards against scales that fit long contexts only: most tests send short prompts."""
    prompts = torch.tensor([[10 + i, 50, 60, 70, 80, 90, 100, 110] for i in range(8)])
    rows = greedy(model, prompts).tolist()
    assert len({tuple(row) for row in rows}) == len(rows)
    assert statistics.median(len(set(row)) for row in rows) > NEW_TOKENS // 2
