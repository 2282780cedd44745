"""How the CPU stand-in gets into a process: by its folder on ``PYTHONPATH``."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import cpu_standin

CHILD = """
import multiprocessing, sys

def tell():
    print("finders", sum(type(f).__module__ == "cpu_standin.finder" for f in sys.meta_path))
    print("torch", "torch" in sys.modules, flush=True)

if __name__ == "__main__":
    child = multiprocessing.get_context("spawn").Process(target=tell)
    child.start()
    child.join()
"""


def run(path: str, program: Path) -> subprocess.CompletedProcess[str]:
    """Run a program with ``path`` as ``PYTHONPATH``."""
    environment = os.environ | {"PYTHONPATH": path}
    command = [sys.executable, str(program)]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60)


@pytest.mark.slow
def test_spawned_processes_have_it_before_torch(tmp_path: Path) -> None:
    """Guards against a scheduler that looks for a GPU although its launcher did not."""
    program = tmp_path / "program.py"
    program.write_text(CHILD)
    told = run(cpu_standin.FOLDER, program)
    assert told.stdout == "finders 1\ntorch False\n" and told.stderr == ""
    assert run("", program).stdout == "finders 0\ntorch False\n"


@pytest.mark.slow
def test_a_refusal_ends_no_process(tmp_path: Path) -> None:
    """Guards against a program that does not start beside a GPU, and against no word about it."""
    shutil.copy(Path(cpu_standin.FOLDER, "sitecustomize.py"), tmp_path)
    refusing = "def install():\n    raise RuntimeError('a device is present')\n"
    (tmp_path / "cpu_standin.py").write_text(refusing)
    (tmp_path / "program.py").write_text("print('alive')")
    told = run(str(tmp_path), tmp_path / "program.py")
    assert told.stdout == "alive\n" and "a device is present" in told.stderr


def test_the_path_of_other_processes(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Guards against servers without it, against a path of the caller that is lost or grows from
    process to process, and against a refusal in each process beside a GPU."""
    given = {"PYTHONPATH": os.pathsep.join(("/a", cpu_standin.FOLDER)), "OTHER": "1"}
    monkeypatch.setattr(cpu_standin, "DEVICE_NODES", (str(tmp_path / "node"),))
    path = os.pathsep.join((cpu_standin.FOLDER, "/a"))
    assert cpu_standin.environment(given) == {"PYTHONPATH": path, "OTHER": "1"}
    assert cpu_standin.environment({}) == {"PYTHONPATH": cpu_standin.FOLDER}
    (tmp_path / "node").touch()
    assert cpu_standin.environment({"OTHER": "1"}) == {"OTHER": "1"}
