"""Deliveries that wait at the same time share a commit, and nothing else."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
from sdcwatch_remediation import app, batch, intake, schema
from sdcwatch_remediation.errors import StoreUnavailable
from sdcwatch_remediation.testing import alert, delivery, fleet, make_rig
from sqlalchemy import event, func, select
from sqlalchemy.exc import IntegrityError

MEMBERS = fleet(24, subnet=11)
TOKEN = {"Authorization": "Bearer alerts-token"}


@pytest.fixture
def rig(tmp_path: Path) -> Iterator[Any]:
    with make_rig(tmp_path, MEMBERS) as made:
        yield made


def until(condition: Callable[[], bool]) -> None:
    pause = threading.Event()
    for _ in range(1000):
        if condition():
            return
        pause.wait(0.01)
    raise AssertionError("it did not come to hold")


class HeldBack:
    """Transactions of the intake wait, once each has begun, until they are let go; it counts them."""

    def __init__(self, rig: Any, monkeypatch: pytest.MonkeyPatch) -> None:
        self.began, self.go, self.transactions = threading.Event(), threading.Event(), 0
        write = rig.service.database.write

        @contextmanager
        def held(*, ahead: bool = False) -> Iterator[Any]:
            self.transactions += 1
            self.began.set()
            assert self.go.wait(30)
            with write(ahead=ahead) as connection:
                yield connection

        monkeypatch.setattr(rig.service.database, "write", held)


def deliver_during_a_commit(rig: Any, held: HeldBack, bodies: list[bytes]) -> list[Any]:
    """Let one delivery begin its transaction, every body arrive meanwhile, and return what each was answered."""
    store, answers = rig.service.store, [None] * len(bodies)

    def send(number: int | None) -> None:
        body = delivery() if number is None else bodies[number]
        try:
            results = app.receive(rig.service, body)
            if number is not None:
                answers[number] = results[0]["result"]
        except StoreUnavailable as error:
            assert number is not None
            answers[number] = error

    threads = [threading.Thread(target=send, args=(number,)) for number in (None, *range(len(bodies)))]
    threads[0].start()
    assert held.began.wait(30)
    for thread in threads[1:]:
        thread.start()
    until(lambda: len(store.intake._waiting) == len(bodies))
    held.go.set()
    for thread in threads:
        thread.join(30)
    return answers


def test_what_arrives_during_a_commit_is_committed_together(rig: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Twenty-four deliveries, one transaction, and each its own case and answer."""
    held = HeldBack(rig, monkeypatch)
    bodies = [delivery(alert(member, number)) for number, member in enumerate(MEMBERS)]
    assert deliver_during_a_commit(rig, held, bodies) == ["accepted"] * len(MEMBERS)
    assert held.transactions == 2
    assert {case["instance_id"] for case in rig.cases()} == {member.instance_id for member in MEMBERS}


def test_requests_wait_on_the_loop_and_share_a_commit(rig: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """While one transaction runs, forty requests arrive without a thread each, and the next one takes them all."""
    held = HeldBack(rig, monkeypatch)
    bodies = [delivery(alert(MEMBERS[number % 20], number)) for number in range(40)]

    async def all_at_once() -> list[httpx.Response]:
        transport = httpx.ASGITransport(app=rig.app)
        async with httpx.AsyncClient(transport=transport, base_url="http://service", headers=TOKEN) as client:
            first = asyncio.ensure_future(client.post("/v1/alerts", content=delivery()))
            await asyncio.to_thread(held.began.wait, 30)
            rest = [asyncio.ensure_future(client.post("/v1/alerts", content=body)) for body in bodies]
            while len(rig.service.store.intake._waiting) < len(bodies):
                await asyncio.sleep(0.01)
            held.go.set()
            return list(await asyncio.gather(first, *rest))

    answers = asyncio.run(all_at_once())
    assert [answer.status_code for answer in answers] == [200] * 41
    results = [answer.json()["alerts"][0]["result"] for answer in answers[1:]]
    assert sorted(results) == ["accepted"] * 20 + ["joined"] * 20
    assert held.transactions == 2


def test_the_same_alert_twice_in_one_commit_is_one_case(rig: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The second of two equal deliveries joins the case that the first opened in the same transaction."""
    bodies = [delivery(alert(MEMBERS[0], 0))] * 6
    answers = deliver_during_a_commit(rig, HeldBack(rig, monkeypatch), bodies)
    assert sorted(answers) == ["accepted", *["joined"] * 5]
    assert len(rig.cases()) == 1


def test_one_that_cannot_be_kept_costs_the_others_nothing(rig: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """It alone is told to come again; the others were rolled back with it, and are kept all the same."""
    keep, bad = batch.keep, delivery(alert(MEMBERS[3], 3))

    def refuse(connection: Any, deliveries: Any, *more: Any) -> Any:
        if any(body == bad for body, _ in deliveries):
            raise IntegrityError("insert", {}, Exception("another process was first"))
        return keep(connection, deliveries, *more)

    monkeypatch.setattr(batch, "keep", refuse)
    bodies = [delivery(alert(MEMBERS[number], number)) for number in range(6)]
    answers = deliver_during_a_commit(rig, HeldBack(rig, monkeypatch), bodies)
    assert [answer == "accepted" for answer in answers] == [True, True, True, False, True, True]
    assert isinstance(answers[3], StoreUnavailable)
    assert len(rig.cases()) == 5


def test_an_unexpected_error_is_no_acknowledgement(rig: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever goes wrong while it is kept, the sender is told to come again, nothing was kept, and the next one is."""

    def broken(*_: Any) -> Any:
        raise RuntimeError("a bug")

    body = delivery(alert(MEMBERS[0], 0))
    with monkeypatch.context() as patch:
        patch.setattr(batch, "keep", broken)
        assert rig.send("POST", "/v1/alerts", content=body).status_code == 503
    assert rig.cases() == []
    assert rig.send("POST", "/v1/alerts", content=body).status_code == 200
    assert len(rig.cases()) == 1


def test_an_answer_comes_only_after_the_commit(rig: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A transaction that fails at its very commit acknowledges nothing and keeps nothing."""
    write = rig.service.database.write

    @contextmanager
    def fails_at_the_end(*, ahead: bool = False) -> Iterator[Any]:
        with write(ahead=ahead) as connection:
            yield connection
            raise StoreUnavailable("the disk is full")

    body = delivery(alert(MEMBERS[0], 0))
    with monkeypatch.context() as patch:
        patch.setattr(rig.service.database, "write", fails_at_the_end)
        assert rig.send("POST", "/v1/alerts", content=body).status_code == 503
    assert rig.cases() == []
    assert rig.audit == []


def test_a_batch_is_a_fixed_number_of_statements(rig: Any) -> None:
    """One delivery and sixty cost as many statements: the database is not asked once a row."""
    count: list[str] = []

    def seen(_c: Any, _cursor: Any, statement: str, *_: Any) -> None:
        count.append(statement)

    derived = [app.derive(rig.service, delivery(alert(MEMBERS[n % 24], n))) for n in range(60)]
    event.listen(rig.service.database.engine, "before_cursor_execute", seen)
    sizes = []
    try:
        for some in (derived[:1], derived):
            count.clear()
            with rig.service.store.write() as connection:
                batch.keep(connection, [(b"{}", one) for one in some], rig.config.policy, rig.clock(), 0.0)
            sizes.append(len(count))
    finally:
        event.remove(rig.service.database.engine, "before_cursor_execute", seen)
    assert sizes[0] == sizes[1]


def test_many_alerts_in_one_body_each_get_their_answer(rig: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A body with more instances than one query may name, and with alerts that are none, is answered alert by alert."""
    monkeypatch.setattr(batch, "NAMES_A_LOOK", 5)
    monkeypatch.setattr(intake, "ALERTS_TOGETHER", 10)
    rig.ring(alert(MEMBERS[2], 2))
    other = {"status": "firing", "labels": {"alertname": "Other"}}
    results = rig.ring(*(alert(member, number) for number, member in enumerate(MEMBERS)), other, "no alert")
    assert [item["index"] for item in results] == list(range(26))
    expected = ["joined" if number == 2 else "accepted" for number in range(24)]
    assert [item["result"] for item in results] == [*expected, "ignored", "rejected"]
    with rig.service.database.read() as connection:
        assert connection.execute(select(func.count()).select_from(schema.signals)).scalar() == 27
