"""The wheel of `make wheel`, installed beside SGLang into a separate environment."""

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

from sglang.srt.patchset import GROUPS, __version__
from unit.patchset.conftest import clean_environment

ROOT = Path(__file__).parents[4]
OURS = "sglang_disagg_patchset"


@dataclass
class Environment:
    """A virtual environment with SGLang and its dependencies, without this package."""

    folder: Path

    @property
    def packages(self) -> Path:
        version = f"python{sys.version_info.major}.{sys.version_info.minor}"
        return self.folder / "lib" / version / "site-packages"

    def python(self, *arguments: str, **env: str) -> subprocess.CompletedProcess[str]:
        """Run the environment's interpreter, outside the repository."""
        return subprocess.run(
            [self.folder / "bin/python", *arguments],
            env=clean_environment(**env),
            cwd=self.folder,
            capture_output=True,
            text=True,
            timeout=300,
        )

    def uv(self, *arguments: str | Path) -> None:
        """Change the environment with `uv pip`, without the network."""
        beside = Path(sys.executable).parent / "uv"
        command = [beside if beside.exists() else "uv", "pip", *arguments, "--offline", "--python"]
        subprocess.run([*command, self.folder / "bin/python"], check=True, timeout=120)

    def sglang(self) -> dict[str, bytes]:
        """Return SGLang's files and their contents."""
        return {name: (self.packages / name).read_bytes() for name in of_sglang()}


def of_sglang() -> list[str]:
    """Return the files of SGLang's distribution, without compiled ones and its commands."""
    names = map(str, metadata.files("sglang") or ())
    return [name for name in names if not name.startswith("..") and not name.endswith(".pyc")]


@pytest.fixture(scope="module")
def clean(tmp_path_factory: pytest.TempPathFactory) -> Environment:
    """An environment without the wheel. SGLang's files are copied, because the wheel is installed
    among them; the rest is linked."""
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
    """The wheel that `make wheel` builds."""
    out = tmp_path_factory.mktemp("dist")
    build = [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", out, ROOT]
    subprocess.run(build, check=True, capture_output=True, timeout=120)
    return next(out.glob("*.whl"))


@pytest.fixture(scope="module")
def installed(clean: Environment, wheel: Path) -> Environment:
    """The environment with the wheel installed."""
    before = clean.sglang()
    clean.uv("install", "--no-deps", wheel)
    assert clean.sglang() == before, "the wheel overwrote files of SGLang"
    return clean


def test_the_wheel_has_no_test_equipment(wheel: Path) -> None:
    """Guards against test equipment in each user's environment."""
    folders = [f"sglang/srt/{name}/" for name in ("disaggregation", "mem_cache", "patchset")]
    names = ZipFile(wheel).namelist()
    assert [name for name in names if not name.startswith((OURS, *folders))] == []


def test_the_wheel_attaches(installed: Environment) -> None:
    """Guards against a wheel that only works inside the repository: as in a fleet's image, files of
    the wheel bind every row, in an interpreter that finds them only through the .pth file."""
    code = (
        "import sglang, sglang.srt.patchset as p, sglang_disagg_patchset_hook as hook;"
        "print(*sglang.__path__, p.__file__, hook.__file__)"
    )
    result = installed.python("-c", code)
    assert result.returncode == 0, result.stderr
    assert len(result.stdout.split()) == 3
    assert all(path.startswith(str(installed.packages)) for path in result.stdout.split())

    # As in the build of an image, without a driver and without the stand-in.
    result = installed.python("-m", "sglang.srt.patchset", "--check")
    assert result.returncode == 0, result.stdout + result.stderr
    assert f"version  {__version__}\n" in result.stdout
    assert result.stdout.count(": attached\n") == len(GROUPS)


def test_the_wheel_can_be_uninstalled(installed: Environment) -> None:
    """Guards against an uninstall that leaves the wheel's files, or removes files of SGLang."""
    before = installed.sglang()
    installed.uv("uninstall", OURS.replace("_", "-"))
    assert installed.sglang() == before
    assert [*installed.packages.glob(f"*{OURS}*")] == []
    result = installed.python("-c", "import sglang.srt.patchset")
    assert "No module named 'sglang.srt.patchset'" in result.stderr
