"""Two real NIXL agents, made as ours are, used from several threads; prints a line a scenario.

Run by ``test_threads.py``, whose tests say what each scenario guards against.
"""

from __future__ import annotations

import os
import threading
import time
from typing import Any

os.environ["UCX_TLS"] = "sm,tcp,self"

import numpy as np  # noqa: E402
from nixl import _api  # noqa: E402

from component import programs  # noqa: E402
from sglang.srt.disaggregation.delta.nixl.agent import configured_agents  # noqa: E402

THREADS = 4
LARGE = 1 << 28
SMALL = 1 << 12
LIMIT_S = 120.0


def make(name: str, memory: Any, workers: int) -> Any:
    with configured_agents(workers):
        agent = _api.nixl_agent(name, _api.nixl_agent_config(backends=["UCX"], num_threads=2))
    agent.register_memory([(memory.ctypes.data, memory.nbytes, 0, "")], "DRAM")
    return agent


SOURCE = np.random.default_rng(0).integers(0, 256, LARGE, np.uint8)
TARGET = np.zeros(LARGE, np.uint8)
OURS, THEIRS = make("ours", SOURCE, THREADS), make("theirs", TARGET, 0)
OURS.add_remote_agent(THEIRS.get_agent_metadata())


def prepare(starts: Any, length: int, note: bytes = b"") -> Any:
    """A transfer of pieces from one memory to the same places of the other."""
    rows = [
        np.array([[memory.ctypes.data + start, length, 0] for start in starts], np.uint64)
        for memory in (SOURCE, TARGET)
    ]
    descs = [OURS.get_xfer_descs(each, "DRAM") for each in rows]
    return OURS.initialize_xfer("WRITE", *descs, "theirs", note)


def finish(handle: Any) -> None:
    state, until = OURS.transfer(handle), time.monotonic() + LIMIT_S
    while state == "PROC" and time.monotonic() < until:
        time.sleep(0.0005)
        state = OURS.check_xfer_state(handle)
    assert state == "DONE", state


def release_beside_a_post() -> None:
    done = [prepare([i * SMALL], SMALL) for i in range(200)]
    for handle in done:
        finish(handle)
    large = prepare([0], LARGE)
    finish(large)
    posts: list[tuple[float, float]] = []
    ended = threading.Event()

    def post() -> None:
        for _ in range(10):
            began = time.monotonic()
            state = OURS.transfer(large)
            posts.append((began, time.monotonic()))
            while state == "PROC":
                state = OURS.check_xfer_state(large)
        ended.set()

    thread = threading.Thread(target=post)
    thread.start()
    releases = []
    while done and not ended.is_set():
        began = time.monotonic()
        OURS.release_xfer_handle(done.pop())
        releases.append((began, time.monotonic()))
        time.sleep(0.002)
    thread.join()
    # Those that began well within a post; a post's first moments are the binding's.
    inside = [
        (release, post)
        for release in releases
        for post in posts
        if post[0] + 0.1 * (post[1] - post[0]) < release[0] < post[1]
    ]
    assert inside, (releases, posts)
    meanwhile = [release for release, post in inside if release[1] < post[1]]
    assert len(meanwhile) > len(inside) / 2, inside


def many_threads() -> None:
    TARGET[:] = 0
    share, rounds = LARGE // THREADS, 60
    errors: list[BaseException] = []

    def use(index: int) -> None:
        random = np.random.default_rng(index)
        try:
            for number in range(rounds):
                # Mostly few pieces, sometimes so many that NIXL's own threads share them.
                count = 2000 if number % 10 == 0 else int(random.integers(1, 64))
                places = random.permutation(share // SMALL)[:count] * SMALL + index * share
                handle = prepare(places, SMALL, f"{index}_{number}".encode())
                finish(handle)
                for place in places[:64]:
                    part = slice(place, place + SMALL)
                    assert (TARGET[part] == SOURCE[part]).all(), (index, number)
                OURS.release_xfer_handle(handle)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=use, args=(index,)) for index in range(THREADS)]
    for thread in threads:
        thread.start()
    # Meanwhile other ranks come and go, as they do on the reader's thread.
    for number in range(20):
        memory = np.zeros(SMALL, np.uint8)
        other = make(f"other-{number}", memory, 0)
        OURS.add_remote_agent(other.get_agent_metadata())
        OURS.remove_remote_agent(f"other-{number}")
    notes: set[bytes] = set()
    until = time.monotonic() + LIMIT_S
    while len(notes) < THREADS * rounds and not errors and time.monotonic() < until:
        for messages in THEIRS.get_new_notifs().values():
            notes.update(messages)
        time.sleep(0.001)
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]
    assert len(notes) == THREADS * rounds


programs.run_scenarios({each.__name__: each for each in (release_beside_a_post, many_threads)})
