"""Exchanges names of other packages while one object is made, and puts them back.

For what no row can reach: SGLang makes its NIXL agent in the middle of a method, from classes that
it looks up there. The table lists every name (``Exchange``), under the
group that needs it.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any  # Any: whatever a module has under a name

from sglang.srt.patchset.status import GroupStatus, state


@contextmanager
def exchanged(group: str, module: str, names: Mapping[str, Any]) -> Iterator[None]:
    """While this holds, ``names`` of ``module`` stand for what is given here (for every thread).

    A name may have dots in it. Where ``group`` is not attached, nothing is exchanged.

    Raises:
        LookupError: the table does not list a name of the module for that group.
    """
    of = next(each for each in state().groups if each.group.name == group)
    for name in names:
        if not any(row.module == module and name in row.names for row in of.group.exchanges):
            raise LookupError(f"{module}:{name} is not an exchange of the group {group}")
    if of.status in (GroupStatus.OFF, GroupStatus.STOCK):
        names = {}
    with ExitStack() as stack:
        for name, value in names.items():
            path, _, last = name.rpartition(".")
            holder: Any = importlib.import_module(module)
            for part in filter(None, path.split(".")):
                holder = getattr(holder, part)
            stack.callback(setattr, holder, last, getattr(holder, last))
            setattr(holder, last, value)
        yield
