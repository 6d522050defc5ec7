"""A run in few words: a flat dict for W&B or TensorBoard, and five lines for the end of the training log.

Reads the rank's own metrics in memory; touches no file and no tensor. Flow: monitor -> **ending**.
"""

from __future__ import annotations

from collections.abc import Sequence

from sdcwatch.catalog import CHECKS
from sdcwatch.metrics import RankMetrics
from sdcwatch.verdict import Verdict

_STEPS = {
    "step": "sdc_training_step",
    "checked_step": "sdc_checked_step",
    "verified_step": "sdc_verified_step",
    "clean_checkpoint_step": "sdc_last_clean_checkpoint_step",
}


def summary(metrics: RankMetrics, verdicts: Sequence[Verdict]) -> dict[str, float]:
    """`sdcwatch/...` -> number; what is not known yet is left out; per-job numbers only on ranks that write them."""
    found: dict[str, float] = {}
    for name, metric in _STEPS.items():
        value = metrics.get(metric)
        if value is not None:
            found[f"sdcwatch/{name}"] = value
    spent = 0.0
    for check in CHECKS:
        spent += metrics.get("sdc_check_seconds_total", check=check) or 0.0
        ran = metrics.get("sdc_checks_total", check=check)
        if ran is not None:
            found[f"sdcwatch/ran/{check}"] = ran
    steps = metrics.get("sdc_step_seconds_total")
    if steps:
        found["sdcwatch/overhead_percent"] = 100.0 * spent / steps
    found["sdcwatch/skipped_checks"] = metrics.get("sdc_checks_skipped_total") or 0.0
    found["sdcwatch/events"] = float(sum(1 for v in verdicts if v.kind != "undefined" and v.new))
    found["sdcwatch/suspects"] = float(len({rank for v in verdicts for rank in v.suspects}))
    return found


def lines(found: dict[str, float], verdicts: Sequence[Verdict], *, spool: str) -> str:
    """Five lines for rank 0's log.

    Args:
        spool: folder to hand to `sdcwatch report`.
    """

    def step(name: str) -> str:
        value = found.get(f"sdcwatch/{name}")
        return "none" if value is None else str(int(value))

    ran = ", ".join(f"{c} {int(found[f'sdcwatch/ran/{c}'])}" for c in CHECKS if f"sdcwatch/ran/{c}" in found)
    events = [v for v in verdicts if v.kind != "undefined"]
    told = "none" if not events else f"{len(events)}; newest at step {events[-1].step}: {events[-1].sentence}"
    overhead = found.get("sdcwatch/overhead_percent")
    cost = "not measured" if overhead is None else f"{overhead:.1f} % of the steps' time on this node"
    return "\n".join(
        [
            f"sdcwatch: step {step('step')}; checked up to {step('checked_step')}, "
            f"verified up to {step('verified_step')}",
            f"  ran         {ran or 'nothing'}; {int(found['sdcwatch/skipped_checks'])} skipped",
            f"  faults      {told}",
            f"  overhead    {cost}; clean checkpoint of step {step('clean_checkpoint_step')}",
            f"  more        sdcwatch report {spool} --output report.html",
        ]
    )
