"""The run report on a real run with a fault: coverage, the event, its window, the checkpoints, in one closed file."""

from __future__ import annotations

import re
import subprocess
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
import torch
from sdcwatch.cli import main
from sdcwatch.monitor import Monitor
from torch.nn.parallel import DistributedDataParallel


def loss_fn(model: torch.nn.Module, batch: torch.Tensor) -> torch.Tensor:
    return model(batch).square().mean()


def a_run_with_a_fault(rank: int, size: int, root: str) -> dict[str, float]:
    """Ten steps; before the seventh, a bit of rank 1's weights flips without a trace in their version counters."""
    folder = Path(root) / "checkpoints"
    ddp = DistributedDataParallel(torch.nn.Linear(5, 2))
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.01)
    monitor = Monitor(
        ddp, optimizer, loss_fn=loss_fn, checkpoint_dir=folder, replay_every=2, spool_dir=f"{root}/spool{rank}",
        node=f"n{rank}",
    )  # fmt: skip
    for step in range(1, 11):
        if step == 7 and rank == 1:
            ddp.module.weight.detach().numpy().view("int32")[0, 0] ^= 1 << 20
        with monitor.step(step) as s:
            s.loss(torch.randn(3, 5, generator=torch.Generator().manual_seed(step))).backward()
            optimizer.step()
            optimizer.zero_grad()
        if step % 3 == 0:
            monitor.checkpoint(folder / f"step-{step}.pt", lambda p: torch.save(ddp.module.state_dict(), p))
    found = monitor.summary()
    monitor.close()
    return found


class Outside(HTMLParser):
    """Collects whatever a browser would load or run."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def handle_starttag(self, tag: str, attrs: Any) -> None:
        if tag in ("script", "link", "img", "iframe"):
            self.found.append(tag)
        self.found += [f"{name}={value}" for name, value in attrs if name in ("src", "href") or name.startswith("on")]


def test_the_report_says_what_happened_in_one_closed_file(
    ranks: Any, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """Every check with its count, the event with its window, each checkpoint with its trust; nothing from elsewhere."""
    root = tmp_path
    (root / "checkpoints").mkdir()
    summaries = ranks(a_run_with_a_fault, 3, str(root))
    said = capfd.readouterr().out
    assert said.count("sdcwatch: step 10;") == 1, "the five lines come from rank 0 alone"
    assert len(said[said.index("sdcwatch: step 10;") :].strip().splitlines()) == 5
    spools = [str(root / f"spool{rank}") for rank in range(3)]
    output = root / "report.html"
    words = ["report", *spools, "--checkpoints", str(root / "checkpoints"), "--output", str(output)]
    assert main(words) == 0
    page = output.read_text()
    outside = Outside()
    outside.feed(page)
    assert (outside.found, "url(" in page, "http" in page) == ([], False, False)
    assert "prefers-color-scheme: dark" in page
    assert "The replicas differed, and nobody could be named." in page
    for check in ("gradient_norm", "gradient_checksum", "allreduce_conservation", "weight_checksum", "replay"):
        row = re.search(rf"<code>{check}</code>.*?</tr>", page, re.DOTALL)
        assert row is not None, check
    assert re.search(r"may be contaminated: steps 6 to 7", page), "from the last clean step to where it was seen"
    assert page.count('class="pill verified"') + page.count('class="pill checked"') >= 1
    assert 'class="pill candidate"' in page
    assert "<svg" in page
    assert summaries[0]["sdcwatch/step"] == 10
    assert summaries[0]["sdcwatch/events"] >= 1
    assert all(isinstance(value, float) for value in summaries[2].values())
    assert 0 < summaries[0]["sdcwatch/overhead_percent"] < 100


@pytest.mark.integration
@pytest.mark.needs("chromium")
@pytest.mark.timeout(240)
def test_the_page_is_dark_or_light_as_the_reader_is_and_a_rotated_checkpoint_is_shown_as_pinned(
    ranks: Any, tmp_path: Path, require: Any
) -> None:
    """In a real Chromium; the verified checkpoint that a rotation removed stays in the list, as the pin it is."""
    from PIL import Image

    (tmp_path / "checkpoints").mkdir()
    ranks(a_run_with_a_fault, 3, str(tmp_path))
    (tmp_path / "checkpoints" / "step-3.pt").unlink()
    output = tmp_path / "report.html"
    words = ["report", str(tmp_path / "spool0"), "--checkpoints", str(tmp_path / "checkpoints")]
    assert main([*words, "--output", str(output)]) == 0
    assert "step-3.pt (pinned)" in output.read_text()
    flags = ["--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--hide-scrollbars"]
    mean = {}
    for scheme in (0, 1):  # dark, light
        picture = tmp_path / f"{scheme}.png"
        subprocess.run(
            [str(require("chromium")), *flags, f"--user-data-dir={tmp_path / 'profile'}", f"--screenshot={picture}",
             "--window-size=1100,1500", f"--blink-settings=preferredColorScheme={scheme}", output.as_uri()],
            check=True, capture_output=True, timeout=100,
        )  # fmt: skip
        with Image.open(picture) as image:
            mean[scheme] = sum(image.convert("L").resize((1, 1)).tobytes())
    assert mean[0] < 60
    assert mean[1] > 200


def test_a_spool_without_a_run_is_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Statuses for scripts: no such folder 2, no such run 1; a folder that can hold anything is no traceback."""
    assert main(["report", str(tmp_path / "none")]) == 2
    assert main(["report", str(tmp_path)]) == 1
    odd = tmp_path / "0" / "a%3Cscript%3E" / "e1764600000000-00000001"
    odd.mkdir(parents=True)
    (odd / "rank-0.prom").write_bytes(b"\xff\x00 not text {\n")
    (odd / "rank-0.events.jsonl").write_bytes(b'{"schema": 1}\n{"half')
    output = tmp_path / "out.html"
    assert main(["report", str(tmp_path), "--output", str(output)]) == 0
    page = output.read_text()
    assert "<script>" not in page
    assert "a&lt;script&gt;" in page
    assert "No check ran" in page
    assert "no such folder" in capsys.readouterr().err
