"""Deliveries that wait at the same time share a commit, and nothing else."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from sdcwatch_remediation.alertmanager import parse
from sdcwatch_remediation.errors import StoreUnavailable
from sdcwatch_remediation.signals import derive
from sdcwatch_remediation.testing import alert, delivery, fleet, make_rig
from sqlalchemy.exc import IntegrityError

MEMBERS = fleet(24, subnet=11)


def deliver_while_the_turn_is_taken(rig: Any, bodies: list[bytes]) -> list[Any]:
    """Let every body wait for the turn, give it free, and return what each was answered."""
    store, answers = rig.service.store, [None] * len(bodies)

    def send(number: int) -> None:
        try:
            derived = [derive(one, "demo") for one in parse(bodies[number])]
            answers[number] = store.record_delivery(bodies[number], derived)[0]["result"]
        except StoreUnavailable as error:
            answers[number] = error

    threads = [threading.Thread(target=send, args=(number,)) for number in range(len(bodies))]
    with store.database.turn():
        for thread in threads:
            thread.start()
        pause = threading.Event()
        for _ in range(500):
            if len(store._intake._waiting) == len(bodies):
                break
            pause.wait(0.02)
    for thread in threads:
        thread.join(30)
    return answers


@pytest.fixture
def rig(tmp_path: Path) -> Iterator[Any]:
    with make_rig(tmp_path, MEMBERS) as made:
        yield made


def test_what_waits_together_is_committed_together(rig: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Twenty-four deliveries, one transaction, and each its own case and answer."""
    transactions, write = [], rig.service.database.write

    @contextmanager
    def counted() -> Iterator[Any]:
        transactions.append(1)
        with write() as connection:
            yield connection

    monkeypatch.setattr(rig.service.database, "write", counted)
    bodies = [delivery(alert(member, number)) for number, member in enumerate(MEMBERS)]
    assert deliver_while_the_turn_is_taken(rig, bodies) == ["accepted"] * len(MEMBERS)
    assert len(transactions) == 1
    assert {case["instance_id"] for case in rig.cases()} == {member.instance_id for member in MEMBERS}


def test_the_same_alert_twice_in_one_commit_is_one_case(rig: Any) -> None:
    """The second of two equal deliveries joins the case that the first opened in the same transaction."""
    bodies = [delivery(alert(MEMBERS[0], 0))] * 6
    assert sorted(deliver_while_the_turn_is_taken(rig, bodies)) == ["accepted", *["joined"] * 5]
    assert len(rig.cases()) == 1


def test_one_that_cannot_be_kept_costs_the_others_nothing(rig: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """It alone is told to come again; the others were rolled back with it, and are kept all the same."""
    intake = rig.service.store._intake
    keep, bad = intake._keep, delivery(alert(MEMBERS[3], 3))

    def refuse(connection: Any, one: Any, lines: Any) -> Any:
        if one.body == bad:
            raise IntegrityError("insert", {}, Exception("another process was first"))
        return keep(connection, one, lines)

    monkeypatch.setattr(intake, "_keep", refuse)
    bodies = [delivery(alert(MEMBERS[number], number)) for number in range(6)]
    answers = deliver_while_the_turn_is_taken(rig, bodies)
    assert [answer == "accepted" for answer in answers] == [True, True, True, False, True, True]
    assert isinstance(answers[3], StoreUnavailable)
    assert len(rig.cases()) == 5
