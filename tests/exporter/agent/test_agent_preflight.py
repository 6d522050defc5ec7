"""A halted node's known-answer test: the real preflight, kept in the spool by the real wait, served by a real agent."""

from __future__ import annotations

import json
import shlex
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from sdcwatch.latch import files as latches
from sdcwatch.launch import halt_wait, launcher
from sdcwatch.spool.folders import job_root, prepare_user_root, user_root

LATCH = latches.Latch(
    latch_id="sdc-00112233445566aa",
    training_job="gpt",
    epoch="e1-00000000",
    step=20,
    check="replay",
    kind="attributed",
    time=1_800_000_000.0,
    named=(latches.NamedRank(0, "n0", "i-0", "GPU-0"),),
    nodes=(latches.LatchNode("n0", "i-0"), latches.LatchNode("n1", "i-1")),
    last_clean_step=10,
    trust_needed="verified",
    checkpoint_dir=None,
    sentence="rank 0 computes wrong gradients",
)
QUESTION = f"/preflight?latch={LATCH.latch_id}"


def wait_out(root: Path, preflight: tuple[str, ...]) -> Path:
    """Lets `sdcwatch run`'s own wait judge this node under the latch, and releases it; returns the job's folder."""
    prepare_user_root(root)
    spool = job_root(root, "gpt")
    spool.mkdir(mode=0o700, exist_ok=True)
    latches.write_latch([spool], LATCH)
    options = halt_wait.WaitOptions("n0", "i-0", user_root(root), None, spool, 60.0, 0.05, preflight)
    said: list[str] = []
    waiting = threading.Thread(
        target=halt_wait.wait_until_free, args=((spool,), options, launcher.Signals(), said.append), daemon=True
    )
    waiting.start()
    deadline = time.monotonic() + 60
    while not any("preflight on n0" in line for line in said):
        assert time.monotonic() < deadline, said
        time.sleep(0.02)
    latches.release(spool, LATCH.latch_id, by="test", reason="judged")
    waiting.join(20)
    assert not waiting.is_alive()
    return spool


def printing(outcome: str, **device: str) -> tuple[str, ...]:
    """A health check that judges one device."""
    line = json.dumps({"outcome": outcome, "devices": [{"device": "cuda:0", "outcome": outcome, **device}]})
    return (sys.executable, "-c", f"import sys; print({line!r}); sys.exit({int(outcome == 'fail')})")


@pytest.fixture
def ask(agent: Callable[..., Any], token_file: Callable[..., Path]) -> Callable[[str], tuple[int, Any]]:
    running = agent("--events-token-file", token_file("events", "e-secret"))

    def get(path: str, token: str = "e-secret") -> tuple[int, Any]:
        status, text = running.ask("GET", path, token=token)
        return status, json.loads(text)

    return get


def test_the_real_preflights_result_is_served_with_its_devices(root: Path, ask: Any) -> None:
    """From latch to answer: judged in a process of its own, kept where nobody shares a folder, and served whole."""
    command = (*halt_wait.preflight_command(None), *shlex.split("--seconds 0.1 --device cpu"))
    spool = wait_out(root, command)
    status, answer = ask(QUESTION)
    assert (status, answer["schema"], answer["agent"]["instance"]) == (200, 1, "i-0")
    (result,) = answer["results"]
    assert (result["latch_id"], result["node"], result["instance"]) == (LATCH.latch_id, "n0", "i-0")
    assert result["result"] == "pass"
    assert abs(result["time"] - time.time()) < 120
    assert [(d["device"], d["outcome"], d["uuid"]) for d in result["devices"]] == [("cpu", "pass", "")]
    assert "output" not in result
    assert (spool / "preflight" / LATCH.latch_id / "n0.json").stat().st_mode & 0o077 == 0


def test_a_failure_names_the_device_that_failed(root: Path, ask: Any) -> None:
    """UUID and serial number of the device go with it; those of a report that lies about its form do not break it."""
    wait_out(root, printing("fail", uuid="GPU-0", serial="1650522003820"))
    (result,) = ask(QUESTION)[1]["results"]
    assert result["result"] == "fail"
    assert result["devices"] == [
        {"device": "cuda:0", "name": "", "uuid": "GPU-0", "serial": "1650522003820", "outcome": "fail"}
    ]


def test_before_there_is_a_result_the_answer_is_empty_and_another_nodes_is_never_told(root: Path, ask: Any) -> None:
    """The agent speaks for its own node: a file that names another node, instance or latch is passed over."""
    assert ask(QUESTION) == (200, {"schema": 1, "agent": ask("/events")[1]["agent"], "results": []})
    spool = wait_out(root, printing("fail", uuid="GPU-0"))
    path = spool / "preflight" / LATCH.latch_id / "n0.json"
    good = json.loads(path.read_text())
    for wrong in ({"instance": "i-1"}, {"node": "n1"}, {"latch_id": "sdc-1"}, {"schema": 2}):
        path.write_text(json.dumps({**good, **wrong}))
        assert ask(QUESTION)[1]["results"] == [], wrong
    path.write_text("[" * 100_000)
    assert ask(QUESTION)[1]["results"] == []


def test_the_road_needs_the_events_token_and_a_latch_id(ask: Any) -> None:
    """Nothing of a request becomes a path."""
    assert ask(QUESTION, token="other")[0] == 401
    for path in ("/preflight", "/preflight?latch=", "/preflight?latch=../../x", "/preflight?latch=a/b"):
        assert ask(path)[0] == 400, path
