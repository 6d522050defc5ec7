"""A short run of the API campaign: hostile requests at every route of a guarded process (`make campaign-api`)."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.integration
@pytest.mark.needs("module:schemathesis")
@pytest.mark.timeout(600)
def test_hostile_requests_end_in_no_error_no_permission_and_no_act(repository: Path) -> None:
    """No 5xx but the intended 503, nobody without permission gets through, no process, connection or file outside."""
    script = repository / "tests" / "remediation" / "api_campaign.py"
    done = subprocess.run(
        [sys.executable, str(script), "--payloads", "400", "--seed", "7"], capture_output=True, text=True, timeout=550
    )
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
    answers = {int(status): int(count) for status, count in re.findall(r"(\d{3}): (\d+)", done.stdout)}
    assert sum(answers.values()) >= 360
    assert {200, 400, 401, 403, 404, 422} <= set(answers), "the requests reach every kind of answer"
