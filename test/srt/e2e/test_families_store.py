"""The families of models that fleets serve, over one store: a server finds the KV that another one
computed, and answers are those of SGLang's aggregated server.

Each row of ``families.STORED`` and ``families.WHOLE`` is a test.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from benchmark.harness import metrics
from component.buffer_only.masters import Master
from e2e import hicache
from e2e.drafts import drafting
from e2e.families import NEW_TOKENS, STORED, WHOLE, Run
from e2e.support import Ids, Reference, dp_attention, prompt_maker
from e2e.test_families import SERVER_ARGS, common_args, marked, prepare
from e2e.test_whole_system import Shape, check_answer_is_found, running

DEADLINE_S = 4.0
VALUES = {"deepseek_v3": 1, "deepseek_v3_nextn": 1, "deepseek_v32": 2}
"""Number of entries of a page in the store (a latent, and an index), even if each of two ranks has
it. Keys and values by head are two entries a rank."""


@pytest.fixture(scope="module")
def served(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[Path, Reference]]:
    """The model of a family, and its reference."""
    model, server = prepare(request.param, tmp_path_factory)
    with server as reference:
        yield model, reference


def rows(runs: tuple[Run, ...]) -> Any:
    parameters = [*map(marked, runs)]
    return pytest.mark.parametrize(
        ("served", "run"), parameters, indirect=["served"], scope="module"
    )


def prompts(model: Path, seed: int) -> list[Ids]:
    """Return four prompts with a common prefix, and two without one."""
    tokens = prompt_maker(model, seed)
    shared = tokens(330)
    return [[*shared, *tokens(140 + 37 * i)] for i in range(4)] + [tokens(430), tokens(517)]


@rows(STORED)
def test_another_server_finds_it(served: tuple[Path, Reference], run: Run, tmp_path: Path) -> None:
    """Guards against a latent, an index or heads that the store keeps in part or under another
    rank's name, and against a page that is loaded in place of another one. All whole pages of all
    prompts must be hits in another process, and each is stored once."""
    model, reference = served
    asked, master = prompts(model, run.seed), Master()
    expected = reference.answers(asked, hicache.NEW_TOKENS)
    ranks = 2 if "prefill_tp2" in run.setup else 1
    compared = NEW_TOKENS.get(run.family, hicache.NEW_TOKENS)

    def shortened(answers: list[Ids]) -> list[Ids]:
        return [answer[:compared] for answer in answers]

    try:
        both = [
            hicache.Backend(
                "mooncake", master.extra_config, {"MC_FORCE_TCP": "1"}, ranks=ranks,
                args=arguments(run, model),
            )
            for _ in range(2)
        ]  # fmt: skip
        with hicache.servers(model, tmp_path, run.page, both, DEADLINE_S) as (writer, reader):
            began = stored_values(master)
            assert shortened(writer.generated(asked)) == shortened(expected)
            writer.flush()  # waits for the writes
            kept = (stored_values(master) - began) / VALUES.get(run.family, 2 * ranks)
            # The last generated token has KV if the overlapped next step had begun.
            texts = [[*prompt, *more] for prompt, more in zip(asked, expected, strict=True)]
            low, high = (whole_pages(texts, run.page, cut) for cut in (1, 0))
            assert low <= kept <= high, f"{kept} pages are stored"
            answers = reader.answers(asked)
            output_ids = [answer["output_ids"] for answer in answers]
            assert shortened(output_ids) == shortened(expected)
            hicache.check_all_from_store(asked, answers, run.page)
            for server in (writer, reader):
                assert server.wait_drained().get("dropped_tokens_total", 0) == 0
    finally:
        master.kill()


def arguments(run: Run, model: Path) -> tuple[str, ...]:
    """Return the arguments of one server of a row. Each call allocates new ports."""
    draft = drafting(model, 3, "NEXTN") if "nextn" in run.setup else ()
    data_parallel = dp_attention() if "prefill_dp" in run.setup else ()
    return (*common_args(run), *SERVER_ARGS.get(run.family, ()), *draft, *data_parallel)


def whole_pages(texts: list[Ids], page: int, less: int) -> int:
    """Return the number of different pages of the texts without their ``less`` last tokens."""
    return len(
        {tuple(text[:end]) for text in texts for end in range(page, len(text) - less + 1, page)}
    )


def stored_values(master: Master) -> int:
    """Return the number of values in the store."""
    return int(metrics.scrape(f"http://127.0.0.1:{master.metrics}")[metrics.STORE_KEYS])


@rows(WHOLE)
def test_prefill_finds_what_decode_wrote(
    served: tuple[Path, Reference], run: Run, logs: Path
) -> None:
    """Guards against an answer or a local turn that decode writes in part, or under keys that
    prefill does not query."""
    model, reference = served
    shape = Shape(run.backend, run.page)
    new_tokens = NEW_TOKENS.get(run.family, hicache.NEW_TOKENS)
    with running(shape, model, reference, logs, common_args(run), new_tokens) as system:
        check_answer_is_found(system)
