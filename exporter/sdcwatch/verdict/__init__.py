"""The verdict engine: what the observations of one step prove, and who they name (perhaps nobody).

Pure, standard library only: it never measures, waits, exports or acts, and the same rows give the same judgement on
every rank. Two questions are answered apart: is the state proven to differ (`contains`), and who did it (`suspects`).
Flow: observation -> exchange -> **verdict** -> contain, event, metrics.

    group.py        who is where                      partition.py   equality classes and the strict majority
    intake.py       transport faults and void rows    signs.py       positive signs of software
    gradient.py     gradient checks                   weights.py     weights and optimizer state
    conservation.py is the reduced gradient the average of the local ones
    audit.py        plan, calibrate, gather           edges.py       replay's edge table
    replay.py       one audit                         engine.py      judge, combine
    replica_sets.py several sets of ranks that each hold a shard of their own
"""

from sdcwatch.verdict.audit import AuditPlan, plan_audit
from sdcwatch.verdict.engine import combine, judge
from sdcwatch.verdict.group import Group
from sdcwatch.verdict.history import History, checked_through, verified_through
from sdcwatch.verdict.records import CONTAINS_FROM, Judgement, Verdict
from sdcwatch.verdict.replay import tie_breaks
from sdcwatch.verdict.replica_sets import checked_everywhere, judge_sets, verified_everywhere

__all__ = [
    "CONTAINS_FROM",
    "AuditPlan",
    "Group",
    "History",
    "Judgement",
    "Verdict",
    "checked_everywhere",
    "checked_through",
    "combine",
    "judge",
    "judge_sets",
    "plan_audit",
    "tie_breaks",
    "verified_everywhere",
    "verified_through",
]
