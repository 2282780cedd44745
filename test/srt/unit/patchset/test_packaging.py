"""The contents of the wheel."""

from __future__ import annotations

import importlib.util
import re
import subprocess
import sys
import zipfile
from importlib import metadata
from pathlib import Path

import pytest

from sglang.srt.patchset import __version__
from sglang.srt.patchset.__main__ import NAME, PLUGINS
from sglang.srt.patchset.status import installed_version
from sglang.srt.patchset.table import BASE_VERSION, CURRENT_VERSION

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[4]
DISTRIBUTION = "sglang_disagg_patchset"
TARGET = "sglang.srt.disaggregation.lead.attach:activate"
PYPROJECT = (ROOT / "pyproject.toml").read_text()
#: `make test-pythons` has no SGLang.
of_sglang = pytest.mark.skipif(installed_version() == "none", reason="SGLang is not installed")


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    """The wheel as `make wheel` builds it, from the current sources."""
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


def test_one_version(wheel):
    """Guards against different versions in the build, the command's output and the changelog; an
    editable installation's metadata, which may be older, is not read."""
    assert f"{DISTRIBUTION}-{__version__}.dist-info/METADATA" in wheel.namelist()
    versions = re.findall(r"^## (\S+)", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    assert versions[0] == __version__


def test_the_long_description_has_no_relative_links(wheel: zipfile.ZipFile) -> None:
    """Guards against links that lead nowhere on a package index."""
    about = wheel.read(f"{DISTRIBUTION}-{__version__}.dist-info/METADATA").decode()
    assert "Description-Content-Type: text/markdown\n" in about
    assert "# sglang-disagg-patchset\n" in about
    text = (ROOT / "README.md").read_text()
    targets = re.findall(r"\]\(([^)]+)\)", text)
    assert [target for target in targets if not target.startswith("https://")]
    kept = re.findall(r"\]\(([^)]+)\)", about)
    assert kept == [target for target in targets if target.startswith("https://")]


def test_links_are_absolute_once_the_project_has_an_address() -> None:
    spec = importlib.util.spec_from_file_location("hatch_build", ROOT / "hatch_build.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    text = "![two](docs/a.svg) [b](docs/b.md#c), [d](#e), [f](https://g)"
    assert module.long_description(text, None, "1") == "two b, d, [f](https://g)"
    assert module.long_description(text, "https://h/i", "1") == (
        "![two](https://h/i/raw/v1/docs/a.svg) [b](https://h/i/blob/v1/docs/b.md#c), "
        "[d](https://h/i/blob/v1/README.md#e), [f](https://g)"
    )


def test_python_versions_are_named_everywhere():
    """The classifiers list the versions that `make test-pythons` checks; setup and README name the
    first and the last."""
    minors = re.findall(r'"Programming Language :: Python :: 3\.(\d+)"', PYPROJECT)
    first, last = minors[0], minors[-1]
    assert [int(minor) for minor in minors] == [*range(int(first), int(last) + 1)]
    assert f'requires-python = ">=3.{first}"' in PYPROJECT
    for file in ("README.md", "CONTRIBUTING.md", "scripts/setup_env.sh"):
        assert f"3.{first} to 3.{last}" in (ROOT / file).read_text()


@of_sglang
def test_a_namespace_package_of_sglang_stays_one(wheel):
    """An additional __init__.py in a folder that SGLang also has would hide its modules there."""
    sglang_folders = {str(file.parent) for file in metadata.files("sglang") or ()}
    our_folders = {
        str(Path(name).parent) for name in wheel.namelist() if name.endswith("__init__.py")
    }
    assert not our_folders & sglang_folders


def test_no_release_of_sglang_comes_with_the_package(wheel: zipfile.ZipFile) -> None:
    """Guards against a server whose SGLang is replaced because this package was installed beside
    it: only the extras name a release, each that of its base."""
    metadata_file = wheel.read(f"{DISTRIBUTION}-{__version__}.dist-info/METADATA").decode()
    requirements = re.findall(
        r"^Requires-Dist: sglang(==\S+); extra == '(\w+)'$", metadata_file, re.M
    )
    assert sorted(requirements, key=lambda each: each[1]) == [
        (f"=={BASE_VERSION}", "cpu"),
        (f"=={CURRENT_VERSION}", "cpu13"),
        (f"=={BASE_VERSION}", "cuda12"),
        (f"=={CURRENT_VERSION}", "cuda13"),
    ]
    assert len(re.findall(r"^Requires-Dist: sglang[^-]", metadata_file, re.M)) == len(requirements)


def test_the_entry_point_is_in_the_wheel(wheel: zipfile.ZipFile) -> None:
    """Guards against a plugin that SGLang 0.5.23 logs as broken and omits."""
    text = wheel.read(f"{DISTRIBUTION}-{__version__}.dist-info/entry_points.txt").decode()
    assert text.split("\n")[:2] == [f"[{PLUGINS}]", f"{NAME} = {TARGET}"]
    module, _, function = TARGET.partition(":")
    assert f"{module.replace('.', '/')}.py" in wheel.namelist()
    assert callable(getattr(importlib.import_module(module), function))
