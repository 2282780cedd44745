"""Settings that tests need before SGLang or torch is imported, and the tests that a run selects.

=============  ==========================================================================
``pytest``     all but tests marked ``nightly``; fuzzers in their short form
``--nightly``  only those, and long fuzzers with new examples each time
``--fast``     only tests that need neither torch nor SGLang, whose names do not exist there,
               and that are not ``slow``; few examples per fuzzer
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

# CI uses the same examples in every run, without a deadline because its two cores are shared.
settings.register_profile("ci", derandomize=True, deadline=None)
settings.register_profile("fast", derandomize=True, deadline=None, max_examples=10)
settings.register_profile("nightly", deadline=None, max_examples=1000, print_blob=True)


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the options that select the tests of a run."""
    parser.addoption("--nightly", action="store_true", help="only controls and long fuzzers")
    parser.addoption("--fast", action="store_true", help="only tests without torch and SGLang")


def pytest_configure(config: pytest.Config) -> None:
    """Load the run's settings before any test module is imported."""
    if config.getoption("fast"):
        settings.load_profile("fast")
        engineless.hide()
    else:
        settings.load_profile("nightly" if config.getoption("nightly") else "ci")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Deselect the tests of other runs."""
    nightly = config.getoption("nightly")
    by_selection: dict[bool, list[pytest.Item]] = {True: [], False: []}
    for item in items:
        if config.getoption("fast"):
            is_selected = item.get_closest_marker("slow") is None
        elif nightly:
            is_fuzzer = item.get_closest_marker("fuzz") is not None
            is_selected = is_fuzzer or is_hypothesis_test(getattr(item, "obj", None))
        else:
            is_selected = True
        is_control = item.get_closest_marker("nightly") is not None
        by_selection[nightly if is_control else is_selected].append(item)
    items[:] = by_selection[True]
    config.hook.pytest_deselected(items=by_selection[False])


def pytest_collection_finish() -> None:
    """Exempt all imported objects from garbage collection: they stay until the end."""
    gc.collect()
    gc.freeze()
