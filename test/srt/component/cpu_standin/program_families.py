"""SGLang's model of each family on the stand-in, compared with that of transformers by logits.

Each family is loaded in a fork, because SGLang sets up its process groups once a process.
"""

from __future__ import annotations

import os
import random
import sys
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path

os.environ["SGLANG_MAMBA_CONV_DTYPE"] = "float32"  # the default rounds; transformers does not

import torch
from transformers import AutoModelForCausalLM

from component.programs import run_scenarios
from models.families import build
from models.in_process import InProcess

STEPS = 10
LENGTHS = {"deepseek_v32": 50}
"""Tokens of a prompt. transformers has no index, which chooses all tokens up to 64."""
ARGS = {"gpt_oss": ("--attention-backend", "triton", "--moe-runner-backend", "triton")}
CLOSE = 0.02
"""Bound of the difference of two logits, which have a spread of 1: SGLang keeps gpt-oss's biases in
bfloat16. A wrong form is off by the spread itself."""


def in_a_fork(check: Callable[[], None]) -> None:
    child = os.fork()
    if child == 0:
        try:
            check()
            status = 0
        except BaseException:
            sys.excepthook(*sys.exc_info())
            status = 1
        sys.stderr.flush()
        os._exit(status)
    assert os.waitpid(child, 0)[1] == 0, "see above"


def compare(family: str) -> None:
    """Compare a prompt's logits, then those of decode steps, which read earlier steps' KV."""
    folder = build(Path(tempfile.mkdtemp()), family)
    length = LENGTHS.get(family, 270)
    text = random.Random(0).choices(range(16, 688), k=length)
    ours = InProcess(folder, "--page-size", "64", *ARGS.get(family, ()))
    answer, logits = ours.answer(text, 1 + STEPS)
    theirs = AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager"
    )
    with torch.no_grad():
        expected = theirs(torch.tensor([text + answer[:-1]])).logits[0, length - 1 :]
    difference = (logits[:, : expected.shape[1]] - expected).abs().max()
    print(f"{family}: largest difference of logits {difference:.0e}", flush=True)
    assert difference < CLOSE
    assert answer == expected.argmax(-1).tolist()


run_scenarios({family: partial(in_a_fork, partial(compare, family)) for family in sys.argv[1:]})
