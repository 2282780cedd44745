"""torch without its compiler.

SGLang decorates a few small functions with ``torch.compile``. On a CPU that would cost more than
it gives: each process imports inductor at start (over a third of its start-up), and the first
request waits for a C++ compiler, which a fresh machine need not have.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any  # Any: modules that are edited, and their objects


def edit(torch: Any) -> None:
    """Have ``torch.compile`` return what it is given."""

    def compile(model: Callable[..., Any] | None = None, **options: Any) -> Callable[..., Any]:
        """Both forms: ``compile(f)`` and ``@compile(...)``."""
        return model if model is not None else lambda function: function

    torch.compile = compile
