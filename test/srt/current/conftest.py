"""Tests with real schedulers of SGLang 0.5.23; not collected if another release is installed.

A process holds one scheduler, and the plugins of one setting have patched its classes. Therefore
the tests of a file that are marked with the same ``server`` run in one process of their own, which
is forked after SGLang has been imported:

    @pytest.mark.server("--disable-overlap-schedule", tokens=4000, env={"NAME": "value"})

``mode``, "decode" (the default) or "prefill", selects the fixture. ``env`` is set before SGLang
loads its plugins, as it does in each of its processes. ``model`` is a family of ``models.families``
or a fixture ("model" by default). "@NAME" in an argument stands for the path of that family or
fixture.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any  # Any: arguments of a mark

import pytest

from current import forked
from current.environment import MODELS, RELEASE, environment

if TYPE_CHECKING:
    from current.decode import Decode
    from current.prefill import Prefill

HERE = Path(__file__).parent
IS_INSTALLED = metadata.version("sglang") == RELEASE
collect_ignore_glob = [] if IS_INSTALLED else ["test_*.py"]
if IS_INSTALLED:
    os.environ.update(environment(None, *MODELS))


def pytest_configure(config: pytest.Config) -> None:
    """Register the mark of this folder."""
    config.addinivalue_line(
        "markers", "server(*arguments, mode, model, tokens, env): the real scheduler of a test"
    )


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Sort tests so that those of one process are adjacent."""
    ours = [item for item in items if item.path.is_relative_to(HERE)]
    ours.sort(key=lambda item: (str(item.path), _key(item)))
    rest = iter(ours)
    items[:] = [next(rest) if item.path.is_relative_to(HERE) else item for item in items]


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_protocol(item: pytest.Item, nextitem: pytest.Item | None) -> bool | None:
    """Run a marked test in the process of its scheduler."""
    if not item.path.is_relative_to(HERE) or item.get_closest_marker("server") is None:
        return None
    group = [
        other
        for other in item.session.items
        if (other.path, _key(other)) == (item.path, _key(item))
    ]
    forked.run(item, group)
    return True


def _key(item: pytest.Item) -> str:
    mark = item.get_closest_marker("server")
    return repr((mark.args, mark.kwargs)) if mark else ""


def _mark(request: pytest.FixtureRequest) -> tuple[tuple[str, ...], dict[str, Any]]:
    mark = request.node.get_closest_marker("server")
    assert mark is not None, "this test needs the mark `server`"
    return mark.args, mark.kwargs


@pytest.fixture(scope="session")
def model(request: pytest.FixtureRequest) -> str:
    """The folder of a random model with output that depends on each earlier token."""
    from models import random_qwen3

    return str(random_qwen3.build(request.config.cache.mkdir("random_qwen3")))


@pytest.fixture(scope="session")
def arithmetic(request: pytest.FixtureRequest) -> str:
    """The folder of a trained model; as its own draft model, it accepts most drafts."""
    from models import untied

    return str(untied.build(request.config.cache.mkdir("untied")))


@pytest.fixture(scope="session")
def eagle3(request: pytest.FixtureRequest, model: str) -> str:
    """The folder of an EAGLE3 head of random weights for ``model``."""
    from models import heads

    return str(heads.eagle3(request.config.cache.mkdir("eagle3"), model))


@pytest.fixture(scope="session")
def adapter1(request: pytest.FixtureRequest, model: str) -> str:
    """The folder of a LoRA adapter of random weights for ``model``."""
    return _adapter(request, model, 1)


@pytest.fixture(scope="session")
def adapter2(request: pytest.FixtureRequest, model: str) -> str:
    """The folder of another such adapter."""
    return _adapter(request, model, 2)


def _adapter(request: pytest.FixtureRequest, model: str, seed: int) -> str:
    from models import random_lora

    return str(random_lora.build(request.config.cache.mkdir(f"adapter{seed}"), model, seed))


def _folder(request: pytest.FixtureRequest, name: str) -> str:
    from models import families

    if name in families.FAMILIES:
        return str(families.build(request.config.cache.mkdir(name), name))
    folder: str = request.getfixturevalue(name)
    return folder


@pytest.fixture
def served(request: pytest.FixtureRequest) -> Any:
    """The only server of this process, created for its first test."""
    if _SERVERS:
        return _SERVERS[0]
    arguments, options = _mark(request)
    model = _folder(request, options.get("model", "model"))
    os.environ.update(options.get("env", {}))

    # A scheduler's process has imported it by then, and the identity is reported only there.
    import sglang.srt.managers.scheduler  # noqa: F401
    from sglang.srt.plugins import load_plugins

    load_plugins()
    from current.decode import Decode
    from current.prefill import Prefill

    server_class = {"decode": Decode, "prefill": Prefill}[options.get("mode", "decode")]
    arguments = tuple(
        re.sub("@(.+)", lambda found: _folder(request, found[1]), argument)
        for argument in arguments
    )
    _SERVERS.append(server_class(model, *arguments, tokens=options.get("tokens", 8000)))
    return _SERVERS[0]


_SERVERS: list[Any] = []


@pytest.fixture
def decode(served: Decode) -> Iterator[Decode]:
    """A decode server, flushed before the test and balanced after it."""
    yield from _balanced(served)


@pytest.fixture
def prefill(served: Prefill) -> Iterator[Prefill]:
    """A prefill server, flushed before the test and balanced after it."""
    yield from _balanced(served)


def _balanced(served: Any) -> Iterator[Any]:
    served.flush()
    before = served.balance()
    yield served
    served.until(served.is_idle)
    served.flush()
    assert served.balance() == before
