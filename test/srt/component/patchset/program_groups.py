"""Feature groups with a mixin that does not fit its real SGLang class: what is left of them?

Run in a process of its own, with a model's path, {group: "module:Name"} and {start: {argument:
value}} in JSON: gives these rows a mixin that overrides what SGLang's class has not, starts
schedulers with these arguments (up to SGLang's own constructor), and imports all targets. Prints
one JSON object: how each start ended, the states of the groups, and which classes have our mixins.
"""

from __future__ import annotations

import dataclasses
import importlib
import json
import sys
from importlib.util import find_spec, module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType
from typing import Any

from typing_extensions import override


class Misfit:
    """Overrides what no class of SGLang has."""

    @override
    def renamed_by_upstream(self) -> None:
        """As if SGLang had renamed it."""


def load_table() -> Any:
    """The table, before SGLang is imported and the hook reads it."""
    hook = find_spec("sglang_disagg_patchset_hook")
    assert hook is not None and hook.origin is not None
    file = Path(hook.origin).with_name("sglang") / "srt/patchset/table.py"
    spec = spec_from_file_location("sglang.srt.patchset.table", file)
    assert spec is not None and spec.loader is not None
    table = sys.modules[spec.name] = module_from_spec(spec)
    spec.loader.exec_module(table)
    return table


def spoil(table: Any, misfits: dict[str, str]) -> None:
    """Give each group's row for the target ("module:Name") the misfit."""
    this = ModuleType("misfits")
    this.Misfit = Misfit  # type: ignore[attr-defined]
    sys.modules["misfits"] = this
    groups = []
    for each in table.GROUPS:
        rows = list(each.rows)
        if each.name in misfits:
            at = [row.target for row in rows].index(misfits[each.name])
            rows[at] = dataclasses.replace(rows[at], mixin="misfits:Misfit")
        groups.append(dataclasses.replace(each, rows=tuple(rows)))
    table.GROUPS = tuple(groups)
    table.TABLE = tuple(row for each in groups for row in each.rows)


def mixed_in(table: Any) -> dict[str, list[str]]:
    """For each group, the targets whose classes have its mixins, or whose objects may get them."""
    from sglang.srt.patchset import status

    assert status.attachment is not None
    found: dict[str, list[str]] = {}
    for group in table.GROUPS:
        for row in group.rows:
            cls = getattr(importlib.import_module(row.module), row.name)
            mixin_module, _, mixin = row.mixin.partition(":")
            is_in = issubclass(cls, getattr(importlib.import_module(mixin_module), mixin))
            assert not (is_in and row.when)
            if is_in or row in status.attachment.optional:
                found.setdefault(group.name, []).append(row.target)
    return found


class StartedError(Exception):
    """SGLang's own constructor was reached."""


def start(server_args: Any) -> str:
    """How the start of a scheduler ends; "StartedError: " with the optional mixins that it got."""
    from sglang.srt.managers.scheduler import Scheduler

    def stock(self: Any, server_args: Any) -> None:
        names = [mixin.__name__ for mixin in optional() if isinstance(self, mixin)]
        raise StartedError(" ".join(names))

    bottom = [cls for cls in Scheduler.__mro__ if cls.__name__ == "Scheduler"][-1]
    original, bottom.__init__ = bottom.__init__, stock
    try:
        Scheduler(server_args)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    finally:
        bottom.__init__ = original
    return "nothing happened"


def optional() -> list[type]:
    """The mixins of the real table that are put on single schedulers."""
    from sglang.srt.disaggregation.delta.decode.invariants import BalancedScheduler
    from sglang.srt.disaggregation.delta.decode.local_scheduler import LocalTurnsScheduler
    from sglang.srt.disaggregation.delta.decode.offload import OffloadScheduler
    from sglang.srt.disaggregation.delta.decode.scheduler import DisaggScheduler
    from sglang.srt.mem_cache.buffer_only.scheduler import BufferOnlyScheduler
    from sglang.srt.mem_cache.buffer_only.store_scheduler import StoreScheduler

    of_decode = [DisaggScheduler, LocalTurnsScheduler, OffloadScheduler]
    return [BalancedScheduler, *of_decode, BufferOnlyScheduler, StoreScheduler]


def parse(model: str, arguments: dict[str, Any]) -> Any:
    """The server arguments, or how they were refused."""
    from sglang.srt.server_args import ServerArgs

    try:
        return ServerArgs(model_path=model, **arguments)
    except Exception as error:
        return f"{type(error).__name__}: {error}"


def main() -> None:
    """Spoil, start, look."""
    model, misfits, starts = sys.argv[1:]
    table = load_table()
    spoil(table, json.loads(misfits))
    # As a launcher does: when arguments are parsed, the schedulers' modules are not imported yet.
    parsed = {name: parse(model, arguments) for name, arguments in json.loads(starts).items()}
    ended = {n: args if isinstance(args, str) else start(args) for n, args in parsed.items()}
    mixed = mixed_in(table)
    from sglang.srt.patchset import state

    states = {each.group.name: each.status.value for each in state().groups}
    print(json.dumps({"ended": ended, "states": states, "mixed_in": mixed}))


if __name__ == "__main__":
    main()
