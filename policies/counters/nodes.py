"""The server, or the nodes of a cluster, that hold the counters, and which of them holds a key."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable
from dataclasses import replace

from policies.counters.resp import Address, Link, Unanswered, cluster_slot

MAX_REMEMBERED_KEYS = 50_000


class Nodes:
    """Connections by node. A single server holds every key; a cluster is recognised by itself."""

    def __init__(self, address: Address, deadline_s: float, scripts: tuple[str, ...]) -> None:
        self._address = address
        self._deadline_s = deadline_s
        self._scripts = scripts
        self._links: dict[tuple[str, int], Link] = {}
        self._starts: list[int] = []
        self._owners: list[tuple[str, int]] = []
        self._slots: dict[str, int] = {}
        self.cluster = False
        self.stale = True
        """The layout must be read again: a node is gone, or a key has moved."""

    @property
    def usable(self) -> bool:
        """Whether every node can be asked right now."""
        return not self.stale and all(self._answers(link) for link in self._links.values())

    def link(self, key: str) -> Link | None:
        """The connection to the node of a key; None when that cannot be asked right now without waiting too long."""
        if not self._links:
            return None
        link = self._links.get(self._owner(key)) if self.cluster else next(iter(self._links.values()))
        return link if link is not None and self._answers(link) else None

    async def refresh(self, timeout_s: float) -> None:
        """Read the layout and connect to every node. Raises OSError, TimeoutError, Unanswered, hiredis.HiredisError."""
        self._drop(lambda link: link.closed)
        home = (self._address.host, self._address.port)
        first = self._links.get(home) or await self._connect(*home, timeout_s)
        self._links[home] = first
        info = await first.ask("INFO", "cluster", within_s=timeout_s)
        self.cluster = isinstance(info, bytes) and b"cluster_enabled:1" in info
        if self.cluster:
            await self._read_layout(first, timeout_s)
        self.stale = False

    def give_up_on(self, silent_for_s: float) -> None:
        """Close connections that have not answered for so long: a new one may get through where they do not."""
        for link in self._links.values():
            if link.oldest_s() > silent_for_s:
                link.close()
        if any(link.closed for link in self._links.values()):
            self.stale = True

    async def load_scripts(self, timeout_s: float) -> None:
        """Load the scripts on every node, again: a server that lost them answers NOSCRIPT."""
        for link in self._links.values():
            for script in self._scripts:
                await link.ask("SCRIPT", "LOAD", script, within_s=timeout_s)

    def close(self) -> None:
        self._drop(lambda link: True)

    async def _connect(self, host: str, port: int, timeout_s: float) -> Link:
        link = await Link.connect(replace(self._address, host=host, port=port), self._deadline_s, timeout_s)
        for script in self._scripts:
            await link.ask("SCRIPT", "LOAD", script, within_s=timeout_s)
        return link

    async def _read_layout(self, first: Link, timeout_s: float) -> None:
        layout = await first.ask("CLUSTER", "SLOTS", within_s=timeout_s)
        if not isinstance(layout, list) or not layout:
            raise Unanswered("the cluster has no slots yet")
        ranges = []
        for start, _, master, *_ in layout:
            host = master[0].decode() if master[0] else self._address.host
            node = (host, int(master[1]))
            if node not in self._links:
                self._links[node] = await self._connect(*node, timeout_s)
            ranges.append((int(start), node))
        ranges.sort()
        self._starts = [start for start, _ in ranges]
        self._owners = [node for _, node in ranges]

    def _owner(self, key: str) -> tuple[str, int]:
        slot = self._slots.get(key)
        if slot is None:
            if len(self._slots) >= MAX_REMEMBERED_KEYS:
                self._slots.clear()
            slot = self._slots[key] = cluster_slot(key)
        return self._owners[bisect_right(self._starts, slot) - 1]

    def _answers(self, link: Link) -> bool:
        return not link.closed and link.oldest_s() <= self._deadline_s

    def _drop(self, unwanted: Callable[[Link], bool]) -> None:
        for node in [node for node, link in self._links.items() if unwanted(link)]:
            self._links.pop(node).close()
