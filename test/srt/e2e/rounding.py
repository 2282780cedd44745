"""Finds seeds for ``test_families.py`` whose answers do not depend on rounding.

    export PYTHONPATH=.:test/srt:test/srt/standin SGLANG_PATCHSET=0
    python -m e2e.rounding FAMILY SEED... [-- ARGUMENTS OF A SERVER]

Servers add the same numbers in different orders: by chunks, by batches, by ranks. If the last bit
decides which expert, which token of an index or which value of fp8 is chosen, their answers differ,
and neither is wrong. This script changes weights by about that amount, ``TRIALS`` times.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

import torch

from e2e.families import NEW_TOKENS
from e2e.test_families import TURNS, conversation
from models.families import build
from models.in_process import InProcess

TRIALS = 8
ROUNDING = 2e-7
"""Relative change of a weight. A float32 rounds by 6e-8, and a sum rounds often."""


def main() -> None:
    arguments, _, more = " ".join(sys.argv[1:]).partition(" -- ")
    family, *seeds = arguments.split()
    folder = build(Path(tempfile.mkdtemp()), family)
    new_tokens = NEW_TOKENS.get(family, 10)
    model = InProcess(folder, *more.split())
    weights = [(weight, weight.data.clone()) for weight in model.runner.model.parameters()]
    for seed in map(int, seeds):
        prompts, _, more_tokens = conversation(folder, seed)
        asked = []
        for _ in range(TURNS):
            answers = [model.answer(prompt, new_tokens)[0] for prompt in prompts]
            asked += zip(prompts, answers, strict=True)
            prompts = [[*text, *answer, *more_tokens()] for text, answer in asked[-len(prompts) :]]
        changed = 0
        for trial in range(TRIALS):
            generator = torch.Generator().manual_seed(trial)
            for weight, exact in weights:
                noise = torch.randn(exact.shape, generator=generator) * ROUNDING
                weight.data.copy_(exact * (1 + noise.to(exact.dtype)))
            changed += sum(model.answer(text, new_tokens)[0] != answer for text, answer in asked)
        for weight, exact in weights:
            weight.data.copy_(exact)
        print(f"seed {seed}: {changed} of {TRIALS * len(asked)} answers change", flush=True)


if __name__ == "__main__":
    main()
