"""Writes a rank's evidence of a replay verdict, once the verdict is on disk and before the job stops.

Only on a new event of an audit, only on the ranks that `plan` names, bounded in bytes and in number, and never in the
way: what cannot be kept is said and counted, and training or the halt goes on. It reads the model and changes nothing.
A healthy run never comes here. Flow: audit -> **keep** -> form.
"""

from __future__ import annotations

import platform
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from sdcwatch._version import __version__
from sdcwatch.checkpoints.manifest import list_checkpoints
from sdcwatch.checks import replay
from sdcwatch.errors import SdcwatchError
from sdcwatch.event import Event, as_dict
from sdcwatch.evidence import facts, form
from sdcwatch.evidence.plan import Holder, file_name, holders
from sdcwatch.evidence.values import Unkeepable, Writer
from sdcwatch.fingerprint import digest_bytes, fingerprint
from sdcwatch.observation import Row, RowError
from sdcwatch.settings import Settings
from sdcwatch.verdict import History
from sdcwatch.watch.audit import Outcome
from sdcwatch.watch.replication import replicated_parameters
from sdcwatch.watch.report import Reporter
from sdcwatch.watch.row_fields import Watched

#: Files that one rank writes in one epoch; a job that goes on after many events has enough of them.
MAX_FILES = 8


class Keeper:
    """Keeps evidence on one rank.

    Args:
        watched: the model.
        settings: `evidence_data`, `evidence_mb`, `checkpoint_dir`.
        reporter: whose spool it goes to, and who says what could not be kept.
    """

    def __init__(self, watched: Watched, settings: Settings, reporter: Reporter) -> None:
        self._watched = watched
        self._settings = settings
        self._reporter = reporter
        self._audit: Outcome | None = None
        self._before = History.initial()
        self._audits = 0
        self._written = 0

    def hold(self, outcome: Outcome | None, before: History) -> None:
        """Takes the audit that is about to be judged, or lets go of it (None).

        Args:
            before: the history that it is judged from.
        """
        self._audit = outcome if outcome is not None and outcome.rows is not None else None
        self._before = before
        self._audits += self._audit is not None

    def keep(self, events: Sequence[Event], rows: Sequence[Row | RowError | None]) -> None:
        """Writes the file of each event of the held audit for which this rank keeps one."""
        if self._audit is None or not self._settings.evidence_mb:
            return
        for event in events:
            for holder in holders(event):
                if holder.rank == self._reporter.rank:
                    self._keep(event, holder, self._audit, rows)

    def _keep(self, event: Event, holder: Holder, audit: Outcome, rows: Sequence[Row | RowError | None]) -> None:
        spool = self._reporter.spool
        name = file_name(event, holder.rank)
        if spool is None:
            return
        if self._written >= MAX_FILES:
            self._reporter.say(f"sdcwatch: {name} is not kept: this rank has written {MAX_FILES} in this epoch")
            return
        try:
            parts = self._parts(event, holder, audit, rows)
            kept = spool.write_evidence(name, parts)
        except Exception as error:  # our border: the verdict stands without it
            self._reporter.swallow("evidence", error)
            self._reporter.say(f"sdcwatch: {name} could not be kept: {error}")
            return
        if not kept:
            self._reporter.say(f"sdcwatch: {name} is not kept: {spool.last_refusal}")
            return
        self._written += 1
        self._reporter.say(f"sdcwatch: evidence kept: {spool.directory / name} ({form.size(parts)} bytes)")

    def _parts(
        self, event: Event, holder: Holder, audit: Outcome, rows: Sequence[Row | RowError | None]
    ) -> list[form.Section]:
        membership = self._reporter.membership
        group, rank = membership.group, self._reporter.rank
        ran, first = audit.ran, (*event.suspects, *event.differing, holder.owner, holder.server or 0)
        payload = None if ran is None else ran.payload if holder.owner == rank else ran.received.get(holder.owner)
        writer = Writer((self._settings.evidence_mb << 20) - (1 << 16))
        identity = self._reporter.identity
        manifest: dict[str, Any] = {
            "event": as_dict(event),
            "holder": {
                "rank": rank,
                "node": identity.node,
                "instance": identity.instance,
                "gpu_uuid": identity.gpu_uuid,
            },
            "owner": holder.owner,
            "server": holder.server,
            "third": group.third(holder.owner),
            "num_ranks": group.size,
            "num_nodes": len(group.node_order),
            "gradients": facts.gradient_records(audit.rows or (), audit.tie or (), group.nodes, holder.owner),
            "digests": _own_digests(audit, holder.owner, rank),
            "rows": facts.rows_record(rows, first),
            "audit_rows": facts.rows_record(audit.rows or (), first),
            "tie_rows": facts.rows_record(audit.tie or (), first),
            "calibration": facts.calibration_record(self._before, holder.owner, holder.server),
            "audits": self._audits,
            "environment": membership.facts[rank],
            "environment_of_owner": membership.facts[holder.owner],
            "versions": {"sdcwatch": __version__, "torch": torch.__version__, "python": platform.python_version()},
            "evidence_data": self._settings.evidence_data,
            "written": round(time.time(), 3),
        }
        manifest |= self._step(payload, writer)
        manifest |= self._model(writer, event)
        return form.encode(manifest, writer.sections)

    def _step(self, payload: bytes | None, writer: Writer) -> dict[str, Any]:
        """The micro-batches: random state, autocast, seeds and shapes always, the batch where asked for."""
        if payload is None:
            return {"step": None, "batch": None, "batch_missing": "this rank did not receive the micro-batch"}
        content = replay.unpacked(payload, self._watched.device)
        batches = content["batches"]
        step = [{"shape": replay.signature(b), "rng": r, "autocast": a, "seed": s} for b, r, a, s in batches]
        found: dict[str, Any] = {
            "step": writer.write({**content, "batches": step}),
            "num_micro_batches": len(batches),
            "batch_digest": facts.hex_text(digest_bytes(payload)),
            "batch": None,
        }
        if self._settings.evidence_data == "none":
            return {**found, "batch_missing": "evidence_data is none"}
        found["batch"], found["batch_missing"] = _attempt(writer, [b for b, *_ in batches])
        return found

    def _model(self, writer: Writer, event: Event) -> dict[str, Any]:
        """Fingerprints of the weights and where to get them; the weights themselves where asked for."""
        module = self._watched.ddp.module
        weights, missing = None, "evidence_data is not weights"
        if self._settings.evidence_data == "weights":
            state = {
                "parameters": dict(module.named_parameters(remove_duplicate=False)),
                "buffers": dict(module.named_buffers(remove_duplicate=False)),
            }
            weights, missing = _attempt(writer, state)
        named = replicated_parameters(self._watched.ddp)
        newest = event.step - 1
        return {
            "model": f"{type(module).__module__}.{type(module).__qualname__}",
            "compiled": type(module).__name__ == "OptimizedModule" or self._watched.model is not self._watched.ddp,
            "parameters": [
                {
                    "name": name,
                    "shape": list(p.shape),
                    "dtype": str(p.dtype).removeprefix("torch."),
                    "weights": facts.hex_text(fingerprint([p])),
                }
                for name, p in named
            ],
            "weights_fingerprint": facts.hex_text(fingerprint(p for _, p in named)),
            "weights_after_step": newest,
            "checkpoints": _checkpoints(self._settings.checkpoint_dir, newest),
            "weights": weights,
            "weights_missing": missing,
        }


def _attempt(writer: Writer, value: Any) -> tuple[Any, str]:
    """A part that may be left out; why it is, or an empty text."""
    mark = writer.mark()
    try:
        return writer.write(value), ""
    except Unkeepable as error:
        writer.back_to(mark)
        return None, str(error)


def _own_digests(audit: Outcome, owner: int, rank: int) -> dict[str, dict[str, str]]:
    """This rank's gradients parameter by parameter, by their index."""
    if audit.ran is None:
        return {}
    known = {"served": audit.ran.served.get(owner)}
    if owner == rank:
        known = {"original": audit.ran.original, "self": audit.ran.own}
    return {
        name: {str(index): f"{digest:016x}" for index, digest in sorted(digests.items())}
        for name, digests in known.items()
        if digests is not None
    }


def _checkpoints(directory: str | None, step: int) -> list[dict[str, Any]]:
    """The newest three checkpoints that hold this step or an earlier one."""
    if not directory:
        return []
    try:
        older = [c for c in list_checkpoints(Path(directory)) if c.step <= step]
    except (OSError, SdcwatchError):
        return []
    newest = sorted(older, key=lambda c: c.step)[-3:]
    return [{"path": str(c.path), "step": c.step, "trust": c.trust} for c in newest]
