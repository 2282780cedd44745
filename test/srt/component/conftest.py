"""What more than one folder needs: the CPU stand-in, and pairs in interpreters of their own."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import pytest

from component import programs
from cpu_standin import gpu_device_node

HERE = Path(__file__).parent
#: Their pools and agents need the stand-in, which is refused beside a GPU.
STANDIN = ("buffer_only", "decode", "mooncake", "nixl", "pools", "prefill", "transfer")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skips what cannot run beside a GPU."""
    if gpu_device_node() is None:
        return
    for item in items:
        if item.path.is_relative_to(HERE) and item.path.relative_to(HERE).parts[0] in STANDIN:
            item.add_marker(pytest.mark.skip(reason="the CPU stand-in is refused beside a GPU"))


@dataclass(frozen=True)
class Elsewhere:
    """Stands for a pair that is made in another interpreter, as is the test's call."""

    backend: str


@pytest.fixture(params=["nixl", "mooncake"])
def pair(request: pytest.FixtureRequest) -> Elsewhere:
    """A ``component.transfer.pair.Pair`` of each backend, where the test runs."""
    if request.param == "mooncake":
        pytest.importorskip("mooncake.engine", reason="needs Mooncake's transfer engine")
    return Elsewhere(request.param)


#: By backend and file, what its tests of this run have printed.
_PRINTED: dict[tuple[str, Path], str] = {}


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    """Tests of a pair run in ``transfer/program.py``, all that were asked for of a file at once."""
    made = pyfuncitem.funcargs.get("pair")
    if not isinstance(made, Elsewhere):
        return None
    key = made.backend, pyfuncitem.path
    if key not in _PRINTED:
        cells = [
            _cell(item)
            for item in pyfuncitem.session.items
            if isinstance(item, pytest.Function)
            and item.path == pyfuncitem.path
            and item.callspec.params.get("pair") == made.backend
        ]
        module = ".".join(pyfuncitem.path.relative_to(HERE.parent).with_suffix("").parts)
        program = str(HERE / "transfer" / "any")
        _PRINTED[key] = programs.run(program, "program.py", made.backend, module, *cells)
    programs.passed(_PRINTED[key], _cell(pyfuncitem))
    return True


def _cell(item: pytest.Function) -> str:
    """What the program is asked for: a test, and its parameters beside the pair, all texts."""
    others = [f"{name}={value}" for name, value in item.callspec.params.items() if name != "pair"]
    return "/".join([item.function.__name__, *others])
