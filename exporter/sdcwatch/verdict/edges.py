"""The edge table: what a pattern of failed replays says about who is at fault.

O is a rank's original local gradient, S its own replay of it, N the replay by its helper on the next node. The edge
that a rank owns fails where S differs from N. O and S come from one node and so count as one witness. Pure table;
it knows no history. Flow: audit -> **edges** -> replay.
"""

from __future__ import annotations

from collections.abc import Set
from dataclasses import dataclass

from sdcwatch.verdict.group import Group
from sdcwatch.verdict.records import ATTRIBUTED, INCONCLUSIVE, SOFTWARE
from sdcwatch.verdict.sentences import capital, who

PERSISTENT, TRANSIENT = "persistent", "transient"


@dataclass(frozen=True, slots=True)
class EdgeView:
    """One audit as the table reads it; index = rank, an edge is named by the rank that owns it.

    Attributes:
        judged: edges that were measured and are calibrated.
        failing: those of them where S differs from N.
        original, own, served: O, S and N of each rank.
        unsure: edges that only calibrate in this audit, and failed.
        shown: ranks whose calibration showed O = S.
        first_difference: index of the first parameter where O and S differ, a rank.
    """

    judged: frozenset[int]
    failing: frozenset[int]
    original: tuple[int | None, ...]
    own: tuple[int | None, ...]
    served: tuple[int | None, ...]
    shown: frozenset[int]
    first_difference: tuple[int | None, ...] = ()
    unsure: frozenset[int] = frozenset()

    def original_differs(self, rank: int) -> bool:
        """O differs from S, where O may be compared."""
        return rank in self.shown and self.original[rank] != self.own[rank]

    def disputed(self, rank: int) -> bool:
        """O itself is disputed: by the helper's replay or by the rank's own."""
        if rank not in self.shown:
            return False
        served = self.served[rank]
        return self.original_differs(rank) or (served is not None and served != self.original[rank])


@dataclass(frozen=True, slots=True)
class Finding:
    """What the table says; the fields are those of a verdict."""

    row: str
    kind: str
    sentence: str
    suspects: tuple[int, ...] = ()
    differing: tuple[int, ...] = ()
    candidates: tuple[int, ...] = ()
    persistence: str | None = None
    contains: bool = False
    first_parameter: int | None = None


def read_table(group: Group, view: EdgeView, third: int | None = None) -> Finding | None:
    """The first row of the table that fits, or None when no edge fails and every comparable O equals S.

    Args:
        third: the digest by a third node of the one edge that `needs_third` named; None when there is none.
    """
    if not view.failing:
        return _originals(group, view)
    if view.unsure:
        # An edge that failed its own calibration speaks for no row that needs every other edge to be sound.
        return _other_pattern(group, view)
    named = one_stands_out(group, view.failing)
    if named is not None:
        return Finding(
            "all edges of one",
            ATTRIBUTED,
            f"Every replay that {who(group, named)} shared with other nodes disagreed with theirs, and no other replay "
            "did.",
            suspects=named,
            differing=named,
            persistence=PERSISTENT,
            contains=any(view.disputed(rank) for rank in named),
        )
    if len(view.failing) == 1:
        (owner,) = view.failing
        return _not_reproducible(group, view, owner) or _with_third(group, view, owner, third)
    return _two_nodes(group, view) or _other_pattern(group, view)


def needs_third(group: Group, view: EdgeView) -> int | None:
    """The owner of the one failing edge that a third node must re-run; None where the table needs no third node."""
    if len(view.failing) != 1 or view.unsure:
        return None
    (owner,) = view.failing
    if group.third(owner) is None or _not_reproducible(group, view, owner) is not None:
        return None
    return owner


def _edges_of(group: Group, ranks: tuple[int, ...]) -> set[int]:
    return {*ranks, *(owner for rank in ranks for owner in group.served_by(rank))}


def one_stands_out(group: Group, failing: Set[int]) -> tuple[int, ...] | None:
    """The rank, or all ranks of the node, whose edges are exactly the failing ones, at least two, to two nodes."""
    if len(failing) < 2:
        return None
    touched = sorted({end for owner in failing for end in (owner, group.helper(owner)) if end is not None})
    nodes = dict.fromkeys(group.nodes[rank] for rank in touched)
    for ranks in (*((rank,) for rank in touched), *(group.members(node) for node in nodes)):
        # With two nodes all other ends of the edges lie on one node, and either side could be at fault.
        if _edges_of(group, ranks) == failing and len(_far_nodes(group, ranks)) >= 2:
            return ranks
    return None


def _far_nodes(group: Group, ranks: tuple[int, ...]) -> set[str]:
    own = {group.nodes[rank] for rank in ranks}
    ends: set[int] = set()
    for rank in ranks:
        helper = group.helper(rank)
        ends.update(group.served_by(rank), () if helper is None else (helper,))
    return {group.nodes[rank] for rank in ends} - own


def _not_reproducible(group: Group, view: EdgeView, owner: int) -> Finding | None:
    if owner not in view.shown or view.served[owner] != view.original[owner]:
        return None
    return Finding(
        "not reproducible",
        INCONCLUSIVE,
        f"{capital(who(group, (owner,)))} could not reproduce its own gradient, though another node reproduced it: "
        "it erred once in repeating it, and nobody can be named.",
        differing=(owner,),
        candidates=(owner,),
    )


def _with_third(group: Group, view: EdgeView, owner: int, third: int | None) -> Finding:
    helper = group.helper(owner)
    assert helper is not None  # an edge has two ends
    own, served = view.own[owner], view.served[owner]
    alone: int | None = None
    if third is not None and third == served:
        alone = owner
    elif third is not None and third == own and not view.original_differs(owner):
        # O and S are one witness only while they agree; a witness that contradicts itself outvotes nobody.
        alone = helper
    if alone is None:
        return Finding(
            "one edge, no third",
            INCONCLUSIVE,
            f"{capital(who(group, (owner,)))} and {who(group, (helper,))} replayed the same micro-batch to different "
            "gradients, and no third node settled which of them is wrong, so nobody can be named.",
            differing=(owner,),
            candidates=tuple(sorted((owner, helper))),
            contains=view.disputed(owner),
        )
    return Finding(
        "one edge, third node",
        ATTRIBUTED,
        f"{capital(who(group, (alone,)))} computed another gradient from the same micro-batch than two other nodes.",
        suspects=(alone,),
        differing=(alone,),
        persistence=TRANSIENT,
        contains=view.disputed(alone),
    )


def _originals(group: Group, view: EdgeView) -> Finding | None:
    if view.original == view.own:
        return None
    apart = tuple(rank for rank in sorted(view.shown) if view.original_differs(rank))
    if not apart:
        return None
    # One of two is no majority either way: a device may have erred once, as well as code.
    if 2 * len(apart) >= len(view.shown) and (len(apart), len(view.shown)) != (1, 2):
        indexes = [i for i in (view.first_difference[rank] for rank in apart if view.first_difference) if i is not None]
        first = min(indexes) if indexes else None
        where = "" if first is None else f" (the first parameter that differs is number {first})"
        return Finding(
            "originals, most ranks",
            SOFTWARE,
            f"Replays agree with each other but not with the training step on {len(apart)} of {len(view.shown)} ranks"
            f"{where}: the loss function given to the monitor is not what the training loop runs: software, no node is "
            "blamed.",
            differing=apart,
            first_parameter=first,
        )
    return Finding(
        "originals, few ranks",
        INCONCLUSIVE,
        f"The gradient that {who(group, apart)} gave differs from two replays of it on different nodes: a fault that "
        "did not repeat, or a batch or loss that was changed there, so nobody can be named.",
        differing=apart,
        candidates=apart,
        contains=True,
    )


def _two_nodes(group: Group, view: EdgeView) -> Finding | None:
    """With two nodes the edges of one bad node are those of the other, too: calibrated, so no software, and no name."""
    if len(group.node_order) != 2:
        return None
    failing = tuple(sorted(view.failing))
    return Finding(
        "two nodes",
        INCONCLUSIVE,
        f"{len(failing)} of {len(view.judged)} replays disagree between the only two nodes, where they agreed before: "
        "one of the two computes wrong, and with fewer than three nodes nobody can be named.",
        differing=failing,
        candidates=tuple(range(group.size)),
        contains=any(view.disputed(owner) for owner in failing),
    )


def _at_every_edge(group: Group, failing: Set[int]) -> tuple[int, ...]:
    """The ranks, or all ranks of the nodes, one of which alone could have made every failing edge fail."""
    pairs = [(owner, helper) for owner in failing if (helper := group.helper(owner)) is not None]
    ranks = set.intersection(*(set(pair) for pair in pairs))
    nodes = set.intersection(*({group.nodes[end] for end in pair} for pair in pairs))
    return tuple(sorted(ranks | {rank for node in nodes for rank in group.members(node)}))


def _other_pattern(group: Group, view: EdgeView) -> Finding:
    failing = tuple(sorted(view.failing))
    ends = {end for owner in failing for end in (owner, group.helper(owner)) if end is not None}
    counted = f"{len(failing)} of {len(view.judged)} replays"
    common = () if view.unsure else _at_every_edge(group, view.failing)
    if common:
        return Finding(
            "some edges of one",
            INCONCLUSIVE,
            f"{counted} disagree between nodes where they agreed before, and {who(group, common)} had a part in each, "
            "but not each of theirs did: a fault that depends on the data, and nobody can be named.",
            differing=failing,
            candidates=tuple(sorted(ends)),
            contains=any(view.disputed(owner) for owner in failing),
        )
    if 2 * len(failing) >= len(view.judged):
        return Finding(
            "other pattern, most edges",
            SOFTWARE,
            f"{counted} disagree between nodes, in no pattern that one node explains: the replay is not reproducible; "
            "software, no node is blamed.",
            differing=failing,
        )
    return Finding(
        "other pattern, few edges",
        INCONCLUSIVE,
        f"{counted} disagree between nodes, in no pattern that one node explains; nobody can be named.",
        differing=failing,
        candidates=tuple(sorted(ends)),
        contains=any(view.disputed(owner) for owner in failing),
    )
