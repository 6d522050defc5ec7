"""A replica group without a GPU, a process or torch: healthy rows of any size, with faults put into their data.

Faults go into what ranks *measured*, never into a verdict. For tests of the verdict engine and for campaigns over group
sizes that no machine has. Standard library only. Flow: **simulated rows** -> verdict.
"""

from __future__ import annotations

import zlib
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from sdcwatch.observation import CONSERVATION_GROUPS, AuditRow, Row, RowError
from sdcwatch.verdict import Group, History, Judgement, judge, plan_audit, tie_breaks

#: Field -> rank -> fault. On a digest the fault is XORed into the healthy value; any other field takes it as its value.
Faults = Mapping[str, Mapping[int, Any]]

_DIGESTS = {f"{name}_{moment}" for name in ("weights", "state") for moment in ("begin", "end", "now")}
_DIGESTS |= {"reduced", "gradient_begin", "original", "self_digest", "batch_received"}
_WEIGHTS = ("weights_begin", "weights_end", "weights_now")


def group_of(*ranks_per_node: int) -> Group:
    """A group of nodes `node-0`, `node-1`, ... with so many ranks each, numbered node by node."""
    nodes = tuple(f"node-{index}" for index, count in enumerate(ranks_per_node) for _ in range(count))
    return Group(nodes, tuple(1000 + rank for rank in range(len(nodes))), (77,) * len(nodes), epoch=5)


def _value(name: str, *key: int) -> int:
    return zlib.crc32(f"{name}{key}".encode()) | 1 << 40


def _conserved(rank: int) -> dict[str, Any]:
    """Sums of each group of parameters that agree within rounding."""
    sums: dict[str, Any] = {}
    for group in range(CONSERVATION_GROUPS):
        sums |= {
            f"local_sum_{group}": 1.0 + group,
            f"reduced_sum_{group}": (1.0 + group) * (1 + 1e-9),
            f"reduce_noise_{group}": 1e-8 * (1 + rank % 3),
        }
    return sums


def healthy_row(group: Group, rank: int, step: int, first: int) -> Row:
    """What a healthy rank measures at `step` of an epoch that began at step `first`."""
    row = Row(
        rank=rank,
        instance=group.instances[rank],
        epoch=group.epoch,
        step=step,
        error=0,
        time=1e9 + step,
        environment=group.environments[rank],
        schema=11,
        hyperparameters=12,
        loss_scale=1024.0,
        compile_count=0,
        optimizer_steps=step - first,
        local_norm=1.0 + rank % 7 / 100,
        local_nonfinite=0,
        reduced=_value("gradient", step),
        reduced_nonfinite=0,
        weights_now=_value("weights", step),
        versions_now=100 * rank + 3 * (step - first),
        batch_bytes=64,
        batch_signature=21,
        free_memory=1 << 30,
        replay_ready=1,
        conservation=1,
        gradient_edits=1,
        **_conserved(rank),
    )
    if step == first:
        return row
    return replace(
        row,
        optimizer_step_of=step - 1,
        gradient_begin=_value("gradient", step - 1),
        weights_begin=_value("weights", step - 1),
        weights_end=_value("weights", step),
        state_begin=_value("state", step - 1),
        state_end=_value("state", step),
        versions_begin=100 * rank + 3 * (step - 1 - first),
        versions_end=100 * rank + 3 * (step - first),
    )


def _changed(row: Any, faults: Faults, rank: int) -> Any:
    changes = {}
    for name, by_rank in faults.items():
        if rank in by_rank and hasattr(row, name):
            fault, healthy = by_rank[rank], getattr(row, name)
            if name not in _DIGESTS or fault is None:
                changes[name] = fault
            elif healthy is not None:  # a rank that measured nothing there has nothing to corrupt
                changes[name] = healthy ^ fault
    return replace(row, **changes) if changes else row


class SimulatedGroup:
    """An epoch of a group, one judged exchange at a time.

    Args:
        group: who is where.
        first: step number of the epoch's first exchange.
    """

    def __init__(self, group: Group, first: int = 0) -> None:
        self.group = group
        self.history = History.initial()
        self.first = first
        self.next_step = first

    def rows(self, faults: Faults | None = None, apart: Mapping[int, int] | None = None) -> list[Row]:
        """The rows of the next step.

        Args:
            faults: what some ranks measured otherwise.
            apart: rank -> fault in its parameters at every moment of the row (a difference that lasts).
        """
        merged: dict[str, dict[int, Any]] = {name: dict(apart) for name in _WEIGHTS} if apart else {}
        for name, by_rank in (faults or {}).items():
            merged.setdefault(name, {}).update(by_rank)
        healthy = (healthy_row(self.group, rank, self.next_step, self.first) for rank in range(self.group.size))
        return [_changed(row, merged, rank) for rank, row in enumerate(healthy)]

    def step(
        self,
        faults: Faults | None = None,
        *,
        apart: Mapping[int, int] | None = None,
        rows: Sequence[Row | RowError | None] | None = None,
    ) -> Judgement:
        """Judges the next step, without an audit."""
        judgement, self.history = judge(
            self.history, self.group, self.next_step, self.rows(faults, apart) if rows is None else rows
        )
        self.next_step += 1
        return judgement

    def steps(self, count: int) -> Judgement:
        """Judges `count` healthy steps and returns the last judgement."""
        assert count > 0
        return [self.step() for _ in range(count)][-1]

    def audit_rows(self, faults: Faults | None = None) -> list[AuditRow]:
        """The first round's rows of an audit of the next step.

        `original` and `self_digest` faults are keyed by the rank, `served_digest` faults by the *owner* whose edge
        they are on.
        """
        group, faults = self.group, faults or {}
        depth = max(1, *(len(group.served_by(rank)) for rank in range(group.size)))
        return [
            _changed(
                self._audit_row(rank, layer, faults), {k: v for k, v in faults.items() if k != "served_digest"}, rank
            )
            for layer in range(depth)
            for rank in range(group.size)
        ]

    def _audit_row(self, rank: int, layer: int, faults: Faults) -> AuditRow:
        owners = self.group.served_by(rank)
        row = AuditRow(
            rank=rank,
            instance=self.group.instances[rank],
            epoch=self.group.epoch,
            step=self.next_step,
            error=0,
            round=0,
            batch_sent=_value("batch", rank, self.next_step),
            batch_unchanged=1,
            weights_now=_value("weights", self.next_step),
        )
        if layer == 0:
            own = _value("local", rank, self.next_step)
            row = replace(row, original=own, self_digest=own)
        if layer < len(owners):
            row = self._serving(row, owners[layer], faults.get("served_digest", {}).get(owners[layer], 0))
        return row

    def _serving(self, row: AuditRow, owner: int, fault: int) -> AuditRow:
        return replace(
            row,
            served_rank=owner,
            served_digest=_value("local", owner, self.next_step) ^ fault,
            batch_received=_value("batch", owner, self.next_step),
        )

    def audit(self, faults: Faults | None = None, row_faults: Faults | None = None) -> Judgement:
        """Judges the next step with an audit, as a monitor would: plan, replay, third node where asked, judge.

        A `tie_digest` fault (keyed by the owner) is what the third node's replay got wrong.
        """
        rows = self.rows(row_faults)
        plan = plan_audit(self.history, self.group, rows)
        audit = self.audit_rows(faults) if plan.run else None
        tie = []
        for owner, third in tie_breaks(self.history, self.group, rows, audit) if audit else ():
            row = replace(self._audit_row(third, 99, {}), round=1)
            tie.append(self._serving(row, owner, (faults or {}).get("tie_digest", {}).get(owner, 0)))
        judgement, self.history = judge(
            self.history, self.group, self.next_step, rows, audit, tie, audit_reason=plan.reason
        )
        self.next_step += 1
        return judgement


def backward_fault(group: Group, rank: int, fault: int = 1) -> Faults:
    """What an audit measures when every backward that `rank` runs, its own or another's, comes out wrong."""
    return {
        "original": {rank: fault},
        "self_digest": {rank: fault},
        "served_digest": dict.fromkeys(group.served_by(rank), fault),
    }
