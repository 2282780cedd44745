"""The matrix of models says *run* if a test runs the cell, and *refused* if a server refuses it."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from functools import cache

import pytest

from benchmark import model_matrix
from benchmark.harness.models import REPOSITORY
from benchmark.model_matrix import FAMILIES, FEATURES, SETUPS, Family, Matrix, refused_here

CELL = re.compile(r"run ((?:\**\d+\**(?:, )?)+)")


@cache
def functions(folder: str) -> dict[str, ast.FunctionDef]:
    """Return all functions of the end-to-end tests of a folder, by name."""
    by_name = {}
    for path in (REPOSITORY / folder).glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.FunctionDef):
                by_name[node.name] = node
    return by_name


def reached(file: str, name: str) -> Iterator[ast.FunctionDef]:
    """Yield a test and all helpers that it calls, directly or not."""
    known = functions("test/srt/e2e") | functions(file.rpartition("/")[0])
    names, visited = [name], set[str]()
    while names:
        current = names.pop()
        if current in visited or current not in known:
            continue
        visited.add(current)
        yield known[current]
        calls = (node.func for node in ast.walk(known[current]) if isinstance(node, ast.Call))
        names += [
            called.id if isinstance(called, ast.Name) else called.attr
            for called in calls
            if isinstance(called, (ast.Name, ast.Attribute))
        ]


def asserted(file: str, name: str) -> list[str]:
    """Return the texts of all assertions that a test reaches."""
    return [
        ast.unparse(node.test)
        for function in reached(file, name)
        for node in ast.walk(function)
        if isinstance(node, ast.Assert)
    ]


def numbers(cells: list[str]) -> set[int]:
    """Return the numbers of the tests that cells name."""
    return {
        int(number)
        for cell in cells
        for numbers_ in CELL.findall(cell)
        for number in re.findall(r"\d+", numbers_)
    }


def rows(*columns: list[list[str]]) -> list[str]:
    return [cell for table in columns for row in table for cell in row]


def test_every_run_is_a_test_that_compares_answers_and_counts_hits() -> None:
    """Guards against a cell whose test was renamed, takes other rows, or passes with wrong tokens
    or without a hit."""
    matrix = model_matrix.matrix()
    cells = rows(matrix.here, matrix.setups, matrix.there)
    named_tests = numbers(cells)
    assert named_tests and named_tests <= {*range(1, len(matrix.tests) + 1)}
    for test in {(test.file, test.function) for test in matrix.tests}:
        file, name = test
        module = ast.parse((REPOSITORY / file).read_text())
        (function,) = [node for node in module.body if getattr(node, "name", "") == name]
        assert isinstance(function, ast.FunctionDef)
        decorated = "".join(map(ast.unparse, function.decorator_list))
        tables = [table for table in ("RUNS", "STORED", "WHOLE") if table in decorated]
        assert len(tables) == 1, f"{file}::{name} is not made of a table of rows"
        claims = asserted(file, name)
        assert any(re.search(r"== .*(expected|answers)", claim) for claim in claims)
        assert any(re.search(r"prefixes|cached_tokens|found in|'local'", claim) for claim in claims)
    ids = [test.id for test in matrix.tests]
    assert len({*ids}) == len(ids)


def test_each_row_is_shown() -> None:
    """Guards against a row of the tests that no cell names, for an unknown family or setup."""
    matrix = model_matrix.matrix()
    shown = numbers(rows(matrix.here, matrix.setups, matrix.there))
    missing = [test.id for number, test in enumerate(matrix.tests, 1) if number not in shown]
    assert missing == []


def test_a_cell_without_a_row_does_not_say_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards against a cell that says *run* because of a row of another part, setup or family."""
    (only,) = [
        test for test in model_matrix.TESTS_HERE
        if test.run.id == "deepseek_v3-nixl-page16-radix-prefill_dp"
    ]  # fmt: skip
    monkeypatch.setattr(model_matrix, "TESTS_HERE", (only,))
    monkeypatch.setattr(model_matrix, "TESTS_THERE", ())
    matrix = Matrix(tests=(only,))
    cells = rows(matrix.here, matrix.setups, matrix.there)
    run = [cell.partition("<br>")[0] for cell in cells if "run" in cell]
    assert run == ["run 1", "radix: run 1"]


@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.names)
def test_cells_that_run_are_not_refused(family: Family) -> None:
    """Guards against cells with other arguments than servers, so that tests run combinations that
    the matrix calls refused."""
    for test in model_matrix.TESTS_HERE:
        if not family.has(test.run):
            continue
        for arguments, parts in FEATURES.values():
            of_setups = [
                arguments for arguments, names in SETUPS.values() if names & {*test.run.setup}
            ]
            if parts <= {*test.run.parts}:
                assert refused_here(family, arguments, *of_setups) is None, test.id


def test_refusals_of_servers_are_refusals_of_cells() -> None:
    """Guards against a matrix that accepts all: windows, states, and drafts over an index."""
    by_name = {family.names: family for family in FAMILIES}
    radix, _ = FEATURES["radix"]
    store, _ = FEATURES["buffer-only"]
    assert "sliding-window" in (refused_here(by_name["gpt-oss"], radix) or "")
    assert "sliding-window" in (refused_here(by_name["gpt-oss"], store) or "")
    assert "linear-attention" in (refused_here(by_name["Qwen3-Next"], store) or "")
    drafts, _ = SETUPS["speculation"]
    dsa = by_name["DeepSeek V3.2 and GLM-5"]
    assert "sparse attention" in (refused_here(dsa, radix, drafts) or "")
    assert refused_here(dsa, radix) is None
