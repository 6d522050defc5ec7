"""From a judgement to what people see: events in the spool, metrics, the log.

One `Reporter` a rank. Every rank builds the same event; only some write it (the suspects' own ranks and the lowest
ranks of two other nodes, so that the proof outlives a node and is attested by two). It decides nothing and is never
collective.
Flow: verdict -> **report** -> event, metrics, spool.
"""

from __future__ import annotations

import contextlib
import logging
import sys
import time
from collections import deque
from collections.abc import Sequence

from sdcwatch import event as events
from sdcwatch.catalog import ACCUSING_CHECKS, CHECKS, TRAINING_STATES
from sdcwatch.checks.norm_history import BOUND as OWN_BOUND
from sdcwatch.checks.norm_history import NormHistory
from sdcwatch.errors import SpoolError
from sdcwatch.evidence import plan as evidence_plan
from sdcwatch.identity import Identity
from sdcwatch.metrics import RankMetrics
from sdcwatch.observation import Row
from sdcwatch.packed_rows import measured
from sdcwatch.spool.rank import Spool
from sdcwatch.verdict import Judgement, Verdict
from sdcwatch.watch import same_step
from sdcwatch.watch.start import Membership

log = logging.getLogger("sdcwatch")

#: Robust deviations above this count as an anomaly (a hint, never an accusation).
DEVIATION_BOUND = 10.0


class Reporter:
    """Writes what one rank has to say.

    Args:
        membership: the epoch's ranks.
        rank: this rank.
        spool: this rank's spool, None where it could not be opened (then only the log speaks).
        on_fault: `observe`, `halt` or `heal`, as events say what happens next.
        kept: how many verdicts `verdicts` remembers.
        interval: seconds between two writes of the metrics file.
        evidence: an audit's event is followed by evidence files, which its journal line names.
    """

    def __init__(
        self,
        membership: Membership,
        rank: int,
        spool: Spool | None,
        *,
        on_fault: str,
        kept: int,
        interval: float,
        evidence: bool = False,
    ) -> None:
        self.membership = membership
        self.rank = rank
        self.identity: Identity = membership.identities[rank]
        self.spool = spool
        self.verdicts: deque[Verdict] = deque(maxlen=kept)
        self._on_fault = on_fault
        self._evidence = evidence
        self._interval = interval
        self._written = 0.0
        self._swallowed: set[str] = set()
        self._ran: dict[str, float] = {}
        self.seconds: dict[str, float] = dict.fromkeys(CHECKS, 0.0)  # of each check, since the start
        self._norms = NormHistory()
        self.metrics = RankMetrics(
            self.identity.labels(),
            writes_node=self.identity.local_rank == 0,
            writes_job=rank in membership.reporters(),
        )
        if spool is not None and (before := spool.previous_metrics()):
            self.metrics.restore(before)
        self._describe()

    def _describe(self) -> None:
        facts = self.membership.facts[self.rank]
        self.metrics.set("sdc_world_size", len(self.membership.identities))
        self.metrics.set(
            "sdc_rank_info",
            1,
            local_rank=self.identity.local_rank,
            host=self.identity.host,
            instance_type="",
            gpu_model=facts.get("gpu", facts.get("cpu", "")),
            driver=facts.get("driver", ""),
        )

    def state(self, state: str) -> None:
        """Exports the job's state (`training`, `evaluating`, ...) and writes the file at once."""
        for name in TRAINING_STATES:
            self.metrics.set("sdc_training_state", float(name == state), state=name)
        self.write(force=True)

    def judged(
        self,
        judgement: Judgement,
        row: Row,
        *,
        when: float,
        checked: int | None,
        verified: int | None,
        action: str | None = None,
    ) -> list[events.Event]:
        """Takes one judgement: counts it, and makes its new verdicts durable.

        Args:
            judgement: what all ranks concluded.
            row: this rank's own row.
            when: the event time, unix seconds, equal on all ranks.
            checked, verified: newest checked and verified step.
            action: what happens to a verdict that contains; by default `halt`, unless `on_fault` is `observe`.

        Returns:
            The new events, in the order of the verdicts; on disk when this returns (on the ranks that write them).
        """
        self._count(judgement, row, checked, verified)
        published = [self.publish(verdict, when, action) for verdict in judgement.verdicts if verdict.new]
        new = [event for event in published if event is not None]
        self.write(force=bool(new))
        return new

    def publish(self, verdict: Verdict, when: float, action: str | None = None) -> events.Event | None:
        """Makes one new verdict an event; None where it is `undefined`, which is remembered only.

        Args:
            when: the event time, unix seconds, equal on all ranks.
            action: as of `judged`.
        """
        verdict = same_step.judged(verdict, self.membership.identities, self.membership.halts)
        self.verdicts.append(verdict)
        if verdict.kind == "undefined":
            return None
        event = self.event(verdict, when, action)
        self._publish(verdict, event)
        return event

    def _count(self, judgement: Judgement, row: Row, checked: int | None, verified: int | None) -> None:
        metrics = self.metrics
        for check, outcome in judgement.checks:
            if outcome.startswith("skipped:"):
                metrics.inc("sdc_skips_total", check=check, reason=outcome.removeprefix("skipped:"))
                metrics.inc("sdc_checks_skipped_total")
            elif outcome == "undefined":
                metrics.inc("sdc_skips_total", check=check, reason="undefined")
                metrics.inc("sdc_checks_skipped_total")
            else:
                metrics.inc("sdc_checks_total", check=check)
                self._ran[check] = time.time()
        for check in judgement.group_sizes:
            metrics.set("sdc_replica_groups", judgement.distinct(check), check=check)
        if judgement.group_sizes:
            smallest = min(sizes[self.rank] for sizes in judgement.group_sizes.values())
            metrics.set("sdc_replica_group_size", smallest)
        if self._ran:
            metrics.set("sdc_last_check_timestamp_seconds", min(self._ran.values()))
        if row.local_norm is not None:
            metrics.set("sdc_gradient_norm", row.local_norm)
        own = self._norms.observe(row.local_norm) if row.local_norm is not None else None
        if judgement.deviations:
            deviation = judgement.deviations[self.rank]
            metrics.set("sdc_gradient_norm_deviation", deviation)
            odd = deviation > DEVIATION_BOUND or (own is not None and own > OWN_BOUND)
            metrics.inc("sdc_gradient_norm_anomalies_total", float(odd))
        metrics.inc("sdc_nonfinite_gradients_total", float(bool(row.local_nonfinite)))
        metrics.inc("sdc_calibration_outliers_total", float(self.rank in judgement.calibration_outliers))
        if checked is not None:
            metrics.set("sdc_checked_step", checked)
        if verified is not None:
            metrics.set("sdc_verified_step", verified)

    def event(self, verdict: Verdict, when: float, action: str | None = None) -> events.Event:
        """The event of a verdict: the same bytes on every rank."""
        contained = action or ("observe" if self._on_fault == "observe" else "halt")
        identities = self.membership.identities
        return events.Event(
            id=events.event_id(
                self.identity.job, self.membership.epoch, verdict.step, verdict.check, verdict.kind, verdict.suspects,
                verdict.differing,
            ),
            training_job=self.identity.job,
            training_cluster=self.identity.cluster,
            epoch=self.membership.epoch,
            step=verdict.step,
            check=verdict.check,
            kind=verdict.kind,
            persistence=verdict.persistence,
            time=round(when, 3),
            suspects=verdict.suspects,
            differing=verdict.differing,
            candidates=verdict.candidates,
            path=verdict.path,
            sentence=verdict.sentence,
            evidence=verdict.evidence,
            action=contained if verdict.contains else "observe",
            drill=False,
            world_size=len(identities),
            last_clean_step=verdict.last_clean_step,
            trust_needed=verdict.trust_needed,
            ranks=tuple(
                events.RankIdentity(
                    rank=i.rank, local_rank=i.local_rank, node=i.node, instance=i.instance, host=i.host,
                    gpu_uuid=i.gpu_uuid, cluster=i.cluster,
                    environment=f"{self.membership.group.environments[i.rank]:016x}",
                )
                for i in identities
            ),
        )  # fmt: skip

    def _publish(self, verdict: Verdict, event: events.Event) -> None:
        identities = self.membership.identities
        outsiders = self.membership.reporters(frozenset(identities[r].node_key for r in verdict.suspects))
        if verdict.suspects and verdict.check in ACCUSING_CHECKS and (self.rank in {*verdict.suspects, *outsiders}):
            for suspect in verdict.suspects:
                if suspect == self.rank or self.rank in outsiders:
                    self.metrics.blame(identities[suspect].labels(), verdict.check, event.time)
        if not verdict.suspects:
            self.metrics.inc("sdc_unattributed_total", check=verdict.check, verdict=verdict.kind)
            self.metrics.set(
                "sdc_last_unattributed_timestamp_seconds", event.time, check=verdict.check, verdict=verdict.kind
            )
        if self.rank not in {*verdict.suspects, *verdict.differing, *outsiders}:
            return
        reporter = events.Reporter(self.rank, self.identity.node, self.identity.instance, self.identity.gpu_uuid)
        detail: dict[str, object] = {"written": round(time.time(), 3)}
        if self._evidence and (files := evidence_plan.named(event)):
            detail["evidence"] = files
        line = events.journal_line(event, reporter, detail)
        # The page goes before the proof: in the milliseconds of the journal's fsync the whole job can be killed.
        # A person looks at a page without a proof; nobody looks at a proof without a page.
        self.write(force=True)
        if self.spool is not None and not self.spool.append_event(line):
            self.swallow("spool", SpoolError(self.spool.last_refusal))
        self.say(events.verdict_line(line) + (f"\n{self._block(event)}" if self.rank in outsiders[:1] else ""))

    def heal(self, check: str, outcome: str, why: str) -> None:
        """Counts how a heal ended (`healed`, `failed`, `refused`), and says it; `why` is empty for `healed`."""
        self.metrics.inc("sdc_heals_total", check=check, outcome=outcome)
        self.write(force=True)
        if self.rank in self.membership.reporters()[:1]:
            text = "the step was healed and checked again; training goes on" if outcome == "healed" else why
            self.say(f"sdcwatch: heal of {check}: {outcome}: {text}")

    def say(self, text: str) -> None:
        """Prints to stderr. A full disk or a closed pipe there is counted and never ends training."""
        try:
            sys.stderr.write(f"{text}\n")  # one write: ranks share a pipe, and a line of JSON must stay whole
            sys.stderr.flush()
        except (OSError, ValueError, AttributeError) as error:  # closed, a name that its encoding lacks, or no stderr
            self.swallow("stderr", error)

    def _block(self, event: events.Event) -> str:
        if event.action == "halt":
            now = f"the job stops before the optimizer step of step {event.step}; no rank trains on"
        elif event.check == "checkpoint":
            now = "this resume is refused; no step is trained from it"
        elif event.action == "heal":
            now = "the step is healed and checked again before any rank uses it; where that fails, the job halts"
        else:
            now = f"training goes on: on_fault={self._on_fault}"
        folder = self.spool.job_directory if self.spool is not None else "<spool>"
        look = f"sdcwatch latch show --dir {folder}" if event.action == "halt" else f"cat {folder}/*/*.events.jsonl"
        if self._evidence and (files := evidence_plan.named(event)):
            look += f"; on node {files[0]['node']}: sdcwatch evidence show {folder}/{event.epoch}/{files[0]['file']}"
        return events.training_log_block(event, what_now=now, look_further=look)

    def finished_step(self, step: int, seconds: float) -> None:
        """Counts one finished step and writes the file when it is due."""
        self.metrics.set("sdc_training_step", step)
        self.metrics.set("sdc_last_step_timestamp_seconds", time.time())
        self.metrics.inc("sdc_step_seconds_total", seconds)
        self.write()

    def spent(self, check: str, seconds: float) -> None:
        """Counts the time of one check."""
        if check in CHECKS:
            self.seconds[check] += max(seconds, 0.0)
            self.metrics.inc("sdc_check_seconds_total", max(seconds, 0.0), check=check)

    def skipped(self, check: str, reason: str) -> None:
        """Counts a skip that no judgement saw."""
        self.metrics.inc("sdc_skips_total", check=check, reason=reason)
        self.metrics.inc("sdc_checks_skipped_total")

    def swallow(self, what: str, error: BaseException) -> None:
        """Counts an exception of our own that training must not see; logged once a kind."""
        self.metrics.inc("sdc_checks_skipped_total")
        if what in CHECKS:
            self.metrics.inc("sdc_skips_total", check=what, reason="error")
        kind = f"{what}:{type(error).__name__}"
        if kind not in self._swallowed:
            self._swallowed.add(kind)
            with contextlib.suppress(OSError, ValueError):  # logging itself raises where stderr is closed
                log.warning("sdcwatch: %s failed and was skipped (further ones are only counted): %r", what, error)

    def write(self, *, force: bool = False) -> None:
        """Writes the metrics file when the interval has passed, or at once."""
        now = time.monotonic()
        if self.spool is None or (not force and now - self._written < self._interval):
            return
        self._written = now
        if not self.spool.write_metrics(self.metrics.lines()):
            self.swallow("spool", SpoolError(self.spool.last_refusal))


def median_time(rows: Sequence[object], default: float) -> float:
    """Median of the clocks in the rows that could be read, unix seconds; robust to a minority of wrong clocks."""
    times = sorted(measured(rows, "time"))
    return times[len(times) // 2] if times else default
