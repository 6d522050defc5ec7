"""The HTTP face: receive alerts durably, show cases, take people's decisions, report health and metrics.

What it does: authenticates before it reads a body, bounds the body, commits, answers, and only then lets the worker
know. 200 means durable; 503 means "send it again"; 400 is only for what is not Alertmanager's at all.
What it never does: act on an alert inside the request.
Its place: in front of `store` and `ledger`; the outermost layer.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import asdict
from typing import Any

from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, Response
from prometheus_client import CONTENT_TYPE_LATEST, generate_latest
from pydantic import BaseModel, ConfigDict, Field, ValidationError
from starlette.concurrency import run_in_threadpool

from sdcwatch_remediation import alertmanager, diagnosis, peers, signals
from sdcwatch_remediation._version import __version__
from sdcwatch_remediation.cases import Case
from sdcwatch_remediation.config import is_loopback
from sdcwatch_remediation.errors import Conflict, NotAlertmanager, StoreUnavailable
from sdcwatch_remediation.service import Service
from sdcwatch_remediation.signals import NoSignal, Signal
from sdcwatch_remediation.web import pages

DOCTOR_WAIT_SECONDS = 10.0
"""How long a second question to the doctor waits for the first; it asks every agent, so one at a time is enough."""


READ_HERE_BYTES = 65_536
"""A longer body is read in a thread, so that other requests go on meanwhile."""


class Person(BaseModel):
    """Who decides, and why."""

    model_config = ConfigDict(extra="forbid")

    by: str = Field(min_length=1, max_length=128, pattern=r"^[A-Za-z0-9][A-Za-z0-9 ._@+-]*$")
    reason: str = Field(default="", max_length=1000)


class Approval(Person):
    """An approval is bound to the request that the person saw."""

    request_sha256: str = Field(pattern=r"^[0-9a-f]{64}$")


class Refused(Exception):
    """A request that is answered with an error."""

    def __init__(self, status: int, message: str) -> None:
        """Take the HTTP status and one sentence for the caller."""
        super().__init__(message)
        self.status = status


def make_app(service: Service) -> FastAPI:
    """Build the ASGI application around one service."""
    app = FastAPI(title="sdcwatch-remediation", version=__version__, docs_url=None, redoc_url=None)
    app.add_exception_handler(Refused, _refused)
    app.add_exception_handler(StoreUnavailable, _unavailable)
    app.add_exception_handler(Conflict, _conflict)
    _add_alerts(app, service)
    _add_cases(app, service)
    _add_decisions(app, service)
    _add_doctor(app, service)
    _add_health(app, service)
    pages.mount(app, service)
    return app


def _add_alerts(app: FastAPI, service: Service) -> None:
    @app.post("/v1/alerts", openapi_extra=_body_of(None))
    async def alerts(request: Request) -> Response:
        """Take one Alertmanager delivery; 200 says that it is durable."""
        try:
            _authorize(service, request, "alerts")
            body = await _body(service, request)
            large = len(body) > READ_HERE_BYTES
            derived = await run_in_threadpool(derive, service, body) if large else derive(service, body)
            results = await service.store.intake.arrive(body, derived)
        except Refused as error:
            service.telemetry.count("sdc_remediation_deliveries_total", str(error.status))
            raise
        except StoreUnavailable:
            service.telemetry.count("sdc_remediation_deliveries_total", "503")
            raise
        service.telemetry.count("sdc_remediation_deliveries_total", "200")
        for result in results:
            service.telemetry.count("sdc_remediation_alerts_total", result["result"])
        if any(result["result"] == "accepted" for result in results):
            service.worker.wake()
        return JSONResponse({"schema": 1, "alerts": results})


def derive(service: Service, body: bytes) -> list[Signal | NoSignal]:
    """Read one delivery and judge each alert of it by itself.

    Raises:
        Refused: it is not Alertmanager's.
    """
    try:
        alerts = alertmanager.parse(body)
    except NotAlertmanager as error:
        raise Refused(400, str(error)) from error
    return [signals.derive(alert, service.config.cluster.name) for alert in alerts]


def receive(service: Service, body: bytes) -> list[dict[str, Any]]:
    """Do what `POST /v1/alerts` does with an admitted delivery, without an event loop; return what became of it."""
    return service.store.record_delivery(body, derive(service, body))


def _add_cases(app: FastAPI, service: Service) -> None:
    @app.get("/v1/cases")
    def cases(request: Request) -> JSONResponse:
        """List the newest cases, newest first."""
        _authorize(service, request, "cases")
        return JSONResponse({"schema": 1, "cases": [case.public() for case in service.store.cases()]})

    @app.get("/v1/cases/{case_id}")
    def case(request: Request, case_id: str) -> JSONResponse:
        """Show one case whole: timeline, gates, evidence, attempts."""
        _authorize(service, request, "cases")
        return JSONResponse({"schema": 1, **case_view(service, _find(service, case_id))})


def _add_doctor(app: FastAPI, service: Service) -> None:
    one_at_a_time = threading.Lock()

    @app.get("/v1/doctor")
    def doctor(request: Request) -> JSONResponse:
        """Tell why nothing would happen now; asks the provider and the agents."""
        _authorize(service, request, "cases")
        if not one_at_a_time.acquire(timeout=DOCTOR_WAIT_SECONDS):
            raise Refused(409, "the doctor is being asked already; come again")
        try:
            found = diagnosis.diagnose(service)
        finally:
            one_at_a_time.release()
        head = {"schema": 1, "time": service.clock(), "cluster": service.config.cluster.name}
        return JSONResponse({**head, "findings": [asdict(finding) for finding in found]})


def case_view(service: Service, case: Case) -> dict[str, Any]:
    """Return one case as `GET /v1/cases/{id}` shows it."""
    timeline = service.store.timeline(case.id)
    first: dict[str, float] = {}
    for line in timeline:
        first.setdefault(line["step"], line["time"])
    moments = (
        "signal_received",
        "proven",
        "quarantined",
        "replace_requested",
        "replacement_proven",
        "latch_released",
    )
    return {
        **case.public(),
        "times": {**{name: first.get(name) for name in moments}, "closed": case.closed_at},
        "timeline": timeline,
        "evidence": [
            {
                "event": copy.event.id,
                "sha256": copy.event.sha256,
                "agent": copy.agent_instance,
                "node": copy.agent_node,
                "address": copy.address,
                "fetched_at": copy.fetched_at,
            }
            for copy in service.store.copies(case.id)
        ],
        "intents": [
            {"id": i.id, "reserved_at": i.reserved_at, "outcome": i.outcome, "code": i.code}
            for i in service.ledger.intents(case.id)
        ],
    }


def _add_decisions(app: FastAPI, service: Service) -> None:
    def decision(path: str, scope: str, model: type[Person], act: Callable[[str, Any], Any]) -> None:
        async def take(request: Request) -> JSONResponse:
            _authorize(service, request, scope)
            body = await _body(service, request)
            try:
                person = model.model_validate_json(body)
            except ValidationError as error:
                problem = error.errors(include_url=False, include_context=False, include_input=False)[0]
                where = ".".join(str(part) for part in problem["loc"]) or "body"
                raise Refused(422, f"{where}: {problem['msg']}") from error
            answer = await run_in_threadpool(act, request.path_params.get("case_id", ""), person)
            service.worker.wake()
            return JSONResponse({"schema": 1, **answer})

        app.add_api_route(path, take, methods=["POST"], openapi_extra=_body_of(model), name=path.rpartition("/")[2])

    def approve(case_id: str, who: Approval) -> dict[str, Any]:
        found = _find(service, case_id)
        return service.ledger.approve(found, by=who.by, request_sha256=who.request_sha256).public()

    def reject(case_id: str, who: Person) -> dict[str, Any]:
        found = _find(service, case_id)
        return service.ledger.reject(found, by=who.by, reason=who.reason).public()

    def cancel(case_id: str, who: Person) -> dict[str, Any]:
        return service.ledger.cancel(_find(service, case_id), by=who.by, reason=who.reason).public()

    def hold(case_id: str, who: Person) -> dict[str, Any]:
        return service.ledger.hold(_find(service, case_id), by=who.by, reason=who.reason).public()

    def unhold(case_id: str, who: Person) -> dict[str, Any]:
        return service.ledger.unhold(_find(service, case_id), by=who.by).public()

    def pause(_: str, who: Person) -> dict[str, Any]:
        service.ledger.pause(by=who.by, reason=who.reason)
        return {"paused": True}

    def resume(_: str, who: Person) -> dict[str, Any]:
        service.ledger.resume(by=who.by)
        return {"paused": False, "stopped": service.context.stop()}

    decision("/v1/cases/{case_id}/approve", "approve", Approval, approve)
    decision("/v1/cases/{case_id}/reject", "approve", Person, reject)
    decision("/v1/cases/{case_id}/cancel", "approve", Person, cancel)
    decision("/v1/cases/{case_id}/hold", "approve", Person, hold)
    decision("/v1/cases/{case_id}/unhold", "approve", Person, unhold)
    decision("/v1/pause", "admin", Person, pause)
    decision("/v1/resume", "admin", Person, resume)


def _add_health(app: FastAPI, service: Service) -> None:
    @app.get("/healthz")
    def healthz() -> dict[str, str]:
        """Say that the process answers."""
        return {"status": "ok"}

    @app.get("/readyz")
    def readyz() -> JSONResponse:
        """Say whether database, worker and provider work."""
        state = service.ready()
        return JSONResponse(state, status_code=200 if state["ready"] else 503)

    @app.get("/metrics")
    def metrics(request: Request) -> Response:
        """Show the metrics; beyond loopback a token that may read cases is needed."""
        if not is_loopback(service.config.server.host) and service.config.server.cases_token_file:
            _authorize(service, request, "cases")
        return Response(generate_latest(service.telemetry.registry), media_type=CONTENT_TYPE_LATEST)


def _authorize(service: Service, request: Request, scope: str) -> None:
    reporter = peers.reports(request.scope, service.config.server.client_names)
    refusal = service.tokens.refuse(request.headers.get("authorization"), scope, reporter=reporter)
    if refusal is not None:
        service.telemetry.count("sdc_remediation_auth_failures_total", refusal.reason.split(" ")[0])
        raise Refused(refusal.status, refusal.reason)


async def _body(service: Service, request: Request) -> bytes:
    limit = service.config.server.body_limit_bytes
    declared = request.headers.get("content-length", "0")
    if not declared.isdecimal() or int(declared) > limit:
        raise Refused(413, f"the body is longer than {limit} bytes")
    chunks, size = [], 0
    async for chunk in request.stream():
        size += len(chunk)
        if size > limit:
            raise Refused(413, f"the body is longer than {limit} bytes")
        chunks.append(chunk)
    return b"".join(chunks)


def _find(service: Service, case_id: str) -> Case:
    case = service.store.case(case_id) if len(case_id) <= 32 else None
    if case is None:
        raise Refused(404, "no such case; GET /v1/cases lists them")
    return case


def _body_of(model: type[BaseModel] | None) -> dict[str, Any]:
    schema = model.model_json_schema() if model else {"type": "object", "required": ["alerts"]}
    return {"requestBody": {"required": True, "content": {"application/json": {"schema": schema}}}}


async def _refused(_: Request, error: Exception) -> Response:
    status = error.status if isinstance(error, Refused) else 500
    headers = {"WWW-Authenticate": "Bearer"} if status == 401 else None
    return JSONResponse({"error": str(error)}, status_code=status, headers=headers)


async def _unavailable(_: Request, error: Exception) -> Response:
    return JSONResponse({"error": "the database cannot take this now; send it again"}, status_code=503)


async def _conflict(_: Request, error: Exception) -> Response:
    return JSONResponse({"error": str(error)}, status_code=409)
