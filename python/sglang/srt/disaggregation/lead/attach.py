"""Wraps SGLang's methods with the parts that are switched on.

SGLang 0.5.23 calls ``activate`` in each of its processes, by the entry point ``disagg_lead`` of
the group ``sglang.srt.plugins``. A part is a module of this package with ``install(wrap)``, which
imports the classes that it needs and names the methods that it wraps. With no part on nothing of
SGLang is imported or replaced.
"""

from __future__ import annotations

import functools
import importlib
import inspect
import logging
from collections.abc import Callable
from importlib import metadata
from typing import Any, NamedTuple  # Any: SGLang's functions and objects

from sglang.srt.disaggregation.lead import settings
from sglang.srt.patchset import environment
from sglang.srt.patchset.table import CURRENT_VERSION, LEAD

logger = logging.getLogger(__name__)

Function = Callable[..., Any]


class LeadPart(NamedTuple):
    """A module of this package, and whether it is switched on. ``is_plain``: servers on which it
    was not run refuse to start with it (``settings``)."""

    name: str
    is_on: Callable[[], bool]
    is_plain: bool = True


def _is_local() -> bool:
    return environment.LOCAL_TOKENS.read() + environment.FALLBACK_PREFILL_TOKENS.read() > 0


#: In the order in which they wrap: the later one's function is called first.
PARTS: tuple[LeadPart, ...] = (
    LeadPart("prefill_exit", _is_local),
    LeadPart("local_scheduler", _is_local),
    LeadPart("without_prefill", lambda: environment.FALLBACK_PREFILL_TOKENS.read() > 0),
    LeadPart("thread", lambda: environment.NIXL_PROGRESS_DELAY.read(0) > 0, is_plain=False),
    LeadPart("admission", lambda: environment.DECODE_ADMISSION.read() == "remaining"),
)

#: The parts that are attached in this process.
attached: list[str] = []


def parts_on() -> list[LeadPart]:
    """The parts that the environment switches on.

    Raises:
        ValueError: a variable is set to something that is not allowed.
    """
    if not environment.is_active() or LEAD in environment.DISABLED_GROUPS.read():
        return []
    return [part for part in PARTS if part.is_on()]


def activate() -> None:
    """Called by SGLang's plugin loader.

    Raises:
        SystemExit: a variable or a method of SGLang is not what it has to be. The loader logs any
            other exception and starts the server without the plugin.
    """
    if not environment.is_active():
        return
    found = metadata.version("sglang")
    if found == CURRENT_VERSION and (wrong := environment.wrong()):
        raise SystemExit(wrong)
    parts = parts_on()
    if not parts or attached:
        return
    if found != CURRENT_VERSION:
        logger.warning(
            "inert: the group %s is for SGLang %s, found %s", LEAD, CURRENT_VERSION, found
        )
        return
    wraps = Wraps()
    for part in parts:
        importlib.import_module(f"{__package__}.{part.name}").install(wraps)
    if any(part.is_plain for part in parts):
        _refuse_at_start(wraps)
    if wraps.misfits:
        raise SystemExit(f"SGLang {found} is not as recorded: {'; '.join(wraps.misfits)}")
    wraps.bind()
    attached.extend(part.name for part in parts)


class Wraps:
    """Methods to be replaced, all or none."""

    def __init__(self) -> None:
        self._wanted: list[tuple[type, str, Function]] = []
        #: Names of methods that differ from the recorded ones.
        self.misfits: list[str] = []

    def __call__(self, owner: type, name: str, signature: str) -> Callable[[Function], Function]:
        """A decorator: the function gets the stock method before the method's own arguments, and
        takes its place in ``owner`` and wherever that class is inherited or bound.

        ``signature``: the stock method's in 0.5.23, without annotations, as ``"(self, req)"``.
        """
        stock = getattr(owner, name, None)
        found = "nothing" if stock is None else shape(stock)
        if found != signature:
            self.misfits.append(f"{owner.__name__}.{name} is {found}, not {signature}")

        def note(ours: Function) -> Function:
            self._wanted.append((owner, name, ours))
            return ours

        return note

    def bind(self) -> None:
        """Replace them."""
        for owner, name, ours in self._wanted:
            stock = getattr(owner, name)
            setattr(owner, name, _around(stock, ours))


def _around(stock: Function, ours: Function) -> Function:
    @functools.wraps(stock)
    def method(self: Any, *args: Any, **kwargs: Any) -> Any:
        return ours(functools.partial(stock, self), self, *args, **kwargs)

    return method


def shape(function: Function) -> str:
    """The signature of ``function`` without annotations."""
    signature = inspect.signature(function)
    plain = [each.replace(annotation=each.empty) for each in signature.parameters.values()]
    return str(signature.replace(parameters=plain, return_annotation=signature.empty))


def _refuse_at_start(wrap: Wraps) -> None:
    from sglang.srt.arg_groups.overrides import model_config_of, resolved_view
    from sglang.srt.server_args import ServerArgs

    @wrap(ServerArgs, "resolve_once", "(self)")
    def resolve_once(stock: Function, self: Any) -> None:
        stock()
        args = resolved_view(self)
        if args.disaggregation_mode == "null":
            return
        reasons = list(settings.refused(args, model_config_of(self)))
        if reasons:
            variables = ", ".join(environment.given(LEAD))
            raise ValueError(
                f"{variables} cannot be combined with {'; '.join(reasons)}. Remove one of them."
            )
