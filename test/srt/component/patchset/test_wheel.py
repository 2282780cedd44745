"""The wheel of `make wheel`, installed beside SGLang into an environment of its own."""

from __future__ import annotations

import shutil
import subprocess
import sys
import sysconfig
import venv
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from zipfile import ZipFile

import pytest

import cpu_standin
from sglang.srt.patchset import GROUPS, __version__
from unit.patchset.conftest import clean_environment

ROOT = Path(__file__).parents[4]
OURS = "sglang_disagg_patchset"


@dataclass
class Environment:
    """A virtual environment with SGLang, its dependencies and no editable installation of ours."""

    folder: Path

    @property
    def packages(self) -> Path:
        version = f"python{sys.version_info.major}.{sys.version_info.minor}"
        return self.folder / "lib" / version / "site-packages"

    def python(self, *arguments: str, **env: str) -> subprocess.CompletedProcess[str]:
        """Run its interpreter, outside the repository."""
        return subprocess.run(
            [self.folder / "bin/python", *arguments],
            env=clean_environment(**env),
            cwd=self.folder,
            capture_output=True,
            text=True,
            timeout=300,
        )

    def uv(self, *arguments: str | Path) -> None:
        """Have `uv pip` change it, with nothing from the network."""
        own = Path(sys.executable).parent / "uv"
        command = [own if own.exists() else "uv", "pip", *arguments, "--offline", "--python"]
        subprocess.run([*command, self.folder / "bin/python"], check=True, timeout=120)

    def sglang(self) -> dict[str, bytes]:
        """SGLang's files and what is in them."""
        return {name: (self.packages / name).read_bytes() for name in of_sglang()}


def of_sglang() -> list[str]:
    """The files of SGLang's distribution, without compiled ones and its commands."""
    names = map(str, metadata.files("sglang") or ())
    return [name for name in names if not name.startswith("..") and not name.endswith(".pyc")]


@pytest.fixture(scope="module")
def clean(tmp_path_factory: pytest.TempPathFactory) -> Environment:
    """SGLang's files are copied, because a wheel is laid among them; the rest is linked."""
    environment = Environment(tmp_path_factory.mktemp("clean") / "venv")
    venv.create(environment.folder, symlinks=True)
    here = Path(sysconfig.get_path("purelib"))
    for name in of_sglang():
        source, target = here / name, environment.packages / name
        compiled = source.parent.glob(f"__pycache__/{source.stem}.*.pyc")
        for file in (source, *(compiled if source.suffix == ".py" else ())):
            copy = target.parent / file.relative_to(source.parent)
            copy.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(file, copy)
    for entry in here.iterdir():
        if OURS not in entry.name and not (environment.packages / entry.name).exists():
            (environment.packages / entry.name).symlink_to(entry)
    return environment


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What `make wheel` builds."""
    out = tmp_path_factory.mktemp("dist")
    build = [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", out, ROOT]
    subprocess.run(build, check=True, capture_output=True, timeout=120)
    return next(out.glob("*.whl"))


@pytest.fixture(scope="module")
def installed(clean: Environment, wheel: Path) -> Environment:
    """The same with the wheel."""
    before = clean.sglang()
    clean.uv("install", "--no-deps", wheel)
    assert clean.sglang() == before, "the wheel overwrote files of SGLang"
    return clean


def test_what_is_in_it(wheel: Path) -> None:
    """Guards against test equipment in everybody's environment."""
    folders = [f"sglang/srt/{name}/" for name in ("disaggregation", "mem_cache", "patchset")]
    names = ZipFile(wheel).namelist()
    assert [name for name in names if not name.startswith((OURS, *folders))] == []


def test_it_attaches(installed: Environment) -> None:
    """Guards against a wheel that only works where the repository is: as in a fleet's image, every
    row is bound, by files of the wheel, in an interpreter that only has the .pth to find them."""
    code = (
        "import sglang, sglang.srt.patchset as p, sglang_disagg_patchset_hook as hook;"
        "print(*sglang.__path__, p.__file__, hook.__file__)"
    )
    said = installed.python("-c", code, PYTHONPATH=cpu_standin.FOLDER)
    assert said.returncode == 0, said.stderr
    assert len(said.stdout.split()) == 3
    assert all(path.startswith(str(installed.packages)) for path in said.stdout.split())

    said = installed.python("-m", "sglang.srt.patchset", "--check", PYTHONPATH=cpu_standin.FOLDER)
    assert said.returncode == 0, said.stdout + said.stderr
    assert f"version  {__version__}\n" in said.stdout
    assert said.stdout.count(": attached\n") == len(GROUPS)


def test_it_can_be_taken_away(installed: Environment) -> None:
    """Guards against an uninstall that leaves files of ours, or takes some of SGLang's along."""
    before = installed.sglang()
    installed.uv("uninstall", OURS.replace("_", "-"))
    assert installed.sglang() == before
    assert [*installed.packages.glob(f"*{OURS}*")] == []
    said = installed.python("-c", "import sglang.srt.patchset")
    assert "No module named 'sglang.srt.patchset'" in said.stderr
