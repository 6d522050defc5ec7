"""Slurm's nodes as Prometheus targets: recorded answers of several releases, and answers that mean no good."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from sdcwatch.cli import main

#: As scontrol of 23.11 prints it, cut to three nodes and to a few of the fields.
NEW = {
    "nodes": [
        {
            "name": "ip-10-1-0-5", "hostname": "ip-10-1-0-5", "address": "10.1.0.5", "partitions": ["dev", "all"],
            "state": ["IDLE", "CLOUD"], "cpus": 192, "version": "23.11.3",
            "boot_time": {"set": True, "infinite": False, "number": 1764600000},
        },
        {
            "name": "ip-10-1-0-6", "hostname": "ip-10-1-0-6", "address": "ip-10-1-0-6", "partitions": ["dev"],
            "state": ["DOWN", "DRAIN", "NOT_RESPONDING"], "reason": "case-0a1b",
        },
        {
            "name": "ip-10-1-0-7", "hostname": "ip-10-1-0-7", "address": "10.1.0.7", "partitions": ["dev"],
            "state": ["IDLE", "CLOUD", "POWERED_DOWN"],
        },
    ],
    "meta": {"plugin": {"type": "openapi/slurmctld"}, "slurm": {"release": "23.11.3", "cluster": "hyperpod"}},
    "errors": [], "warnings": [],
}  # fmt: skip
#: As scontrol of 21.08 prints it: one state, and flags beside it.
OLD = {
    "meta": {}, "errors": [],
    "nodes": [
        {"name": "n1", "address": "10.0.0.1", "state": "allocated", "state_flags": ["DRAIN"], "partitions": ["p"]},
        {"name": "n2", "address": "10.0.0.2", "state": "idle", "state_flags": ["POWERED_DOWN"], "partitions": ["p"]},
    ],
}  # fmt: skip
#: As sinfo --Node --noheader --format=%N|%o|%T|%P prints it: a node stands once for each partition.
TABLE = "n1|n1|idle|dev*\nn1|n1|idle|long\nn2|10.0.0.2|down*|dev*\nn3|n3|idle~|dev*\n"

Run = Callable[..., tuple[int, Any, str]]


@pytest.fixture
def discover(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Run:
    """`discover(answer, *options)`: exit status, what was printed as JSON (None: nothing), stderr."""

    def run(answer: Any, *options: str) -> tuple[int, Any, str]:
        path = tmp_path / "answer"
        path.write_text(answer if isinstance(answer, str) else json.dumps(answer))
        status = main(["discover", "slurm", "--port", "9478", "--input", str(path), *options])
        out, err = capsys.readouterr()
        return status, json.loads(out) if out else None, err

    return run


def listed(found: Any) -> list[str]:
    return [target for group in found for target in group["targets"]]


def test_nodes_of_a_new_release(discover: Run) -> None:
    """A drained and silent node stays, for its agent may hold evidence; one that is powered down is no target."""
    status, found, err = discover(NEW)
    assert (status, err) == (0, "")
    assert listed(found) == ["10.1.0.5:9478", "ip-10-1-0-6:9478"]
    assert found[0]["labels"] == {
        "__meta_slurm_node": "ip-10-1-0-5",
        "__meta_slurm_state": "IDLE,CLOUD",
        "__meta_slurm_partitions": "dev,all",
    }


def test_nodes_of_an_old_release_and_of_sinfo(discover: Run) -> None:
    """The same targets from state and flags, and from a table with a line for each partition."""
    assert listed(discover(OLD)[1]) == ["10.0.0.1:9478"]
    status, found, _ = discover(TABLE)
    assert (status, listed(found)) == (0, ["n1:9478", "10.0.0.2:9478"])
    assert found[0]["labels"]["__meta_slurm_partitions"] == "dev,long"


def test_a_port_for_each_user_and_one_partition_only(discover: Run) -> None:
    """Two users on a node have two agents; other partitions may not be training nodes."""
    assert listed(discover(NEW, "--port", "9480", "--partition", "all")[1]) == ["10.1.0.5:9478", "10.1.0.5:9480"]


@pytest.mark.parametrize(
    ("name", "address"),
    [("n;rm -rf /", "10.0.0.9"), ("n9", "10.0.0.9/x"), ("n9", "a b"), ("../n9", "n9"), ("n9", "-x"), ("n9", "é")],
)
def test_a_node_with_an_odd_name_is_left_out_and_named(discover: Run, name: str, address: str) -> None:
    """The others are listed all the same, and the status says that something is wrong."""
    odd = {"name": name, "address": address, "state": ["IDLE"], "partitions": []}
    status, found, err = discover({"nodes": [*NEW["nodes"], odd]})  # type: ignore[misc]
    assert (status, len(found)) == (1, 2)
    assert "is no name to scrape" in err


@pytest.mark.parametrize("answer", ['{"nodes": []}', "{}", "{", "", '{"nodes": 3}', "n1|n1\n", '{"nodes": [{}]}'])
def test_an_answer_without_nodes_changes_nothing(discover: Run, tmp_path: Path, answer: str) -> None:
    """A controller that restarts must not blind Prometheus."""
    file = tmp_path / "targets.json"
    assert discover(NEW, "--output", str(file))[0] == 0
    before = file.read_text()
    status, found, err = discover(answer, "--output", str(file))
    assert (status, found, file.read_text()) == (1, None, before)
    assert err.startswith("sdcwatch discover: ")
    assert [path.name for path in tmp_path.glob(".*")] == []


def program(path: Path, text: str) -> None:
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)


def test_slurm_is_asked_with_plain_words_and_sinfo_where_scontrol_has_no_json(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The programs see exactly these arguments, and no shell reads them."""
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    (tmp_path / "answer").write_text(json.dumps(NEW))
    program(tmp_path / "scontrol", f'printf "%s\\n" "$@" >{tmp_path}/words; cat {tmp_path}/answer')
    assert main(["discover", "slurm", "--port", "1"]) == 0
    assert (tmp_path / "words").read_text().split() == ["show", "nodes", "--json"]
    assert listed(json.loads(capsys.readouterr().out)) == ["10.1.0.5:1", "ip-10-1-0-6:1"]
    program(tmp_path / "scontrol", "echo 'scontrol: unrecognized option --json' >&2; exit 1")
    (tmp_path / "table").write_text(TABLE)
    program(tmp_path / "sinfo", f'printf "%s\\n" "$@" >{tmp_path}/words; cat {tmp_path}/table')
    assert main(["discover", "slurm", "--port", "1"]) == 0
    assert (tmp_path / "words").read_text().split() == ["--Node", "--noheader", "--all", "--format=%N|%o|%T|%P"]
    program(tmp_path / "sinfo", "exit 1")
    assert main(["discover", "slurm", "--port", "1"]) == 1
    assert "unrecognized option" in capsys.readouterr().err


def test_wrong_use_is_status_2(discover: Run, capsys: pytest.CaptureFixture[str]) -> None:
    """No port, or one that is none."""
    assert main(["discover", "slurm", "--port", "0"]) == 2
    with pytest.raises(SystemExit, match="2"):
        main(["discover", "slurm"])
