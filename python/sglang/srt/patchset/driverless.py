"""Imports SGLang 0.5.10.post1 where there is no GPU driver, as in the build of an image.

SGLang imports ``sgl_kernel``, whose compiled operators are linked with the driver's library. If
they do not load, its loader imports a module ``common_ops``. ``allow_import`` puts an empty one
there, so that every class can be imported and compared. Only ``--check`` does this, because such a
process cannot compute anything.
"""

from __future__ import annotations

import ctypes
import sys
from types import ModuleType

DRIVER = "libcuda.so.1"
#: Line of the report of ``--check`` in that case.
NOTE = f"\nwithout a GPU driver ({DRIVER}): SGLang's compiled operators were not loaded\n"
_EMPTY = ModuleType("common_ops")


def allow_import() -> None:
    """Let ``sgl_kernel`` be imported without its operators if there is no driver."""
    try:
        ctypes.CDLL(DRIVER)
    except OSError:
        _EMPTY.__file__ = __file__  # because the loader logs it
        sys.modules.setdefault(_EMPTY.__name__, _EMPTY)


def has_no_operators() -> bool:
    """Return True if ``sgl_kernel`` was imported without its operators."""
    return getattr(sys.modules.get("sgl_kernel"), _EMPTY.__name__, None) is _EMPTY
