"""The import hook in fresh interpreters, on a miniature SGLang."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import sglang_disagg_patchset_hook as hook
from unit.patchset.conftest import clean_environment

pytestmark = pytest.mark.slow

REPORT = """
from sglang.srt.consumer import Engine, Options
print(Engine().run(), Options(colour="blue").checked)
"""
IDENTITY = """
import pickle
from sglang.srt.mixins import Loud
print(Engine.__module__, Engine.__qualname__, Engine.__name__, Engine.__doc__)
assert pickle.loads(pickle.dumps(Engine)) is Engine and issubclass(Engine, Loud)
"""
STOCK_REPORT = "from sglang.srt.consumer import Engine; print(Engine().run())"

# The shape of any other hook: it queries the finders behind it (or all others) and adds an edit.
OTHER_HOOK = """
import sys
class Other:
    def find_spec(self, name, path=None, target=None):
        if name != "sglang.srt.engine" or getattr(self, "busy", False):
            return None
        self.busy = True
        finders = {finders}
        specs = (f.find_spec(name, path, target) for f in finders if f is not self)
        spec = next(filter(None, specs))
        self.busy = False
        run = spec.loader.exec_module
        def exec_module(module):
            run(module)
            module.edited = True
        spec.loader.exec_module = exec_module
        return spec
"""


def test_rebinds_before_any_consumer_imports(fake_sglang):
    """A consumer that imported the stock class would silently run unpatched. Pickle, log lines and
    metric labels use module and name, which must not change."""
    result = fake_sglang.run(REPORT + IDENTITY)
    assert result.stdout.splitlines() == [
        "['stock', 'loud'] ['stock', 'mixin']",
        "sglang.srt.engine Engine Engine Stock engine.",
    ]
    assert result.stderr == ""


@pytest.mark.parametrize(
    "finders", ["sys.meta_path[sys.meta_path.index(self) + 1:]", "sys.meta_path"]
)
@pytest.mark.parametrize("place", [0, 1])
def test_works_beside_another_hook(fake_sglang, finders, place):
    """Two hooks on one module must both apply their edit, and must not query each other for
    ever."""
    hook = OTHER_HOOK.replace("{finders}", finders)
    result = fake_sglang.run(
        f"{hook}\nsys.meta_path.insert({place}, Other())\n{REPORT}\n"
        "import sglang.srt.engine as engine; print(engine.edited)"
    )
    assert result.stdout == "['stock', 'loud'] ['stock', 'mixin']\nTrue\n"


def test_runs_before_a_hook_that_loads_modules_itself(fake_sglang):
    """A hook in front that uses PathFinder would hide the targets if this hook did not move
    forward."""
    result = fake_sglang.run(
        f"""
        import sys
        from importlib.machinery import PathFinder
        class Selfish:
            def find_spec(self, name, path=None, target=None):
                return PathFinder.find_spec(name, path) if name == "sglang.srt.engine" else None
        sys.meta_path.insert(0, Selfish())
        {STOCK_REPORT}
        """
    )
    assert result.stdout == "['stock', 'loud']\n"


# The finder that setuptools appends to the meta path for an editable installation.
EDITABLE = """
import sys, typing_extensions
from importlib.util import spec_from_file_location
class Editable:
    @classmethod
    def find_spec(cls, name, path=None, target=None):
        if name == "sglang":
            folder = {sources!r} + "/sglang"
            return spec_from_file_location(
                name, folder + "/__init__.py", submodule_search_locations=[folder]
            )
sys.meta_path.append(Editable)
sys.path[:] = [{folder!r}, *(p for p in sys.path if p.startswith(sys.base_prefix))]
"""


@pytest.mark.parametrize(("switch", "runs"), [("1", "['stock', 'loud']"), ("0", "['stock']")])
def test_sglang_is_an_editable_installation(fake_sglang, switch, runs):
    """As in SGLang's own images. The wheel's folder of the same name is on the path, and Python
    takes it for the whole package: SGLang disappeared as soon as the patch set was installed."""
    sources = fake_sglang.folder / "sources"
    for file in ("__init__", *(f"srt/{name}" for name in ("settings", "engine", "consumer"))):
        target = sources / f"sglang/{file}.py"
        target.parent.mkdir(parents=True, exist_ok=True)
        (fake_sglang.folder / f"sglang/{file}.py").rename(target)
    # The hook is in the wheel, too.
    shutil.copy(Path(hook.__file__), fake_sglang.folder)
    finder = EDITABLE.format(sources=str(sources), folder=str(fake_sglang.folder))
    code = f"{finder}\n{STOCK_REPORT}\nimport sglang; print(sglang.__file__)"
    done = fake_sglang.run(code, SGLANG_PATCHSET=switch)
    assert done.stdout.split("\n")[:2] == [runs, str(sources / "sglang/__init__.py")]
    assert done.stderr == ""


def test_one_loader_for_several_modules(fake_sglang):
    """As with a zip file: the import of the next module, which has no row, failed with KeyError."""
    result = fake_sglang.run(
        f"""
        import sys
        from importlib.machinery import PathFinder
        class Shared:
            def __init__(self):
                self.loaders = {{}}
            def create_module(self, spec):
                return None
            def exec_module(self, module):
                self.loaders[module.__name__].exec_module(module)
        shared = Shared()
        class Finder:
            def find_spec(self, name, path=None, target=None):
                if name not in ("sglang.srt.engine", "sglang.srt.consumer", "sglang.srt.settings"):
                    return None
                spec = PathFinder.find_spec(name, path)
                if spec is not None:
                    shared.loaders[name], spec.loader = spec.loader, shared
                return spec
        sys.meta_path.insert(1, Finder())
        import importlib.util
        import sglang.srt
        importlib.util.find_spec("sglang.srt.engine")  # found twice, imported once
        {STOCK_REPORT}
        import sglang.srt.settings
        print(sorted(shared.loaders))
        """
    )
    assert result.stderr == "" and result.stdout.startswith("['stock', 'loud']\n")


UNINSTALLED = """
from importlib import metadata
def version(name):
    raise metadata.PackageNotFoundError(name)
metadata.version = version
"""
#: A second process logs nothing more.
AGAIN = f"""
import subprocess, sys
sys.stdout.flush()
subprocess.run([sys.executable, "-c", {STOCK_REPORT!r}], check=True)
"""


@pytest.mark.parametrize(
    ("reason", "line"),
    [
        ("another version", "made for SGLang 0.5.10.post1 and 0.5.23, found 0.5.99"),
        ("uninstalled", "no package `sglang` is installed"),
        ("half written", "the replacement table did not load"),
        ("switched off", None),  # the user switched it off
    ],
)
def test_stock_sglang_runs(fake_sglang, reason, line):
    """Guards against a table of another release, or a broken one, that takes SGLang down or is in
    half of its processes; and against a reason that is not logged, or logged by every process."""
    code, env = STOCK_REPORT, {}
    if reason == "another version":
        fake_sglang.set_version("0.5.99")
        code = STOCK_REPORT + AGAIN
    elif reason == "uninstalled":
        code = UNINSTALLED + STOCK_REPORT
    elif reason == "half written":
        fake_sglang.write("sglang/srt/patchset/table.py", "this is not Python")
    else:
        env = {"SGLANG_PATCHSET": "0"}
    result = fake_sglang.run(code, **env)
    assert set(result.stdout.splitlines()) == {"['stock']"}
    lines = result.stderr.splitlines()
    assert len(lines) == (line is not None)
    assert all(re.match(f"sglang-disagg-patchset: inert.*{line}", line_) for line_ in lines), lines


@pytest.mark.parametrize(
    ("first", "rows", "is_held"),
    [
        ("engine", "bound bound", False),
        # If the first row failed, the group failed, and the second row is not tried.
        ("consumer", "failed stock", True),
    ],
)
def test_targets_imported_before_the_hook(fake_sglang, first, rows, is_held):
    """A hook that starts late can still rebind, unless the stock class was already imported
    elsewhere."""
    result = fake_sglang.run(
        f"""
        import sys, sglang_disagg_patchset_hook
        hook = sys.meta_path.pop(0)
        import sglang.srt.{first}
        sys.meta_path.insert(0, hook)
        import sglang.srt.mixins
        from sglang.srt.patchset import state
        print(*[item.status.value for group in state().groups for item in group.rows])
        """
    )
    assert result.stdout == f"{rows}\n"
    assert ("stock class held by sglang.srt.consumer.Engine" in result.stderr) == is_held


@pytest.mark.parametrize("body", ["raise RuntimeError('x')", "raise SystemExit(3)", "not Python"])
def test_a_broken_hook_does_not_break_the_interpreter(fake_sglang, body):
    """The .pth line runs in every Python of the environment, also in a pip that repairs it."""
    fake_sglang.write("sglang_disagg_patchset_hook.py", body)
    result = fake_sglang.run("print('alive')")
    assert (result.stdout, result.stderr) == ("alive\n", "")  # the hook is not imported
    result = fake_sglang.run("import sglang; print('alive')")
    assert result.stdout == "alive\n"
    (line,) = result.stderr.splitlines()
    assert line.startswith("sglang-disagg-patchset: not loaded")


def modules_after(code: str) -> set[str]:
    """Return the modules that a fresh interpreter has loaded after ``code``."""
    code = f"import sys, importlib.util as util; {code}; print(*sys.modules)"
    told = subprocess.check_output([sys.executable, "-c", code], env=clean_environment(), text=True)
    return set(told.split())


def test_the_start_of_an_interpreter_imports_nothing_of_ours():
    """Guards against modules without byte code that cost every process of the environment
    milliseconds; the hook may use only modules that every interpreter has loaded."""
    assert "sglang_disagg_patchset_hook" not in modules_after("pass")
    asked = modules_after("util.find_spec('sglang')")
    assert "sglang_disagg_patchset_hook" in asked
    assert not {m for m in asked if m.split(".")[0] in ("sglang", "torch", "numpy")}
