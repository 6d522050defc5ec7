"""One replay audit across the ranks: move micro-batches one node on, replay, exchange what came out.

Every branch that decides about a collective is agreed on first, so that a rank which misread its rows cannot split
the group. What a failing edge means is `verdict`'s business. Flow: monitor -> **audit** -> checks.replay, exchange.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
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


@dataclass(slots=True)
class Ran:
    """What this rank ran in one audit, for evidence; per-parameter digests are by index.

    Attributes:
        payload: its own micro-batches, packed.
        original, own: digests of the real backward's gradients, and of its own replay (None: it failed).
        received, served: by owner, the micro-batches that came here and the digests of their replay.
    """

    payload: bytes
    original: dict[int, int]
    own: dict[int, int] | None = None
    received: dict[int, bytes] = field(default_factory=dict)
    served: dict[int, dict[int, int]] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Outcome:
    """What an audit gave: rows of both rounds and what this rank ran, or the reason why none ran."""

    rows: AuditRows | None = None
    tie: AuditRows | None = None
    reason: str | None = None
    ran: Ran | None = None


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
        *,
        unchanged: bool = True,
    ) -> Outcome:
        """Audits one step; collective, so every rank of the group calls it.

        Args:
            rows: the rows of this step, in rank order.
            mine: this rank's own row.
            payload: this rank's packed micro-batches (None: not ready, as its row says).
            original: fingerprints of the local gradients of the real backward, by parameter.
            unchanged: the live batch is still what the loss function left behind; where it is not on one rank, nothing
                of this audit is judged.
        """
        plan = plan_audit(history, self._group, rows)
        decision = digest_bytes(f"{plan.run}|{plan.reason}".encode()) >> 1
        agreed, _ = self._exchange.agree(int(plan.run), decision)
        if not agreed:
            return Outcome(reason="error")
        if not plan.run:
            return Outcome(reason=plan.reason)
        sizes = [0 if isinstance(r, RowError) else (r.batch_bytes or 0) for r in rows]
        ran = Ran(payload or b"", dict(original))
        own = dataclasses.replace(self._own(mine, ran), batch_unchanged=int(unchanged))
        _, noticed = self._exchange.agree(int(self.collective), _COLLECTIVE)
        if noticed:
            # A forward with collectives must not run on the servers alone: not every rank serves equally many.
            self.collective = True
            return Outcome(reason="collective")
        first: AuditRows = []
        for routes in self._layers:
            first += self._serve(own if not first else _bare(own), ran, routes, sizes)
        ties = tuple(tie_breaks(history, self._group, rows, first))
        agreed, highest = self._exchange.agree(len(ties), digest_bytes(repr(ties).encode()) >> 1)
        if not agreed or not highest:
            return Outcome(rows=first, ran=ran)
        thirds = {third: owner for owner, third in ties}
        return Outcome(rows=first, tie=self._serve(_bare(own, tie=1), ran, thirds, sizes), ran=ran)

    def _own(self, mine: Row, ran: Ran) -> AuditRow:
        """This rank's own micro-batch again; a replay that fails is a void row, never a broken run."""
        row = AuditRow(
            rank=mine.rank,
            instance=mine.instance,
            epoch=mine.epoch,
            step=mine.step,
            error=ErrorCode.NONE,
            round=0,
            batch_sent=digest_bytes(ran.payload),
        )
        try:
            again = self._replay(ran.payload, watch=True)
            ran.own = again.digests
            return dataclasses.replace(
                row,
                weights_now=fingerprint(self._parameters),
                original=replay.combine_digests(ran.original),
                self_digest=again.digest,
                first_difference=replay.first_difference(ran.original, again.digests),
            )
        except Exception as error:  # our border
            self._swallow("replay", error)
            return dataclasses.replace(row, error=ErrorCode.CHECK)

    def _serve(self, row: AuditRow, ran: Ran, routes: Mapping[int, int], sizes: Sequence[int]) -> AuditRows:
        """Moves micro-batches along `routes` (server -> owner), replays what arrived, and exchanges the rows."""
        received = self._exchange.transit(ran.payload, routes, sizes)
        ran.received.update(received)
        try:
            for owner, data in received.items():
                again = self._replay(data)
                ran.served[owner] = again.digests
                row = dataclasses.replace(
                    row, served_rank=owner, batch_received=digest_bytes(data), served_digest=again.digest
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
