"""SGLang 0.5.23: the table stays out of it without a word, and the command reports on the lead."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from sglang.srt.disaggregation import lead
from sglang.srt.patchset.table import CURRENT_VERSION

from .conftest import FakeSglang

pytestmark = pytest.mark.slow

#: Two parts, by variables; each wraps ``Engine.run``.
MAIN = """
import os, runpy, sys
from sglang.srt.disaggregation.lead import attach
attach.PARTS = tuple(
    attach.LeadPart(name, lambda name=name: name.upper() in os.environ) for name in ("one", "two")
)
sys.argv[1:] = {arguments}
runpy.run_module("sglang.srt.patchset", run_name="__main__", alter_sys=True)
"""
PART = """
from sglang.srt.engine import Engine

def install(wrap):
    wrap(Engine, "run", "(self, steps={steps})")(lambda stock, self, steps={steps}: stock(steps))
"""


@pytest.fixture
def current(fake_sglang: FakeSglang) -> FakeSglang:
    """The miniature as release 0.5.23, with our entry point installed beside it."""
    fake_sglang.set_version(CURRENT_VERSION)
    target = fake_sglang.folder / "sglang/srt/disaggregation/lead"
    shutil.copytree(
        Path(lead.__path__[0]), target, ignore=lambda folder, names: {"__pycache__"} & set(names)
    )
    for name in "one", "two":
        fake_sglang.write(f"sglang/srt/disaggregation/lead/{name}.py", PART.format(steps=1))
    install_entry_point(fake_sglang, "disagg_lead")
    return fake_sglang


def install_entry_point(fake: FakeSglang, name: str) -> None:
    """As pip does; what other tests have installed is behind it on the path."""
    folder = "sglang_disagg_patchset-9.dist-info"
    fake.write(f"{folder}/METADATA", "Metadata-Version: 2.1\nName: sglang-disagg-patchset\n")
    target = "sglang.srt.disaggregation.lead.attach:activate"
    fake.write(f"{folder}/entry_points.txt", f"[sglang.srt.plugins]\n{name} = {target}\n")


def report(fake: FakeSglang, *arguments: str, **env: str) -> subprocess.CompletedProcess[str]:
    """The command, with the two parts."""
    return fake.run(MAIN.format(arguments=list(arguments)), check=False, **env)


def test_the_table_says_nothing(current: FakeSglang) -> None:
    """Guards against a line in each log of a server that has all it was promised, and against a
    class of 0.5.10's table on 0.5.23's."""
    code = "from sglang.srt.consumer import Engine; print(Engine().run())"
    result = current.run(code)
    assert (result.stdout, result.stderr) == ("['stock']\n", "")


ON, ALL = {"ONE": "1"}, "group lead: one\n  on   one\n  off  two\n"


@pytest.mark.parametrize(
    ("env", "status", "said"),
    [
        (ON, 0, f"found {CURRENT_VERSION}: the group lead"),
        (ON, 0, ALL),
        ({}, 0, "group lead: off\n"),
        (ON | {"SGLANG_PATCHSET": "0"}, 1, "inert: turned off by SGLANG_PATCHSET=0"),
        (ON | {"SGLANG_PATCHSET_DISABLE": "lead"}, 0, "group lead: off"),
        # A server would not start with these, on whatever side they are read.
        (ON | {"SGLANG_PATCHSET": "maybe"}, 2, "does not start: SGLANG_PATCHSET must be"),
        (ON | {"SGLANG_PATCHSET_DISABLE": "laed"}, 2, "lead, not 'laed'"),
        ({"SGLANG_DISAGGREGATION_HANDSHAKE_TIMEOUT": "soon"}, 2, "HANDSHAKE_TIMEOUT must be"),
        # Variables that nobody reads: SGLang was told to load other plugins only.
        (ON | {"SGLANG_PLUGINS": "other, plugin"}, 2, "SGLANG_PLUGINS does not name disagg_lead"),
        (ON | {"SGLANG_PLUGINS": "other, disagg_lead"}, 0, ALL),
    ],
)
def test_the_report(current: FakeSglang, env: dict[str, str], status: int, said: str) -> None:
    """Guards against an operator who cannot see whether a variable has reached the server."""
    result = report(current, **env)
    assert result.returncode == status, result.stderr
    assert said in result.stdout + result.stderr and "group base" not in result.stdout


def test_a_plugin_that_is_not_installed_is_an_error(current: FakeSglang) -> None:
    """Guards against variables that nobody reads: the entry point is missing, as in an old
    installation."""
    install_entry_point(current, "something_else")
    result = report(current, ONE="1")
    assert result.returncode == 2 and "is not installed" in result.stdout


def test_the_check_compares_signatures_of_all_parts(current: FakeSglang) -> None:
    """Guards against a part that is found not to fit when it is first switched on."""
    assert report(current, "--check").returncode == 0
    # Of another length: Python compares that and whole seconds with its byte code.
    current.write("sglang/srt/disaggregation/lead/two.py", PART.format(steps=12))
    result = report(current, "--check", ONE="1")
    assert result.returncode == 2
    assert "does not fit: Engine.run is (self, steps=1), not (self, steps=12)" in result.stdout
    assert report(current, ONE="1").returncode == 0
