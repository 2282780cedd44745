"""Makes README the long description of the package on an index, which has none of the other files.

Links to files become absolute with the address ``Repository`` of ``[project.urls]``, or plain text
if there is none.
"""

import re
from pathlib import Path
from typing import Any  # Any: the table [project]

from hatchling.metadata.plugin.interface import MetadataHookInterface

LINK = re.compile(r"(!?)\[([^\]]*)\]\((?!https?:)([^)]*)\)")


def long_description(text: str, repository: str | None, version: str) -> str:
    """Return ``text`` with absolute links, to the tag of ``version``."""

    def absolute(link: re.Match[str]) -> str:
        mark, label, target = link.groups()
        if not repository:
            return label
        view, path = ("raw" if mark else "blob"), f"README.md{target}" * target.startswith("#")
        return f"{mark}[{label}]({repository}/{view}/v{version}/{path or target})"

    return LINK.sub(absolute, text)


class CustomMetadataHook(MetadataHookInterface):
    def update(self, metadata: dict[str, Any]) -> None:
        repository = metadata.get("urls", {}).get("Repository")
        text = (Path(self.root) / "README.md").read_text()
        text = long_description(text, repository, metadata["version"])
        metadata["readme"] = {"content-type": "text/markdown", "text": text}
