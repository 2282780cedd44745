"""Whether the installed SGLang is one that this package was written against."""

from __future__ import annotations

from importlib import metadata

from sglang.srt.patchset import environment
from sglang.srt.patchset.table import BASE_VERSION, CURRENT_VERSION


def installed_version() -> str:
    """Version of the installed SGLang, from its metadata; "none" where there is no metadata."""
    try:
        return metadata.version("sglang")
    except metadata.PackageNotFoundError:
        return "none"


def why_inert(found: str) -> str:
    """Why the table stays out of SGLang ``found``; empty if it may attach."""
    if not environment.ACTIVE.read():
        return "turned off by SGLANG_PATCHSET=0"
    made_for = f"made for SGLang {BASE_VERSION} and {CURRENT_VERSION}"
    if found == "none":
        return (
            f"{made_for}, and no package `sglang` is installed. If `import "
            "sglang` still works, it may find only this package's files (`pip uninstall "
            "sglang-disagg-patchset` removes them)"
        )
    if found == CURRENT_VERSION:
        return f"on SGLang {found} there is the group lead alone, which SGLang loads as a plugin"
    return "" if found == BASE_VERSION else f"{made_for}, found {found}"
