"""A database that was not meant (empty, older, foreign): nothing is done on it until a person says so."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from sdcwatch_remediation.errors import ConfigError
from sdcwatch_remediation.highwater import HighWater
from sdcwatch_remediation.testing import Rig, fleet, make_rig

MEMBERS = fleet(4)


@pytest.fixture
def rig(tmp_path: Path) -> Iterator[Rig]:
    """A service that has done one replacement and knows how far its database came."""
    with make_rig(tmp_path, MEMBERS) as made:
        again(made, mark_file=str(tmp_path / "state.mark"))
        yield made


def again(rig: Rig, **database: str) -> None:
    """Start the service anew with other settings of `[database]`."""
    rig.config = replace(rig.config, database=replace(rig.config.database, **database))
    rig.restart()


def file_of(rig: Rig) -> Path:
    return Path(rig.config.database.url.removeprefix("sqlite:///"))


def foreign(rig: Rig) -> str:
    """The configuration pins another database."""
    again(rig, id="another-id")
    return "is another one, database.id says another-id"


def emptied(rig: Rig) -> str:
    """Somebody removed the file, and nothing is pinned: the mark beside it is still there."""
    rig.service.close()
    file_of(rig).unlink()
    rig._open()
    return "the one used here before was"


def emptied_and_pinned(rig: Rig) -> str:
    """The whole folder is gone, the mark too; the configuration still names the id."""
    pinned = rig.service.database.id
    rig.service.close()
    file_of(rig).unlink()
    Path(rig.config.database.mark_file).unlink()
    again(rig, id=pinned)
    return f"is new and empty, database.id says {pinned}"


def older(rig: Rig) -> str:
    """A backup from before the last act was put back; its id is right."""
    rig.service.close()
    shutil.copy(file_of(rig), f"{file_of(rig)}.backup")
    rig._open()
    rig.fault(0)
    rig.rounds(4)
    assert rig.provider.calls == [MEMBERS[0].instance_id]
    rig.service.close()
    shutil.copy(f"{file_of(rig)}.backup", file_of(rig))
    for name in ("-wal", "-shm"):
        Path(f"{file_of(rig)}{name}").unlink(missing_ok=True)
    again(rig, id=HighWater(rig.config.database.mark_file)._id)
    return "it is an older copy"


@pytest.mark.parametrize("how", [foreign, emptied, emptied_and_pinned, older])
def test_a_database_that_was_not_meant_is_frozen(rig: Rig, how: Callable[[Rig], str]) -> None:
    """Deliveries are kept and proven; nothing is quarantined, replaced or released, and every window says why."""
    said = how(rig)
    done = list(rig.provider.calls)
    posts = {instance: len(agent.posts) for instance, agent in rig.agents.agents.items()}
    rig.fault(2)
    rig.rounds(5, seconds=120.0)
    case = rig.case(MEMBERS[2])
    assert (case["state"], case["intents"], case["quarantined_at"]) == ("settling", [], None)
    assert said in case["reason"]
    assert rig.provider.calls == done
    assert {instance: len(agent.posts) for instance, agent in rig.agents.agents.items()} == posts
    ready = rig.send("GET", "/readyz", token=None)
    assert (ready.status_code, said in ready.json()["frozen"]) == (200, True)
    assert rig.service.telemetry.registry.get_sample_value("sdc_remediation_frozen") == 1
    assert rig.service.telemetry.registry.get_sample_value("sdc_remediation_stopped") == 1
    findings = {one["name"]: one for one in rig.send("GET", "/v1/doctor", token="cases").json()["findings"]}
    assert findings["database"]["status"] == "fail"
    assert rig.send("POST", "/v1/resume", token="admin", content=b'{"by":"Ada"}').json()["stopped"].startswith("frozen")
    rig.rounds(3, seconds=2.0)
    assert rig.provider.calls == done, "a resume is no thaw"


@pytest.mark.integration
@pytest.mark.parametrize("how", [foreign, emptied, emptied_and_pinned, older])
def test_what_the_sentence_says_thaws_it(rig: Rig, how: Callable[[Rig], str]) -> None:
    """The id is pinned, or the mark removed, by somebody who knows; then the waiting case goes on."""
    how(rig)
    done = list(rig.provider.calls)
    rig.fault(2)
    rig.rounds(3)
    if how is older:
        assert "remove the file, restart" in rig.service.context.frozen
        Path(rig.config.database.mark_file).unlink()
        rig.restart(per_day=5, concurrent=5)
    else:
        assert rig.service.database.id in rig.service.context.frozen
        again(rig, id=rig.service.database.id)
    assert rig.service.context.frozen == ""
    rig.rounds(3, seconds=2.0)
    assert rig.provider.calls == [*done, MEMBERS[2].instance_id]
    assert rig.service.telemetry.registry.get_sample_value("sdc_remediation_frozen") == 0


def test_the_mark_is_written_before_the_act(rig: Rig) -> None:
    """When the provider is called, the file already knows of the request: a copy from before it would be told."""
    seen: list[tuple[int, int]] = []
    rig.provider.on_replace = lambda _: seen.append(
        (HighWater(rig.config.database.mark_file)._line, rig.service.store.newest_line())
    )
    rig.fault(2)
    rig.rounds(3)
    assert len(seen) == 1
    assert seen[0][0] == seen[0][1]


def test_restarts_of_the_same_database_freeze_nothing(rig: Rig) -> None:
    """Orderly ends and kills alike: what was committed is never behind the mark."""
    for member in range(3):
        rig.fault(member, ring=True, step=member)
        rig.rounds(2)
        rig.restart()
        assert rig.service.context.frozen == ""


def test_a_mark_that_cannot_be_read_stops_the_start_and_one_that_cannot_be_written_is_told(
    rig: Rig, tmp_path: Path
) -> None:
    """Garbage is never taken for "nothing known"; an unwritable folder is a finding, and the service goes on."""
    (tmp_path / "bad").write_text("{")
    with pytest.raises(ConfigError, match="how far the database had come"):
        HighWater(str(tmp_path / "bad"))
    water = rig.service.context.store.high_water
    assert water is not None
    water.path = str(tmp_path / "none" / "mark")
    rig.fault(2)
    rig.rounds(3)
    assert len(rig.provider.calls) == 1
    findings = [one["name"] for one in rig.send("GET", "/v1/doctor", token="cases").json()["findings"]]
    assert "mark" in findings
