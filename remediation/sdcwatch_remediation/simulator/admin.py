"""The simulator's admin endpoints: read its state and calls, order faults, advance its clock, change its nodes.

What it does: maps `/_simulator/...` onto methods of `Simulator`, one JSON object in and one out.
What it never does: speak SageMaker; boto3 never sees these paths.
Its place: beside the SageMaker side of `server`, for a demo or a test in another process. See docs/simulator.md.
"""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Any
from urllib.parse import parse_qs, urlsplit

from sdcwatch_remediation.simulator.faults import MENU, Fault

if TYPE_CHECKING:
    from sdcwatch_remediation.simulator.simulator import Simulator


class AdminError(Exception):
    """An admin request that cannot be answered; `status` is the HTTP status."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


def answer_admin(simulator: Simulator, method: str, path: str, body: Any) -> dict[str, Any]:
    """Answer one admin request.

    Raises:
        AdminError: No such endpoint.
        ValueError: The body is not what the endpoint takes; the message says what it takes.
    """
    parts = urlsplit(path)
    query = {key: values[-1] for key, values in parse_qs(parts.query).items()}
    match (method, parts.path):
        case ("GET", "/_simulator/state"):
            return simulator.state()
        case ("GET", "/_simulator/calls"):
            return _calls(simulator, query)
        case ("GET", "/_simulator/faults"):
            return {"menu": MENU, "faults": simulator.faults.listing()}
        case ("POST", "/_simulator/faults"):
            if not isinstance(body, dict) or "kind" not in body:
                raise ValueError(f'POST {{"kind": ...}} with one of {", ".join(MENU)}')
            simulator.order_fault(Fault.from_json(body))
            return {"faults": simulator.faults.listing()}
        case ("DELETE", "/_simulator/faults"):
            simulator.clear_faults(query.get("kind"))
            return {"faults": simulator.faults.listing()}
        case ("POST", "/_simulator/advance"):
            return {"now": simulator.advance(_seconds(body))}
        case ("POST", "/_simulator/nodes"):
            _change_nodes(simulator, body)
            return simulator.state()
        case ("POST", "/_simulator/reset"):
            simulator.reset()
            return simulator.state()
    raise AdminError(
        404, "endpoints: GET state, calls, faults; POST faults, advance, nodes, reset; DELETE faults; see docs"
    )


def _calls(simulator: Simulator, query: dict[str, str]) -> dict[str, Any]:
    since = query.get("since", "0")
    if not since.isdecimal():
        raise ValueError("since is the number of the last call already seen")
    return {"calls": [asdict(c) for c in simulator.calls(query.get("operation")) if c.number > int(since)]}


def _seconds(body: Any) -> float:
    seconds = body.get("seconds") if isinstance(body, dict) else None
    if isinstance(seconds, bool) or not isinstance(seconds, (int, float)):
        raise ValueError('POST {"seconds": <virtual seconds, 0 or more>}')
    return float(seconds)


def _change_nodes(simulator: Simulator, body: Any) -> None:
    takes = (
        'POST one of {"instance_id", "status"}, {"replace": <instance id>} (somebody else has it replaced), '
        '{"spares": [<address>, ...]}'
    )
    match body:
        case {"instance_id": str(instance_id), "status": str(status)}:
            simulator.set_status(instance_id, status)
        case {"replace": str(instance_id)}:
            simulator.others_replace(instance_id)
        case {"spares": list(addresses)} if all(isinstance(a, str) for a in addresses):
            simulator.add_spares(addresses)
        case _:
            raise ValueError(takes)
