"""Flags of the group on the command line of SGLang 0.5.23, each for one environment variable.

SGLang's parser gets them, so that they are also in ``--help`` and ``--config`` files; a keyword
argument of ``sglang.Engine`` has the name of a flag, with underscores. A flag sets its variable,
which SGLang's processes inherit, and replaces a value that the variable had, until the next parse.

Contract: main thread of a launcher, before it starts a process.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from typing import Any  # Any: SGLang's arguments

from sglang.srt.disaggregation.lead import attach
from sglang.srt.patchset import environment, flags
from sglang.srt.patchset.environment import Variable

ADMISSION = "--disaggregation-decode-admission"
#: Flag -> variable. The names are those of 0.5.10.post1, where admission needs no flag.
VARIABLE_OF: dict[str, Variable[Any]] = {
    flags.LOCAL: environment.LOCAL_TOKENS,
    flags.LOCAL_WHEN_LOST: environment.FALLBACK_PREFILL_TOKENS,
    flags.LOCAL_TIME_RATIO: environment.LOCAL_SHARE,
    flags.LOCAL_MAX_ITL: environment.LOCAL_MAX_ITL_MS,
    ADMISSION: environment.DECODE_ADMISSION,
}


def install(wrap: attach.Wraps) -> None:
    """See ``attach``."""
    from sglang.srt.server_args import ServerArgs

    @wrap(ServerArgs, "add_cli_args", "(parser)")
    def add_cli_args(stock: attach.Function, parser: argparse.ArgumentParser) -> None:
        stock()
        group = parser.add_argument_group("sglang-disagg-patchset")
        for flag, variable in VARIABLE_OF.items():
            text = f"{variable.text} Sets {variable.name}.".replace("%", "%%")
            group.add_argument(flag, type=_checked(variable), metavar="VALUE", help=text)

    @wrap(ServerArgs, "from_cli_args", "(args)")
    def from_cli_args(stock: attach.Function, args: argparse.Namespace) -> Any:
        _take_from(vars(args))
        return stock()

    def from_keywords(**keywords: Any) -> Any:
        _take_from(keywords)
        return ServerArgs(**keywords)

    # Its constructor loads SGLang's plugins, and then calls this attribute.
    engine = sys.modules.get("sglang.srt.entrypoints.engine")
    if engine is not None:
        engine.Engine.server_args_class = staticmethod(from_keywords)


def _checked(variable: Variable[Any]) -> Callable[[str], str]:
    """Return a parser of ``argparse`` that checks a text and returns it."""

    def check(text: str) -> str:
        try:
            variable.parse(text)
        except ValueError:
            raise argparse.ArgumentTypeError(f"must be {variable.allowed}, not {text!r}") from None
        return text

    return check


#: Variables that flags have set, with their text before: a second engine of a process does not
#: inherit the flags of the first.
_before: dict[str, str | None] = {}


def _take_from(arguments: dict[str, Any]) -> None:
    """Remove our flags from ``arguments``, set their variables, and attach the parts that are now
    on.

    Raises:
        ValueError: a value that is not allowed; the message names the argument.
    """
    for flag, variable in VARIABLE_OF.items():
        name = flag.removeprefix("--").replace("-", "_")
        if name in _before:
            variable.write(_before.pop(name), variable.name)
        value = arguments.pop(name, None)
        if value is not None:
            _before[name] = variable.write(str(value), name)
    attach.activate()
