"""Feature groups with a mixin that does not fit its real SGLang class.

Run in its own process, with a model's path, {group: "module:Name"} and {start: {argument: value}}
in JSON. Gives these rows a mixin that overrides a method SGLang's class lacks, starts schedulers
with these arguments (up to SGLang's own constructor), and imports all targets. Prints one JSON
object: the result of each start, the states of the groups, and the classes with mixins.
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
    """A mixin that overrides a method which no class of SGLang has."""

    @override
    def renamed_by_upstream(self) -> None:
        """Stand for a method that SGLang has renamed."""


def load_table() -> Any:
    """Load the table before SGLang is imported and the hook reads it."""
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
    for group in table.GROUPS:
        rows = list(group.rows)
        if group.name in misfits:
            index = [row.target for row in rows].index(misfits[group.name])
            rows[index] = dataclasses.replace(rows[index], mixin="misfits:Misfit")
        groups.append(dataclasses.replace(group, rows=tuple(rows)))
    table.GROUPS = tuple(groups)
    table.TABLE = tuple(row for group in groups for row in group.rows)


def mixed_in(table: Any) -> dict[str, list[str]]:
    """Return for each group the targets that have its mixins, or get them on objects."""
    from sglang.srt.patchset import status

    assert status.attachment is not None
    targets: dict[str, list[str]] = {}
    for group in table.GROUPS:
        for row in group.rows:
            cls = getattr(importlib.import_module(row.module), row.name)
            mixin_module, _, mixin = row.mixin.partition(":")
            is_in = issubclass(cls, getattr(importlib.import_module(mixin_module), mixin))
            assert not (is_in and row.when)
            if is_in or row in status.attachment.optional:
                targets.setdefault(group.name, []).append(row.target)
    return targets


class StartedError(Exception):
    """SGLang's own constructor was reached."""


def start(server_args: Any) -> str:
    """Return the error that ends a scheduler's start: "StartedError: " and its optional mixins."""
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
    return "no error"


def optional() -> list[type]:
    """Return the mixins of the real table that are put on single schedulers."""
    from sglang.srt.disaggregation.delta.decode.invariants import BalancedScheduler
    from sglang.srt.disaggregation.delta.decode.local_scheduler import LocalTurnsScheduler
    from sglang.srt.disaggregation.delta.decode.offload import OffloadScheduler
    from sglang.srt.disaggregation.delta.decode.scheduler import DisaggScheduler
    from sglang.srt.mem_cache.buffer_only.scheduler import BufferOnlyScheduler
    from sglang.srt.mem_cache.buffer_only.store_scheduler import StoreScheduler

    decode_mixins = [DisaggScheduler, LocalTurnsScheduler, OffloadScheduler]
    return [BalancedScheduler, *decode_mixins, BufferOnlyScheduler, StoreScheduler]


def parse(model: str, arguments: dict[str, Any]) -> Any:
    """Return the server arguments, or the error that refused them."""
    from sglang.srt.server_args import ServerArgs

    try:
        return ServerArgs(model_path=model, **arguments)
    except Exception as error:
        return f"{type(error).__name__}: {error}"


def main() -> None:
    """Break the groups, start schedulers and print the results."""
    model, misfits, starts = sys.argv[1:]
    table = load_table()
    spoil(table, json.loads(misfits))
    # As a launcher does: when arguments are parsed, the schedulers' modules are not imported yet.
    parsed = {name: parse(model, arguments) for name, arguments in json.loads(starts).items()}
    ended = {n: args if isinstance(args, str) else start(args) for n, args in parsed.items()}
    mixed = mixed_in(table)
    from sglang.srt.patchset import state

    states = {group.group.name: group.status.value for group in state().groups}
    print(json.dumps({"ended": ended, "states": states, "mixed_in": mixed}))


if __name__ == "__main__":
    main()
