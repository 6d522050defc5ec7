"""Wrong use of the OTLP options is refused before anything is served, with what to do instead."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from sdcwatch.agent import otlp_options
from sdcwatch.errors import ConfigurationError


def take(*words: object) -> otlp_options.OtlpOptions | None:
    parser = argparse.ArgumentParser()
    otlp_options.add_arguments(parser)
    return otlp_options.take(parser.parse_args([str(word) for word in words]))


def test_nothing_is_pushed_unless_asked() -> None:
    """Without an endpoint there are no options."""
    assert take() is None


@pytest.mark.parametrize(
    ("words", "endpoint"),
    [
        (("http://collector",), "http://collector:4318"),
        (("http://collector/base/",), "http://collector:4318/base"),
        (("https://[::1]:9/",), "https://[::1]:9"),
        (("http://collector", "--otlp-protocol", "grpc"), "http://collector:4317"),
    ],
)
def test_an_endpoint_gets_its_protocols_port(words: tuple[str, ...], endpoint: str) -> None:
    """4318 for HTTP, 4317 for gRPC, and what stands in the URL before both."""
    options = take("--otlp-endpoint", *words)
    assert options is not None
    assert options.endpoint == endpoint


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (("--otlp-endpoint", "collector:4318"), "no URL such as"),
        (("--otlp-endpoint", "ftp://collector"), "no URL such as"),
        (("--otlp-endpoint", "http://collector:99999"), "--otlp-endpoint"),
        (("--otlp-endpoint", "http://me:secret@collector"), "headers file"),
        (("--otlp-endpoint", "http://collector/v1/metrics"), "leave off /v1/metrics"),
        (("--otlp-endpoint", "http://collector/x", "--otlp-protocol", "grpc"), "no path"),
        (("--otlp-endpoint", "http://collector", "--otlp-ca", "/ca.pem"), "https endpoint"),
        (("--otlp-endpoint", "http://collector", "--otlp-interval", "0"), "between 0.1 and 3600"),
        (("--otlp-endpoint", "http://collector", "--otlp-headers-file", "/nowhere"), "No such file"),
        (("--otlp-ca", "/ca.pem"), "without --otlp-endpoint"),
    ],
)
def test_wrong_use_is_refused_with_what_to_do(words: tuple[str, ...], says: str) -> None:
    """Each wrong combination has a sentence of its own."""
    with pytest.raises(ConfigurationError, match=says):
        take(*words)


def test_headers_are_read_afresh_and_a_bad_line_is_not_shown(tmp_path: Path) -> None:
    """Blank lines and comments are passed over; a line that is no header is named by its number only."""
    path = tmp_path / "headers"
    path.write_text("# collector\n\nAuthorization: Bearer a:b \nX-Scope-OrgID: 7\n")
    options = take("--otlp-endpoint", "http://127.0.0.1", "--otlp-headers-file", path)
    assert options is not None
    assert options.headers() == {"authorization": "Bearer a:b", "x-scope-orgid": "7"}
    path.write_text("hunter2\n")
    with pytest.raises(ConfigurationError, match="line 1") as caught:
        options.headers()
    assert "hunter2" not in str(caught.value)


def test_a_secret_does_not_travel_in_clear_text(tmp_path: Path) -> None:
    """A header that looks like a secret needs https beyond the loopback; a tenant's name does not."""
    path = tmp_path / "headers"
    path.write_text("X-Scope-OrgID: 7\n")
    assert take("--otlp-endpoint", "http://collector", "--otlp-headers-file", path)
    path.write_text("X-Api-Key: 7\n")
    assert take("--otlp-endpoint", "https://collector", "--otlp-headers-file", path)
    with pytest.raises(ConfigurationError, match="clear text"):
        take("--otlp-endpoint", "http://collector", "--otlp-headers-file", path)


@pytest.mark.parametrize(("protocol", "extra"), [("http", "otlp"), ("grpc", "otlp-grpc")])
def test_a_missing_package_is_named_with_its_extra(
    monkeypatch: pytest.MonkeyPatch, protocol: str, extra: str, require: Callable[[str], Any]
) -> None:
    """Without the optional package the agent says which extra to install, instead of starting without a push."""
    import importlib

    from sdcwatch.agent import otlp_senders, otlp_wire

    wire: Any = None
    if protocol == "grpc":
        require("module:opentelemetry.proto")
        wire = otlp_wire.load()
    real = importlib.import_module

    def without(name: str, package: str | None = None) -> Any:
        if name.startswith(("opentelemetry", "grpc")):
            raise ModuleNotFoundError(f"No module named {name!r}")
        return real(name, package)

    monkeypatch.setattr(importlib, "import_module", without)
    options = take("--otlp-endpoint", "http://127.0.0.1", "--otlp-protocol", protocol)
    assert options is not None
    with pytest.raises(ConfigurationError, match=rf"pip install 'sdcwatch\[{extra}\]'"):
        otlp_senders.make(options, wire or otlp_wire.load())
