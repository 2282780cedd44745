"""Whether the installed SGLang is the one that this patch set was written against."""

from __future__ import annotations

import os
from importlib import metadata

from sglang.srt.patchset.table import BASE_VERSION

_OFF = ("0", "false", "no", "off")


def installed_version() -> str:
    """Version of the installed SGLang, from its metadata; "none" where there is no metadata."""
    try:
        return metadata.version("sglang")
    except metadata.PackageNotFoundError:
        return "none"


def turned_off() -> bool:
    """Whether the user turned the patch set off."""
    return os.environ.get("SGLANG_PATCHSET", "").strip().lower() in _OFF


def why_inert(found: str) -> str:
    """Why the patch set stays out of SGLang ``found``; empty if it may attach."""
    if turned_off():
        return "turned off by SGLANG_PATCHSET=0"
    if found != BASE_VERSION:
        return f"made for SGLang {BASE_VERSION}, found {found}"
    return ""
