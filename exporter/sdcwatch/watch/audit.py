"""One replay audit across the ranks: move micro-batches one node on, replay, exchange what came out.

Every branch that decides about a collective is agreed on first, so that a rank which misread its rows cannot split
the group. What a failing edge means is `verdict`'s business. Flow: monitor -> **audit** -> checks.replay, exchange.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from sdcwatch.checks import replay
from sdcwatch.fingerprint import digest_bytes, fingerprint
from sdcwatch.observation import AuditRow, ErrorCode, Row, RowError
from sdcwatch.verdict import Group, History, plan_audit, tie_breaks
from sdcwatch.watch.exchange import Exchange

AuditRows = list[AuditRow | RowError]

#: What the ranks agree about with the flag "my forward issued a collective"; any number that is the same everywhere.
_COLLECTIVE = 1


@dataclass(frozen=True, slots=True)
class Outcome:
    """What an audit gave: rows of both rounds, or the reason why none ran."""

    rows: AuditRows | None = None
    tie: AuditRows | None = None
    reason: str | None = None


class Auditor:
    """Runs audits for one rank.

    Args:
        exchange, group: the replica group.
        module: the plain module under DDP.
        loss_fn: the user's loss function.
        parameters: the replicated parameters, in module order.
        device: where the model lives.
        swallow: counts an exception of ours.
    """

    def __init__(
        self,
        exchange: Exchange,
        group: Group,
        *,
        module: torch.nn.Module,
        loss_fn: replay.LossFunction,
        parameters: Sequence[torch.nn.Parameter],
        device: torch.device,
        swallow: Callable[[str, BaseException], None],
    ) -> None:
        self._exchange = exchange
        self._group = group
        self._module = module
        self._loss_fn = loss_fn
        self._parameters = parameters
        self._device = device
        self._swallow = swallow
        self.collective = False
        self._layers = _layers(group)

    def run(
        self,
        history: History,
        rows: Sequence[Row | RowError],
        mine: Row,
        payload: bytes | None,
        original: Mapping[int, int],
    ) -> Outcome:
        """Audits one step; collective, so every rank of the group calls it.

        Args:
            rows: the rows of this step, in rank order.
            mine: this rank's own row.
            payload: this rank's packed micro-batches (None: not ready, as its row says).
            original: fingerprints of the local gradients of the real backward, by parameter.
        """
        plan = plan_audit(history, self._group, rows)
        decision = digest_bytes(f"{plan.run}|{plan.reason}".encode()) >> 1
        agreed, _ = self._exchange.agree(int(plan.run), decision)
        if not agreed:
            return Outcome(reason="error")
        if not plan.run:
            return Outcome(reason=plan.reason)
        sizes = [0 if isinstance(r, RowError) else (r.batch_bytes or 0) for r in rows]
        own = self._own(mine, payload or b"", dict(original))
        _, noticed = self._exchange.agree(int(self.collective), _COLLECTIVE)
        if noticed:
            # A forward with collectives must not run on the servers alone: not every rank serves equally many.
            self.collective = True
            return Outcome(reason="collective")
        first: AuditRows = []
        for routes in self._layers:
            first += self._serve(own if not first else _bare(own), payload or b"", routes, sizes)
        ties = tuple(tie_breaks(history, self._group, rows, first))
        agreed, highest = self._exchange.agree(len(ties), digest_bytes(repr(ties).encode()) >> 1)
        if not agreed or not highest:
            return Outcome(rows=first)
        thirds = {third: owner for owner, third in ties}
        return Outcome(rows=first, tie=self._serve(_bare(own, tie=1), payload or b"", thirds, sizes))

    def _own(self, mine: Row, payload: bytes, original: dict[int, int]) -> AuditRow:
        """This rank's own micro-batch again; a replay that fails is a void row, never a broken run."""
        row = AuditRow(
            rank=mine.rank,
            instance=mine.instance,
            epoch=mine.epoch,
            step=mine.step,
            error=ErrorCode.NONE,
            round=0,
            batch_sent=digest_bytes(payload),
            batch_unchanged=1,
        )
        try:
            again = self._replay(payload, watch=True)
            return dataclasses.replace(
                row,
                weights_now=fingerprint(self._parameters),
                original=replay.combine_digests(original),
                self_digest=again.digest,
                first_difference=replay.first_difference(original, again.digests),
            )
        except Exception as error:  # our border
            self._swallow("replay", error)
            return dataclasses.replace(row, error=ErrorCode.CHECK)

    def _serve(self, row: AuditRow, payload: bytes, routes: Mapping[int, int], sizes: Sequence[int]) -> AuditRows:
        """Moves micro-batches along `routes` (server -> owner), replays what arrived, and exchanges the rows."""
        received = self._exchange.transit(payload, routes, sizes)
        try:
            for owner, data in received.items():
                digest = self._replay(data).digest
                row = dataclasses.replace(
                    row, served_rank=owner, batch_received=digest_bytes(data), served_digest=digest
                )
        except Exception as error:  # our border
            self._swallow("replay", error)
            row = dataclasses.replace(row, error=ErrorCode.CHECK)
        return list(self._exchange.rows(row))

    def _replay(self, payload: bytes, *, watch: bool = False) -> replay.Replayed:
        before = _sequence(self._exchange.group)
        result = replay.run(
            payload,
            module=self._module,
            loss_fn=self._loss_fn,
            parameters=self._parameters,
            device=self._device,
        )
        if watch and _sequence(self._exchange.group) != before:
            self.collective = True
        return result


def _bare(own: AuditRow, *, tie: int = 0) -> AuditRow:
    """The row of a further layer or round: who sends it and on which weights, without the rank's own replay."""
    return dataclasses.replace(own, round=tie, original=None, self_digest=None, first_difference=None)


def _layers(group: Group) -> list[dict[int, int]]:
    """Server -> owner, in as many layers as the busiest server has owners (several where nodes differ in size)."""
    layers: list[dict[int, int]] = []
    for server in range(group.size):
        for depth, owner in enumerate(group.served_by(server)):
            if depth == len(layers):
                layers.append({})
            layers[depth][server] = owner
    return layers


def _sequence(group: Any) -> int:
    """How many collectives the group has issued (0 where the backend does not say)."""
    try:
        return int(group._get_sequence_number_for_group())
    except (RuntimeError, AttributeError):
        return 0
