"""One rank as a process of its own: writes its spool as the monitor does, sees one event, and dies by SIGKILL.

    python rank.py '{"root": ..., "job": ..., "epoch": ..., "rank": ..., "born": ..., "event": {...}, ...}'

Times are unix seconds. `born`: when its first metrics file appears. `write`: false for a rank that dies at the event
before it has written a word of it. `torn`: true for one that dies between its metrics and its journal. `dies`: seconds
from the event to the SIGKILL.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from typing import Any

from sdcwatch import event as events
from sdcwatch.metrics import RankMetrics
from sdcwatch.spool.rank import Spool


def until(when: float) -> None:
    """Sleeps; what it waits for is the clock itself."""
    while (left := when - time.time()) > 0:
        time.sleep(min(left, 0.5))


def identity(one: events.RankIdentity, job: str) -> dict[str, str]:
    return {
        "training_job": job,
        "training_cluster": one.cluster,
        "training_node": one.node,
        "training_instance": one.instance,
        "gpu_uuid": one.gpu_uuid,
        "rank": str(one.rank),
    }


def main(spec: dict[str, Any]) -> None:
    event, _, _ = events.parse_line({"schema": 1, "event": spec["event"], "reporter": spec["reporter"], "detail": {}})
    own = event.ranks[spec["rank"]]
    labels = identity(own, event.training_job)
    until(spec["born"])
    spool = Spool.open(spec["root"], event.training_job, event.epoch, own.rank, own.local_rank, labels)
    metrics = RankMetrics(labels, writes_node=True, writes_job=spec["reports"])
    metrics.set("sdc_training_step", event.step - 1)
    metrics.set("sdc_last_step_timestamp_seconds", time.time())
    if spec["reports"]:
        metrics.set("sdc_world_size", event.world_size)
        metrics.set("sdc_training_state", 1, state="training")
        metrics.set("sdc_checked_step", event.step - 1)
    assert spool.write_metrics(metrics.lines()), spool.last_refusal
    until(event.time)
    if spec["write"]:
        line = events.journal_line(event, events.Reporter(**spec["reporter"]), {"written": time.time()})
        for suspect in event.suspects:
            metrics.blame(identity(event.ranks[suspect], event.training_job), event.check, event.time)
        assert spool.write_metrics(metrics.lines()), spool.last_refusal
        if spec["torn"]:
            os.kill(os.getpid(), signal.SIGKILL)
        assert spool.append_event(line), spool.last_refusal
    until(event.time + spec["dies"])
    os.kill(os.getpid(), signal.SIGKILL)


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
