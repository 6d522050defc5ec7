"""Options of `sdcwatch agent` that say where metrics and events are pushed over OTLP, checked before anything starts.

It opens no connection and imports no OpenTelemetry package. A secret never stands on the command line (anybody on the
node can read that): headers come from a file, read afresh at each push, so that a mounted secret can be rotated.
Standard library only. Flow: command -> **otlp_options** -> otlp.
"""

from __future__ import annotations

import argparse
import ipaddress
import re
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import SplitResult, urlsplit

from sdcwatch.errors import ConfigurationError

PROTOCOLS = ("http", "grpc")
_LONGEST_FILE = 64 << 10
_HEADER = re.compile(r"([!#$%&'*+.^_`|~0-9A-Za-z-]+):[ \t]*([\x20-\x7e\t]*)\Z")
_SECRET = re.compile("auth|token|key|cookie|secret", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class OtlpOptions:
    """Where to push, and how.

    Attributes:
        secure: TLS, because the endpoint is https.
        path: of the endpoint, without a slash at its end; `/v1/metrics` and `/v1/logs` follow it (http only).
        headers_file: one `Name: value` a line, sent with each request.
        ca: PEM file of the authorities that may vouch for the collector; None: the system's.
        interval: seconds between two pushes.
    """

    protocol: str
    secure: bool
    host: str
    port: int
    path: str
    headers_file: Path | None
    ca: Path | None
    interval: float

    @property
    def endpoint(self) -> str:
        """The endpoint as text, without anything that was secret in it."""
        return f"{'https' if self.secure else 'http'}://{_bracketed(self.host)}:{self.port}{self.path}"

    @property
    def address(self) -> str:
        """`host:port`."""
        return f"{_bracketed(self.host)}:{self.port}"

    def headers(self) -> dict[str, str]:
        """The headers as their file says now, names in lower case.

        Raises:
            ConfigurationError: the file cannot be read, or a line is no header.
        """
        if self.headers_file is None:
            return {}
        try:
            with self.headers_file.open("rb") as stream:
                text = stream.read(_LONGEST_FILE).decode("ascii")
        except (OSError, UnicodeDecodeError) as error:
            reason = getattr(error, "strerror", None) or "not ASCII text"
            raise ConfigurationError(f"--otlp-headers-file {self.headers_file}: {reason}") from error
        found: dict[str, str] = {}
        for number, line in enumerate(text.splitlines(), 1):
            if not line.strip() or line.startswith("#"):
                continue
            match = _HEADER.match(line)
            if match is None:  # the line itself may be a secret, so it is not shown
                raise ConfigurationError(
                    f"--otlp-headers-file {self.headers_file}, line {number}: write one `Name: value` a line"
                )
            found[match.group(1).lower()] = match.group(2).strip()
        return found


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the `--otlp-*` options."""
    add = parser.add_argument
    add("--otlp-endpoint", metavar="URL", help="push metrics and events over OTLP too, as to http://127.0.0.1:4318")
    add("--otlp-protocol", choices=PROTOCOLS, default="http", help="http (protobuf) or grpc; each is an extra")
    add("--otlp-headers-file", type=Path, metavar="PATH", help="headers for the collector, one `Name: value` a line")
    add("--otlp-ca", type=Path, metavar="PATH", help="authorities (PEM) that may vouch for an https collector")
    add("--otlp-interval", type=float, default=15.0, metavar="SECONDS", help="pause between two pushes (15)")


def take(arguments: argparse.Namespace) -> OtlpOptions | None:
    """The options, or None where no endpoint is given.

    Raises:
        ConfigurationError: wrong use; the message says what to change.
    """
    if not arguments.otlp_endpoint:
        if arguments.otlp_headers_file or arguments.otlp_ca:
            raise ConfigurationError("--otlp-headers-file and --otlp-ca mean nothing without --otlp-endpoint")
        return None
    url = _split(arguments.otlp_endpoint, arguments.otlp_protocol)
    if not 0.1 <= arguments.otlp_interval <= 3600:
        raise ConfigurationError("--otlp-interval must be between 0.1 and 3600 seconds")
    secure = url.scheme == "https"
    if arguments.otlp_ca and not secure:
        raise ConfigurationError("--otlp-ca needs an https endpoint")
    options = OtlpOptions(
        protocol=arguments.otlp_protocol,
        secure=secure,
        host=url.hostname or "",
        port=url.port or (4317 if arguments.otlp_protocol == "grpc" else 4318),
        path=url.path.rstrip("/"),
        headers_file=arguments.otlp_headers_file,
        ca=arguments.otlp_ca,
        interval=arguments.otlp_interval,
    )
    secrets = [name for name in options.headers() if _SECRET.search(name)]
    if secrets and not secure and not _is_loopback(options.host):
        raise ConfigurationError(
            f"the header {secrets[0]!r} would travel to {options.host} in clear text: use an https endpoint"
        )
    return options


def _split(endpoint: str, protocol: str) -> SplitResult:
    try:
        url = urlsplit(endpoint)
        port = url.port
    except ValueError as error:
        raise ConfigurationError(f"--otlp-endpoint: {error}") from error
    if url.scheme not in ("http", "https") or not url.hostname or port == 0:
        raise ConfigurationError(f"--otlp-endpoint {endpoint!r} is no URL such as http://127.0.0.1:4318")
    if url.username or url.password or url.query or url.fragment:
        raise ConfigurationError("--otlp-endpoint carries no user, query or fragment: put secrets in a headers file")
    if url.path.rstrip("/").endswith(("/v1/metrics", "/v1/logs")):
        raise ConfigurationError("--otlp-endpoint is the collector's base: leave off /v1/metrics, it is added")
    if protocol == "grpc" and url.path.strip("/"):
        raise ConfigurationError("--otlp-endpoint takes no path with --otlp-protocol grpc")
    return url


def _bracketed(host: str) -> str:
    return f"[{host}]" if ":" in host else host


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
