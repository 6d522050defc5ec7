"""docs/contracts.md against the bytes: spool layout, journal lines, agent.json, and the agent's answers.

Reads what the product writes as a stranger would: JSON, HTTP and the words of the document, no class of ours.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import select
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from sdcwatch.event import Event, RankIdentity, Reporter, event_id, journal_line
from sdcwatch.metrics import RankMetrics
from sdcwatch.spool.rank import Spool

EPOCH = "e1764600000000-00c0ffee"
IDENTITY = {
    "training_job": "gpt", "training_cluster": "blue", "training_node": "n0", "training_instance": "i-0",
    "gpu_uuid": "GPU-0", "rank": "0",
}  # fmt: skip


@pytest.fixture(scope="module")
def contracts() -> str:
    return (Path(__file__).parents[2] / "docs/contracts.md").read_text(encoding="utf-8")


def line() -> dict[str, Any]:
    """One journal line with every field set."""
    parts: tuple[Any, ...] = ("gpt", EPOCH, 7, "replay", "attributed", (1,), (1,))
    ranks = tuple(RankIdentity(r, 0, f"n{r}", f"i-{r}", f"h{r}", f"GPU-{r}", "blue", "ab") for r in range(3))
    event = Event(
        id=event_id(*parts), training_job="gpt", training_cluster="blue", epoch=EPOCH, step=7, check="replay",
        kind="attributed", persistence="persistent", time=1764600007.5, suspects=(1,), differing=(1,), candidates=(1,),
        path="backward compute", sentence="rank 1 is wrong", evidence={"é": 1}, action="halt", drill=False,
        world_size=3, last_clean_step=4, trust_needed="verified", ranks=ranks,
    )  # fmt: skip
    return journal_line(event, Reporter(0, "n0", "i-0", "GPU-0"), {"written": 1.0})


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Path, str]]:
    """A spool with one rank's files, and the address of an agent that serves it."""
    root = tmp_path_factory.mktemp("site") / "spool"
    (root.parent / "token").write_text("secret")
    spool = Spool.open(root, "gpt", EPOCH, 0, 0, IDENTITY)
    metrics = RankMetrics(IDENTITY, writes_node=True, writes_job=True)
    metrics.set("sdc_world_size", 3)
    spool.write_metrics(metrics.lines())
    spool.append_event(line())
    words = [sys.executable, "-m", "sdcwatch.cli", "agent", "--spool-dir", root, "--port", "0", "--node", "n0"]
    words += ["--instance", "i-0", "--cluster", "blue", "--events-token-file", root.parent / "token"]
    process = subprocess.Popen([*map(str, words)], stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        assert select.select([process.stdout], [], [], 20)[0]
        found = re.search(r"(http://[\d.:]+)/metrics", process.stdout.readline())
        assert found is not None
        yield root, found.group(1)
    finally:
        process.kill()
        process.communicate(timeout=20)
        spool.close()


def fetch(address: str, **headers: str) -> tuple[Any, str]:
    with urllib.request.urlopen(urllib.request.Request(address, headers=headers), timeout=10) as answer:
        return answer.headers, answer.read().decode()


def test_the_spool_is_laid_out_as_written(site: tuple[Path, str], contracts: str) -> None:
    """Each file stands where the table says, and every file that stands there is in the table."""
    root, _ = site
    user = root / str(os.getuid())
    found = {str(p.relative_to(user)) for p in user.rglob("*") if p.is_file()}
    assert found == {
        "node.json", "agent.lock", "agent.json", f"gpt/{EPOCH}/rank-0.json", f"gpt/{EPOCH}/rank-0.prom",
        f"gpt/{EPOCH}/rank-0.events.jsonl",
    }  # fmt: skip
    for name in found:
        assert re.sub(r"rank-0", "rank-<rank>", Path(name).name) in contracts
    assert {p.stat().st_mode & 0o777 for p in user.rglob("*") if p.is_file()} == {0o600}


def test_the_json_files_have_the_documented_keys(site: tuple[Path, str]) -> None:
    """What other parts read by key."""
    user = site[0] / str(os.getuid())
    node = json.loads((user / "node.json").read_text())
    assert node.keys() == {"schema", "cluster", "node", "instance", "host", "time"}
    agent = json.loads((user / "agent.json").read_text())
    assert agent.keys() == {"schema", "pid", "host", "port", "started", "outlives_ranks", "scrapes"}
    claim = json.loads((user / f"gpt/{EPOCH}/rank-0.json").read_text())
    assert claim.keys() >= {"schema", "rank", "local_rank", "pid", "identity"}
    assert {node["schema"], agent["schema"], claim["schema"]} == {1}


def test_a_journal_line_has_exactly_the_documented_fields(contracts: str) -> None:
    """The fields of docs/contracts.md's own example, neither more nor fewer."""
    example = contracts.split("## Event (schema 1)")[1].split("- `event` is the same")[0]
    inside = example.split('"event": {')[1].split('"reporter"')[0]
    documented = set(re.findall(r'"(\w+)"', inside.split('"ranks": [')[0])) | {"ranks"}
    of_rank = set(re.findall(r'"(\w+)"', inside.split('"ranks": [')[1]))
    of_reporter = set(re.findall(r'"(\w+)"', example.split('"reporter": {')[1].split("}")[0]))
    written = line()
    assert written.keys() == {"schema", "event", "reporter", "detail"}
    assert written["event"].keys() == documented
    assert {key for rank in written["event"]["ranks"] for key in rank} == of_rank
    assert written["reporter"].keys() == of_reporter


def test_the_id_can_be_made_from_the_document_alone() -> None:
    """SHA-256 over the canonical JSON of the seven parts, in their order."""
    event = line()["event"]
    names = ("training_job", "epoch", "step", "check", "kind", "suspects", "differing")
    text = json.dumps([event[name] for name in names], sort_keys=True, separators=(",", ":"), ensure_ascii=False)
    assert event["id"] == "sdc-" + hashlib.sha256(text.encode()).hexdigest()[:16]


def test_events_are_served_as_they_were_written(site: tuple[Path, str]) -> None:
    """The answer has the documented keys, the filter is on the ranks' instances, and nothing is changed."""
    _, address = site
    answer = json.loads(fetch(f"{address}/events?instance=i-2&since=0", Authorization="Bearer secret")[1])
    assert answer.keys() == {"schema", "agent", "events", "truncated"}
    assert answer["agent"].keys() == {"cluster", "node", "instance", "version"}
    assert (answer["schema"], answer["truncated"]) == (1, False)
    assert answer["events"] == [line()]
    for query in ("instance=i-7", "since=1764600008", "instance="):
        assert json.loads(fetch(f"{address}/events?{query}", Authorization="Bearer secret")[1])["events"] == []


def test_metrics_are_prometheus_text_and_health_is_200(site: tuple[Path, str]) -> None:
    """With the content type by which Prometheus 2 and 3 choose a parser."""
    _, address = site
    headers, text = fetch(f"{address}/metrics")
    assert headers["Content-Type"].startswith("text/plain; version=0.0.4")
    assert 'sdc_world_size{training_job="gpt",training_cluster="blue"} 3\n' in text
    assert fetch(f"{address}/healthz")[1] == "ok\n"


def test_a_scrape_is_a_get_with_the_header_of_prometheus(site: tuple[Path, str]) -> None:
    """agent.json lists its time, newest last, at most 16."""
    root, address = site
    for _ in range(18):
        fetch(f"{address}/metrics", **{"X-Prometheus-Scrape-Timeout-Seconds": "5"})
    fetch(f"{address}/metrics")
    # A time is written after its answer has been sent, so it may come a moment later than the answer.
    deadline = time.monotonic() + 20
    scrapes: list[float] = []
    while len(scrapes) < 16 and time.monotonic() < deadline:
        scrapes = json.loads((root / str(os.getuid()) / "agent.json").read_text())["scrapes"]
    assert len(scrapes) == 16
    assert scrapes == sorted(scrapes)
