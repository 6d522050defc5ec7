"""One request to the Kubernetes API, through the official client: once, bounded in time and size, and never raised.

What it does: holds the official client's `ApiClient` (addresses, TLS, tokens and their renewal are its own) and sends
requests that are plain records, so that what is committed to the audit log is what goes over the wire.
What it never does: repeat a request, follow a redirect, or raise for what the server or the network does.
Its place: `actions/eks` and `actions/handover` use it. The only file that imports the package `kubernetes`, which is
the extra `eks`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from sdcwatch_remediation.actions.scheduler import ActResult, SchedulerProblem
from sdcwatch_remediation.errors import ConfigError
from sdcwatch_remediation.records import Outcome

MERGE_PATCH = "application/merge-patch+json"
STRATEGIC_PATCH = "application/strategic-merge-patch+json"
JSON = "application/json"
ANSWER_LIMIT_BYTES = 33_554_432
CONNECT_SECONDS = 5.0

# Nothing of these left this machine, so the request had no effect.
_NOT_REACHED = ("NewConnectionError", "ConnectTimeoutError", "NameResolutionError", "ConnectionRefusedError")


@dataclass(frozen=True, slots=True)
class Reply:
    """What came back of one request."""

    status: int
    """HTTP status; 0: no answer."""
    text: str
    problem: str
    """Without an answer: the error's class and words."""
    reached: bool = True
    """False: the server was never reached, so nothing can have happened."""

    def body(self) -> dict[str, Any]:
        """Return the answer as a JSON object; empty where it is none."""
        try:
            tree = json.loads(self.text)
        except ValueError:
            return {}
        return tree if isinstance(tree, dict) else {}

    @property
    def words(self) -> str:
        """What the server said, or why it said nothing."""
        said = self.problem or self.body().get("message") or self.text
        return f"status {self.status}: {said}"[:500] if self.status else str(said)[:500]


class EksClient:
    """The Kubernetes API of one cluster."""

    def __init__(self, api: Any, *, timeout_seconds: float = 30.0) -> None:
        """Use an `ApiClient` of the official client that makes one attempt only (`connect` gives one)."""
        self._api, self._timeout = api, (CONNECT_SECONDS, timeout_seconds)

    @classmethod
    def connect(cls, kubeconfig: str = "", *, timeout_seconds: float = 30.0) -> EksClient:
        """Make a client from a kubeconfig, or from the pod's own service account; nothing is asked yet.

        Raises:
            ConfigError: the extra is missing, or the configuration cannot be used.
        """
        try:
            from kubernetes import config
            from kubernetes.client.api_client import ApiClient
            from kubernetes.client.configuration import Configuration
        except ImportError as error:
            raise ConfigError(
                "actions.isolate = 'eks' and policy.handover_groups need the extra: "
                f"pip install 'sdcwatch-remediation[eks]' ({error})"
            ) from error
        settings = Configuration()
        # urllib3 repeats a request three times by default, which a write must never be.
        settings.retries = False
        settings.client_go_retries = False
        try:
            if kubeconfig:
                config.load_kube_config(kubeconfig, client_configuration=settings, persist_config=False)
            else:
                config.load_incluster_config(client_configuration=settings)
        except (config.ConfigException, OSError, ValueError, TypeError, KeyError) as error:
            where = (
                f"actions.eks_kubeconfig_file {kubeconfig}" if kubeconfig else "no kubeconfig, and no pod's own token"
            )
            raise ConfigError(f"{where}: {error}") from error
        return cls(ApiClient(settings), timeout_seconds=timeout_seconds)

    def send(self, request: Mapping[str, Any]) -> Reply:
        """Send one request (`method`, `path`, and where it has them `query`, `content_type`, `body`), exactly once."""
        try:
            sent = self._api.param_serialize(
                request["method"],
                request["path"],
                query_params=list(request.get("query", {}).items()),
                header_params={"Accept": "*/*", "Content-Type": request.get("content_type", JSON)},
                body=request.get("body"),
                auth_settings=["BearerToken"],
            )
            answer = self._api.call_api(*sent, _request_timeout=self._timeout)
            data = answer.response.read(ANSWER_LIMIT_BYTES + 1, decode_content=True)
            answer.response.release_conn()
        except Exception as error:  # the client raises its own, urllib3's and whatever a credentials plug-in has
            name = type(error).__name__
            return Reply(0, "", f"{name}: {error}"[:500], reached=name not in _NOT_REACHED)
        if len(data) > ANSWER_LIMIT_BYTES:
            return Reply(0, "", f"the answer is longer than {ANSWER_LIMIT_BYTES} bytes")
        return Reply(int(answer.status), data.decode(errors="replace"), "")

    def get(self, path: str, query: Mapping[str, str] | None = None) -> Reply:
        """Read once."""
        return self.send({"method": "GET", "path": path, "query": dict(query or {})})

    def act(self, request: Mapping[str, Any]) -> ActResult:
        """Send one write and say what is known of it."""
        reply = self.send(request)
        if not reply.status:
            if not reply.reached:
                return ActResult(Outcome.REFUSED, "NotReached", reply.words)
            return ActResult(Outcome.UNKNOWN, reply.problem.partition(":")[0], reply.words)
        code = f"Status{reply.status}"
        if reply.status < 300:
            return ActResult(Outcome.ACCEPTED)
        # The server's own errors, and its own time-outs, may come after the effect.
        return ActResult(Outcome.REFUSED if reply.status < 500 else Outcome.UNKNOWN, code, reply.words)


def answered(reply: Reply, what: str) -> Reply:
    """Return a reply of a read that succeeded.

    Raises:
        SchedulerProblem: it did not.
    """
    if not 200 <= reply.status < 300:
        raise SchedulerProblem(f"{what}: {reply.words}")
    return reply
