"""The replacement table: every SGLang class that this patch set replaces, and nothing else.

To add a row, write a *mixin*: a plain class, not a subclass of the upstream one, whose methods call
``super()``. The hook builds ``class Name(Mixin, UpstreamName)`` right after the upstream module has
executed and binds it in that module under the upstream name, so that everything that imports the
name later gets it. What a mixin has to keep to is checked by :mod:`sglang.srt.patchset.guard`:

* mark every method that overrides an upstream one with ``typing_extensions.override`` (innermost,
  below ``staticmethod`` and the like), and give it the upstream parameters and defaults;
* a method that is not marked must be new;
* a mixin for a dataclass is a dataclass; its fields come after the upstream ones and have defaults;
* a mixin module must not import a name from its own target module at its top: it would get the
  class that is about to be replaced. Import inside the method, or under ``TYPE_CHECKING``.

Rows for one name stack in table order, the last one outermost. Name the module whose *global* the
consumer reads: ``managers.scheduler`` and ``RadixCache`` replaces the tree that the scheduler
builds and leaves every other user of ``RadixCache`` with the stock one.
"""

from __future__ import annotations

from dataclasses import dataclass

#: The only SGLang release that this patch set attaches to.
BASE_VERSION = "0.5.10.post1"


@dataclass(frozen=True)
class Replacement:
    """One row: in ``module``, ``name`` becomes ``mixin`` ("package.module:Class") on top of it."""

    module: str
    name: str
    mixin: str
    why: str

    @property
    def target(self) -> str:
        """The replaced name, as "module:Name"."""
        return f"{self.module}:{self.name}"


TABLE: tuple[Replacement, ...] = (
    Replacement(
        module="sglang.srt.server_args",
        name="ServerArgs",
        mixin="sglang.srt.patchset.args:DisaggArgs",
        why="the flags of the patch set, and their validation",
    ),
)
