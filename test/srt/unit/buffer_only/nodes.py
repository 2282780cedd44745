"""Tree nodes without a tree."""

from __future__ import annotations

from typing import Any

from sglang.srt.mem_cache.buffer_only.backup_queue import StoredNode, split_marks


class Node(StoredNode):
    """A path of nodes whose tokens do not matter."""

    def __init__(self, parent: Node | None, tokens: int) -> None:
        self.parent = parent
        self.key = range(tokens)
        self.backuped = False

    def split(self, front: int) -> Node:
        """Cut off the first ``front`` tokens, as SGLang's tree does."""
        new = Node(self.parent, front)
        self.parent, self.key = new, range(len(self.key) - front)
        split_marks(new, self, front)
        return new


def chain(*tokens: int) -> list[Any]:
    """A root and a path below it; the nodes of the path."""
    nodes = [Node(None, 0)]
    for count in tokens:
        nodes.append(Node(nodes[-1], count))
    return nodes[1:]
