"""An interpreter without torch and SGLang: a test that imports one is skipped.

The package's own modules stay importable below ``sglang`` if they import none of SGLang's.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType

import pytest

OURS = Path(__file__).parents[2] / "python" / "sglang"
HEAVY = ("torch", "transformers", "triton", "nixl", "mooncake", "sgl_kernel")


class _Skips(MetaPathFinder):
    """Skips the test or the test file that imports a module.

    Not an ImportError, because libraries catch that and continue without the module.
    """

    def __init__(self, *roots: str) -> None:
        self._roots = roots

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> None:
        if name.split(".")[0] in self._roots:
            raise pytest.skip.Exception(f"needs {name}", allow_module_level=True)


def hide() -> None:
    """Hide the modules from now on; call before any import of SGLang."""
    assert not {"torch", "sglang"} & set(sys.modules), "imported already"
    sys.meta_path[:] = [
        finder for finder in sys.meta_path if "patchset" not in type(finder).__module__
    ]
    package = ModuleType("sglang")
    package.__spec__ = ModuleSpec("sglang", None, is_package=True)
    package.__path__ = [str(OURS)]
    sys.modules["sglang"] = package
    sys.meta_path.insert(0, _Skips(*HEAVY))
    sys.meta_path.append(_Skips("sglang"))  # last: for modules that no other finder knows
