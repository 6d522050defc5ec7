"""A case as one trace: its spans, its ids, and that it reaches a real OTLP/HTTP receiver once and delays nobody."""

from __future__ import annotations

import http.server
import itertools
import re
import socket
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from sdcwatch_remediation import trace_export, tracing
from sdcwatch_remediation.cases import Case
from sdcwatch_remediation.config import check
from sdcwatch_remediation.errors import ConfigError
from sdcwatch_remediation.settings import Tracing
from sdcwatch_remediation.states import STATES
from sdcwatch_remediation.testing import Rig, fleet, make_rig

MEMBERS = fleet(4)
SUSPECT = MEMBERS[2]


@pytest.fixture
def rig(tmp_path: Path) -> Iterator[Rig]:
    """A service without tracing, in mode auto."""
    with make_rig(tmp_path, MEMBERS) as made:
        yield made


class Receiver:
    """An OTLP/HTTP collector for traces; it answers with `status`."""

    def __init__(self) -> None:
        self.status = 200
        self.tries = 0
        self.headers: list[dict[str, str]] = []
        self.requests: list[Any] = []
        receiver = self

        class Handler(http.server.BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                from opentelemetry.proto.collector.trace.v1 import trace_service_pb2 as service

                body = self.rfile.read(int(self.headers["Content-Length"]))
                assert self.path == "/v1/traces"
                assert self.headers["Content-Type"] == "application/x-protobuf"
                receiver.tries += 1
                receiver.headers.append({k.lower(): v for k, v in self.headers.items()})
                if receiver.status == 200:
                    receiver.requests.append(service.ExportTraceServiceRequest.FromString(body))
                self.send_response(receiver.status)
                self.send_header("Content-Length", "0")
                self.end_headers()

            def log_message(self, *args: Any) -> None:
                pass

        self._server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}"
        threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True).start()

    def spans(self) -> list[Any]:
        """The spans of the only request."""
        (request,) = self.requests
        return list(request.resource_spans[0].scope_spans[0].spans)

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()


@pytest.fixture
def receiver(require: Callable[[str], Path]) -> Iterator[Receiver]:
    """A collector that takes everything."""
    require("module:opentelemetry.proto")
    made = Receiver()
    yield made
    made.close()


def traced(rig: Rig, endpoint: str, **more: Any) -> trace_export.TraceExporter:
    """Restarts the service with tracing on."""
    rig.config = replace(rig.config, tracing=Tracing(endpoint=endpoint, **more))
    rig.restart()
    assert rig.service.traces is not None
    return rig.service.traces


def replaced(rig: Rig) -> Case:
    """Lets one case go its whole way: event 5 s before the alert, replacement up after 100 s."""
    rig.fault(2, time=rig.clock() - 5)
    rig.rounds(1, seconds=1)
    rig.provider.come_up(SUSPECT.instance_id, launched=rig.clock())
    rig.rounds(1, seconds=100)
    (case,) = rig.service.store.cases()
    assert (case.state, case.outcome) == ("closed", "replaced")
    return case


def test_a_replacement_is_one_trace_from_the_event_to_the_end(rig: Rig) -> None:
    """Spans run without a gap from the event's own time: detected, alerted, proof, ..., resumed; all below one root."""
    case = replaced(rig)
    root, *parts = tracing.spans(case, rig.service.store.timeline(case.id))
    assert (root.name, root.ok, root.parent_id) == ("case", True, "")
    assert (root.start, root.end) == (case.event_time, case.closed_at)
    assert [span.name for span in parts] == [
        "detected", "alerted", "proof", "settled", "quarantine", "replace", "proven", "resumed",
    ]  # fmt: skip
    assert parts[0].start == root.start
    assert parts[0].end - parts[0].start == 5
    assert all(before.end == after.start for before, after in itertools.pairwise(parts))
    assert parts[-1].end == root.end
    waited = next(span for span in parts if span.name == "proven")
    assert waited.end - waited.start == 100
    assert {span.parent_id for span in parts} == {root.span_id}
    assert {span.trace_id for span in parts} == {root.trace_id}
    assert root.attributes["sdcwatch.replacement"] == case.replacement != ""
    marks = {span.name: [mark.name for mark in span.marks] for span in parts}
    assert "proven" in marks["proof"]
    assert "quarantined" in marks["quarantine"]
    assert "replace_requested" in marks["replace"]
    assert "replacement_proven" in marks["proven"]
    assert "latch_released" in marks["resumed"]


def test_every_state_has_a_span() -> None:
    """A state that is added to the table cannot vanish from traces."""
    assert tracing.PHASES.keys() == {name for name, state in STATES.items() if state.kind != "terminal"}


def test_ids_are_w3c_and_follow_from_the_case_alone(rig: Rig) -> None:
    """Made twice, the spans are equal; ids have W3C's form, differ from one another and from another case's."""
    case = replaced(rig)
    timeline = rig.service.store.timeline(case.id)
    made = tracing.spans(case, timeline)
    assert made == tracing.spans(case, timeline)
    assert re.fullmatch(r"00-[0-9a-f]{32}-[0-9a-f]{16}-01", tracing.traceparent(case.id))
    assert tracing.traceparent(case.id).split("-")[1:3] == [made[0].trace_id, made[0].span_id]
    assert len({span.span_id for span in made}) == len(made)
    assert tracing.trace_id("case-other") != made[0].trace_id


def test_a_case_that_ends_badly_says_so(rig: Rig) -> None:
    """A case that expires is a trace with an error and its reason; one that is refused claims neither."""
    rig.fault(2, by=[])
    rig.rounds(1)
    rig.rounds(1, seconds=1e6)
    (case,) = rig.service.store.cases()
    root, *parts = tracing.spans(case, rig.service.store.timeline(case.id))
    assert case.state == "expired"
    assert root.ok is False
    assert root.message.startswith("expired: ")
    assert [span.name for span in parts] == ["alerted", "proof"]
    assert root.start == case.opened_at  # nothing was proven, so no event's time is believed
    refused = replace(case, state="refused")
    assert tracing.spans(refused, rig.service.store.timeline(case.id))[0].ok is None


def test_a_clock_that_runs_ahead_bends_no_span(rig: Rig) -> None:
    """An event from the future starts its trace when the alert came; no span ends before it begins."""
    case = replaced(rig)
    made = tracing.spans(replace(case, event_time=case.opened_at + 30), rig.service.store.timeline(case.id))
    assert made[0].start == case.opened_at
    assert all(span.end >= span.start for span in made)


def test_a_trace_arrives_once_when_its_case_has_ended(rig: Rig, receiver: Receiver) -> None:
    """Not before the end, once over rounds and a restart, with the ids and times of the spans."""
    traces = traced(rig, receiver.url)
    rig.fault(2)
    rig.rounds(1)
    assert traces.round() == 0
    rig.provider.come_up(SUSPECT.instance_id, launched=rig.clock())
    rig.rounds(1, seconds=10)
    assert traces.round() == 1
    assert traces.round() == 0
    rig.restart()
    assert rig.service.traces is not None
    assert rig.service.traces.round() == 0
    (case,) = rig.service.store.cases()
    expected = tracing.spans(case, rig.service.store.timeline(case.id))
    sent = receiver.spans()
    assert [span.name for span in sent] == [span.name for span in expected]
    assert [span.trace_id.hex() for span in sent] == [span.trace_id for span in expected]
    assert [span.span_id.hex() for span in sent] == [span.span_id for span in expected]
    assert [span.parent_span_id.hex() for span in sent] == [span.parent_id for span in expected]
    assert sent[0].start_time_unix_nano == int(case.event_time * 1e9)
    assert sent[0].status.code == 1
    assert [event.name for event in sent[2].events] == [mark.name for mark in expected[2].marks]
    assert rig.service.store.timeline(case.id)[-1]["detail"]["trace_id"] == expected[0].trace_id


def test_an_outage_delays_a_trace_and_loses_none(rig: Rig, receiver: Receiver) -> None:
    """503 or nobody there: nothing is marked as sent, also over a restart; later it arrives, once."""
    receiver.status = 503
    traces = traced(rig, receiver.url)
    case = replaced(rig)
    assert traces.round() == 0
    assert receiver.tries == 1
    failures = rig.service.telemetry.registry.get_sample_value("sdc_remediation_errors_total", {"where": "traces"})
    assert failures == 1, "a trace that is not sent is seen"
    with socket.socket() as nobody:
        nobody.bind(("127.0.0.1", 0))
        assert traced(rig, f"http://127.0.0.1:{nobody.getsockname()[1]}").round() == 0
    assert "trace_exported" not in [line["step"] for line in rig.service.store.timeline(case.id)]
    receiver.status = 200
    traces = traced(rig, receiver.url)
    assert traces.round() == 1
    assert traces.round() == 0
    assert len(receiver.requests) == 1


def test_a_refused_trace_waits_aside(rig: Rig, receiver: Receiver) -> None:
    """A collector that refuses a trace is not asked again at once."""
    receiver.status = 400
    traces = traced(rig, receiver.url)
    replaced(rig)
    assert (traces.round(), traces.round(), receiver.tries) == (0, 0, 1)


def test_a_black_hole_delays_neither_the_worker_nor_the_end(rig: Rig, require: Callable[[str], Path]) -> None:
    """With a collector that never answers, a case goes its way, and the service closes in under 5 s."""
    require("module:opentelemetry.proto")
    with socket.socket() as hole:
        hole.bind(("127.0.0.1", 0))
        hole.listen(8)
        hole.settimeout(20)
        replaced(rig)
        traces = traced(rig, f"http://127.0.0.1:{hole.getsockname()[1]}", timeout_seconds=30.0)
        traces.start()
        with hole.accept()[0]:  # the trace is under way now
            rig.fault(1, step=4321)
            rig.rounds(1, seconds=1)
            assert rig.case(MEMBERS[1])["state"] == "proving_replacement"
            begun = time.monotonic()
            rig.service.close()
            took = time.monotonic() - begun
            print(f"closed with a black-holed collector after {took:.2f} s")
            assert took < 5
    rig.restart()


def test_headers_are_sent_and_read_afresh(rig: Rig, receiver: Receiver, tmp_path: Path) -> None:
    """The file's headers travel with the request; a rotated secret is used at the next one."""
    path = tmp_path / "headers"
    path.write_text("# collector\nAuthorization: Bearer one\n")
    receiver.status = 503
    traces = traced(rig, receiver.url, headers_file=str(path))
    replaced(rig)
    traces.round()
    path.write_text("Authorization: Bearer two\n")
    traces.round()
    assert [headers["authorization"] for headers in receiver.headers] == ["Bearer one", "Bearer two"]


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"endpoint": "collector:4318"}, "no URL such as"),
        ({"endpoint": "http://me:pw@collector"}, "no URL such as"),
        ({"endpoint": "http://collector", "headers_file": "secret"}, "clear text"),
        ({"endpoint": "http://collector", "headers_file": "nonsense"}, "line 1"),
        ({"endpoint": "http://collector", "headers_file": "nowhere"}, "cannot be read"),
        ({"endpoint": "https://collector", "ca_file": "nowhere"}, "tracing.ca_file"),
    ],
)
def test_wrong_settings_are_refused_with_what_to_do(
    rig: Rig, tmp_path: Path, settings: dict[str, str], says: str, require: Callable[[str], Path]
) -> None:
    """Each wrong setting refuses the start with a sentence of its own."""
    require("module:opentelemetry.proto")
    (tmp_path / "secret").write_text("X-Api-Key: 1\n")
    (tmp_path / "nonsense").write_text("hunter2\n")
    placed = {key: str(tmp_path / text) if key.endswith("_file") else text for key, text in settings.items()}
    with pytest.raises(ConfigError, match=says):
        trace_export.make(Tracing(**placed), rig.service.store, pause_seconds=1)


def test_a_missing_package_is_named_with_its_extra(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the optional package the start says what to install; without an endpoint nothing is needed."""
    import importlib

    def without(name: str, package: str | None = None) -> Any:
        raise ModuleNotFoundError(f"No module named {name!r}")

    monkeypatch.setattr(importlib, "import_module", without)
    with pytest.raises(ConfigError, match=r"pip install 'sdcwatch-remediation\[otlp\]'"):
        trace_export.make(Tracing(endpoint="http://127.0.0.1"), rig.service.store, pause_seconds=1)
    assert trace_export.make(Tracing(), rig.service.store, pause_seconds=1) is None


def test_paths_of_the_section_start_at_the_configuration_file(rig: Rig) -> None:
    """`tracing` is a section like the others and passes the configuration's own check."""
    assert check(replace(rig.config, tracing=Tracing())).tracing.endpoint == ""
