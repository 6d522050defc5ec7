"""The fixed membership of one epoch: which rank lives on which node, and who replays for whom.

Built once from the set-up exchange and read by every verdict. It never changes within an epoch and holds no
observation. Flow: set-up exchange -> **Group** -> plan_audit, tie_breaks, judge.
"""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class Group:
    """A replica group: the ranks that must hold bit-identical state, and where they run.

    Nodes are ordered by their lowest rank; "next node" means next in that order, and the last is followed by the
    first. No rank is a reference for the others.

    Attributes:
        nodes: node key of each rank; the index is the rank.
        instances: digest (u64) that each rank must carry in its rows.
        environments: environment digest (u64) of each rank, as exchanged at set-up.
        epoch: number of this membership (u64).
        ranks: what the job calls them, where this is one replica set of several; 0, 1, ... by default.

    Raises:
        ValueError: no rank at all, or tuples of different lengths.
    """

    nodes: tuple[str, ...]
    instances: tuple[int, ...]
    environments: tuple[int, ...]
    epoch: int
    ranks: tuple[int, ...] = ()
    _members: dict[str, tuple[int, ...]] = field(init=False, repr=False, compare=False)
    _helpers: tuple[int | None, ...] = field(init=False, repr=False, compare=False)
    _thirds: tuple[int | None, ...] = field(init=False, repr=False, compare=False)
    _served: tuple[tuple[int, ...], ...] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        if not self.nodes:
            raise ValueError("a group needs at least one rank")
        if not len(self.nodes) == len(self.instances) == len(self.environments):
            raise ValueError("nodes, instances and environments must have one entry for each rank")
        if not self.ranks:
            object.__setattr__(self, "ranks", tuple(range(len(self.nodes))))
        collected: dict[str, list[int]] = {}
        for rank, node in enumerate(self.nodes):
            collected.setdefault(node, []).append(rank)
        members = {node: tuple(ranks) for node, ranks in collected.items()}
        helpers, thirds = self._partners(members, 1), self._partners(members, 2)
        served: list[list[int]] = [[] for _ in self.nodes]
        for owner, server in enumerate(helpers):
            if server is not None:
                served[server].append(owner)
        # A frozen dataclass lets derived fields be set only this way, once, here.
        object.__setattr__(self, "_members", members)
        object.__setattr__(self, "_helpers", helpers)
        object.__setattr__(self, "_thirds", thirds)
        object.__setattr__(self, "_served", tuple(tuple(owners) for owners in served))

    @staticmethod
    def _partners(members: dict[str, tuple[int, ...]], distance: int) -> tuple[int | None, ...]:
        order = list(members)
        partners: dict[int, int | None] = {}
        for position, node in enumerate(order):
            there = members[order[(position + distance) % len(order)]]
            for local, rank in enumerate(members[node]):
                partners[rank] = there[local % len(there)] if len(order) > distance else None
        return tuple(partners[rank] for rank in sorted(partners))

    def part(self, ranks: tuple[int, ...]) -> Group:
        """The group of some of these ranks alone, by position."""
        return Group(
            nodes=tuple(self.nodes[rank] for rank in ranks),
            instances=tuple(self.instances[rank] for rank in ranks),
            environments=tuple(self.environments[rank] for rank in ranks),
            epoch=self.epoch,
            ranks=tuple(self.ranks[rank] for rank in ranks),
        )

    @property
    def size(self) -> int:
        """Number of ranks."""
        return len(self.nodes)

    @property
    def node_order(self) -> tuple[str, ...]:
        """The distinct nodes, ordered by their lowest rank."""
        return tuple(self._members)

    def members(self, node: str) -> tuple[int, ...]:
        """Ranks on `node`, ascending."""
        return self._members[node]

    def helper(self, rank: int) -> int | None:
        """The rank on the next node that replays `rank`'s micro-batch; None when there is only one node."""
        return self._helpers[rank]

    def third(self, rank: int) -> int | None:
        """A rank on a node that is neither `rank`'s nor its helper's; None with fewer than three nodes."""
        return self._thirds[rank]

    def served_by(self, rank: int) -> tuple[int, ...]:
        """The ranks whose helper is `rank` (several, or none, where nodes differ in size)."""
        return self._served[rank]
