"""SGLang's own GSM8K evaluation: prefill and decode score what the aggregated server scores.

Skipped unless both of these are set; nothing is downloaded:

    SGLANG_TEST_GSM8K_MODEL        folder of a model, or its name, with its files in the cache
    SGLANG_TEST_GSM8K_DATA         questions in GSM8K's format: a JSON line each, with "question"
                                   and "answer"; the first five are the examples of every prompt

and optionally

    SGLANG_TEST_GSM8K_QUESTIONS    questions asked at most, 200 by default
    SGLANG_TEST_GSM8K_TOLERANCE    largest difference of two scores, 0 by default, where also all
                                   texts must be the same. Half precision needs some, about 0.02:
                                   its rounding depends on which requests share a batch
    SGLANG_TEST_GSM8K_SERVER_ARGS  further arguments of every server, which win over those of the
                                   test: float32 on the CPU, pages of 16 tokens, pools of 64,000

The pairs answer all questions twice; with the decode radix cache, the second time from the tree.
This asks the shipped model, which scores well, what it was trained for (see ../models/README.md)::

    SGLANG_TEST_GSM8K_MODEL=test/srt/models/tiny_arith \\
    SGLANG_TEST_GSM8K_DATA=test/srt/models/tiny_arith/test_set.jsonl \\
    SGLANG_TEST_GSM8K_QUESTIONS=40 \\
    python -m pytest test/srt/e2e/test_disaggregation_accuracy.py -s

And on a machine with a GPU that holds two servers at once (the test's default is the CPU)::

    SGLANG_CPU_STANDIN=0 SGLANG_TEST_GSM8K_TOLERANCE=0.02 \\
    SGLANG_TEST_GSM8K_SERVER_ARGS="--device cuda --dtype bfloat16 --attention-backend flashinfer \\
        --sampling-backend flashinfer --mem-fraction-static 0.4" ...
"""

from __future__ import annotations

import argparse
import os
import shlex
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from benchmark.harness.metrics import HIT_TOKENS, PROMPT_TOKENS
from benchmark.harness.pair import Aggregated, Pair
from benchmark.harness.servers import Sizes
from e2e.support import START_METHOD, pair_config, settle

PREFIX = "SGLANG_TEST_GSM8K_"
MODEL = os.environ.get(f"{PREFIX}MODEL")
DATA = os.environ.get(f"{PREFIX}DATA")
QUESTIONS = int(os.environ.get(f"{PREFIX}QUESTIONS", "200"))
TOLERANCE = float(os.environ.get(f"{PREFIX}TOLERANCE", "0"))
SERVER_ARGS = tuple(shlex.split(os.environ.get(f"{PREFIX}SERVER_ARGS", "")))
PLACE = {"SGLANG_CPU_STANDIN": os.environ.get("SGLANG_CPU_STANDIN", "0"), START_METHOD: "fork"}
POOL_TOKENS = 64_000

pytestmark = [
    pytest.mark.skipif(
        not (MODEL and DATA),
        reason=f"needs {PREFIX}MODEL and {PREFIX}DATA; the module's docstring says more",
    ),
    pytest.mark.timeout(0),  # how long it takes is a matter of the model
]


@dataclass(frozen=True)
class Outcome:
    """Share of right answers, and all answers in the order of the questions."""

    score: float
    texts: list[str]


def evaluate(url: str) -> Outcome:
    """SGLang's GSM8K evaluation of the server or load balancer at ``url``, greedy, five examples.

    Raises:
        AssertionError: an answer is missing. The evaluation itself logs a failed request, and goes
            on with an empty text, which would count as a wrong answer.
    """
    from sglang.test.run_eval import run_eval_once
    from sglang.test.simple_eval_gsm8k import GSM8KEval

    questions = GSM8KEval(num_examples=QUESTIONS, num_threads=32, num_shots=5, data_path=DATA)
    # Text goes in as it is, with no chat template, so that base models can be asked too.
    how = argparse.Namespace(api="completion", model="default", max_tokens=512, temperature=0.0)
    result, seconds, _ = run_eval_once(how, f"{url}/v1", questions)
    texts = [conversation[-1]["content"] for conversation in result.convos]
    assert all(texts), f"{texts.count('')} of {len(texts)} requests were not answered"
    print(f"\nGSM8K: {result.score:.3f} of {len(texts)} questions in {seconds:.1f} s")
    return Outcome(result.score, texts)


@pytest.fixture(scope="module", autouse=True)
def one_parser_at_a_time() -> Iterator[None]:
    """The evaluation reads numbers with ``ast`` on 32 threads, which CPython 3.11 gets wrong at
    times ("AST constructor recursion depth mismatch")."""
    from sglang.test import simple_eval_gsm8k

    lock, read = threading.Lock(), simple_eval_gsm8k.get_answer_value

    def locked(text: str) -> object:
        with lock:
            return read(text)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(simple_eval_gsm8k, "get_answer_value", locked)
        yield


@pytest.fixture(scope="module", autouse=True)
def api_key() -> Iterator[None]:
    """The client of the evaluation asks for a key; the servers do not."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("OPENAI_API_KEY", "EMPTY")
        yield


@pytest.fixture(scope="module")
def aggregated(api_key: None, tmp_path_factory: pytest.TempPathFactory) -> Outcome:
    """The stock aggregated server's outcome, which both arms are compared with."""
    folder = tmp_path_factory.mktemp("aggregated")
    sizes = Sizes(pool_tokens=POOL_TOKENS, page_size=16)
    with Aggregated(Path(MODEL or ""), folder, sizes, extra_args=SERVER_ARGS, env=PLACE) as server:
        return evaluate(server.config.url)


@pytest.mark.parametrize("radix", [True, False], ids=["radix", "no_radix"])
def test_gsm8k(aggregated: Outcome, logs: Path, radix: bool) -> None:
    """What the arithmetic set shows for the shipped model, for any model and its own questions:
    the KV that decode gets, or finds in its tree, costs no right answers."""
    config = pair_config(
        Path(MODEL or ""),
        logs,
        radix=radix,
        router=True,
        page_size=16,
        decode_tokens=POOL_TOKENS,
        prefill_sizes=Sizes(pool_tokens=POOL_TOKENS, page_size=16),
        prefill_args=SERVER_ARGS,
        decode_args=SERVER_ARGS,
        env=PLACE,
    )
    with Pair(config, logs / "pair", start_timeout_s=1200) as pair:
        for again in (False, True):
            before = pair.metrics()[1]
            outcome = evaluate(pair.target.url)
            assert abs(outcome.score - aggregated.score) <= TOLERANCE
            if TOLERANCE == 0:
                assert outcome.texts == aggregated.texts
            settle(pair)
            after = pair.metrics()[1]
            if radix and again:
                hit = after[HIT_TOKENS] - before[HIT_TOKENS]
                asked = after[PROMPT_TOKENS] - before[PROMPT_TOKENS]
                assert hit >= 0.9 * asked, "the pool evicts: raise --max-total-tokens"
