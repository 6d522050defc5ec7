"""What stands on the disk when a job is killed while an event is being written."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from sdcwatch.identity import Identity
from sdcwatch.report import Reporter
from sdcwatch.spool import Spool
from sdcwatch.start import Membership
from sdcwatch.verdict import Verdict

EPOCH = "e1764600000000-00000001"


class Killed(BaseException):
    """SIGKILL, as far as the code after it is concerned."""


@pytest.fixture
def reporter(tmp_path: Path) -> Reporter:
    """Rank 0 of three, on a node other than the suspect's."""
    identities = tuple(Identity("gpt", "c1", f"n{n}", f"i-{n}", f"n{n}", f"GPU-{n}", n, 0) for n in range(3))
    group: Any = SimpleNamespace(environments=(1, 1, 1))
    membership = Membership(EPOCH, identities, ({"cpu": "x"},) * 3, group, replays=True)
    spool = Spool.open(tmp_path, "gpt", EPOCH, 0, 0, identities[0].labels())
    return Reporter(membership, 0, spool, on_fault="observe", kept=8, interval=5.0)


@pytest.mark.parametrize(
    ("kind", "suspects", "series"),
    [
        ("attributed", (2,), 'sdc_last_mismatch_timestamp_seconds{training_job="gpt"'),
        ("inconclusive", (), 'sdc_last_unattributed_timestamp_seconds{training_job="gpt"'),
    ],
)
def test_the_page_is_on_the_disk_before_the_proof(
    reporter: Reporter, monkeypatch: pytest.MonkeyPatch, kind: str, suspects: tuple[int, ...], series: str
) -> None:
    """Every rank may die in the journal's fsync: the page must come all the same, so the metrics are written first."""
    spool = reporter.spool
    assert spool is not None

    def killed(line: object) -> bool:
        raise Killed

    monkeypatch.setattr(spool, "append_event", killed)
    verdict = Verdict(step=7, check="replay", kind=kind, suspects=suspects, differing=(2,), contains=True)
    judgement: Any = SimpleNamespace(
        verdicts=(verdict,), checks=(), group_sizes={}, deviations=None, calibration_outliers=()
    )
    row: Any = SimpleNamespace(local_norm=None, local_nonfinite=False)
    with pytest.raises(Killed):
        reporter.judged(judgement, row, when=1_764_600_060.125, checked=6, verified=5)
    text = (spool.directory / "rank-0.prom").read_text()
    assert any(line.startswith(series) and line.endswith(" 1764600060.125") for line in text.splitlines())
    spool.close()
