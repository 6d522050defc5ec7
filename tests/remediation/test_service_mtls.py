"""Alerts by certificate instead of a token: who is let in, what they may do, through the server's own TLS."""

from __future__ import annotations

import socket
import ssl
import subprocess
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import httpx
import pytest
from sdcwatch_remediation import preflight
from sdcwatch_remediation.peers import names_of
from sdcwatch_remediation.server import make_server
from sdcwatch_remediation.settings import Config, Server
from sdcwatch_remediation.testing import alert, delivery, fleet, make_rig
from sdcwatch_remediation.testing.rig import Rig

MEMBERS = fleet(4)
NAME = "DNS:alertmanager.monitoring"
BODY = delivery(alert(MEMBERS[1], 1))


class Authority:
    """An authority and what it signs, made by openssl."""

    def __init__(self, folder: Path, openssl: Path, name: str) -> None:
        self.folder, self._openssl, self.name = folder, openssl, name
        self.cert, self._key = folder / f"{name}.pem", folder / f"{name}.key"
        self._run("req", "-x509", *self._new(self._key), "-days", "2", "-subj", f"/CN={name}", "-out", self.cert)

    def _new(self, key: Path) -> list[str | Path]:
        return ["-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes", "-keyout", key]

    def _run(self, *words: str | Path) -> None:
        subprocess.run([self._openssl, *words], check=True, capture_output=True, timeout=60)

    def sign(self, file: str, names: str, *, usage: str = "clientAuth", days: str = "2") -> tuple[str, str]:
        """Return certificate and key of somebody with these alternative names."""
        cert, key, request = (self.folder / f"{self.name}-{file}.{end}" for end in ("pem", "key", "csr"))
        extensions = self.folder / f"{self.name}-{file}.ext"
        extensions.write_text(f"subjectAltName={names}\nextendedKeyUsage={usage}\n")
        self._run("req", *self._new(key), "-subj", f"/CN={file}", "-out", request)
        by = ("-CA", self.cert, "-CAkey", self._key, "-CAcreateserial", "-days", days, "-extfile", extensions)
        self._run("x509", "-req", "-in", request, *by, "-out", cert)
        return str(cert), str(key)


class Site:
    """A service behind TLS that takes alerts by certificate alone."""

    def __init__(self, rig: Rig, url: str, clients: Authority, strangers: Authority) -> None:
        self.rig, self.url, self.clients, self.strangers = rig, url, clients, strangers

    def send(self, method: str, path: str, pair: tuple[str, str] | None = None, token: str = "") -> httpx.Response:
        context = ssl.create_default_context(cafile=str(self.clients.cert))
        if pair is not None:
            context.load_cert_chain(*pair)
        headers = {"Authorization": f"Bearer {token}"} if token else {}
        with httpx.Client(verify=context, trust_env=False, timeout=10.0) as client:
            return client.request(method, self.url + path, headers=headers, content=BODY)


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory, require: Callable[[str], Path]) -> Iterator[Site]:
    folder, openssl = tmp_path_factory.mktemp("mtls"), require("openssl")
    clients, strangers = (Authority(folder, openssl, name) for name in ("ours", "theirs"))
    cert, key = clients.sign("server", "IP:127.0.0.1", usage="serverAuth")
    with make_rig(folder, MEMBERS, mode="approve") as rig:
        tls = {"tls_cert_file": cert, "tls_key_file": key, "client_ca_file": str(clients.cert)}
        rig.config = replace(
            rig.config, server=replace(rig.config.server, alerts_token_file="", client_names=(NAME, "CN:old"), **tls)
        )
        rig.restart()
        server = make_server(rig.service)
        listener = socket.create_server(("127.0.0.1", 0))
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]}, daemon=True)
        thread.start()
        try:
            yield Site(rig, f"https://127.0.0.1:{listener.getsockname()[1]}", clients, strangers)
        finally:
            server.should_exit = True
            thread.join(15)
            listener.close()


@pytest.fixture(scope="module")
def reporter(site: Site) -> tuple[str, str]:
    """The certificate of Alertmanager."""
    return site.clients.sign("alertmanager", NAME)


def test_a_pinned_certificate_delivers_without_a_token(site: Site, reporter: tuple[str, str]) -> None:
    """By its alternative name, or by a subject that is pinned too while one is rotated for the other."""
    for pair in (reporter, site.clients.sign("old", "DNS:unheard-of")):
        answer = site.send("POST", "/v1/alerts", pair)
        assert (answer.status_code, answer.json()["alerts"][0]["result"] in ("accepted", "joined")) == (200, True)


def test_the_certificate_that_reported_can_approve_nothing(site: Site, reporter: tuple[str, str]) -> None:
    """Not even with the token of an approver or an admin beside it, by no road, the web page's sign-in included."""
    paths = ("approve", "reject", "cancel", "hold")
    for path, token in ((f"/v1/cases/x/{word}", "approve-token") for word in paths):
        assert site.send("POST", path, reporter, token).status_code == 403
    assert site.send("POST", "/v1/pause", reporter, "admin-token").status_code == 403
    assert site.send("GET", "/v1/cases", reporter, "cases-token").status_code == 403
    context = ssl.create_default_context(cafile=str(site.clients.cert))
    context.load_cert_chain(*reporter)
    form = {"token": "approve-token", "by": "Ada"}
    with httpx.Client(verify=context, trust_env=False) as client:
        assert client.post(site.url + "/ui/login", data=form).status_code == 401
    with httpx.Client(verify=ssl.create_default_context(cafile=str(site.clients.cert)), trust_env=False) as client:
        cookie = client.post(site.url + "/ui/login", data=form).headers["set-cookie"].partition(";")[0]
    with httpx.Client(verify=context, trust_env=False) as client:
        answer = client.get(site.url + "/ui", headers={"Cookie": cookie})
        assert (answer.status_code, answer.headers["location"]) == (303, "/ui/login")


def test_a_certificate_of_another_name_delivers_nothing(site: Site) -> None:
    """The authority alone is not enough; neither is a name that begins or ends like the pinned one."""
    for number, name in enumerate(("DNS:node-1", NAME + ".evil", "DNS:x.alertmanager.monitoring", "URI:" + NAME)):
        pair = site.clients.sign(f"other{number}", name)
        assert site.send("POST", "/v1/alerts", pair).status_code == 401
    assert site.send("POST", "/v1/alerts").status_code == 401
    assert site.send("POST", "/v1/alerts", token="alerts-token").status_code == 401


def test_a_certificate_that_does_not_verify_is_no_connection(site: Site) -> None:
    """Another authority, one's own signature, a server's certificate, an old one: TLS ends before any HTTP is read."""
    before = site.rig.service.store.last_delivery()
    pairs = [
        site.strangers.sign("alertmanager", NAME),
        (str(site.strangers.cert), str(site.strangers.cert.with_suffix(".key"))),
        site.clients.sign("wrong-use", NAME, usage="serverAuth"),
        site.clients.sign("expired", NAME, days="-1"),
    ]
    for pair in pairs:
        with pytest.raises(httpx.TransportError):
            site.send("POST", "/v1/alerts", pair)
    assert site.rig.service.store.last_delivery() == before


def test_people_and_probes_need_no_certificate(site: Site) -> None:
    """On the same port, with their tokens as before."""
    assert site.send("GET", "/healthz").status_code == 200
    assert site.send("GET", "/v1/cases", token="cases-token").status_code == 200


def test_a_header_is_no_certificate(site: Site) -> None:
    """What a proxy or a client writes about a certificate into a header means nothing."""
    context = ssl.create_default_context(cafile=str(site.clients.cert))
    names = ("X-Client-Cert", "X-SSL-Client-S-DN", "X-Forwarded-Client-Cert", "sdcwatch.client_names")
    headers = dict.fromkeys(names, NAME)
    with httpx.Client(verify=context, trust_env=False) as client:
        assert client.post(site.url + "/v1/alerts", headers=headers, content=BODY).status_code == 401


def test_authorities_that_are_none_stop_the_start(tmp_path: Path) -> None:
    """A file without a certificate in it is told before anything listens."""
    (tmp_path / "junk").write_text("no PEM")
    server = Server(client_ca_file=str(tmp_path / "junk"), client_names=(NAME,))
    problems = list(preflight.problems(Config(server=server)))
    assert [problem for problem in problems if "client_ca_file" in problem and "cannot be read as PEM" in problem]


def test_only_alternative_names_and_the_subjects_common_name_count() -> None:
    """An organisation or an address of the same text is not a name."""
    certificate = {
        "subject": ((("organizationName", "alertmanager"),), (("commonName", "one"),)),
        "subjectAltName": (("DNS", "two"), ("URI", "spiffe://three"), ("IP Address", "10.0.0.1"), ("email", "four")),
    }
    assert names_of(certificate) == {"CN:one", "DNS:two", "URI:spiffe://three"}
    assert names_of({}) == names_of(None) == frozenset()
