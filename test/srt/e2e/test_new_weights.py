"""New weights, and release of memory, while a prefill server is stopped and decode holds pages that
prefill may still write to."""

from __future__ import annotations

import asyncio
import itertools
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from benchmark.harness import checks
from benchmark.harness.fleet import Pair
from e2e.support import (
    EventLogs,
    Ids,
    Reference,
    answers_with,
    ask_decode,
    frozen,
    pair_config,
    post,
    prompt_maker,
    settle,
    until,
)
from e2e.support import running as running_on
from models.random_qwen3 import build

NEW_TOKENS = 12
LOST = 6
ENV = {
    # Only the test's actions end a room.
    "SGLANG_DISAGGREGATION_HEARTBEAT_INTERVAL": "60",
    "SGLANG_DISAGGREGATION_QUARANTINE_TIMEOUT": "240",
    "MC_FORCE_TCP": "1",
}


@dataclass
class Scene:
    """A pair, its prompts, and the right answers of two versions of the weights."""

    pair: Pair
    events: EventLogs
    prompts: list[Ids]
    answers: dict[str, list[Ids]]
    models: dict[str, Path]
    tokens: Any
    _lost: Iterator[int] = field(default_factory=itertools.count)

    def check_right(self, name: str) -> None:
        """Check the answers for these weights, twice, so that the second come from the tree."""
        for _ in range(2):
            assert self.pair.generate(self.prompts, NEW_TOKENS) == self.answers[name]

    def lose(self) -> None:
        """Send requests, and abort them after they were announced and before prefill writes."""
        self.events.read()
        rids = [f"lost-{next(self._lost):06d}" for _ in range(LOST)]
        prompts = [[*prompt, *self.tokens(40)] for prompt in self.prompts[:LOST]]
        with ThreadPoolExecutor(1) as pool:
            asked = ask_decode(self.pair, prompts, NEW_TOKENS, rids=rids)
            lost = pool.submit(asyncio.run, asked)
            self.events.wait_admitted(LOST)
            for rid in rids:
                post(self.pair.decode_url, "/abort_request", rid=rid)
            results = lost.result(timeout=60)
        assert all(result.error or result.finish_reasons for result in results)
        assert checks.load(self.pair.decode_url).tokens > 0, "no pages are held"

    def update(self, url: str, name: str) -> None:
        post(url, "/update_weights_from_disk", model_path=str(self.models[name]))


@pytest.fixture(
    scope="module", params=["nixl", pytest.param("mooncake", marks=pytest.mark.nightly)]
)
def scene(
    request: Any, model: Path, reference: Reference, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Scene]:
    if request.param == "mooncake":
        pytest.importorskip("mooncake.engine", reason="needs Mooncake's transfer engine")
    tokens = prompt_maker(model, seed=51)
    prompts = [tokens(150 + 17 * number) for number in range(8)]
    other = build(tmp_path_factory.mktemp("other") / "random_qwen3", seed=1)
    folder = tmp_path_factory.mktemp("new_weights")
    answers = {
        "old": reference.answers(prompts, NEW_TOKENS),
        "new": answers_with(reference, other, prompts, NEW_TOKENS),
    }
    assert reference.server.generate(prompts, NEW_TOKENS) == answers["old"]
    assert all(a != b for a, b in zip(*answers.values(), strict=True))
    config = pair_config(model, folder, backend=request.param, page_size=16, env=ENV)
    with Pair(config, folder) as pair:
        scene = Scene(
            pair, EventLogs(folder), prompts, answers, {"old": model, "new": other}, tokens
        )
        yield scene


@pytest.mark.hazard("flush-while-held")
def test_weights_from_disk(scene: Scene) -> None:
    """Guards against SGLang's assertion that decode can flush, which would end the server. No KV of
    the old weights may be hit, and the held pages are freed, and intact, once prefill has woken."""
    scene.check_right("old")
    with frozen(scene.pair.processes["prefill"]):
        scene.lose()
        scene.update(scene.pair.decode_url, "new")
        assert checks.load(scene.pair.decode_url).tokens > 0, "held pages were freed"
    settle(scene.pair)
    scene.update(scene.pair.prefill_url, "new")
    scene.check_right("new")
    settle(scene.pair)


@pytest.mark.hazard("flush-while-held")
def test_release_and_resume_of_memory(scene: Scene) -> None:
    """Guards against SGLang's assertion that decode is idle, which would end the server. Memory
    that prefill may still write to is kept until prefill has stopped; the answer comes then."""
    scene.update(scene.pair.prefill_url, "new")
    scene.update(scene.pair.decode_url, "new")
    scene.check_right("new")
    done = threading.Event()

    def release() -> None:
        post(scene.pair.decode_url, "/release_memory_occupation")
        done.set()

    with ThreadPoolExecutor(1) as pool:
        with frozen(scene.pair.processes["prefill"]):
            scene.lose()
            released = pool.submit(release)
            assert not done.wait(3), "memory was released under remote writes"
            log = scene.pair.processes["decode"].log_text()
            assert "release of memory waits until nothing owns any" in log
        released.result(timeout=60)
    post(scene.pair.decode_url, "/resume_memory_occupation")
    scene.check_right("new")
    settle(scene.pair)


@pytest.mark.hazard("flush-while-held")
def test_weights_of_a_paused_server(scene: Scene, reference: Reference) -> None:
    """Guards against retracted requests that a weight update on a paused server breaks: they must
    resume from their copies to their full length, and leave nothing of their KV in the tree."""
    for url in (scene.pair.prefill_url, scene.pair.decode_url):
        scene.update(url, "new")
    scene.check_right("new")
    length = 400
    with ThreadPoolExecutor(2) as pool:
        running = pool.submit(scene.pair.generate, scene.prompts[:2], length)
        until(lambda: running_on(scene.pair.decode_url) == 2, 60.0)
        with frozen(scene.pair.processes["prefill"]):
            scene.lose()
            post(scene.pair.decode_url, "/pause_generation", mode="retract")
            assert running_on(scene.pair.decode_url) == 0 and not running.done()
            scene.update(scene.pair.decode_url, "old")
            post(scene.pair.decode_url, "/continue_generation")
        answers = running.result(timeout=120)
    assert [len(answer) for answer in answers] == [length, length]
    log = scene.pair.processes["decode"].log_text()
    assert "Cache flushed. Not freed" in log
    settle(scene.pair)
    scene.update(scene.pair.prefill_url, "old")
    scene.check_right("old")
    follow = [[*p, *answer] for p, answer in zip(scene.prompts[:2], answers, strict=True)]
    # These prompts would hit KV that the other weights computed.
    assert scene.pair.generate(follow, NEW_TOKENS) == reference.answers(follow, NEW_TOKENS)
    settle(scene.pair)
