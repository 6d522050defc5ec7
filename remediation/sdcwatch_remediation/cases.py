"""The frozen record of one case, and how it is read from and shown as text.

What it does: holds the columns of table `cases` as one record; renders it for the API.
What it never does: change a case (`store.move`).
Its place: passed between `store`, `casework`, `actions/*` and `app`.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, dataclass, fields
from typing import Any

from sqlalchemy import RowMapping

from sdcwatch_remediation.evidence import canonical_json
from sdcwatch_remediation.records import Inventory, Member


@dataclass(frozen=True, slots=True)
class Case:
    """One case; times are unix seconds, empty text means not known yet."""

    id: str
    cluster: str
    instance_id: str
    node_name: str
    group_name: str
    job: str
    gpu_uuid: str
    state: str
    outcome: str
    """Set when it is clear how the case will end: `replaced`, `replaced_by_others`, `suspected`, `rejected`, ..."""
    reason: str
    opened_at: float
    state_since: float
    deadline: float | None
    next_at: float
    """Nothing is tried again before this time."""
    closed_at: float | None
    event_id: str
    event_time: float
    """Of the newest proven event; 0 while there is none."""
    event_key: str
    """`<check> at step <n>`: what must not fail again on new hardware."""
    quarantined_at: float | None
    released_at: float | None
    replacement: str
    """Instance id of the proven replacement."""
    approved_by: str
    approved_sha256: str
    """The request that a person approved; it counts only while it equals `request_sha256`."""
    gates: str
    request: str
    """Canonical JSON of what the service would do, or was allowed to do."""
    before: str
    """The inventory at the time of the proof, as JSON."""
    held_by: str
    """Who holds the case, and why; nothing is done about it meanwhile. Empty: nobody."""

    @property
    def request_sha256(self) -> str:
        """SHA-256 of the request, in hex; an approval is bound to it. Empty while there is no request."""
        return hashlib.sha256(self.request.encode()).hexdigest() if self.request else ""

    @property
    def mark_left(self) -> str:
        """What a person does about the mark of the node's own agent, which nobody else can lift; empty: there is none.

        It follows a reason, so it begins with a semicolon.
        """
        if self.quarantined_at is None:
            return ""
        return f"; {self.node_name} trains again once QUARANTINE.json is removed there (`sdcwatch run` prints its path)"

    @property
    def approved(self) -> bool:
        """Whether a person approved exactly the present request."""
        return bool(self.request) and self.approved_sha256 == self.request_sha256

    def before_inventory(self) -> Inventory | None:
        """Return the inventory at the time of the proof."""
        if not self.before:
            return None
        tree = json.loads(self.before)
        tree["members"] = tuple(Member(**member) for member in tree["members"])
        tree["short_groups"] = tuple(tree.get("short_groups", ()))
        return Inventory(**tree)

    def public(self) -> dict[str, Any]:
        """Return the case as the API shows it."""
        tree = {key: value for key, value in asdict(self).items() if key not in ("before", "gates", "request")}
        tree["gates"] = json.loads(self.gates) if self.gates else []
        tree["request"] = json.loads(self.request) if self.request else None
        tree["request_sha256"] = self.request_sha256
        return tree


def from_row(row: RowMapping) -> Case:
    """Build a case from a row of table `cases`."""
    return Case(**{item.name: row[item.name] for item in fields(Case)})


def inventory_json(inventory: Inventory) -> str:
    """Return an inventory as JSON, for `Case.before`."""
    return canonical_json(asdict(inventory))
