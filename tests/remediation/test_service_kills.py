"""kill -9 of the real `serve`, over real HTTP, at five moments; `make campaign-kill` makes sixty runs."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from sdcwatch_remediation.testing.kills import MOMENTS, KillResult, run
from sdcwatch_remediation.testing.postgres import PostgresServer

pytestmark = [pytest.mark.integration, pytest.mark.timeout(600)]

AT = ("replace_requested", "amid the call", "quarantined", "replace_answered", "at random")


def judge(result: KillResult) -> None:
    assert result.problems == [], result
    assert result.moments, f"nothing was killed: {result}"
    assert result.effects <= 1


def test_five_kills_replace_one_node_each_and_once(tmp_path: Path) -> None:
    """Whatever the moment, the next process reads the world: one request with an effect, one case, and it ends."""
    folders = [tmp_path / str(number) for number in range(len(AT))]
    for folder in folders:
        folder.mkdir()
    with ThreadPoolExecutor(3) as pool:
        results = list(pool.map(run, [MOMENTS.index(moment) for moment in AT], folders))
    for result in results:
        judge(result)


def test_two_processes_on_postgresql_are_killed_and_replace_once(tmp_path: Path, postgres: PostgresServer) -> None:
    """The one that is left, or the next one, takes the lease over and does not ask again."""
    judge(run(MOMENTS.index("replacing"), tmp_path, postgres=postgres.new_database()))
