"""What heals a judgement, or why nothing may: a pure function of what all ranks read, so that all conclude the same.

Two roads. A gradient that the reduce got wrong is computed again by all ranks. Weights or optimizer state that part
from a strict majority of ranks *and* of nodes are overwritten from it, and the gradient is computed again on them.
Everything that leaves a doubt about which values are right is refused by name, and halts. It measures and moves
nothing. Flow: judge -> **plan** -> healer.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass, replace

from sdcwatch.observation import Row, RowError
from sdcwatch.verdict import Group, History, Judgement, Verdict
from sdcwatch.verdict.columns import Columns
from sdcwatch.verdict.intake import readable
from sdcwatch.verdict.partition import majority, product
from sdcwatch.verdict.records import (
    ALLREDUCE_CONSERVATION,
    CLEAN,
    GRADIENT_CHECKSUM,
    REPLAY,
    STATE_AT_REST,
    TRANSPORT,
    UNDEFINED,
    WEIGHT_CHECKSUM,
)

#: What must be equal before the gradient alone can be at fault.
_STATE = ("weights_begin", "state_begin", "weights_end", "state_end", "weights_now")


@dataclass(frozen=True, slots=True)
class Healed:
    """One heal of this epoch: how many reducing backwards had run, and the nodes that may have caused it."""

    count: int
    nodes: frozenset[str]


@dataclass(frozen=True, slots=True)
class Plan:
    """How one judgement is healed.

    Attributes:
        check: the check whose event it is, as metrics count it.
        refusal: why it cannot be healed, one clause; empty where it can.
        source: the rank whose parameters and optimizer state the others take; None: only the gradient is recomputed.
        targets: the ranks that are overwritten, ascending.
        nodes: nodes that may have caused it; another event of one of them within the window halts.
    """

    check: str
    refusal: str = ""
    source: int | None = None
    targets: tuple[int, ...] = ()
    nodes: frozenset[str] = frozenset()

    @property
    def digest(self) -> int:
        """63 bits on which the ranks agree before any of them acts."""
        content = [self.check, self.refusal, self.source, list(self.targets), sorted(self.nodes)]
        return int.from_bytes(hashlib.blake2b(json.dumps(content).encode(), digest_size=8).digest(), "little") >> 1


def asks(judgement: Judgement) -> bool:
    """Whether a judgement holds a new, proven difference of state, so that something must be done at once."""
    return any(v.contains and v.new for v in judgement.verdicts)


def make_plan(
    judgement: Judgement,
    before: History,
    group: Group,
    rows: Sequence[Row | RowError],
    *,
    past: Sequence[Healed],
    count: int,
    window: int,
) -> Plan:
    """Decides how a judgement that `asks` is healed.

    Args:
        judgement: what all ranks concluded.
        before: the history from which it was judged.
        rows: the rows that were judged, in rank order.
        past: earlier heals of this epoch.
        count: reducing backwards of this epoch so far.
        window: a second event of one node within this many reducing backwards halts.
    """
    verdicts = [v for v in judgement.verdicts if v.contains]
    # The replay's own event first: it halts whatever else there is, and the metrics should say so.
    first = next((v for v in verdicts if v.check == REPLAY), next(v for v in verdicts if v.new))
    nodes = frozenset(group.nodes[r] for r in first.suspects or first.candidates or first.differing)
    plan = Plan(first.check, nodes=nodes)
    read = readable(group, rows)
    if first.check == REPLAY:
        return replace(plan, refusal="a replay disputes a gradient, and steps before this one may have used such, too")
    if any(v.path == TRANSPORT for v in verdicts) or read is None:
        return replace(plan, refusal="not every rank's row could be read")
    if len(verdicts) > 1:
        return replace(plan, refusal="more than one difference stands")
    recent = sorted(n for past_heal in past if count - past_heal.count <= window for n in nodes & past_heal.nodes)
    if recent:
        return replace(plan, refusal=f"it is the second event within heal_window that may be of {recent[0]}")
    columns = Columns(read, group)
    if first.check == GRADIENT_CHECKSUM:
        return replace(plan, refusal=_gradient_doubt(columns))
    if first.check == ALLREDUCE_CONSERVATION:
        return replace(plan, refusal=_gradient_doubt(columns) or _conservation_doubt(before))
    if first.check == WEIGHT_CHECKSUM:
        return _overwriting(plan, first, before, group, columns)
    return replace(plan, refusal=f"nothing heals {first.check}")


def _gradient_doubt(columns: Columns) -> str:
    if columns.absent("weights_now") or any(columns.labels(name) for name in _STATE):
        return "the weights or optimizer state of the ranks are not equal, or were not measured"
    return ""


def _conservation_doubt(before: History) -> str:
    if before.conserved_step is None or before.conserved_step != before.step:
        return "reduces since allreduce_conservation last ran may have been wrong in the same way"
    return ""


def _overwriting(plan: Plan, verdict: Verdict, before: History, group: Group, columns: Columns) -> Plan:
    if verdict.path == STATE_AT_REST or columns.labels("state_begin"):
        return replace(plan, refusal="optimizer state that changed at rest was already used by a step")
    if columns.absent("weights_now"):
        return replace(plan, refusal="the weights were not measured")
    since, needed = before.gradient_clean_since, before.weights_clean_step
    if since is None or needed is None or since > needed:
        # A rank that passes on a wrong chunk of a reduce can make the majority hold the wrong values.
        return replace(plan, refusal="the reduced gradient was not seen clean at every step since the weights agreed")
    part = product(*(columns.labels(name) for name in ("gradient_begin", *_STATE)))
    inside = majority(part, group)
    if inside is None:
        return replace(plan, refusal="no strict majority of ranks and nodes holds the same values")
    targets = tuple(r for r in range(group.size) if r not in set(inside))
    return replace(plan, source=inside[0], targets=targets)


def recheck(again: Judgement) -> str:
    """Why the judgement of the healed step is not good enough; "" where gradients and weights are seen equal."""
    results = dict(again.checks)
    back = [v for v in again.verdicts if v.contains or v.path == TRANSPORT]
    if back:
        return f"the difference came back: {back[0].sentence}"
    if results.get(GRADIENT_CHECKSUM) not in (CLEAN, UNDEFINED) or results.get(WEIGHT_CHECKSUM) != CLEAN:
        return "the healed step could not be checked again"
    return ""


def only_new(again: Judgement, first: Judgement) -> Judgement:
    """The judgement of the healed step without what the first one of that step already said."""
    said = {(v.check, v.kind, v.suspects, v.differing) for v in first.verdicts}
    return replace(
        again,
        verdicts=tuple(v for v in again.verdicts if (v.check, v.kind, v.suspects, v.differing) not in said),
        checks=tuple((check, result) for check, result in again.checks if check != REPLAY),
    )
