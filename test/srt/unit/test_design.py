"""What the documents list, against what is there."""

from __future__ import annotations

import ast
import io
import re
import runpy
import subprocess
import sys
import tokenize
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]


def test_the_page_of_hazards_is_up_to_date() -> None:
    """Guards against a page that promises tests which were renamed or removed: ``make hazards``
    writes it."""
    check = [sys.executable, str(ROOT / "scripts/hazards.py"), "--check"]
    done = subprocess.run(check, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_a_hazard_needs_a_row_and_a_test(tmp_path: Path) -> None:
    """Guards against a marker that was misspelt, and against a hazard that nothing tests."""
    filled = runpy.run_path(str(ROOT / "scripts/hazards.py"))["filled"]
    (tmp_path / "test_a.py").write_text(
        '@pytest.mark.hazard("one", "two")\n@pytest.mark.gpu\ndef test_b(): pass\n'
    )
    row = "| {} | goes wrong | is prevented | gone |\n"
    assert "| is prevented | `test_a.py::test_b` |" in filled(
        row.format("one") + row.format("two"), tmp_path
    )
    for names in (["one"], ["one", "two", "three"]):
        with pytest.raises(ValueError, match="two: test_a.py::test_b|three"):
            filled("".join(map(row.format, names)), tmp_path)


def imports(source: str) -> set[str]:
    """Every name that a file imports, under ``TYPE_CHECKING`` and in functions too."""
    nodes = list(ast.walk(ast.parse(source)))
    names = [(node.module, node.names) for node in nodes if isinstance(node, ast.ImportFrom)]
    plain = {each.name for node in nodes if isinstance(node, ast.Import) for each in node.names}
    return plain | {
        name for module, of in names for name in (module, *(f"{module}.{each.name}" for each in of))
    }


def in_circles(graph: dict[str, set[str]]) -> set[str]:
    """The modules that lead back to themselves."""
    found = set()
    for module in graph:
        reached, ahead = set(), [module]
        while ahead:
            new = graph[ahead.pop()] - reached
            reached |= new
            ahead += new
        found |= {module} & reached
    return found


def test_imports_have_no_circles() -> None:
    """Guards against files that can only be read together."""
    assert in_circles({"a": {"b"}, "b": {"c"}, "c": {"b"}, "d": {"a"}}) == {"b", "c"}
    root = ROOT / "python"
    paths = [path for path in root.rglob("*.py") if path.name != "__init__.py"]
    files = {".".join(path.relative_to(root).with_suffix("").parts): path for path in paths}
    graph = {name: imports(path.read_text()) & files.keys() for name, path in files.items()}
    assert in_circles(graph) == set()


def test_the_ground_floor_imports_nothing_above_it() -> None:
    """Guards against a package that cannot say what it replaces without a feature that does not
    load: features are named in the table, as texts."""
    root = ROOT / "python/sglang/srt"
    features = ("disaggregation/delta", "disaggregation/lead", "mem_cache/buffer_only")
    assert all((root / each).is_dir() for each in features)
    names = tuple(f"sglang.srt.{each.replace('/', '.')}" for each in features)
    reached = {
        path.name: up
        for path in (root / "patchset").glob("*.py")
        if (up := [name for name in imports(path.read_text()) if name.startswith(names)])
    }
    assert reached == {}


def says_why(source: str) -> bool:
    """Whether a module that uses ``Any`` has a comment ``# Any: ...``; also if it uses none."""
    tokens = list(tokenize.generate_tokens(io.StringIO(source).readline))
    comments = [each.string for each in tokens if each.type == tokenize.COMMENT]
    uses = any(each.type == tokenize.NAME and each.string == "Any" for each in tokens)
    return not uses or any(re.search(r"\bAny: \w", comment) for comment in comments)


def test_any_says_why() -> None:
    """Guards against what mypy does not check for no reason: where a type of SGLang's or a protocol
    of ours would do, it is named; where not, one comment in the file says what has none."""
    assert says_why('"""Any: of text."""\nfrom typing import Any  # Any: values in JSON\n')
    assert says_why('"""Any module."""\n# many\n')
    assert not says_why('"""Any: of text."""\nfrom typing import Any\nx: Any = 1  # Any\n')
    silent = [
        str(path.relative_to(ROOT))
        for path in sorted((ROOT / "python").rglob("*.py"))
        if not says_why(path.read_text(encoding="utf-8"))
    ]
    assert silent == []
