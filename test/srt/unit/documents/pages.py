"""The pages of the repository, for the tests in this folder."""

from __future__ import annotations

import re
import shlex
import sysconfig
from collections.abc import Iterator
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[4]
SITE_PACKAGES = Path(sysconfig.get_paths()["purelib"])
_HIDDEN = ("results", "out", "dist", "build", "node_modules")


def pages() -> list[Path]:
    """Return all hand-written Markdown pages, without the output of benchmarks."""
    found_pages = []
    for path in sorted(ROOT.rglob("*.md")):
        folders = path.relative_to(ROOT).parts[:-1]
        if not any(part.startswith((".", *_HIDDEN)) for part in folders):
            found_pages.append(path)
    return found_pages


def links(page: Path) -> Iterator[tuple[Path, str]]:
    """Yield the files that ``page`` links to, each with its anchor (or an empty text)."""
    text = re.sub(r"```.*?```", "", page.read_text(), flags=re.DOTALL)
    for target in re.findall(r"\]\(([^)\s]+)\)", text):
        if re.match(r"[a-z]+:", target):
            continue
        path, _, anchor = target.partition("#")
        yield (page.parent / path).resolve() if path else page, anchor


def anchors(page: Path) -> set[str]:
    """Return the anchors of a page's headings, as GitHub makes them."""
    text = re.sub(r"```.*?```", "", page.read_text(), flags=re.DOTALL)
    headings = re.findall(r"^#+ (.*)$", text, re.MULTILINE)
    return {
        re.sub(r"[^\w\- ]", "", heading).strip().lower().replace(" ", "-") for heading in headings
    }


def commands(text: str, module: str) -> Iterator[list[str]]:
    """Yield the arguments of each ``python -m MODULE ...`` in the code blocks of a page."""
    for block in re.findall(r"```bash\n(.*?)```", text, re.DOTALL):
        for line in block.replace("\\\n", " ").splitlines():
            if f"-m {module} " in line:
                yield shlex.split(line.split(f"-m {module} ")[1], comments=True)


def flags(arguments: list[str]) -> set[str]:
    """Return the names of the flags among command line arguments."""
    return {argument.partition("=")[0] for argument in arguments if argument.startswith("--")}


@cache
def server_flags() -> set[str]:
    """Return the flags of ``sglang.launch_server``: SGLang's, read from its source, and the patch
    set's."""
    from sglang.srt.patchset import flags

    source = (SITE_PACKAGES / "sglang/srt/server_args.py").read_text()
    patch_set_flags = {
        flags.FLAG,
        flags.LOCAL,
        flags.LOCAL_WHEN_LOST,
        flags.LOCAL_TIME_RATIO,
        flags.MODE,
        flags.PAGES,
    }
    return (
        set(re.findall(r'(?:add_argument\(\s*|^\s+)"(--[a-z0-9-]+)",', source, re.MULTILINE))
        | patch_set_flags
    )


@cache
def router_flags() -> set[str]:
    """Return the flags of ``sglang_router.launch_router``, read from its source."""
    source = (SITE_PACKAGES / "sglang_router/router_args.py").read_text()
    return {f"--{name}" for name in re.findall(r'"--(?:\{prefix\})?([a-z0-9-]+)"', source)}
