"""The doctor: each thing that would keep a proven fault from being acted on is one finding, with what to do."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest
from sdcwatch_remediation import cli, diagnosis
from sdcwatch_remediation.facts import Answer
from sdcwatch_remediation.rehearsal import rehearse
from sdcwatch_remediation.testing import Rig, alert, fleet, make_rig

MEMBERS = fleet(6)


@pytest.fixture
def rig(tmp_path: Path) -> Iterator[Rig]:
    """A service about which nothing is wrong, at the real time (the agents' clocks are real)."""
    with make_rig(tmp_path, MEMBERS, windows=("Mon-Sun 00:00-24:00",)) as made:
        made.clock.now = time.time()
        made.ring(alert(MEMBERS[0], 0, alertname="SDCWatchdog"))
        again(made, database={"id": made.service.database.id}, kill_switch={"file": str(tmp_path / "stop")})
        yield made


def again(rig: Rig, **sections: dict[str, Any]) -> None:
    rig.config = replace(rig.config, **{n: replace(getattr(rig.config, n), **v) for n, v in sections.items()})
    rig.restart()
    rig.rounds(1)


def failing(rig: Rig) -> dict[str, dict[str, str]]:
    answer = rig.send("GET", "/v1/doctor", token="cases")
    assert answer.status_code == 200, answer.text
    return {one["name"]: one for one in answer.json()["findings"] if one["status"] == "fail"}


def test_nothing_fails_where_nothing_is_wrong(rig: Rig) -> None:
    """Every question passes but the two that cannot be told from here, and nothing is written, asked or done."""
    before = rig.service.store.newest_line()
    gates = rig.service.telemetry.registry.get_sample_value("sdc_remediation_gates_total", {"gate": "proven"})
    assert failing(rig) == {}
    found = rig.send("GET", "/v1/doctor", token="cases").json()["findings"]
    assert {one["name"] for one in found if one["status"] == "unknown"} == {"permission", "drill"}
    assert rig.service.store.newest_line() == before
    assert gates == rig.service.telemetry.registry.get_sample_value("sdc_remediation_gates_total", {"gate": "proven"})
    assert (rig.provider.calls, rig.cases()) == ([], [])


def late_clock(rig: Rig) -> None:
    rig.clock.now -= 100


def paused(rig: Rig) -> None:
    rig.service.ledger.pause(by="Ada", reason="drill")


def switch(rig: Rig) -> None:
    Path(rig.config.kill_switch.file).touch()


def unreadable_switch(rig: Rig) -> None:
    again(rig, kill_switch={"file": str(Path(rig.config.kill_switch.file).parent / "none" / "stop")})


def provider_gone(rig: Rig) -> None:
    rig.provider.readable = False


def silent(rig: Rig) -> None:
    for member in MEMBERS[:4]:
        rig.agents[member.instance_id].status = 500


def token_gone(rig: Rig) -> None:
    Path(rig.config.agents.events_token_file).unlink()


def token_shared(rig: Rig) -> None:
    Path(rig.config.server.approve_token_file).write_text("alerts-token\n")


def stuck(rig: Rig) -> None:
    rig.clock.now += 3600


def mode(**policy: Any) -> Callable[[Rig], None]:
    return lambda rig: again(rig, policy=policy)


def held(rig: Rig) -> None:
    rig.ring(alert(MEMBERS[1], 1))
    rig.service.ledger.hold(rig.service.store.cases()[0], by="Ada", reason="looking")


def waiting(rig: Rig) -> None:
    again(rig, policy={"mode": "approve"})
    rig.fault(1, time=rig.clock())
    rig.rounds(3)
    assert rig.case()["state"] == "awaiting_approval"


CASES: list[tuple[Callable[[Rig], None], str, str]] = [
    (paused, "pause", "paused by Ada: drill"),
    (switch, "kill_switch", "is on"),
    (unreadable_switch, "kill_switch", "cannot be looked at"),
    (mode(mode="observe"), "mode", "quarantine observe, replace observe: nothing is done"),
    (mode(replace="recommend"), "mode", "quarantined and never replaced"),
    (mode(groups=()), "groups", "no group may be acted on"),
    (mode(groups=("wrokers",)), "group", "the cluster has workers"),
    (provider_gone, "provider", "cannot be read whole"),
    (silent, "agents", "2 of 6 agents answer"),
    (token_gone, "credentials", "cannot be read"),
    (token_shared, "credentials", "share a token"),
    (late_clock, "clock", "differ from this one by at most"),
    (stuck, "worker", "not ended a round"),
    (mode(concurrent=0), "gate_concurrent", "0 of 0 replacements under way"),
    (mode(per_day=0), "gate_per_day", "0 of 0 in 24 h"),
    (mode(min_running=9), "gate_capacity", "9 must"),
    (mode(shared_nodes=True), "gate_others_work", "cannot say what else runs"),
    (held, "case", "is held by Ada: looking"),
    (waiting, "case", "is awaiting_approval"),
]


@pytest.mark.integration
@pytest.mark.parametrize(("breaks", "name", "said"), CASES)
def test_one_thing_that_is_wrong_is_one_finding(rig: Rig, breaks: Callable[[Rig], None], name: str, said: str) -> None:
    """What was broken is found under its own name, in words, with what to do."""
    breaks(rig)
    found = failing(rig)
    assert name in found, found
    assert said in found[name]["detail"]
    assert found[name]["fix"]


def test_closed_windows_breaker_and_budget_come_from_the_policy_itself(rig: Rig) -> None:
    """Used-up budgets, an open breaker and a closed window are told in the gate's own words."""
    again(rig, policy={"windows": ("Mon-Sun 00:00-00:01",), "per_day": 1, "cooldown_seconds": 600.0})
    rig.clock.now += 3600 if time.gmtime(rig.clock()).tm_hour == 0 else 0
    rig.fault(1, time=rig.clock())
    rig.rounds(3)
    rig.service.ledger.approve(
        rig.service.store.cases()[0], by="Ada", request_sha256=rig.service.store.cases()[0].request_sha256
    )
    rig.rounds(3)
    rig.provider.come_up(MEMBERS[1].instance_id, launched=rig.clock())
    rig.rounds(3, seconds=2.0)
    found = failing(rig)
    assert {"gate_per_day", "gate_cooldown", "gate_window"} <= set(found)
    assert "1 of 1 in 24 h" in found["gate_per_day"]["detail"]
    again(rig, policy={"breaker_instances": 2})
    assert "look like a bad detector" in failing(rig)["gate_breaker"]["detail"]


def test_a_fix_is_known_for_every_gate_that_can_fail_without_a_fault(rig: Rig) -> None:
    """Gates about the evidence itself pass in a rehearsal; each other gate has its own advice."""
    decisions = rehearse(rig.service.context, MEMBERS[0], rig.provider.inventory())
    assert [decision.answer for decision in decisions] == [Answer.GO, Answer.GO]
    asked = {gate.name for decision in decisions for gate in decision.gates}
    of_evidence = {"proven", "node_matches", "event_node_matches", "same_environment", "one_suspect", "one_member"}
    of_evidence |= {"one_case_in_job", "new_failure", "clock", "fresh", "confirmed", "inventory_read"}
    assert asked - of_evidence - {"not_held", "not_stopped"} == set(diagnosis.FIXES)


def test_only_who_may_read_cases_may_ask(rig: Rig) -> None:
    """The answer names nodes and settings, so it is as closed as the cases are."""
    assert rig.send("GET", "/v1/doctor", token=None).status_code == 401
    assert rig.send("GET", "/v1/doctor", token="alerts").status_code == 403


@pytest.fixture
def over_http(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> Rig:
    """Lets the command talk to the rig without a socket."""

    def send(self: Any, method: str, path: str, body: Any) -> Any:
        answer = rig.send(method, path, token=None, headers=dict(self._http.headers), json=body)
        return answer.json()

    monkeypatch.setattr("sdcwatch_remediation.client.Client._send", send)
    return rig


def configuration(rig: Rig, folder: Path) -> Path:
    path = folder / "service.toml"
    path.write_text(
        '[cluster]\nname = "demo"\n[server]\nalerts_token_file = "alerts.token"\ncases_token_file = "cases.token"\n'
        '[agents]\nevents_token_file = "events.token"\n'
    )
    return path


def test_the_command_says_one_line_each_and_its_status_is_the_answer(
    over_http: Rig, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Status 0 where a proven fault would be acted on, 1 where not; `--json` is one object with the same findings."""
    path = configuration(over_http, tmp_path)
    assert cli.main(["doctor", "--config", str(path)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert all(line.split()[0] in ("pass", "unknown") for line in lines)
    over_http.service.ledger.pause(by="Ada", reason="drill")
    assert cli.main(["doctor", "--config", str(path)]) == 1
    (line,) = [line for line in capsys.readouterr().out.splitlines() if line.startswith("fail")]
    assert "paused by Ada: drill -> sdcwatch-remediation resume" in line
    assert cli.main(["doctor", "--json", "--config", str(path)]) == 1
    tree = json.loads(capsys.readouterr().out)
    assert tree["schema"] == 1
    assert [one["name"] for one in tree["findings"] if one["status"] == "fail"] == ["pause"]


def test_without_a_service_or_a_configuration_it_says_that(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The most common reason of all: nothing runs."""
    path = tmp_path / "service.toml"
    assert cli.main(["doctor", "--config", str(path)]) == 1
    out = capsys.readouterr().out
    assert "sdcwatch-remediation init" in out
    for name in ("alerts", "cases", "events"):
        (tmp_path / name).write_text(f"{name}-1")
    path.write_text(
        '[server]\nport=1\nalerts_token_file="alerts"\ncases_token_file="cases"\n'
        '[cluster]\nname="demo"\n[agents]\nevents_token_file="events"\n'
    )
    assert cli.main(["doctor", "--config", str(path)]) == 1
    assert "start `sdcwatch-remediation serve`; without it nothing happens at all" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("answer", "status", "said"),
    [
        (httpx.Response(200, json=[{"name": "remediation"}]), 0, "it has the receiver remediation"),
        (httpx.Response(200, json=[{"name": "mail"}]), 1, "no receiver remediation, only mail"),
        (httpx.Response(503), 1, "does not say its receivers"),
        (httpx.Response(200, text="<html>"), 1, "does not say its receivers"),
    ],
)
def test_alertmanagers_receiver_is_looked_for(
    over_http: Rig,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    answer: httpx.Response,
    status: int,
    said: str,
) -> None:
    """Where a URL is given, the receiver of the shipped routes must be there."""
    answer.request = httpx.Request("GET", "http://127.0.0.1/")
    monkeypatch.setattr(httpx, "get", lambda *_, **__: answer)
    words = ["--config", str(configuration(over_http, tmp_path)), "--alertmanager", "http://127.0.0.1:9093"]
    assert cli.main(["doctor", *words]) == status
    assert said in capsys.readouterr().out
