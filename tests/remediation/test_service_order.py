"""The writers' lock is handed on in the order of asking, and the intake waits for one turn at most."""

from __future__ import annotations

import threading

from sdcwatch_remediation.order import Order


def ask(order: Order, name: str, got: list[str], *, ahead: bool = False) -> threading.Thread:
    """Ask in a thread of its own, and come back once the question stands in the queue."""
    stands = len(order._waiting)

    def work() -> None:
        assert order.acquire(timeout=30, ahead=ahead)
        got.append(name)
        order.release()

    thread = threading.Thread(target=work)
    thread.start()
    pause = threading.Event()
    while len(order._waiting) == stands:
        assert thread.is_alive()
        pause.wait(0.005)
    return thread


def test_the_lock_goes_on_in_the_order_of_asking() -> None:
    """Whoever gives it back cannot take it again before those who wait; one that is ahead goes first."""
    order, got = Order(), list[str]()
    assert order.acquire(timeout=1)
    threads = [ask(order, "worker", got), ask(order, "person", got), ask(order, "intake", got, ahead=True)]
    order.release()
    for thread in threads:
        thread.join(30)
    assert got == ["intake", "worker", "person"]
    assert order.acquire(timeout=1)


def test_who_is_ahead_twice_does_not_starve_the_others() -> None:
    """After its turn the intake asks again, and the worker that waited has had its own in between."""
    order, got = Order(), list[str]()
    assert order.acquire(timeout=1, ahead=True)
    worker = ask(order, "worker", got)
    order.release()
    assert order.acquire(timeout=30, ahead=True)
    got.append("intake again")
    worker.join(30)
    assert got == ["worker", "intake again"]


def test_who_waits_too_long_leaves_the_queue() -> None:
    """A wait that timed out takes no later turn."""
    order = Order()
    assert order.acquire(timeout=1)
    assert not order.acquire(timeout=0.05)
    order.release()
    assert order.acquire(timeout=1)
    order.release()
