"""A miniature SGLang to attach to: interpreters that start fast, and tables made for the tests."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import textwrap
from dataclasses import dataclass
from pathlib import Path

import pytest

import sglang.srt.patchset as patchset

ENGINE = """
import dataclasses

class Engine:
    "Stock engine."
    def run(self, steps=1):
        return ["stock"] * steps

@dataclasses.dataclass
class Options:
    size: int = 1
    def __post_init__(self):
        self.checked = ["stock"]
"""
# A second module, imported after the first one is in use.
MOTOR = """
from sglang.srt.engine import Engine

class Motor(Engine):
    def start(self):
        return "stock"
"""
CONSUMER = "from sglang.srt.engine import Engine, Options\n"
MIXINS = """
import dataclasses
from typing_extensions import override

class Loud:
    @override
    def run(self, steps=1):
        return super().run(steps) + ["loud"]

class Eager:
    @override
    def start(self):
        return "eager"

class Louder:
    @override
    def run(self, steps=1):
        return super().run(steps) + ["louder"]

class Loudest:
    @override
    def run(self, steps=1):
        return super().run(steps) + ["loudest"]

class Drifted:
    @override
    def run(self, steps=2, *, fast=False):
        return super().run(steps)

@dataclasses.dataclass
class MoreOptions:
    colour: str = "red"
    @override
    def __post_init__(self):
        super().__post_init__()
        self.checked.append("mixin")
"""
#: Rows of (class of sglang.srt.engine, or "module.Class"; mixin; ``when``, if any).
Rows = tuple[tuple[str, ...], ...]
LOUD = (("Engine", "Loud"), ("Options", "MoreOptions"))


@dataclass
class FakeSglang:
    """A folder that shadows the installed SGLang, with the real patchset package beside it."""

    folder: Path

    def write(self, path: str, text: str) -> Path:
        """Write one file below the folder."""
        file = self.folder / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(textwrap.dedent(text))
        return file

    def set_version(self, version: str) -> None:
        """Change the version in the package metadata."""
        shutil.rmtree(next(self.folder.glob("sglang-*.dist-info")), ignore_errors=True)
        self.write(
            f"sglang-{version}.dist-info/METADATA",
            f"Metadata-Version: 2.1\nName: sglang\nVersion: {version}\n",
        )

    def set_table(self, rows: Rows) -> None:
        """Replace the table by one group, "feature", of these rows."""
        self.set_groups({"feature": rows})

    def set_groups(
        self,
        groups: dict[str, Rows],
        needs: dict[str, tuple[str, ...]] | None = None,
        obstacles: dict[str, str] | None = None,
    ) -> None:
        """Replace the groups; names other than ``base`` have no special meaning."""
        file = self.folder / "sglang/srt/patchset/table.py"
        head = file.read_text().split("_BASE = ")[0]
        lines = "".join(
            f"    Group({name!r}, 'test', ({_rows(rows)}), {(needs or {}).get(name, ())!r}, "
            f"{(obstacles or {}).get(name, '')!r}),\n"
            for name, rows in groups.items()
        )
        flat = "tuple(row for group in GROUPS for row in group.rows)"
        file.write_text(f"{head}GROUPS = (\n{lines})\nTABLE = {flat}\n")

    def run(
        self, code: str, *options: str, check: bool = True, **env: str
    ) -> subprocess.CompletedProcess[str]:
        """Run ``code`` in a fresh interpreter that finds this SGLang first."""
        result = subprocess.run(
            [sys.executable, *options, "-c", textwrap.dedent(code)],
            env=clean_environment(PYTHONPATH=str(self.folder), **env),
            capture_output=True,
            text=True,
            timeout=60,
            cwd=self.folder,
        )
        assert not check or result.returncode == 0, result.stderr
        return result


def _rows(rows: Rows) -> str:
    """Return the rows as the table's source writes them."""
    text = ""
    for target, mixin, *when in rows:
        module, name = (target if "." in target else f"engine.{target}").split(".")
        arguments = f"sglang.srt.{module}", name, f"sglang.srt.mixins:{mixin}", "test", *when
        text += f"Replacement{arguments!r}, "
    return text


def clean_environment(**env: str) -> dict[str, str]:
    """Return this process's environment without variables for the patch set or Python's path."""
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("SGLANG_", "PYTHONPATH"))}
    return kept | env


@pytest.fixture
def fake_sglang(tmp_path: Path) -> FakeSglang:
    """A miniature SGLang of the expected version, with one plain and one dataclass row."""
    fake = FakeSglang(tmp_path)
    fake.write("sglang/__init__.py", "from sglang.srt import settings\n")
    fake.write("sglang/srt/settings.py", "")
    fake.write("sglang/srt/engine.py", ENGINE)
    fake.write("sglang/srt/motor.py", MOTOR)
    fake.write("sglang/srt/consumer.py", CONSUMER)
    fake.write("sglang/srt/mixins.py", MIXINS)
    package = Path(patchset.__file__).parent
    shutil.copytree(
        package, tmp_path / "sglang/srt/patchset", ignore=shutil.ignore_patterns("__pycache__")
    )
    fake.write("sglang-0.dist-info/METADATA", "")
    fake.set_version(patchset.BASE_VERSION)
    fake.set_table(LOUD)
    return fake
