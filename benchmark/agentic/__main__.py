"""Command line of the suite.

python -m benchmark.agentic COMMAND [--help]
"""

from __future__ import annotations

import importlib
import sys

COMMANDS = {
    "generate": ("benchmark.agentic.sample.generate", "make a trace of agentic traffic"),
    "sample": ("benchmark.agentic.sample.cli", "cut a smaller trace that shares as much"),
    "describe": ("benchmark.agentic.sample.describe", "what a trace holds"),
    "replay": ("benchmark.agentic.replay.cli", "send a trace to a server or router"),
    "route": ("benchmark.agentic.router.cli", "run the router"),
    "capacity": ("benchmark.agentic.capacity.cli", "where the decode capacity wall stands"),
    "simulate": ("benchmark.agentic.capacity.simulate", "replay a trace against simulated pools"),
    "report": ("benchmark.agentic.report.cli", "a matrix of real servers, one page"),
}


def main() -> int:
    """Exit status of the command; each module's ``main`` takes the arguments after its name."""
    name, *arguments = sys.argv[1:] or ["--help"]
    if name not in COMMANDS:
        width = max(map(len, COMMANDS))
        print("python -m benchmark.agentic COMMAND [--help]\n")
        print("\n".join(f"  {command:<{width}}  {text}" for command, (_, text) in COMMANDS.items()))
        return 0 if name in ("-h", "--help") else 2
    module = importlib.import_module(COMMANDS[name][0])
    return int(module.main(arguments) or 0)


if __name__ == "__main__":
    sys.exit(main())
