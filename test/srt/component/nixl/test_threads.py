"""One NIXL agent that several threads use at once, as transfer workers do."""

from __future__ import annotations

import pytest

from component.programs import passed, run


@pytest.fixture(scope="module")
def output() -> str:
    """What the program printed, all scenarios run once."""
    return run(__file__, "program_threads.py")


@pytest.mark.hazard("spinning-workers")
def test_a_release_does_not_wait_for_a_post(output: str) -> None:
    """Guards against a lock of the agent's that a post holds for its whole length: a release waits
    for it with the interpreter's lock in its hands, and so does the scheduler."""
    passed(output, "release_beside_a_post")


@pytest.mark.hazard("racing-peer-tables")
def test_many_threads(output: str) -> None:
    """Guards against wrong bytes, lost notifications and crashes where posts, looks and releases
    run side by side, while other ranks come and go."""
    passed(output, "many_threads")
