"""Lists in the documents and rules for the code, against the tree."""

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
    """Guards against a page that names renamed or removed tests; ``make hazards`` writes it."""
    check = [sys.executable, str(ROOT / "scripts/hazards.py"), "--check"]
    done = subprocess.run(check, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_a_hazard_needs_a_row_and_a_test(tmp_path: Path) -> None:
    """Guards against a misspelt marker, and against a hazard without a test."""
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
    """Return every name that a file imports, also under ``TYPE_CHECKING`` and in functions."""
    nodes = list(ast.walk(ast.parse(source)))
    names = [(node.module, node.names) for node in nodes if isinstance(node, ast.ImportFrom)]
    plain = {alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names}
    return plain | {
        name
        for module, aliases in names
        for name in (module, *(f"{module}.{alias.name}" for alias in aliases))
    }


def in_circles(graph: dict[str, set[str]]) -> set[str]:
    """Return the modules that import themselves, directly or not."""
    circular = set()
    for module in graph:
        reached, ahead = set(), [module]
        while ahead:
            new = graph[ahead.pop()] - reached
            reached |= new
            ahead += new
        circular |= {module} & reached
    return circular


def test_imports_have_no_circles() -> None:
    """Guards against files that can only be understood together."""
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


def explains_any(source: str) -> bool:
    """True if a module that uses ``Any`` has a comment ``# Any: ...``, or if it uses none."""
    tokens = list(tokenize.generate_tokens(io.StringIO(source).readline))
    comments = [token.string for token in tokens if token.type == tokenize.COMMENT]
    uses = any(token.type == tokenize.NAME and token.string == "Any" for token in tokens)
    return not uses or any(re.search(r"\bAny: \w", comment) for comment in comments)


def test_any_says_why() -> None:
    """Guards against values that mypy does not check without a reason: use a type of SGLang's or a
    protocol if one fits; otherwise one comment in the file says which values have no type."""
    assert explains_any('"""Any: of text."""\nfrom typing import Any  # Any: values in JSON\n')
    assert explains_any('"""Any module."""\n# many\n')
    assert not explains_any('"""Any: of text."""\nfrom typing import Any\nx: Any = 1  # Any\n')
    silent = [
        str(path.relative_to(ROOT))
        for path in sorted((ROOT / "python").rglob("*.py"))
        if not explains_any(path.read_text(encoding="utf-8"))
    ]
    assert silent == []
