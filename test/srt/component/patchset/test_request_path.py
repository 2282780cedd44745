"""The number of files that a request passes through is that of docs/design.md."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[4]
DOCUMENTED = re.compile(r"at most (\d+) of our files on decode and (\d+) on prefill")

#: Features that are off on the traced servers.
OFF = re.compile("/local_|/turn_|speculation|retraction|/mooncake/|buffer_only/")
#: Number of files by which the text may be too high.
SLACK = 3


def test_a_request_passes_through_as_many_files_as_the_text_says() -> None:
    """Guards against a path that grows file by file, and against an outdated number in the text."""
    script = ROOT / "scripts/request_path.py"
    done = subprocess.run(
        [sys.executable, script], capture_output=True, text=True, timeout=300, check=False
    )
    paths = dict(re.findall(r"^(decode|prefill): \d+ files: (.*)$", done.stdout, re.MULTILINE))
    assert set(paths) == {"decode", "prefill"}, done.stderr
    documented = DOCUMENTED.search(" ".join((ROOT / "docs/design.md").read_text().split()))
    assert documented is not None
    for (side, names), bound in zip(
        sorted(paths.items()), map(int, documented.groups()), strict=True
    ):
        files = names.split(", ")
        assert bound - SLACK <= len(files) <= bound, (side, len(files), files)
        # No file of the other side's folder is on the path.
        other = {"decode": "/prefill/", "prefill": "/decode/"}[side]
        assert [file for file in files if f"delta{other}" in file or OFF.search(file)] == []
