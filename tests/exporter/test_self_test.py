"""The self-test at start: every check finds an injected fault, and one that cannot is said to be blind."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from sdcwatch.catalog import CHECKS
from sdcwatch.watch import self_test


def test_every_check_finds_the_injection_and_leaves_no_trace() -> None:
    """Nothing is blind, it takes milliseconds, and the random state is the user's."""
    before = torch.get_rng_state()
    self_test.run(torch.device("cpu"))
    found = min((self_test.run(torch.device("cpu")) for _ in range(5)), key=lambda result: result.seconds)
    assert found.blind == ()
    assert found.seconds < 0.2
    assert torch.equal(torch.get_rng_state(), before)
    assert {*self_test.CHECKS, "checkpoint"} == set(CHECKS)


def nothing(*_: Any, **__: Any) -> Any:
    raise RuntimeError("broken")


@pytest.mark.parametrize(
    ("name", "broken", "blind"),
    [
        ("fingerprint", lambda tensors: 7, {"gradient_checksum", "weight_checksum", "replay"}),
        ("norm", lambda tensor: torch.ones(()), {"gradient_norm"}),
        ("weights", lambda count, seed: torch.zeros(count, dtype=torch.float64), {"allreduce_conservation"}),
        ("fingerprint", nothing, set(self_test.CHECKS)),
        ("judge", nothing, set(self_test.CHECKS)),
    ],
)
def test_a_check_that_cannot_see_is_blind(
    monkeypatch: pytest.MonkeyPatch, name: str, broken: Any, blind: set[str]
) -> None:
    """A fingerprint that is always the same, a constant norm, weights of zero, and code that raises."""
    monkeypatch.setattr(self_test, name, broken)
    assert set(self_test.run(torch.device("cpu")).blind) == blind


def start(rank: int, size: int, root: str, broken: bool) -> Any:
    from sdcwatch import Monitor
    from torch import nn
    from torch.nn.parallel import DistributedDataParallel

    if broken and rank == 1:
        self_test.norm = lambda tensor: torch.ones(())  # type: ignore[assignment]
    ddp = DistributedDataParallel(nn.Linear(4, 2))
    optimizer = torch.optim.SGD(ddp.parameters(), 0.1)
    monitor = Monitor(ddp, optimizer, spool_dir=f"{root}/node-{rank}", node=f"node-{rank}")
    with monitor.step(0):
        ddp(torch.ones(3, 4)).sum().backward()
        optimizer.step()
    assert monitor._epoch is not None
    metrics = monitor._epoch.reporter.metrics
    found = {
        name: (metrics.get("sdc_self_test_passed", check=name), metrics.get("sdc_detector_enabled", check=name))
        for name in ("gradient_norm", "weight_checksum")
    }
    verdicts = monitor.verdicts
    monitor.close()
    return found, verdicts


@pytest.mark.parametrize("broken", [False, True])
def test_a_rank_that_is_blind_shows_on_all(ranks: Any, tmp_path: Path, broken: bool) -> None:
    """The metric that SDCCheckDisabled reads falls to 0 on every rank; the injection itself is no verdict anywhere."""
    for found, verdicts in ranks(start, 2, str(tmp_path), broken):
        assert found["weight_checksum"] == (1, 1)
        assert found["gradient_norm"] == ((0, 0) if broken else (1, 1))
        assert verdicts == ()


RULES = Path(__file__).parents[2] / "alert_rules"


def begin(rank: int, size: int, root: str, case: str) -> tuple[bool, str, list[str]]:
    """A job's first steps: are weights as before the Monitor, what a scrape shows, and what its spool has of events."""
    from sdcwatch import Monitor
    from torch import nn
    from torch.nn.parallel import DistributedDataParallel

    if case == "blind" and rank == 1:
        self_test.norm = lambda tensor: torch.ones(())  # type: ignore[assignment]
    ddp = DistributedDataParallel(nn.Linear(4, 2))
    optimizer = torch.optim.SGD(ddp.parameters(), 0.1)
    before = [(p.detach().clone(), p._version) for p in ddp.parameters()]
    monitor = Monitor(
        ddp, optimizer, loss_fn=lambda model, batch: model(batch).sum(), spool_dir=f"{root}/n-{rank}", node=f"n-{rank}",
        on_fault="halt",
    )  # fmt: skip
    untouched = not optimizer.state and all(
        torch.equal(was, p) and p._version == version and p.grad is None
        for (was, version), p in zip(before, ddp.parameters(), strict=True)
    )
    for number in range(2):
        with monitor.step(number) as step:
            step.loss(torch.ones(3, 4)).backward()
            optimizer.step()
            optimizer.zero_grad()
    assert monitor._epoch is not None
    metrics = monitor._epoch.reporter.metrics
    if case == "leaks" and rank == 0:
        odd = {"training_node": "self-test-1", "training_instance": "i", "gpu_uuid": "g", "rank": "1"}
        metrics.blame(odd, "weight_checksum", 30.0)
    text = metrics.lines()
    monitor.close()
    folder = Path(root, f"n-{rank}")
    return untouched, text, [p.read_text() for p in folder.rglob("*.events.jsonl")] + list(folder.rglob("HALTED*"))


def fired(promtool: Path, folder: Path, texts: list[str]) -> set[str]:
    """Every alert of ours that fires within nine minutes over what these ranks export."""
    lines = [line for text in texts for line in text.splitlines() if line and not line.startswith("#")]
    samples = {name: float(value) for name, _, value in (line.rpartition(" ") for line in lines)}
    samples = {name: value if value < 1e9 else 0.0 for name, value in samples.items()}  # promtool's clock begins at 0
    names = {
        rule["alert"]: path
        for path in RULES.glob("*.rules.yaml")
        for group in yaml.safe_load(path.read_text())["groups"]
        for rule in group["rules"]
        if "alert" in rule
    }
    case = {
        "rule_files": sorted(str(path) for path in set(names.values())),
        "evaluation_interval": "15s",
        "tests": [
            {
                "interval": "15s",
                "input_series": [{"series": name, "values": f"{value}x60"} for name, value in samples.items()],
                "alert_rule_test": [
                    {"eval_time": at, "alertname": name, "exp_alerts": []} for name in names for at in ("1m", "9m")
                ],
            }
        ],
    }
    (folder / "case.yaml").write_text(yaml.safe_dump(case))
    done = subprocess.run([promtool, "test", "rules", "case.yaml"], cwd=folder, capture_output=True, text=True)
    found = set(re.findall(r"alertname: (\w+)", done.stdout + done.stderr))
    assert bool(found) == bool(done.returncode), done.stdout + done.stderr
    return found


@pytest.mark.parametrize("case", ["healthy", "blind", "leaks"])
def test_the_injection_at_start_is_no_event_and_pages_nobody(
    ranks: Any, tmp_path: Path, require: Callable[[str], Path], case: str
) -> None:
    """Weights, spool and counters know nothing of it, and of the alerts only one that says a check is off may fire."""
    results = ranks(begin, 3, str(tmp_path), case)
    assert all(untouched for untouched, *_ in results)
    assert [left for *_, left in results] == [[], [], []]
    texts = [text for _, text, _ in results]
    counted = re.findall(r"(?m)^sdc_(?:mismatches|unattributed|nonfinite_gradients)_total\{.* (\S+)$", "".join(texts))
    assert (set(map(float, counted)) - {0.0} == {1.0}) == (case == "leaks"), counted
    assert len(re.findall(r"(?m)^sdc_self_test_passed\{", texts[0])) == len(CHECKS) - 1
    assert not [path for path in RULES.glob("*.rules.yaml") if "sdc_self_test" in path.read_text()]
    alerts = fired(require("promtool"), tmp_path, texts)
    wanted = {"leaks": {"SDCReplicaMismatch"}, "blind": {"SDCCheckDisabled"}, "healthy": set()}[case]
    assert alerts == wanted | {"SDCWatchdog"}, "one that leaked would page; one that is not found says so"
