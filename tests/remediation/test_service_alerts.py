"""Deliveries: what is accepted, what opens nothing, and who may send; through the real app and a real SQLite file."""

from __future__ import annotations

import json
import sqlite3
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from sdcwatch_remediation import schema
from sdcwatch_remediation.records import Member
from sdcwatch_remediation.testing import Rig, alert, delivery, fleet, make_rig
from sqlalchemy import func, select

MEMBERS = fleet(4)


@pytest.fixture
def rig(tmp_path: Path) -> Iterator[Rig]:
    with make_rig(tmp_path, MEMBERS) as made:
        yield made


def rows(rig: Rig, table: str) -> int:
    with rig.service.database.read() as connection:
        return int(connection.execute(select(func.count()).select_from(schema.metadata.tables[table])).scalar() or 0)


def test_a_doorbell_is_durable_before_it_is_answered(rig: Rig) -> None:
    """After the 200 another connection finds the raw body, the signal and the case in the file."""
    body = delivery(alert(MEMBERS[1], 1))
    answer = rig.send("POST", "/v1/alerts", content=body)
    assert answer.status_code == 200
    path = rig.config.database.url.removeprefix("sqlite:///")
    with sqlite3.connect(path) as connection:
        assert connection.execute("select body from deliveries").fetchall() == [(body,)]
        assert connection.execute("select result from signals").fetchall() == [("accepted",)]
        assert connection.execute("select instance_id, state from cases").fetchall() == [
            (MEMBERS[1].instance_id, "received")
        ]
        assert connection.execute("pragma journal_mode").fetchone() == ("wal",)
    connection.close()


def test_a_batch_is_judged_alert_by_alert(rig: Rig) -> None:
    """One odd alert in a batch costs the others nothing, and the answer says what became of each."""
    resolved = {**alert(MEMBERS[3], 3), "status": "resolved"}
    other = {**alert(MEMBERS[0], 0), "labels": {"alertname": "SDCWatchdog"}}
    results = rig.ring(
        alert(MEMBERS[0], 0), {"labels": {"alertname": 7}}, "text", other, resolved, alert(MEMBERS[1], 1)
    )
    assert [r["result"] for r in results] == ["accepted", "rejected", "rejected", "ignored", "resolved", "accepted"]
    assert {case["instance_id"] for case in rig.cases()} == {MEMBERS[0].instance_id, MEMBERS[1].instance_id}


@pytest.mark.parametrize(
    "body", [b"", b"{", b"[]", b'{"alerts": {}}', b"\xff\xfe", b"[" * 100_000, b'{"alerts": 1e999}', b"null"]
)
def test_what_is_not_alertmanagers_is_a_400_and_keeps_nothing(rig: Rig, body: bytes) -> None:
    """A body without a list of alerts is the only 400, and the answer says what to do."""
    answer = rig.send("POST", "/v1/alerts", content=body)
    assert answer.status_code == 400
    assert "Alertmanager" in answer.json()["error"]
    assert rows(rig, "deliveries") == 0


def test_a_body_over_the_limit_is_a_413(rig: Rig) -> None:
    """A long body is refused by its declared length, and also when it declares none."""
    long = b" " * (rig.config.server.body_limit_bytes + 1)
    assert rig.send("POST", "/v1/alerts", content=long).status_code == 413

    async def chunks() -> object:
        for _ in range(17):
            yield b" " * 65_536

    assert rig.send("POST", "/v1/alerts", content=chunks()).status_code == 413  # type: ignore[arg-type]
    assert rows(rig, "deliveries") == 0


@pytest.mark.parametrize(
    ("token", "status"),
    [(None, 401), ("wrong", 401), ("cases", 403), ("approve", 403), ("admin", 403), ("alerts", 200)],
)
def test_only_the_alerts_token_delivers(rig: Rig, token: str | None, status: int) -> None:
    """No or an unknown token is 401, one of another scope is 403, and neither keeps anything."""
    answer = rig.send("POST", "/v1/alerts", token=token, content=delivery(alert(MEMBERS[1], 1)))
    assert answer.status_code == status
    assert rows(rig, "deliveries") == (1 if status == 200 else 0)


def test_a_token_is_rotated_without_a_restart(rig: Rig) -> None:
    """Two tokens are valid at once, and a token that left the file is refused."""
    path = Path(rig.config.server.alerts_token_file)
    path.write_text("alerts-token\nnext-token\n")
    assert {rig.send("POST", "/v1/alerts", token=t, content=delivery()).status_code for t in ("alerts", "next")} == {
        200
    }
    path.write_text("next-token\n")
    assert rig.send("POST", "/v1/alerts", token="alerts", content=delivery()).status_code == 401


def test_a_locked_database_is_a_503_and_the_retry_succeeds(rig: Rig) -> None:
    """While another connection holds the file Alertmanager is told to come again; then nothing is lost."""
    connection = sqlite3.connect(rig.config.database.url.removeprefix("sqlite:///"), isolation_level=None)
    connection.execute("BEGIN IMMEDIATE")
    body = delivery(alert(MEMBERS[1], 1))
    assert rig.send("POST", "/v1/alerts", content=body).status_code == 503
    connection.execute("ROLLBACK")
    connection.close()
    assert rig.send("POST", "/v1/alerts", content=body).status_code == 200
    assert rows(rig, "deliveries") == 1


HOSTILE_NODES = [
    "all",
    "ALL",
    "n[1-64]",
    "a,b",
    "-h",
    "x;reboot",
    "../x",
    "n1\n",
    "n" * 512,
    "nоde-1",
    "",
    " node-1",
    "node-1\x00",
    "$(id)",
    "node-1/../2",
]


@pytest.mark.parametrize("node", HOSTILE_NODES)
def test_a_hostile_node_name_opens_nothing(rig: Rig, node: str) -> None:
    """No text but a plain host name gets past the door: no case, no question to any agent."""
    (result,) = rig.ring(alert(MEMBERS[1], 1, training_node=node))
    assert result["result"] == "rejected"
    rig.rounds(2, seconds=1)
    assert rig.cases() == []
    assert all(not agent.asked for agent in rig.agents.agents.values())


@pytest.mark.parametrize(
    ("label", "value"),
    [
        ("training_instance", "i-1"),
        ("training_instance", "i-" + "g" * 17),
        ("training_instance", MEMBERS[1].instance_id + "\n"),
        ("training_instance", "http://127.0.0.1/"),
        ("training_instance", ""),
        ("training_cluster", "another"),
        ("training_cluster", ""),
        ("training_job", "a/../b"),
        ("gpu_uuid", "GPU-x y"),
        ("rank", "-1"),
        ("rank", "٣"),
        ("check", "replay;"),
    ],
)
def test_every_label_that_is_kept_has_a_strict_form(rig: Rig, label: str, value: str) -> None:
    """One label out of form is enough: recorded, answered with 200, and nothing opens."""
    (result,) = rig.ring(alert(MEMBERS[1], 1, **{label: value}))
    assert (result["result"], result["case"]) == ("rejected", None)
    assert rig.cases() == []
    assert rows(rig, "signals") == 1


def test_scrape_labels_are_not_read(rig: Rig) -> None:
    """`instance`, `node` and `pod` may say anything; identity comes from our own labels alone."""
    rig.ring(alert(MEMBERS[1], 1, instance="i-0evil", node="all", pod="../x", namespace=";"))
    assert rig.case()["node_name"] == "node-1"


def test_twins_at_once_open_one_case(rig: Rig) -> None:
    """Eight equal deliveries from as many threads, and one ten minutes later after a restart: one case."""
    body = delivery(alert(MEMBERS[1], 1))
    codes: list[int] = []
    threads = [
        threading.Thread(target=lambda: codes.append(rig.send("POST", "/v1/alerts", content=body).status_code))
        for _ in range(8)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    while codes.count(503):  # a busy file says "again"; Alertmanager does come again
        codes.remove(503)
        codes.append(rig.send("POST", "/v1/alerts", content=body).status_code)
    assert codes == [200] * 8
    rig.clock.now += 600
    rig.restart()
    assert rig.ring(alert(MEMBERS[1], 1))[0]["result"] == "joined"
    assert len(rig.cases()) == 1
    assert rows(rig, "deliveries") == 9


def test_answers_are_counted(rig: Rig) -> None:
    """Deliveries by status, alerts by result and refused credentials are what a scrape shows."""
    rig.ring(alert(MEMBERS[1], 1), alert(MEMBERS[1], 1, training_node="all"))
    rig.send("POST", "/v1/alerts", content=b"{")
    rig.send("POST", "/v1/alerts", token=None)
    value = rig.service.telemetry.registry.get_sample_value
    assert value("sdc_remediation_deliveries_total", {"code": "200"}) == 1
    assert value("sdc_remediation_deliveries_total", {"code": "400"}) == 1
    assert value("sdc_remediation_deliveries_total", {"code": "401"}) == 1
    assert value("sdc_remediation_alerts_total", {"result": "accepted"}) == 1
    assert value("sdc_remediation_alerts_total", {"result": "rejected"}) == 1
    assert value("sdc_remediation_auth_failures_total", {"reason": "no"}) == 1


def test_deep_and_strange_json_is_survived(rig: Rig) -> None:
    """Lone surrogates, huge numbers and nested labels are one alert's problem, never a 500."""
    odd = json.dumps({"alerts": [alert(MEMBERS[1], 1, training_job="\ud800"), {"labels": {"alertname": ["x"]}}]})
    answer = rig.send("POST", "/v1/alerts", content=odd.encode())
    assert answer.status_code == 200
    assert [r["result"] for r in answer.json()["alerts"]] == ["rejected", "rejected"]


def unknown(number: int = 0) -> Member:
    """An instance that the inventory does not have."""
    return replace(MEMBERS[0], instance_id=f"i-{0xABC + number:017x}", node_name=f"gone-{number}")


def test_an_alert_that_was_refused_a_moment_ago_joins_its_case(rig: Rig) -> None:
    """Reminders of an alert that names no member of the inventory open one case in five minutes, not one each."""
    rig.clock.now += 10
    (first,) = rig.ring(alert(unknown(), 1))
    rig.service.worker.round()
    assert rig.case()["state"] == "refused"
    for _ in range(5):
        rig.clock.now += 50
        (again,) = rig.ring(alert(unknown(), 1))
        assert (again["result"], again["case"]) == ("joined", first["case"])
    assert [line["step"] for line in rig.case()["timeline"]].count("signal_again") == 5
    rig.clock.now += 51  # measured from the refusal, so reminders never keep it closed
    (later,) = rig.ring(alert(unknown(), 1))
    assert later["result"] == "accepted"
    assert later["case"] != first["case"]


@pytest.mark.parametrize(
    "label", [{"training_node": "gone-7"}, {"training_job": "another"}, {"gpu_uuid": "GPU-another"}]
)
def test_another_alert_about_a_refused_instance_is_judged_by_itself(rig: Rig, label: dict[str, str]) -> None:
    """A refusal answers for the same node, job and GPU only: another name may be the right one."""
    rig.clock.now += 10
    rig.ring(alert(unknown(), 1))
    rig.service.worker.round()
    assert [item["result"] for item in rig.ring(alert(unknown(), 1, **label))] == ["accepted"]


def test_a_refusal_does_not_outlive_the_process_that_refused(rig: Rig) -> None:
    """After a restart, perhaps with another configuration, the same alert is judged afresh."""
    rig.clock.now += 10
    rig.ring(alert(unknown(), 1))
    rig.service.worker.round()
    rig.clock.now += 10
    rig.restart()
    assert [item["result"] for item in rig.ring(alert(unknown(), 1))] == ["accepted"]


def test_only_a_refusal_answers_for_the_next_alert(rig: Rig) -> None:
    """A case that a person rejected without an event, or that ended otherwise, is no answer to a new alert."""
    rig.clock.now += 10
    rig.ring(alert(MEMBERS[1], 1))
    rig.service.worker.round()
    (case,) = rig.service.store.cases()
    assert case.state == "unproven"
    rig.service.ledger.cancel(case, by="anna", reason="a test")
    assert [item["result"] for item in rig.ring(alert(MEMBERS[1], 1))] == ["accepted"]


def test_a_flood_costs_one_look_at_the_inventory_a_round(rig: Rig) -> None:
    """Sixty forged alerts are sixty cases, and the provider is asked once for all of them."""
    rig.ring(*(alert(unknown(number), 1) for number in range(60)))
    before = rig.provider.reads
    rig.service.worker.round()
    assert {case["state"] for case in rig.cases()} == {"refused"}
    assert rig.provider.reads == before + 1


def test_a_look_that_is_seconds_old_is_not_used(rig: Rig) -> None:
    """A round that takes long reads the inventory again, and so does the next round."""
    context = rig.service.context
    before = rig.provider.reads
    assert context.glance() is context.glance()
    rig.clock.now += 3
    context.glance()
    assert rig.provider.reads == before + 2
    rig.ring(alert(unknown(), 1))
    rig.service.worker.round()
    assert rig.provider.reads == before + 3
