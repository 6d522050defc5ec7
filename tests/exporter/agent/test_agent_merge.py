"""What the agent makes of a spool: one set of series, monotonic, and nothing that a file had no right to say."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families
from sdcwatch.agent.collector import TOTAL_CAPS, Collector
from sdcwatch.agent.expiry import MAX_EPOCHS, Expiry
from sdcwatch.agent.node import Node
from sdcwatch.agent.rank_file import RankFileReader
from sdcwatch.agent.state import StateFile
from sdcwatch.agent.tally import Tally
from sdcwatch.catalog import METRICS, TRAINING_STATES
from sdcwatch.metrics import RankMetrics
from sdcwatch.spool.folders import prepare_user_root
from sdcwatch.spool.rank import Spool
from sdcwatch.spool.reader import MAX_RANKS, epoch_ranks

GOLDEN = Path(__file__).parents[1] / "golden"
NODE = Node("blue", "n0", "i-0", "h0")
OTHER = {
    "training_job": "gpt",
    "training_cluster": "blue",
    "training_node": "n9",
    "training_instance": "i-9",
    "gpu_uuid": "GPU-9",
    "rank": "9",
}
Make = Callable[..., Any]


class Scrape:
    """One collected text, by series."""

    def __init__(self, text: str) -> None:
        self.text = text
        self.values: dict[tuple[str, frozenset[tuple[str, str]]], float] = {}
        for family in text_string_to_metric_families(text):
            for sample in family.samples:
                key = (sample.name, frozenset(sample.labels.items()))
                assert key not in self.values, f"twice: {key}"
                self.values[key] = sample.value

    def find(self, name: str, **labels: str) -> list[float]:
        wanted = set(labels.items())
        return [value for (found, have), value in self.values.items() if found == name and wanted <= have]

    def dropped(self, reason: str) -> float:
        return self.find("sdc_agent_series_dropped_total", reason=reason)[0]


@pytest.fixture
def user(root: Path) -> Path:
    return prepare_user_root(root)


@pytest.fixture
def scrape(user: Path) -> Callable[[], Scrape]:
    tally = Tally()
    collector = Collector(user, NODE, StateFile(user, host="127.0.0.1", port=1, outlives_ranks=True), tally)
    return lambda: Scrape(collector.collect().text)


@pytest.fixture
def expire(user: Path) -> Callable[..., int]:
    """Runs expiry as if `ahead` seconds had passed."""

    def run(ahead: float = 0.0, **how: float) -> int:
        return Expiry(**how).run(user, RankFileReader(NODE, Tally()), time.time() + ahead)

    return run


def forge(rank: Any, text: str) -> None:
    """Writes any text as the rank's file."""
    assert rank.spool.write_metrics(text)


def test_two_ranks_become_one_exposition(rank: Make, scrape: Callable[[], Scrape]) -> None:
    """The whole text, byte for byte (UPDATE_GOLDEN=1 writes it afresh): families together, HELP and TYPE once."""
    for number in (1, 0):
        one = rank(number)
        one.metrics.set("sdc_training_step", 100 + number)
        one.metrics.set("sdc_world_size", 2)
        one.metrics.inc("sdc_checks_total", 3, check="replay")
        one.metrics.inc("sdc_step_seconds_total", 0.25)
        one.metrics.blame(OTHER, "replay", 1764600000.5)
        one.write()
    text = "".join(part for part in scrape().text.splitlines(keepends=True) if not part.startswith("sdc_build_info"))
    path = GOLDEN / "merged.prom"
    if os.environ.get("UPDATE_GOLDEN"):
        path.write_text(text)
    assert text == path.read_text()


def test_a_file_that_claims_another_node_is_dropped_and_counted(rank: Make, scrape: Callable[[], Scrape]) -> None:
    """A forged or stray file cannot speak for somebody else's hardware, except to blame a suspect."""
    forged = rank(0, training_node="n9", training_instance="i-9")
    forged.metrics.set("sdc_training_step", 5)
    forged.metrics.inc("sdc_step_seconds_total", 1)
    forged.write()
    honest = rank(1)
    honest.metrics.blame(OTHER, "replay", 7.0)
    honest.write()
    found = scrape()
    assert found.find("sdc_training_step") == []
    assert found.find("sdc_step_seconds_total") == []
    assert found.dropped("foreign_node") == 2
    assert found.find("sdc_last_mismatch_timestamp_seconds", training_instance="i-9", rank="9") == [7.0]


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("sdc_unheard_of 1\n", "unknown_family"),
        (
            'sdc_agent_ranks_seen{training_cluster="blue",training_node="n0",training_instance="i-0"} 99\n',
            "unknown_family",
        ),
        ('sdc_world_size{training_job="gpt"} 1\n', "labels"),
        ('sdc_world_size{training_job="gpt",training_cluster="blue",instance="x"} 1\n', "labels"),
        ('sdc_checks_total{training_job="gpt",training_cluster="blue",check="vibes"} 1\n', "labels"),
        ('sdc_checks_total{training_job="gpt",training_cluster="blue",check="replay"} NaN\n', "labels"),
        ('sdc_checks_total{training_job="gpt",training_cluster="blue",check="replay"} -1\n', "labels"),
        ('sdc_world_size{training_job="another",training_cluster="blue"} 1\n', "foreign_job"),
        ('sdc_world_size{training_job="gpt",training_cluster="red"} 1\n', "foreign_node"),
    ],
)
def test_what_the_catalogue_does_not_allow_is_dropped_and_counted(
    rank: Make, scrape: Callable[[], Scrape], text: str, reason: str
) -> None:
    """One bad series does not take its neighbours with it."""
    one = rank()
    forge(one, text + 'sdc_heals_total{training_job="gpt",training_cluster="blue",check="replay",outcome="healed"} 2\n')
    found = scrape()
    assert found.dropped(reason) == 1
    assert found.find("sdc_heals_total") == [2]
    assert sum(name in METRICS and METRICS[name].scope != "agent" for name, _ in found.values) == 1


@pytest.mark.parametrize(
    "text", ["sdc_world_size{", "sdc_world_size 1 1700000000", 'sdc_world_size{a="b} 1', "\0\0", "sdc_world_size one"]
)
def test_lines_that_are_none_are_counted(rank: Make, scrape: Callable[[], Scrape], text: str) -> None:
    """Garbage is a number on the agent's own dashboard, not a failed scrape."""
    forge(rank(), text + "\n")
    assert scrape().find("sdc_agent_parse_errors_total") == [1]


@pytest.mark.parametrize("size", [64, 2 << 20])
def test_binary_and_oversized_files_do_not_stop_a_scrape(rank: Make, scrape: Callable[[], Scrape], size: int) -> None:
    """Whatever lies in the folder, the other ranks are served."""
    bad = rank(0)
    (bad.spool.directory / "rank-0.prom").write_bytes(os.urandom(size))
    rank(1).metrics.set("sdc_training_step", 1)
    found = scrape()
    assert found.find("sdc_mismatches_total", rank="1", check="replay") == [0]
    assert found.find("sdc_agent_parse_errors_total")[0] >= 1


def test_a_fifo_in_place_of_a_file_does_not_hang_a_scrape(rank: Make, scrape: Callable[[], Scrape]) -> None:
    """Opening one would block for ever."""
    path = rank(0).spool.directory / "rank-0.prom"
    path.unlink()
    os.mkfifo(path)
    assert scrape().find("sdc_mismatches_total") == []


def test_a_newer_epoch_replaces_the_older_one_of_the_same_rank(rank: Make, scrape: Callable[[], Scrape]) -> None:
    """After a restart no series stands twice, gauges are the new process's, and counters went on."""
    old = rank(0, 0)
    old.metrics.set("sdc_training_step", 500)
    old.metrics.set("sdc_gradient_norm", 1.0)
    old.metrics.inc("sdc_checks_total", 40, check="replay")
    old.metrics.inc("sdc_checks_skipped_total", 4)
    old.write().spool.close()
    new = rank(0, 1, restore=True, gpu_uuid="GPU-0")
    new.metrics.set("sdc_training_step", 3)
    new.metrics.inc("sdc_checks_total", check="replay")
    new.write()
    found = scrape()
    assert found.find("sdc_training_step") == [3]
    assert found.find("sdc_gradient_norm") == []
    assert found.find("sdc_checks_total") == [41]
    assert found.find("sdc_checks_skipped_total") == [4]


def test_counters_go_on_even_when_the_rank_began_at_0(rank: Make, scrape: Callable[[], Scrape]) -> None:
    """A rank that could not read its predecessor's file must not look like a reset."""
    for epoch, count in ((0, 40), (1, 2), (2, 7)):
        one = rank(0, epoch)
        one.metrics.inc("sdc_checks_total", count, check="replay")
        one.write().spool.close()
        assert scrape().find("sdc_checks_total") == [{0: 40, 1: 42, 2: 47}[epoch]]


def test_job_gauges_come_from_the_newest_epoch_alone(rank: Make, scrape: Callable[[], Scrape]) -> None:
    """A state of the epoch before (halted) must not stand beside the new one (training)."""
    for epoch, now in ((0, "halted"), (1, "training")):
        one = rank(epoch, epoch, gpu_uuid="GPU-x")
        job = RankMetrics(one.identity, writes_node=True, writes_job=True)
        for state in TRAINING_STATES if epoch == 0 else (now,):
            job.set("sdc_training_state", state == now, state=state)
        forge(one, job.lines())
        if now == "halted":
            one.spool.close()
    found = scrape()
    assert found.find("sdc_training_state") == [1]
    assert found.find("sdc_training_state", state="training") == [1]


def test_the_time_of_an_event_outlives_the_epoch_that_saw_it(rank: Make, scrape: Callable[[], Scrape]) -> None:
    """A page must not lose its event because the job restarted."""
    old = rank(0, 0)
    old.metrics.blame(OTHER, "replay", 50.0)
    old.metrics.inc("sdc_unattributed_total", check="replay", verdict="software")
    old.metrics.set("sdc_last_unattributed_timestamp_seconds", 60.0, check="replay", verdict="software")
    old.write().spool.close()
    rank(0, 1)
    found = scrape()
    assert found.find("sdc_last_mismatch_timestamp_seconds", rank="9") == [50.0]
    assert found.find("sdc_last_unattributed_timestamp_seconds") == [60.0]
    assert found.find("sdc_unattributed_total") == [1]


def test_a_dead_ranks_series_stay_until_its_epoch_expires(
    rank: Make, scrape: Callable[[], Scrape], expire: Callable[..., int]
) -> None:
    """The page still names the hardware after the rank died; an hour later it is gone, its events are not."""
    one = rank(0)
    one.metrics.inc("sdc_mismatches_total", check="replay")
    one.event(5.0)
    one.write().age(0)
    assert expire(3500) == 0
    assert scrape().find("sdc_mismatches_total", check="replay") == [1]
    assert expire(3700) == 2
    found = scrape()
    assert found.find("sdc_mismatches_total") == []
    assert found.find("sdc_agent_events_pending") == [1]
    assert expire(8 * 86400) == 2
    assert not one.spool.job_directory.exists()


def test_a_living_ranks_epoch_never_expires(rank: Make, expire: Callable[..., int]) -> None:
    """However long a rank writes nothing (a long compilation), its files stay."""
    one = rank(0)
    for path in one.spool.directory.iterdir():
        os.utime(path, (1, 1))
    assert expire(10 * 86400) == 0


def test_a_latch_outlives_everything(rank: Make, expire: Callable[..., int]) -> None:
    """Expiry must never let a halted job start again."""
    one = rank(0)
    one.age(0)
    latch = one.spool.job_directory / "HALTED.json"
    latch.write_text("{}")
    expire(30 * 86400)
    expire(60 * 86400)
    assert latch.exists()


def test_counters_go_on_over_an_expired_epoch(
    rank: Make, scrape: Callable[[], Scrape], expire: Callable[..., int], user: Path
) -> None:
    """What expires is folded first, also when the agent dies between the two steps."""
    texts = {}
    for epoch, count in ((0, 40), (1, 2)):
        old = rank(0, epoch)
        old.metrics.inc("sdc_checks_total", count, check="replay")
        texts[old.write().spool.directory.name] = old.metrics.lines()
        old.age(0)
    expire(3700)
    for name, text in texts.items():
        again = Spool.open(user.parent, "gpt", name, 0, 0, old.identity)
        again.write_metrics(text)  # as if the removal had not happened
        again.close()
    assert scrape().find("sdc_checks_total") == [42]
    new = rank(0, 2)
    new.metrics.inc("sdc_checks_total", 1, check="replay")
    new.write()
    assert scrape().find("sdc_checks_total") == [43]


def test_a_crash_loop_cannot_fill_the_spool(root: Path, expire: Callable[..., int]) -> None:
    """Epochs beyond the bound expire at once, the oldest first."""
    for number in range(MAX_EPOCHS + 3):
        spool = Spool.open(root, "gpt", f"e{1000 + number}-00000000", 0, 0, {})
        spool.close()
    assert expire() == 3
    assert min(path.name for path in spool.job_directory.iterdir() if path.is_dir()) == "e1003-00000000"


def test_two_jobs_are_served_apart(rank: Make, scrape: Callable[[], Scrape]) -> None:
    """A shared node keeps both, and a file cannot speak for the other job."""
    for job, size in (("gpt", 4), ("bert/../x", 8)):
        one = rank(0, job=job)
        one.metrics.set("sdc_world_size", size)
        one.write()
    found = scrape()
    assert found.find("sdc_world_size", training_job="gpt") == [4]
    assert found.find("sdc_world_size", training_job="bert/../x") == [8]


def test_caps_hold_whatever_ranks_write(rank: Make, scrape: Callable[[], Scrape]) -> None:
    """80 forged files of up to 2,000 series stay under the cap, and the refused are counted."""
    template = (
        'sdc_mismatches_total{{training_job="gpt",training_cluster="blue",training_node="n{n}",training_instance="i",'
        'gpu_uuid="g",rank="{n}",check="replay"}} 1\n'
    )
    first = rank(0)
    for number in range(80):
        text = "".join(template.format(n=number * 2000 + n) for n in range(2000 if number < 4 else 200))
        (first.spool.directory / f"rank-{number}.prom").write_text(text)
    found = scrape()
    kept = [key for key in found.values if METRICS[key[0]].scope == "rank"]
    assert len(kept) <= TOTAL_CAPS["rank"]
    assert found.dropped("cap") > 4 * 1800


def test_of_absurdly_many_ranks_the_lowest_are_looked_at(root: Path) -> None:
    """A folder full of files bounds the work of a scrape; a large node is far below the bound."""
    spool = Spool.open(root, "gpt", "e1-00000000", 0, 0, {})
    for number in range(MAX_RANKS + 50):
        (spool.directory / f"rank-{number}.prom").touch()
    assert [files.rank for files in epoch_ranks("gpt", spool.directory)] == list(range(MAX_RANKS))
    spool.close()


def test_a_file_is_parsed_again_only_when_it_changed(rank: Make, user: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks that wrote nothing new cost a stat."""
    from sdcwatch.agent import rank_file

    reads: list[Path] = []
    real = rank_file.read_regular
    monkeypatch.setattr(rank_file, "read_regular", lambda path, limit: reads.append(path) or real(path, limit))
    one = rank(0)
    collector = Collector(user, NODE, StateFile(user, host="h", port=1, outlives_ranks=True), Tally())
    collector.collect()
    collector.collect()
    assert len(reads) == 1
    one.write()
    collector.collect()
    assert len(reads) == 2


@pytest.mark.parametrize("state", TRAINING_STATES)
def test_rank_whose_process_is_gone_is_in_no_living_state(rank: Make, scrape: Callable[[], Scrape], state: str) -> None:
    """A signal ended it before it could say so itself. What it counted stays, and so do `halted` and `finished`."""
    one = rank(0)
    for name in TRAINING_STATES:
        one.metrics.set("sdc_training_state", name == state, state=name)
    one.metrics.inc("sdc_checks_total", 7, check="replay")
    one.write()
    assert scrape().find("sdc_training_state", state=state) == [1]
    one.spool.close()
    found = scrape()
    assert found.find("sdc_training_state", state=state) == [float(state in ("halted", "finished"))]
    assert len(found.find("sdc_training_state")) == len(TRAINING_STATES)
    assert found.find("sdc_checks_total") == [7]
