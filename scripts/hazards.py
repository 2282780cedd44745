"""Fill the last column of the hazards in docs/promises.md with the tests that name them.

    python scripts/hazards.py            # writes the page
    python scripts/hazards.py --check    # fails if that would change it

Sources are parsed, not imported. A name that only the page or only the markers have is an error.
"""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]
TESTS = ROOT / "test" / "srt"
PAGE = ROOT / "docs" / "promises.md"
ROW = re.compile(r"^\| ([a-z0-9-]+) \| (.+?) \| (.+?) \|.*\|$")


def marked(tests: Path) -> Iterator[tuple[str, str]]:
    """Yield each marker of each test below the folder ``tests``: (hazard, ``file::test``)."""
    for file in sorted(tests.rglob("test_*.py")):
        source = file.read_text()
        if "mark.hazard" not in source:
            continue
        for function in ast.parse(source).body:
            if isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef):
                name = f"{file.relative_to(tests)}::{function.name}"
                for decorator in function.decorator_list:
                    if ast.unparse(decorator).startswith("pytest.mark.hazard("):
                        assert isinstance(decorator, ast.Call)
                        yield from ((ast.literal_eval(text), name) for text in decorator.args)


def filled(page: str, tests: Path) -> str:
    """Return ``page`` with the tests of each row. Raises ValueError if names do not agree."""
    tests_of: dict[str, list[str]] = {}
    for hazard, test in marked(tests):
        tests_of.setdefault(hazard, []).append(test)
    lines, rows = [], set()
    for line in page.splitlines():
        row = ROW.match(line)
        if row is not None and row[1] != "hazard":
            name, wrong, prevented = row.groups()
            rows.add(name)
            cell = ", ".join(f"`{test}`" for test in tests_of.get(name, ()))
            line = f"| {name} | {wrong} | {prevented} | {cell} |"
        lines.append(line)
    if rows != set(tests_of):
        nowhere = [f"{name}: {tests_of[name][0]}" for name in sorted(set(tests_of) - rows)]
        raise ValueError(
            f"markers without a row: {nowhere}; rows without a test: {sorted(rows - set(tests_of))}"
        )
    return "\n".join(lines) + "\n"


def main() -> int:
    """Write or check the page. Return the exit status."""
    page = PAGE.read_text()
    try:
        new = filled(page, TESTS)
    except ValueError as error:
        print(f"{PAGE}: {error}", file=sys.stderr)
        return 1
    if "--check" in sys.argv[1:]:
        if new != page:
            print(f"{PAGE} is out of date: run scripts/hazards.py", file=sys.stderr)
        return int(new != page)
    PAGE.write_text(new)
    return 0


if __name__ == "__main__":
    sys.exit(main())
