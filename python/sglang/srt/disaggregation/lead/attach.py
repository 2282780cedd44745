"""Wraps SGLang's methods with the parts that are switched on.

SGLang 0.5.23 calls ``activate`` in each of its processes, through the entry point ``disagg_lead``
of the group ``sglang.srt.plugins``. A part is a module of this package with ``install(wrap)``,
which imports the classes and names the methods that it wraps. ``flags`` and ``identity`` are always
on: they add arguments to SGLang's parser, and report the package.

Contract: ``activate`` runs in each process of SGLang before it builds its engine or scheduler, when
no thread calls the wrapped methods yet, so there is no lock. A second call, after a launcher has
read its flags, attaches the parts again if others are on. All ranks have the same environment, and
so the same parts.
"""

from __future__ import annotations

import functools
import importlib
import inspect
import logging
from collections.abc import Callable
from importlib import metadata
from typing import Any, NamedTuple  # Any: SGLang's functions and objects

from sglang.srt.patchset import environment
from sglang.srt.patchset.table import CURRENT_VERSION, LEAD

logger = logging.getLogger(__name__)

Function = Callable[..., Any]


class LeadPart(NamedTuple):
    """A module of this package. ``is_on`` returns True if it is switched on."""

    name: str
    is_on: Callable[[], bool]


def _is_made_for() -> bool:
    return metadata.version("sglang") == CURRENT_VERSION


def _is_local() -> bool:
    return environment.LOCAL_TOKENS.read() + environment.FALLBACK_PREFILL_TOKENS.read() > 0


def _is_remaining() -> bool:
    return environment.DECODE_ADMISSION.read() == "remaining"


#: In wrapping order: the function of a later part is called first.
PARTS: tuple[LeadPart, ...] = (
    LeadPart("flags", _is_made_for),
    LeadPart("settings", lambda: _is_local() or _is_remaining()),
    LeadPart("prefill_exit", _is_local),
    LeadPart("local_scheduler", _is_local),
    LeadPart("explain", lambda: _is_local() and environment.EXPLAIN.read()),
    LeadPart("without_prefill", lambda: environment.FALLBACK_PREFILL_TOKENS.read() > 0),
    LeadPart("thread", lambda: environment.NIXL_PROGRESS_DELAY.read(0) > 0),
    LeadPart("admission", _is_remaining),
    LeadPart("identity", _is_made_for),
)

#: Names of the parts attached in this process.
attached: list[str] = []
#: SGLang's own attributes that the attached parts replace.
_stock: list[tuple[type, str, Any]] = []


def parts_on() -> list[LeadPart]:
    """Return the parts that are on with this environment.

    Raises:
        ValueError: a variable has a value that is not allowed.
    """
    if not environment.is_active() or LEAD in environment.DISABLED_GROUPS.read():
        return []
    return [part for part in PARTS if part.is_on()]


def activate() -> None:
    """Attach the parts that are switched on. Called by SGLang's plugin loader, and again when a
    launcher has read its flags.

    Raises:
        SystemExit: a variable has a wrong value or a method of SGLang another signature. Not
            another exception, because the loader would log it and start without the plugin.
    """
    if not environment.is_active():
        return
    found = metadata.version("sglang")
    if found == CURRENT_VERSION and (wrong := environment.wrong()):
        raise SystemExit(wrong)
    names = [part.name for part in parts_on()]
    if names == attached:
        return
    if found != CURRENT_VERSION:
        logger.warning(
            "group %s is inert: made for SGLang %s, found %s", LEAD, CURRENT_VERSION, found
        )
        return
    _restore()
    wraps = Wraps()
    for name in names:
        importlib.import_module(f"{__package__}.{name}").install(wraps)
    if wraps.misfits:
        raise SystemExit(f"SGLang {found} is not as recorded: {'; '.join(wraps.misfits)}")
    wraps.bind()
    attached.extend(names)


def _restore() -> None:
    """Give SGLang its own methods back, so that all parts are attached in their order."""
    for owner, name, attribute in reversed(_stock):
        setattr(owner, name, attribute)
    _stock.clear()
    attached.clear()


class Wraps:
    """Methods to replace, all or none."""

    def __init__(self) -> None:
        self._replacements: list[tuple[type, str, Function]] = []
        #: Methods whose signature differs, as text.
        self.misfits: list[str] = []

    def __call__(self, owner: type, name: str, signature: str) -> Callable[[Function], Function]:
        """Return a decorator for a function that replaces the method ``name`` of ``owner``. The
        function gets the stock method before the method's own arguments.

        ``signature``: of the stock method in 0.5.23, without annotations, as ``"(self, req)"``.
        """
        stock = getattr(owner, name, None)
        found = "nothing" if stock is None else shape(stock)
        if found != signature:
            self.misfits.append(f"{owner.__name__}.{name} is {found}, not {signature}")

        def decorate(wrapper: Function) -> Function:
            self._replacements.append((owner, name, wrapper))
            return wrapper

        return decorate

    def bind(self) -> None:
        """Replace the methods."""
        for owner, name, wrapper in self._replacements:
            attribute = inspect.getattr_static(owner, name)
            _stock.append((owner, name, attribute))
            method = _around(getattr(owner, name), wrapper)
            is_static = isinstance(attribute, (staticmethod, classmethod))
            setattr(owner, name, staticmethod(method) if is_static else method)


def _around(stock: Function, wrapper: Function) -> Function:
    @functools.wraps(stock)
    def method(self: Any, *args: Any, **kwargs: Any) -> Any:
        return wrapper(functools.partial(stock, self), self, *args, **kwargs)

    return method


def shape(function: Function) -> str:
    """Return the signature of ``function`` without annotations."""
    signature = inspect.signature(function)
    plain = [p.replace(annotation=p.empty) for p in signature.parameters.values()]
    return str(signature.replace(parameters=plain, return_annotation=signature.empty))
