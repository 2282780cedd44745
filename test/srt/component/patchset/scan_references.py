"""Import everything a server imports, then look for stock classes that the table has replaced.

Run by ``test_stale_references.py`` in its own process; prints one line a finding.
"""

from __future__ import annotations

import gc
import importlib
import sys
import types
from collections.abc import Iterator

ENTRY_POINTS = (
    "sglang.launch_server",
    "sglang.srt.managers.scheduler",
    "sglang.srt.managers.tp_worker",
    "sglang.srt.managers.data_parallel_controller",
    "sglang.srt.entrypoints.engine",
    "sglang.srt.entrypoints.http_server",
    "sglang.srt.disaggregation.nixl",
    "sglang.srt.disaggregation.mooncake",
    "sglang.srt.disaggregation.ascend.conn",
    "sglang.srt.mem_cache.chunk_cache",
    "sglang.srt.mem_cache.hiradix_cache",
    "sglang.srt.mem_cache.hi_mamba_radix_cache",
    "sglang.srt.mem_cache.mamba_radix_cache",
    "sglang.srt.mem_cache.swa_radix_cache",
)


def holders(base: type, module: str, bound: type) -> Iterator[str]:
    """Yield places that still refer to ``base`` although ``module`` now has ``bound``."""
    if base.__module__ != module:
        return  # the row names a consumer: other modules keep the stock class on purpose
    for name, loaded in list(sys.modules.items()):
        if name.startswith("sglang") and loaded is not None:
            for key, value in list(vars(loaded).items()):
                if value is base:
                    yield f"module attribute {name}.{key}"
    for derived in base.__subclasses__():
        if (
            base in derived.__bases__
            and not issubclass(derived, bound)
            and not issubclass(bound, derived)
        ):
            yield f"subclass {derived.__module__}.{derived.__qualname__}"
    yield from _hidden(base)


def _hidden(base: type) -> Iterator[str]:
    """Yield references in registries, defaults and closures, except those of ``super()``."""
    modules = {id(vars(m)) for m in list(sys.modules.values()) if isinstance(m, types.ModuleType)}
    for referrer in gc.get_referrers(base):
        if isinstance(referrer, dict) and id(referrer) not in modules:
            keys = [key for key, value in referrer.items() if value is base]
            if any(isinstance(key, str) and key.isidentifier() for key in keys):
                yield f"dictionary entry {keys}"


def main() -> None:
    """Print the findings, and the number of checked rows."""
    from sglang.srt.patchset import status

    for name in ENTRY_POINTS:
        importlib.import_module(name)
    report = status.load_all()
    attachment = status.attachment
    assert attachment is not None and not report.inert, report.inert
    for item in (item for group in report.groups for item in group.rows):
        if item.status is not status.RowStatus.BOUND:
            print(f"{item.row.target}: {item.status.value} {item.reason}")
    for row, (base, bound) in attachment.bound.items():
        for finding in holders(base, row.module, bound):
            print(f"{row.target}: {finding}")
    print(f"{len(attachment.bound) + len(attachment.optional)} rows")


if __name__ == "__main__":
    main()
