"""Settings that every test needs before SGLang or torch is imported, and which tests a run takes.

=============  ==========================================================================
``pytest``     all but tests marked ``nightly``; fuzzers in their short form
``--nightly``  only those, and the fuzzers in their long form, with new examples each time
``--fast``     only what imports neither torch nor SGLang, whose names do not exist there, and
               is not ``slow``; of fuzzers a glimpse
=============  ==========================================================================
"""

from __future__ import annotations

import gc
import os

import pytest
from hypothesis import is_hypothesis_test, settings

import cpu_standin
import engineless

# So that a bare `pytest` behaves like `make test`; the programs of tests inherit the variables.
os.environ.update(cpu_standin.environment(os.environ))
if cpu_standin.gpu_device_node() is None:
    cpu_standin.install()

# In CI the same examples in every run. No deadline: its two cores are shared.
settings.register_profile("ci", derandomize=True, deadline=None)
settings.register_profile("fast", derandomize=True, deadline=None, max_examples=10)
settings.register_profile("nightly", deadline=None, max_examples=1000, print_blob=True)


def pytest_addoption(parser: pytest.Parser) -> None:
    """Which tests a run takes."""
    parser.addoption("--nightly", action="store_true", help="only controls and long fuzzers")
    parser.addoption("--fast", action="store_true", help="only what needs no torch and no SGLang")


def pytest_configure(config: pytest.Config) -> None:
    """Before any test module is imported."""
    if config.getoption("fast"):
        settings.load_profile("fast")
        engineless.hide()
    else:
        settings.load_profile("nightly" if config.getoption("nightly") else "ci")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leaves out what is for another run."""
    nightly = config.getoption("nightly")
    taken: dict[bool, list[pytest.Item]] = {True: [], False: []}
    for item in items:
        if config.getoption("fast"):
            is_taken = item.get_closest_marker("slow") is None
        elif nightly:
            is_fuzzer = item.get_closest_marker("fuzz") is not None
            is_taken = is_fuzzer or is_hypothesis_test(getattr(item, "obj", None))
        else:
            is_taken = True
        is_control = item.get_closest_marker("nightly") is not None
        taken[nightly if is_control else is_taken].append(item)
    items[:] = taken[True]
    config.hook.pytest_deselected(items=taken[False])


def pytest_collection_finish() -> None:
    """What was imported until now stays: the collector need not look through it again and again."""
    gc.collect()
    gc.freeze()
