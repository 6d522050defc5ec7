"""Field case 26: locks across fork, signals and garbage collection. Ours take none, and workers export nothing."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

BUSY = """
import gc, os, signal, sys
from sdcwatch.metrics import RankMetrics
from sdcwatch.spool.rank import Spool

identity = {
    "training_job": "gpt", "training_cluster": "blue", "training_node": "n0", "training_instance": "i-0",
    "gpu_uuid": "GPU-0", "rank": "0",
}
spool = Spool.open(sys.argv[1], "gpt", "e1764600000000-00000000", 0, 0, identity)
metrics = RankMetrics(identity, writes_node=True, writes_job=True)
signals = 0

class Cycle:
    def __init__(self): self.me = self
    def __del__(self): metrics.inc("sdc_checks_skipped_total")

def update(*_):
    global signals
    signals += 1
    metrics.inc("sdc_nonfinite_gradients_total")
    spool.write_metrics(metrics.lines())

signal.signal(signal.SIGTERM, update)
signal.signal(signal.SIGALRM, update)
signal.setitimer(signal.ITIMER_REAL, 0.02, 0.02)
gc.set_threshold(20)
workers, steps = [], 0
while len(workers) < 25:
    steps += 1
    Cycle()
    metrics.set("sdc_training_step", steps)
    spool.write_metrics(metrics.lines())
    if steps % 5 == 0:
        os.kill(os.getpid(), signal.SIGTERM)
    if (worker := os.fork()) == 0:
        signal.setitimer(signal.ITIMER_REAL, 0)
        metrics.set("sdc_training_step", 10**9)
        wrote = spool.write_metrics(metrics.lines()) or spool.append_event({"schema": 1})
        gc.collect()
        os._exit(1 if wrote else 0)
    workers.append(worker)
signal.setitimer(signal.ITIMER_REAL, 0)
bad = [status for worker in workers for status in [os.waitpid(worker, 0)[1]] if status]
print(len(workers), signals, steps)
sys.exit(1 if bad or not signals else 0)
"""


def test_workers_forked_in_mid_update_neither_hang_nor_export(tmp_path: Path) -> None:
    """Forks, SIGTERM and finalizers strike while counters are hot: no hang, and only the rank's values are written."""
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", BUSY, str(tmp_path)], capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stdout + done.stderr
    (written,) = tmp_path.glob("*/gpt/*/rank-0.prom")
    (line,) = [one for one in written.read_text().splitlines() if one.startswith("sdc_training_step{")]
    assert float(line.split()[-1]) < 10**9
    assert not written.with_name("rank-0.events.jsonl").exists()
