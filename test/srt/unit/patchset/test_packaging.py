"""The wheel: what is in it, and that it works laid beside SGLang."""

from __future__ import annotations

import subprocess
import sys
import zipfile
from importlib import metadata
from pathlib import Path

import pytest

from .conftest import clean_environment

ROOT = Path(__file__).parents[4]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    """Built as `make wheel` does, from the sources as they are."""
    out = tmp_path_factory.mktemp("dist")
    command = [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", out, ROOT]
    subprocess.run(command, check=True, capture_output=True, timeout=120)
    (file,) = out.glob("*.whl")
    return zipfile.ZipFile(file)


def test_contents(wheel):
    """The .pth and its module belong at the top, and every source file must be packed."""
    names = {name for name in wheel.namelist() if ".dist-info/" not in name}
    assert {"sglang_disagg_patchset.pth", "sglang_disagg_patchset_hook.py"} <= names
    sources = {str(p.relative_to(ROOT / "python")) for p in (ROOT / "python").rglob("*.py")}
    assert sources <= names
    assert not {name for name in names if "__pycache__" in name}


def test_overwrites_no_file_of_sglang(wheel):
    """SGLang stays the unmodified package: no file of ours may land on one of its files."""
    theirs = {str(file) for file in metadata.files("sglang") or ()}
    assert "sglang/__init__.py" in theirs
    assert not theirs & set(wheel.namelist())


def test_a_namespace_package_of_sglang_stays_one(wheel):
    """An __init__.py of ours in a folder that SGLang has too would hide its modules there."""
    theirs = {str(file.parent) for file in metadata.files("sglang") or ()}
    ours = {str(Path(name).parent) for name in wheel.namelist() if name.endswith("__init__.py")}
    assert not ours & theirs


def test_works_beside_sglang(wheel, fake_sglang):
    """As installed from a wheel: all in one folder, found through the .pth alone."""
    wheel.extractall(fake_sglang.folder)
    fake_sglang.set_table((("Engine", "Loud"),))
    code = f"""
import site, sys
site.addsitedir({str(fake_sglang.folder)!r})
import sglang_disagg_patchset_hook, sglang, sglang.srt.patchset.combine as part
from sglang.srt.consumer import Engine
print(Engine().run(), len(sglang.__path__), sglang_disagg_patchset_hook.__file__, part.__file__)
"""
    result = subprocess.run(
        [sys.executable, "-S", "-c", code],
        env=clean_environment(PYTHONPATH=_dependencies(fake_sglang.folder)),
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert result.returncode == 0, result.stderr
    assert result.stdout.startswith("['stock', 'loud'] 1 ")
    assert result.stdout.count(str(fake_sglang.folder)) == 2


def _dependencies(folder: Path) -> str:
    """A path with the one library that the mixins import, and no other installation of ours."""
    import typing_extensions

    libraries = folder / "libraries"
    libraries.mkdir()
    (libraries / "typing_extensions.py").symlink_to(typing_extensions.__file__)
    return str(libraries)
