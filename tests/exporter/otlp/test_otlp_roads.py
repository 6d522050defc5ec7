"""The two roads out of one agent, a scrape and OTLP, compared family by family and sample by sample."""

from __future__ import annotations

import itertools
import math
import ssl
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families
from sdcwatch.agent.collector import Snapshot
from sdcwatch.agent.node import Node
from sdcwatch.agent.otlp_metrics import UNITS
from sdcwatch.catalog import BLAME, METRICS

Make = Callable[..., Any]
NODE = Node("blue", "n0", "i-0", "host0")


def scraped(text: str) -> dict[str, dict[tuple[tuple[str, str], ...], str]]:
    """name -> labels -> value, as text so that NaN equals itself."""
    found: dict[str, dict[tuple[tuple[str, str], ...], str]] = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            found.setdefault(sample.name, {})[tuple(sorted(sample.labels.items()))] = repr(float(sample.value))
    return found


def received(families: dict[str, Any]) -> dict[str, dict[tuple[tuple[str, str], ...], str]]:
    found: dict[str, dict[tuple[tuple[str, str], ...], str]] = {}
    for name, family in families.items():
        data = family.sum if family.WhichOneof("data") == "sum" else family.gauge
        for point in data.data_points:
            assert point.WhichOneof("value") == "as_double"
            labels = {a.key: a.value.string_value for a in point.attributes}
            assert all(a.value.WhichOneof("value") == "string_value" for a in point.attributes)
            found.setdefault(name, {})[tuple(sorted(labels.items()))] = repr(point.as_double)
    return found


def fill(rank: Any) -> None:
    """Gives every family that a rank may write a value in every combination of its enumerated labels."""
    for number, metric in enumerate(METRICS.values()):
        if metric.scope == "agent" or metric.name in BLAME:
            continue
        for labels in itertools.product(*(metric.enums.get(label, ("x",)) for label in metric.labels)):
            change = rank.metrics.inc if metric.kind == "counter" else rank.metrics.set
            change(
                metric.name,
                1 if metric.kind == "info" else number + 0.5,
                **dict(zip(metric.labels, labels, strict=True)),
            )
    rank.metrics.blame(rank.identity, "replay", 1_764_600_123.25)
    rank.write()


def busy_node(rank: Make) -> None:
    """Two jobs, three ranks, every family, and the values and label texts that have broken exporters."""
    fill(rank(0))
    second = rank(1)
    second.metrics.set("sdc_gradient_norm", math.nan)
    second.metrics.set("sdc_gradient_norm_deviation", -math.inf)
    second.metrics.set("sdc_training_step", 2.0**64)
    second.write()
    odd = rank(0, job='gpt "7b" \\ é/1', gpu_uuid="GPU-odd")
    odd.metrics.set("sdc_gradient_norm", 5e-324)
    odd.write()


def test_names_labels_and_values_are_the_same_on_both_roads(road: Any, agent: Make, rank: Make) -> None:
    """Each family and sample of a scrape arrives over OTLP with the same name, label set and value, and no other."""
    collector, options = road
    busy_node(rank)
    running = agent(*options)
    running.metrics(**{"X-Prometheus-Scrape-Timeout-Seconds": "10"})
    collector.until(lambda: collector.batches("metrics") and "sdc_agent_last_scrape" in str(collector.snapshot()))
    families = collector.snapshot()
    pushed, scrape = received(families), scraped(running.metrics())
    # A push is counted once it is answered, so it cannot carry its own count: names and labels are compared here.
    own = "sdc_agent_otlp_requests_total"
    assert pushed[own].keys() == scrape[own].keys()
    assert pushed | {own: {}} == scrape | {own: {}}
    assert scrape.keys() == METRICS.keys()
    values = {value for series in scrape.values() for value in series.values()}
    assert {"nan", "-inf", repr(2.0**64), "5e-324"} <= values
    print(f"{len(scrape)} families, {sum(map(len, scrape.values()))} samples, the same on both roads")
    for name, family in families.items():
        assert family.description == METRICS[name].help
        if METRICS[name].kind == "counter":
            assert family.sum.is_monotonic
            assert family.sum.aggregation_temporality == 2  # cumulative
            assert all(0 < p.start_time_unix_nano <= p.time_unix_nano for p in family.sum.data_points)
        else:
            assert family.WhichOneof("data") == "gauge"


def test_the_resource_says_which_agent_sent_it(receiver: Any, http_options: Any, agent: Make, rank: Make) -> None:
    """service.name, service.instance.id and the node's identity stand on the resource besides."""
    rank(0)
    agent(*http_options)
    receiver.until(lambda: receiver.batches("metrics"))
    told = {a.key: a.value.string_value for a in receiver.batches("metrics")[0].resource_metrics[0].resource.attributes}
    assert told["service.name"] == "sdcwatch-agent"
    assert told["service.instance.id"] == told["training_instance"] == "i-0"
    assert (told["training_cluster"], told["training_node"]) == ("blue", "n0")


def test_names_survive_the_translation_back_to_prometheus() -> None:
    """Under the rules by which collectors append units, `_ratio` and `_total`, every catalogued name stays itself."""
    words = {"s": "seconds", "By": "bytes"}
    for metric in METRICS.values():
        assert metric.unit in UNITS
        unit = UNITS[metric.unit]
        tokens = metric.name.split("_")
        assert unit != "1"
        if unit:
            assert words[unit] in tokens
        assert (tokens[-1] == "total") == (metric.kind == "counter")
        assert "ratio" not in tokens


def encoder(require: Make, **times: float) -> Any:
    require("module:opentelemetry.proto")
    from sdcwatch.agent.otlp_metrics import MetricsEncoder
    from sdcwatch.agent.otlp_wire import load

    return MetricsEncoder(load(), NODE, **{"since": 1000.0, "started": 2000.0, **times})


def points(requests: list[Any]) -> dict[str, Any]:
    return {
        family.name: point
        for request in requests
        for family in request.resource_metrics[0].scope_metrics[0].metrics
        for point in (family.sum if family.WhichOneof("data") == "sum" else family.gauge).data_points
    }


def snapshot(when: float, **values: float) -> Any:
    return Snapshot(when, tuple((name, f'{name}{{rank="0"}}', float(value)) for name, value in values.items()), {})


def test_a_counter_starts_anew_only_where_it_began_anew(require: Make) -> None:
    """Ranks' counters count from the spool's first push, the agent's from its start, and a lower value from the push
    before it.
    """
    encode = encoder(require)
    name = "sdc_mismatches_total"
    first = points(encode.encode(snapshot(3000, **{name: 4, "sdc_agent_files_expired_total": 1})))
    assert first[name].start_time_unix_nano == 1000 * 10**9
    assert first["sdc_agent_files_expired_total"].start_time_unix_nano == 2000 * 10**9
    encode.delivered()
    assert points(encode.encode(snapshot(3010, **{name: 5})))[name].start_time_unix_nano == 1000 * 10**9
    assert points(encode.encode(snapshot(3020, **{name: 1})))[name].start_time_unix_nano == 3000 * 10**9


def test_a_series_that_left_the_scrape_ends_over_otlp_too(require: Make) -> None:
    """It gets one point that says "no recorded value", until that was delivered; then none."""
    encode = encoder(require)
    encode.encode(snapshot(3000, sdc_training_step=7, sdc_world_size=2))
    encode.delivered()
    for _ in range(2):
        gone = points(encode.encode(snapshot(3010, sdc_world_size=2)))["sdc_training_step"]
        assert (gone.flags, gone.WhichOneof("value")) == (1, None)
    encode.delivered()
    assert set(points(encode.encode(snapshot(3020, sdc_world_size=2)))) == {"sdc_world_size"}


def test_a_full_node_is_sent_in_requests_that_grpc_servers_take(require: Make) -> None:
    """9,000 series travel in requests below 4 MB, none lost and none twice."""
    labels = 'training_job="' + "j" * 60 + '",training_cluster="blue",training_node="hyperpod-i-0123456789abcdef0"'
    name = "sdc_training_step"
    rows = tuple((name, f'{name}{{{labels},rank="{n}"}}', float(n)) for n in range(9000))
    requests = encoder(require).encode(Snapshot(3000, rows, {}))
    assert len(requests) == 5
    assert max(request.ByteSize() for request in requests) < 4 << 20
    sent = [
        point.as_double
        for request in requests
        for point in request.resource_metrics[0].scope_metrics[0].metrics[0].gauge.data_points
    ]
    assert sorted(sent) == list(range(9000))


def certificate(folder: Path) -> tuple[Path, Path]:
    cert, key = folder / "cert.pem", folder / "key.pem"
    words = f"openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes -keyout {key} -out {cert} "
    words += "-days 2 -subj /CN=collector -addext subjectAltName=IP:127.0.0.1"
    subprocess.run(words.split(), check=True, capture_output=True, timeout=30)
    return cert, key


@pytest.mark.needs("openssl")
def test_an_https_collector_is_checked_and_gets_the_headers(
    secure_receiver: Make, agent: Make, rank: Make, tmp_path: Path
) -> None:
    """With the collector's authority named, batches arrive with the file's headers; without it, none does."""
    cert, key = certificate(tmp_path)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(cert, key)
    collector = secure_receiver(context)
    headers = tmp_path / "headers"
    headers.write_text("# for the collector\nAuthorization: Bearer first\n")
    rank(0)
    options = ("--otlp-endpoint", collector.url, "--otlp-interval", "0.2", "--otlp-headers-file", headers)
    untrusting = agent(*options)
    line = untrusting.process.stderr.readline()
    assert "OTLP: " in line
    assert "certificate verify failed" in line
    untrusting.kill()
    assert collector.batches("metrics") == []
    agent(*options, "--otlp-ca", cert)
    collector.until(lambda: collector.batches("metrics"))
    assert collector.headers[-1]["authorization"] == "Bearer first"
    headers.write_text("Authorization: Bearer second\n")
    collector.until(lambda: collector.headers[-1]["authorization"] == "Bearer second")


@pytest.mark.integration
@pytest.mark.needs("openssl")
def test_grpc_goes_through_tls_with_the_headers(
    secure_grpc_receiver: Make, agent: Make, rank: Make, tmp_path: Path
) -> None:
    """The same over gRPC: nothing without the collector's authority, batches with the headers with it."""
    cert, key = certificate(tmp_path)
    collector = secure_grpc_receiver(cert, key)
    headers = tmp_path / "headers"
    headers.write_text("Authorization: Bearer first\n")
    rank(0)
    options = ("--otlp-endpoint", collector.url, "--otlp-protocol", "grpc", "--otlp-interval", "0.2")
    untrusting = agent(*options, "--otlp-headers-file", headers)
    lines = iter(untrusting.process.stderr.readline, "")  # gRPC writes lines of its own there
    assert any("are not sent: UNAVAILABLE" in line for line in lines)
    untrusting.kill()
    assert collector.batches("metrics") == []
    agent(*options, "--otlp-headers-file", headers, "--otlp-ca", cert)
    collector.until(lambda: collector.batches("metrics"))
    assert collector.headers[-1]["authorization"] == "Bearer first"


def test_scrapes_go_on_and_the_agent_pushes_again_after_an_outage(
    receiver: Any, http_options: Any, agent: Make, rank: Make
) -> None:
    """While the collector says 503 scrapes are answered; when it takes again, so is the newest snapshot."""
    tries: list[str] = []

    def refuse(signal: str, request: Any) -> int:
        tries.append(signal)
        return 503

    receiver.refuse = refuse
    mine = rank(0)
    running = agent(*http_options)
    receiver.until(lambda: len(tries) >= 2)
    begun = time.monotonic()
    assert "sdc_build_info" in running.metrics()
    assert time.monotonic() - begun < 2
    mine.metrics.set("sdc_training_step", 77)
    mine.write()
    receiver.refuse = lambda signal, request: 200
    families = receiver.next_snapshot()
    assert [p.as_double for p in families["sdc_training_step"].gauge.data_points] == [77]
    assert "metrics are not sent: status 503" in running.process.stderr.readline()
    assert "metrics are sent again" in running.process.stderr.readline()


def test_a_training_process_never_imports_otlp() -> None:
    """What a rank imports, the starting of an agent included, loads no OpenTelemetry message, no gRPC and no sender."""
    code = (
        "import sys, sdcwatch, sdcwatch.agent.start, sdcwatch.spool, sdcwatch.metrics;"
        "bad = [m for m in sys.modules if m.split('.')[0] in ('opentelemetry', 'grpc', 'google')"
        " or m == 'sdcwatch.agent.otlp'];"
        "sys.exit(str(bad) if bad else 0)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
