"""Pages for people: open cases, one case whole, and a decision with a confirmation of its own.

What it does: renders Jinja2 templates with autoescape under a policy that allows no script; takes approve and reject
only from a signed-in person, with the session's own form value, for exactly the request that was shown.
What it never does: decide otherwise than `POST /v1/cases/{id}/approve` does: both call the ledger.
Its place: `app` mounts it with one line, under `/ui`.
"""

from __future__ import annotations

import hmac
import json
import time
from datetime import datetime, timezone
from importlib.resources import files
from typing import Any
from urllib.parse import parse_qs, urlsplit

from fastapi import FastAPI, Request
from fastapi.responses import HTMLResponse, RedirectResponse, Response
from jinja2 import Environment, PackageLoader, StrictUndefined
from starlette.concurrency import run_in_threadpool

from sdcwatch_remediation import peers
from sdcwatch_remediation.cases import Case
from sdcwatch_remediation.errors import Conflict, StoreUnavailable
from sdcwatch_remediation.evidence import canonical_json
from sdcwatch_remediation.service import Service
from sdcwatch_remediation.states import STATES
from sdcwatch_remediation.web import session as sessions

HEADERS = {
    "Content-Security-Policy": "default-src 'none'; style-src 'self'; form-action 'self'; base-uri 'none'; "
    "frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    # With `no-referrer` a browser sends `Origin: null` with our own forms too, and they could not be told from others'.
    "Referrer-Policy": "same-origin",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cache-Control": "no-store",
}
FORM_BYTES = 16_384
DECISIONS = ("approve", "reject")
ENDED_SHOWN = 20


class Pages:
    """The pages of one service."""

    def __init__(self, service: Service) -> None:
        """Load the templates."""
        self.service = service
        self._templates = Environment(
            loader=PackageLoader("sdcwatch_remediation.web"),
            autoescape=True,
            undefined=StrictUndefined,
            trim_blocks=True,
            lstrip_blocks=True,
        )
        self._templates.filters |= {"when": _when, "ago": lambda at: _span(service.clock() - at), "words": _words}
        self._style = files("sdcwatch_remediation.web").joinpath("style.css").read_text(encoding="utf-8")

    def page(self, name: str, who: sessions.Session | None, status: int = 200, **values: Any) -> HTMLResponse:
        """Render one template."""
        text = self._templates.get_template(name).render(
            who=who, cluster=self.service.config.cluster.name, now=self.service.clock(), **values
        )
        return HTMLResponse(text, status_code=status, headers=HEADERS)

    def who(self, request: Request) -> sessions.Session | None:
        """Return who is signed in; a connection with the certificate of one that reports alerts is nobody's."""
        if peers.reports(request.scope, self.service.config.server.client_names):
            return None
        cookie = request.cookies.get(sessions.COOKIE, "")
        return sessions.read(self.service.tokens, cookie, time.time())

    def style(self) -> Response:
        """Return the one style sheet."""
        return Response(self._style, media_type="text/css", headers={**HEADERS, "Cache-Control": "max-age=300"})

    def home(self, request: Request) -> Response:
        """List the open cases, and the newest that ended."""
        if (who := self.who(request)) is None:
            return _to("/ui/login")
        store = self.service.store
        ended = [case for case in store.cases(limit=200) if case.closed_at is not None][:ENDED_SHOWN]
        return self.page(
            "home.html", who, open=store.cases(open_only=True), ended=ended, stop=self.service.context.stop()
        )

    def case(self, request: Request, case_id: str, *, status: int = 200, problem: str = "") -> Response:
        """Show one case whole."""
        if (who := self.who(request)) is None:
            return _to("/ui/login")
        case = self._find(case_id)
        if case is None:
            return self.page(
                "message.html", who, 404, title="No such case", text="The list of cases shows what there is."
            )
        values = {"case": case, "gates": case.public()["gates"], "copies": self.service.store.copies(case.id)}
        values |= {"timeline": self.service.store.timeline(case.id), "problem": problem, **self._outlook(case)}
        return self.page("case.html", who, status, may=self._may(who, case), **values)

    def confirm(self, request: Request, case_id: str, decision: str) -> Response:
        """Ask once more, with the exact request."""
        if (who := self.who(request)) is None:
            return _to("/ui/login")
        case = self._find(case_id)
        if case is None or decision not in self._may(who, case):
            return self.case(request, case_id, status=409, problem=f"This case cannot be answered with {decision} now.")
        request_text = _pretty(case)
        return self.page("confirm.html", who, case=case, decision=decision, request=request_text, **self._outlook(case))

    async def decide(self, request: Request, case_id: str, decision: str) -> Response:
        """Take a decision."""
        form, who = await self._form(request), self.who(request)
        if who is None:
            return _to("/ui/login")
        if form is None or not hmac.compare_digest(form.get("csrf", "").encode(), who.csrf.encode()):
            return self.page(
                "message.html", who, 403, title="Not taken", text="The form is not of this session. Go back."
            )
        return await run_in_threadpool(self._decide, request, who, case_id, decision, form)

    def _decide(
        self, request: Request, who: sessions.Session, case_id: str, decision: str, form: dict[str, str]
    ) -> Response:
        case = self._find(case_id)
        if case is None or not who.may("approve") or decision not in DECISIONS:
            return self.page(
                "message.html", who, 403, title="Not taken", text="This token may not decide about this case."
            )
        try:
            if decision == "approve":
                self.service.ledger.approve(case, by=who.by, request_sha256=form.get("request_sha256", ""))
            else:
                self.service.ledger.reject(case, by=who.by, reason=form.get("reason", "")[:1000])
        except Conflict as error:
            return self.case(request, case_id, status=409, problem=f"Not taken: {error}")
        except StoreUnavailable:
            return self.page("message.html", who, 503, title="Not taken", text="The database is busy. Try again.")
        self.service.worker.wake()
        return _to(f"/ui/cases/{case.id}")

    async def login(self, request: Request) -> Response:
        """Exchange a token for a session."""
        form = await self._form(request) or {}
        if peers.reports(request.scope, self.service.config.server.client_names):
            form = {}
        cookie = sessions.sign_in(
            self.service.tokens, form.get("token", "").strip(), form.get("by", "").strip(), time.time()
        )
        if cookie is None:
            self.service.telemetry.count("sdc_remediation_auth_failures_total", "login")
            return self.page("login.html", None, 401, problem="That token may not read cases, or the name is not one.")
        answer = _to("/ui")
        secure = request.url.scheme == "https" or self.service.config.server.behind_proxy
        lasts = int(sessions.LASTS_SECONDS)
        answer.set_cookie(
            sessions.COOKIE, cookie, max_age=lasts, path="/ui", httponly=True, samesite="strict", secure=secure
        )
        return answer

    async def logout(self, request: Request) -> Response:
        """Forget the session in this browser."""
        form, who = await self._form(request), self.who(request)
        answer = _to("/ui/login")
        if (
            who is not None
            and form is not None
            and hmac.compare_digest(form.get("csrf", "").encode(), who.csrf.encode())
        ):
            answer.delete_cookie(sessions.COOKIE, path="/ui")
        return answer

    async def _form(self, request: Request) -> dict[str, str] | None:
        """Read a short form that this very site sent; None for anything else."""
        if request.headers.get("sec-fetch-site", "same-origin") not in ("same-origin", "none"):
            return None
        origin = request.headers.get("origin")
        if origin is not None and urlsplit(origin).netloc != request.headers.get("host"):
            return None
        chunks, size = [], 0
        async for chunk in request.stream():
            size += len(chunk)
            if size > FORM_BYTES:
                return None
            chunks.append(chunk)
        try:
            fields = parse_qs(b"".join(chunks).decode(), max_num_fields=16, errors="strict")
        except ValueError:
            return None
        return {key: values[0] for key, values in fields.items()}

    def _find(self, case_id: str) -> Case | None:
        return self.service.store.case(case_id) if len(case_id) <= 32 else None

    def _may(self, who: sessions.Session, case: Case) -> tuple[str, ...]:
        if not who.may("approve") or case.closed_at is not None:
            return ()
        approve = ("approve",) if case.state == "awaiting_approval" else ()
        return (*approve, "reject") if "rejected" in STATES[case.state].next else approve

    def _outlook(self, case: Case) -> dict[str, Any]:
        return {"state": STATES[case.state], "lost": _lost(case), "silence": _silence(case)}


def mount(app: FastAPI, service: Service) -> None:
    """Add the pages to the application; they stand outside of its OpenAPI."""
    pages = Pages(service)

    def add(path: str, method: str, take: Any) -> None:
        app.add_api_route(path, take, methods=[method], include_in_schema=False, response_model=None)

    def login_page() -> Response:
        return pages.page("login.html", None, problem="")

    add("/ui", "GET", pages.home)
    add("/ui/style.css", "GET", pages.style)
    add("/ui/login", "GET", login_page)
    add("/ui/login", "POST", pages.login)
    add("/ui/logout", "POST", pages.logout)
    add("/ui/cases/{case_id}", "GET", _case_route(pages))
    add("/ui/cases/{case_id}/{decision}", "GET", pages.confirm)
    add("/ui/cases/{case_id}/{decision}", "POST", pages.decide)


def _case_route(pages: Pages) -> Any:
    # A route's own signature says what a query may set, so it must not be `Pages.case`'s.
    def show(request: Request, case_id: str) -> Response:
        return pages.case(request, case_id)

    return show


def _lost(case: Case) -> str:
    if case.outcome == "replaced":
        return f"All volumes of {case.instance_id} are gone."
    return (
        f"Replacing destroys every volume of {case.instance_id}: checkpoints, logs and data that lie only there. "
        "The job goes on from its newest verified checkpoint; steps after it are computed again."
    )


def _silence(case: Case) -> str:
    state = STATES[case.state]
    if state.kind == "terminal":
        return "Nothing: the case is over."
    when = f"by {_when(case.deadline)}" if case.deadline is not None else "in time"
    stays = "the node stays quarantined, and is not replaced" if case.quarantined_at else "the node is not touched"
    if case.state == "not_given_back":
        return f"The node stays with whoever has it now. If nobody gives it back {when}, the case is {state.overdue}."
    if case.state == "handed_over":
        return f"Its owner replaces the node. If no other instance runs in its place {when}, a person is asked."
    if state.kind == "waiting":
        return f"If nobody answers {when}, the case is {state.overdue}: {stays}."
    return f"The service goes on by itself. If it cannot end this state {when}, the case is {state.overdue}."


def _pretty(case: Case) -> str:
    return json.dumps(json.loads(case.request), indent=2) if case.request else ""


def _words(detail: dict[str, Any]) -> str:
    parts = [f"{key}: {value if isinstance(value, str) else canonical_json(value)}" for key, value in detail.items()]
    return " · ".join(part for part in parts if not part.endswith(": "))[:600]


def _when(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, tz=timezone.utc).strftime("%Y-%m-%d %H:%M:%S UTC")


def _span(seconds: float) -> str:
    for size, name in ((86_400, "d"), (3600, "h"), (60, "min")):
        if seconds >= size:
            return f"{seconds / size:.0f} {name}"
    return f"{max(0, seconds):.0f} s"


def _to(path: str) -> RedirectResponse:
    return RedirectResponse(path, status_code=303, headers=HEADERS)
