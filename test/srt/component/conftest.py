"""Shared by several folders: the CPU stand-in, and pairs in their own interpreters."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import pytest

from component import programs
from cpu_standin import gpu_device_node

HERE = Path(__file__).parent
#: Folders with pools and agents on the stand-in, which is refused beside a GPU.
STANDIN = ("buffer_only", "decode", "mooncake", "nixl", "pools", "prefill", "transfer")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip tests that cannot run beside a GPU."""
    if gpu_device_node() is None:
        return
    for item in items:
        if item.path.is_relative_to(HERE) and item.path.relative_to(HERE).parts[0] in STANDIN:
            item.add_marker(pytest.mark.skip(reason="the CPU stand-in is refused beside a GPU"))


@dataclass(frozen=True)
class Elsewhere:
    """Stands for a pair in another interpreter, which also calls the test."""

    backend: str


@pytest.fixture(params=["nixl", "mooncake"])
def pair(request: pytest.FixtureRequest) -> Elsewhere:
    """Stands for a ``component.transfer.pair.Pair`` of each backend."""
    if request.param == "mooncake":
        pytest.importorskip("mooncake.engine", reason="needs Mooncake's transfer engine")
    return Elsewhere(request.param)


#: Backend and file -> output of the file's tests in this run.
_PRINTED: dict[tuple[str, Path], str] = {}


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    """Run tests of a pair in ``transfer/program.py``, all selected ones of a file at once."""
    elsewhere = pyfuncitem.funcargs.get("pair")
    if not isinstance(elsewhere, Elsewhere):
        return None
    key = elsewhere.backend, pyfuncitem.path
    if key not in _PRINTED:
        cells = [
            _cell(item)
            for item in pyfuncitem.session.items
            if isinstance(item, pytest.Function)
            and item.path == pyfuncitem.path
            and item.callspec.params.get("pair") == elsewhere.backend
        ]
        module = ".".join(pyfuncitem.path.relative_to(HERE.parent).with_suffix("").parts)
        program = str(HERE / "transfer" / "any")
        _PRINTED[key] = programs.run(program, "program.py", elsewhere.backend, module, *cells)
    programs.passed(_PRINTED[key], _cell(pyfuncitem))
    return True


def _cell(item: pytest.Function) -> str:
    """Return the program's name for a test: its function and parameters, without the pair."""
    others = [f"{name}={value}" for name, value in item.callspec.params.items() if name != "pair"]
    return "/".join([item.function.__name__, *others])
