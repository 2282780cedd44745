"""The UCX workers that NIXL assigns to the threads of a real prefill manager."""

from __future__ import annotations

import re

import pytest

from component import programs


@pytest.mark.hazard("wrong-counts")
def test_each_transfer_thread_has_a_ucx_worker() -> None:
    """Guards against threads that wait for each other in NIXL: the configured number of workers is
    a total, of which SGLang's thread pool took all but one. The rigs' agents had no such pool."""
    output = programs.run(__file__, "program_workers.py")
    bound = re.findall(r"bound shared worker (\d+) to thread", output)
    assert "POSTED 4" in output and len(set(bound)) == len(bound) == 4, output[-3000:]
