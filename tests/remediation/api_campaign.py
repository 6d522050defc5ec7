"""The campaign `make campaign-api`: hostile requests at every route of a running service, in every state of sign-in.

Schemathesis makes the requests of the routes in `/openapi.json`, in form and out of form; bodies that no description
knows (deep, torn, huge, binary) and the web page's forms are added here. Status 1 when one answer is a 5xx other
than the intended 503, when a credential could do what it may not, or when the server's process did anything outside.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import requests
import schemathesis
from hypothesis import HealthCheck, Phase, Verbosity, given, seed, settings
from hypothesis import strategies as st
from hypothesis.errors import Unsatisfiable
from schemathesis import GenerationMode

MAY = {
    "/v1/alerts": {"alerts"},
    "/v1/cases": {"cases", "approve", "admin"},
    "/v1/doctor": {"cases", "approve", "admin"},
    "/v1/pause": {"admin"},
    "/v1/resume": {"admin"},
    "/v1/cases/{case_id}": {"cases", "approve", "admin"},
}
"""Who may use a route; decisions about a case are `approve`'s."""
ROLES = ("alerts", "cases", "approve", "admin")
HEADERS: list[tuple[str, dict[str, str]]] = [
    *((role, {"Authorization": f"Bearer {role}-token"}) for role in ROLES),
    ("none", {}),
    ("unknown", {"Authorization": "Bearer somebody-else"}),
    ("empty", {"Authorization": "Bearer "}),
    ("basic", {"Authorization": "Basic YWRtaW46YWRtaW4="}),
    ("torn", {"Authorization": "Bearer\tapprove-token"}),
    ("long", {"Authorization": "Bearer " + "x" * 8000}),
    ("latin", {"Authorization": "Bearer sch\xfcssel"}),
    ("two", {"Authorization": "Bearer alerts-token approve-token"}),
]

_scalars = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=40)
_trees = st.recursive(
    _scalars, lambda inner: st.lists(inner, max_size=5) | st.dictionaries(st.text(), inner, max_size=5)
)
_LABELS = ("alertname", "category", "training_instance", "training_node", "training_cluster", "training_job")
_words = st.sampled_from(
    ["SDCReplicaMismatch", "SDCDrill", "sdc", "demo", "i-00000000000000001", "i-" + "f" * 17, "all"]
)
_labels = st.dictionaries(
    st.sampled_from([*_LABELS, "gpu_uuid", "rank", "check", "drill"]),
    _words
    | st.text(max_size=60)
    | st.sampled_from(["$(id)", "`id`", "../../etc/passwd", "http://127.0.0.1:1/", "\ud800"]),
)
_alerts = st.fixed_dictionaries(
    {"status": st.sampled_from(["firing", "resolved"]) | _trees, "labels": _labels | _trees}
)
_deliveries = st.fixed_dictionaries({"alerts": st.lists(_alerts | _trees, max_size=5)})
_RAW = [
    b"",
    b"{",
    b"\xff\xfe",
    b"[" * 50_000,
    b'{"alerts":' + b"[" * 50_000,
    b'{"alerts": 1e999}',
    b"9" * 10_000,
    b"NaN",
]
BODIES = st.one_of(
    st.sampled_from(_RAW),
    st.binary(max_size=200),
    (_deliveries | _trees).map(lambda tree: json.dumps(tree).encode()),
)
FORMS = st.dictionaries(
    st.sampled_from(["token", "by", "csrf", "request_sha256", "reason"]),
    st.text(max_size=80) | st.sampled_from(["approve-token", "alerts-token", "Ada", "<script>", "0" * 64]),
    max_size=5,
)


class Campaign:
    """The requests, and what was wrong with an answer."""

    def __init__(self, url: str, cases: list[dict[str, str]], first: int) -> None:
        self.url, self.first = url, first
        self.cases = [case["id"] for case in cases]
        self.session = requests.Session()
        self.session.trust_env = False
        self.answers: Counter[int] = Counter()
        self.sent = 0
        self.problems: list[str] = []

    def judge(self, method: str, path: str, who: str, answer: Any, said: str) -> None:
        """Look at one answer."""
        self.sent += 1
        status = int(answer.status_code)
        self.answers[status] += 1
        if status >= 500 and status != 503:
            self.problems.append(f"{method} {path} as {who}: {status}; {said[:300]}")
        if path.startswith("/v1/"):
            may = MAY.get(path, {"approve"})
            if who not in may and status not in (401, 403, 405):
                self.problems.append(f"{method} {path} as {who}: {status} without permission; {said[:300]}")

    def run(self, payloads: int) -> None:
        """Send about so many requests."""
        schema = schemathesis.openapi.from_url(f"{self.url}/openapi.json")
        operations = [found.ok() for found in schema.get_all_operations()]
        each = max(2, payloads * 6 // 10 // (2 * len(operations)))
        for number, operation in enumerate(operations):
            for mode in (GenerationMode.POSITIVE, GenerationMode.NEGATIVE):
                try:
                    strategy = operation.as_strategy(generation_mode=mode)
                    self._repeat(number, each, self._api, strategy)
                except schemathesis.errors.InvalidSchema as error:
                    self.problems.append(f"{operation.label}: the description is wrong: {error}")
        rest = max(10, payloads - self.sent)
        paths = st.sampled_from(self._decisions())
        self._repeat(100, rest * 4 // 10, lambda body: self._raw("/v1/alerts", body), BODIES)
        self._repeat(101, rest * 3 // 10, lambda pair: self._raw(*pair), st.tuples(paths, BODIES))
        self._repeat(102, payloads - self.sent, self._form, st.tuples(st.sampled_from(self._pages()), FORMS))

    def _repeat(self, number: int, count: int, send: Callable[[Any], None], strategy: Any) -> None:
        if count < 1:
            return
        quiet = settings(
            max_examples=count,
            database=None,
            deadline=None,
            phases=[Phase.generate],
            verbosity=Verbosity.quiet,
            suppress_health_check=list(HealthCheck),
        )
        # A route without parameters has no request out of form.
        with suppress(Unsatisfiable):
            seed(self.first + number)(quiet(given(strategy)(lambda case: send(case))))()

    def _who(self, path: str) -> tuple[str, dict[str, str]]:
        """Every state of sign-in in turn, and every other time one that may use the route, so that it gets further."""
        if self.sent % 2:
            return HEADERS[self.sent // 2 % len(HEADERS)]
        may = sorted(MAY.get(path, {"approve"} if path.startswith("/v1/") else {"cases"}))
        return next(known for known in HEADERS if known[0] == may[self.sent // 2 % len(may)])

    def _api(self, case: Any) -> None:
        path = str(case.operation.path)
        who, headers = self._who(path)
        if "case_id" in (case.path_parameters or {}) and self.sent % 3 == 0:
            case.path_parameters["case_id"] = self.cases[self.sent % len(self.cases)]
        kept = {k: v for k, v in (case.headers or {}).items() if k.lower() != "authorization"}
        case.headers = type(case.headers)({**kept}) if case.headers is not None else None
        answer = case.call(session=self.session, headers=headers, timeout=30)
        self.judge(str(case.method).upper(), path, who, answer, repr(case.body))

    def _raw(self, path: str, body: bytes) -> None:
        shape = "/v1/cases/{case_id}" + path[path.rindex("/") :] if path.startswith("/v1/cases/") else path
        who, headers = self._who(shape)
        encoding = {"Content-Encoding": "gzip"} if self.sent % 17 == 0 else {}
        sent = iter([body]) if self.sent % 5 == 0 else body
        answer = self.session.post(self.url + path, data=sent, headers={**headers, **encoding}, timeout=30)
        self.judge("POST", shape, who, answer, repr(body))

    def _form(self, pair: tuple[str, dict[str, str]]) -> None:
        path, form = pair
        cookies = {"Cookie": f"sdcwatch_session={form.get('csrf', '').encode().hex()[:900]}"}
        data = {key: value.encode("utf-8", "surrogatepass") for key, value in form.items()}
        method = "POST" if self.sent % 4 else "GET"
        answer = self.session.request(
            method, self.url + path, data=data, headers=cookies, timeout=30, allow_redirects=False
        )
        self.judge(method, path, "nobody", answer, repr(form))

    def _decisions(self) -> list[str]:
        words = ("approve", "reject", "cancel", "hold", "unhold")
        return [*(f"/v1/cases/{case}/{word}" for case in self.cases for word in words), "/v1/pause", "/v1/resume"]

    def _pages(self) -> list[str]:
        case = self.cases[0]
        odd = ["/ui/cases/%00", "/ui/cases/..%2f..%2f", "/ui/cases/" + "x" * 3000, f"/ui/cases/{case}/nonsense"]
        return ["/ui", "/ui/login", "/ui/logout", f"/ui/cases/{case}", f"/ui/cases/{case}/approve", *odd]


@contextmanager
def served() -> Iterator[tuple[dict[str, Any], Callable[[], dict[str, Any]]]]:
    """Start the guarded server; gives its first line, and how to end it and read its report."""
    with tempfile.TemporaryDirectory() as folder:
        script = Path(__file__).with_name("guarded_server.py")
        process = subprocess.Popen([sys.executable, str(script), folder], stdout=subprocess.PIPE, text=True)
        assert process.stdout is not None
        try:
            first = json.loads(process.stdout.readline())

            def end() -> dict[str, Any]:
                process.terminate()
                out, _ = process.communicate(timeout=60)
                return dict(json.loads(out.splitlines()[-1]))

            yield first, end
        finally:
            if process.poll() is None:
                process.kill()
            process.communicate(timeout=20)


def main() -> int:
    """Send them and say what came of it."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--payloads", type=int, default=10_000, help="how many requests, about (default 10000)")
    parser.add_argument("--seed", type=int, default=0, help="another seed, other requests (default 0)")
    arguments = parser.parse_args()
    began = time.monotonic()
    with served() as (first, end):
        campaign = Campaign(first["url"], first["cases"], arguments.seed)
        campaign.run(arguments.payloads)
        report = end()
    problems = list(campaign.problems)
    for kind in ("processes", "connections", "files"):
        problems += [f"outside the process ({kind}): {what}" for what in report[kind]]
    if not report["guard_works"]:
        problems.append("the guard does not see what it must see")
    if report["replace_calls"]:
        problems.append(f"the provider was called: {report['replace_calls']}")
    for problem in problems[:40]:
        print(f"BAD {problem}")
    answers = ", ".join(f"{status}: {count}" for status, count in sorted(campaign.answers.items()))
    print(
        f"{campaign.sent} requests in {time.monotonic() - began:.0f} s, answers {answers}; "
        f"{len(report['processes'])} processes started, {len(report['connections'])} connections opened, "
        f"{len(report['files'])} files written outside; {len(problems)} bad"
    )
    return 1 if problems or campaign.sent < arguments.payloads * 9 // 10 else 0


if __name__ == "__main__":
    sys.exit(main())
