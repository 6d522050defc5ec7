"""Reads a HyperPod cluster's inventory and asks for one replacement at a time, through unmodified boto3.

What it does: `HyperPod` implements `records.Provider`. A replace call is sent at most once (`total_max_attempts=1`:
boto3 would otherwise send it up to three times, and the call has no client token), names one instance by `NodeIds`,
and its answer is read to the end: a 200 can carry the failure of the only node it was about.
What it never does: repeat a replace, name more than one instance, use node logical ids, delete or reboot anything,
or send an id that is not `i-` and 17 hex digits.
Its place: behind the worker's reserve-act-observe. It is the only file of the service that imports boto3.
"""

from __future__ import annotations

import re
import threading
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import boto3
from botocore.config import Config
from botocore.exceptions import (
    BotoCoreError,
    ClientError,
    CredentialRetrievalError,
    EndpointConnectionError,
    NoCredentialsError,
    ParamValidationError,
    PartialCredentialsError,
)

from sdcwatch_remediation.errors import RemediationError
from sdcwatch_remediation.records import Inventory, Member, Outcome, ReplaceResult

INSTANCE_ID = re.compile(r"i-[0-9a-f]{17}\Z")
CLUSTER_NAME = re.compile(
    r"(arn:aws[a-z-]*:sagemaker:[a-z0-9-]*:[0-9]{12}:cluster/[a-z0-9]{12}|[a-zA-Z0-9](-*[a-zA-Z0-9]){0,62})\Z"
)

EXPIRED = frozenset({"ExpiredToken", "ExpiredTokenException", "RequestExpired", "TokenRefreshRequired"})
"""Error codes after which the client is built afresh, so that credentials are looked up again (botocore#3117)."""
AGAIN_LATER = EXPIRED | frozenset(
    {"RequestLimitExceeded", "Throttling", "ThrottlingException", "ThrottledException", "TooManyRequestsException"}
)
"""Refusals of the whole call that a later, new attempt may overcome."""
REFUSALS = AGAIN_LATER | frozenset(
    {
        "AccessDenied",
        "AccessDeniedException",
        "IncompleteSignature",
        "IncompleteSignatureException",
        "InvalidClientTokenId",
        "InvalidSignatureException",
        "MissingAuthenticationToken",
        "MissingAuthenticationTokenException",
        "NotAuthorized",
        "OptInRequired",
        "ResourceNotFound",
        "ResourceNotFoundException",
        "SerializationException",
        "SignatureDoesNotMatch",
        "UnknownOperationException",
        "UnrecognizedClientException",
        "ValidationError",
        "ValidationException",
    }
)
"""Error codes that say that the service did not carry the call out. Any other code leaves the outcome unknown."""
NODE_AGAIN_LATER = frozenset({"InstanceIdInUse", "InternalServerError", "InvalidInstanceStatus"})
"""Per-node codes in `Failed[]` after which AWS's documentation says to wait and ask again."""

SESSION_NAME = re.compile(r"[A-Za-z0-9=,.@-]{2,64}", re.ASCII)
ACTOR_SECONDS = 900
"""The shortest time for which a role can be taken."""
LIST_READS = 5
PAGES_AT_MOST = 1000
DESCRIBE_WORKERS = 8
MESSAGE_LIMIT = 500

_GONE = frozenset({"ShuttingDown", "NotFound"})
_COMING = frozenset({"Pending", "DeepHealthCheckInProgress"})
_NEVER_SENT = (
    CredentialRetrievalError,
    EndpointConnectionError,
    NoCredentialsError,
    ParamValidationError,
    PartialCredentialsError,
)
_Details = dict[str, tuple[str, str]]
"""Instance id -> (address, host name): neither changes while an instance lives."""


class InventoryUnreadable(RemediationError):
    """The live inventory could not be read whole; nothing may be decided on a part of it. Try again later."""


class HyperPod:
    """One HyperPod cluster as a `records.Provider`; safe to use from several threads."""

    def __init__(
        self,
        cluster: str,
        *,
        region: str,
        endpoint_url: str | None = None,
        access_key_id: str | None = None,
        secret_access_key: str | None = None,
        session_token: str | None = None,
        profile: str | None = None,
        connect_timeout_seconds: float = 5.0,
        read_timeout_seconds: float = 30.0,
        actor_role_arn: str = "",
        sts_endpoint_url: str | None = None,
    ) -> None:
        """Remember how to reach the cluster; nothing is sent yet.

        Args:
            cluster: Name or ARN of the cluster.
            region: AWS region.
            endpoint_url: Another endpoint than AWS's own, such as the simulator's; None or empty: AWS.
            access_key_id: With `secret_access_key` and `session_token`, fixed credentials; None: boto3's own chain.
            secret_access_key: See `access_key_id`.
            session_token: See `access_key_id`.
            profile: A profile of the AWS configuration files.
            connect_timeout_seconds: How long to wait for a connection.
            read_timeout_seconds: How long to wait for an answer; after it the outcome of a replace is unknown.
            actor_role_arn: IAM role that is taken for one replace call, see `acting_for`; empty: the own credentials.
            sts_endpoint_url: Another endpoint for taking that role; None: AWS's own, of the region.

        Raises:
            ValueError: The cluster's name could not be one.
        """
        if CLUSTER_NAME.match(cluster) is None:
            raise ValueError(f"cluster {cluster[:80]!r} is neither the name nor the ARN of a HyperPod cluster")
        self._cluster = cluster
        self._session_arguments = {
            "region_name": region,
            "aws_access_key_id": access_key_id,
            "aws_secret_access_key": secret_access_key,
            "aws_session_token": session_token,
            "profile_name": profile,
        }
        self._endpoint_url = endpoint_url or None
        self._actor_role_arn, self._sts_endpoint_url = actor_role_arn, sts_endpoint_url
        self._config = Config(
            retries={"total_max_attempts": 1, "mode": "standard"},
            connect_timeout=connect_timeout_seconds,
            read_timeout=read_timeout_seconds,
            max_pool_connections=DESCRIBE_WORKERS,
        )
        self._lock = threading.Lock()
        self._client: Any = None
        self._details: _Details = {}

    def close(self) -> None:
        """Close the connections; the next call opens new ones."""
        self._drop_client()

    def inventory(self) -> Inventory:
        """Read all instances of the cluster, their addresses and the cluster's repair setting.

        A listing of one page is one answer and counts as it is. A longer one is read until two reads in a row give
        the same instances, because a node that comes or goes between two pages can hide another.

        Raises:
            InventoryUnreadable: A call failed, or the instances kept changing.
        """
        about = self._read("describe_cluster", "InstanceGroups")
        listed, details = self._settled_listing()
        on_eks = "Eks" in about.get("Orchestrator", {})
        members = [_member(item, *details[item["InstanceId"]], on_eks=on_eks) for item in listed]
        return Inventory(
            cluster=self._cluster,
            members=tuple(sorted(members, key=lambda m: m.instance_id)),
            fetched_at=time.time(),
            node_recovery=about.get("NodeRecovery"),
            short_groups=_short_groups(about, members),
        )

    def replace_request(self, instance_id: str) -> dict[str, Any]:
        """Return the exact request that `replace` sends.

        Raises:
            ValueError: The id is not `i-` and 17 hex digits.
        """
        if INSTANCE_ID.match(instance_id) is None:
            raise ValueError(f"{instance_id[:80]!r} is no EC2 instance id (i- and 17 hex digits); nothing was sent")
        return {"ClusterName": self._cluster, "NodeIds": [instance_id]}

    def replace(self, instance_id: str) -> ReplaceResult:
        """Ask once for the replacement of one instance, and say what is known afterwards.

        Never raises for what AWS or the network does: whatever is no definite refusal is `UNKNOWN`, and only reading
        the inventory can settle it.
        """
        try:
            request = self.replace_request(instance_id)
        except ValueError as error:
            return _result(Outcome.REFUSED, "InvalidInstanceId", str(error))
        try:
            client = self._get_client()
        except (BotoCoreError, ValueError) as error:
            return _result(Outcome.REFUSED, type(error).__name__, str(error), retryable=True)
        return self._ask(client, request, instance_id)

    def acting_for(self, case_id: str) -> HyperPod | _Actor:
        """Return who makes the one replace call of a case: with `actor_role_arn`, that role in a session of its own."""
        return _Actor(self, case_id) if self._actor_role_arn else self

    def replace_as(self, case_id: str, instance_id: str) -> ReplaceResult:
        """Take the actor's role once, in a session named after the case, and ask once; see `replace`."""
        try:
            request = self.replace_request(instance_id)
            client = self._actor_client(case_id)
        except ClientError as error:
            return self._refusal(error)
        except (BotoCoreError, ValueError, KeyError) as error:
            # The role was not taken, so nothing was sent to SageMaker.
            return _result(
                Outcome.REFUSED, type(error).__name__, str(error), retryable=isinstance(error, BotoCoreError)
            )
        try:
            return self._ask(client, request, instance_id)
        finally:
            client.close()

    def try_actor(self) -> str | None:
        """Take the actor's role once and give it up; return the problem (empty: none), or None where there is no role.

        Nothing is asked of SageMaker: it has no dry run, and a replace call is never a test.
        """
        if not self._actor_role_arn:
            return None
        try:
            # The role trusts sessions that are named as cases are.
            self._actor_client("case-000000000000").close()
        except (BotoCoreError, ClientError, ValueError, KeyError) as error:
            return f"{type(error).__name__}: {error}"[:MESSAGE_LIMIT]
        return ""

    def _actor_client(self, case_id: str) -> Any:
        if SESSION_NAME.fullmatch(case_id) is None:
            raise ValueError(f"{case_id[:80]!r} cannot name a session; nothing was sent")
        session = boto3.session.Session(**self._session_arguments)
        sts = session.client("sts", endpoint_url=self._sts_endpoint_url, config=self._config)
        try:
            taken = sts.assume_role(
                RoleArn=self._actor_role_arn, RoleSessionName=case_id, DurationSeconds=ACTOR_SECONDS
            )["Credentials"]
        finally:
            sts.close()
        actor = boto3.session.Session(
            region_name=self._session_arguments["region_name"],
            aws_access_key_id=taken["AccessKeyId"],
            aws_secret_access_key=taken["SecretAccessKey"],
            aws_session_token=taken["SessionToken"],
        )
        return actor.client("sagemaker", endpoint_url=self._endpoint_url, config=self._config)

    def _ask(self, client: Any, request: dict[str, Any], instance_id: str) -> ReplaceResult:
        try:
            answer = client.batch_replace_cluster_nodes(**request)
        except ClientError as error:
            return self._refusal(error)
        except _NEVER_SENT as error:
            # None of these got as far as a connection, so AWS has not seen the request.
            self._drop_client()
            return _result(Outcome.REFUSED, type(error).__name__, str(error), retryable=True)
        except BotoCoreError as error:
            return _result(Outcome.UNKNOWN, type(error).__name__, str(error))
        return _read_answer(answer, instance_id)

    def replacement_of(self, before: Inventory, now: Inventory, instance_id: str) -> Member | None:
        """Return the instance that runs in place of `instance_id`, or None as long as that is not proven.

        The proof: the old id is absent or no longer Running, and an instance of the same group, with an id that was
        not in `before` and a later launch, is Running; on Slurm it also has the old one's host name. Where several
        instances of a group are being replaced at once on EKS, nothing says which new one stands for which, so as
        many new ones must run as old ones are gone; each old id then stands for one of them. A node that others delete
        meanwhile therefore delays the proof, and never makes it up.
        """
        old = _find(before, instance_id)
        current = _find(now, instance_id)
        if old is None or (current is not None and current.status == "Running"):
            return None
        known = {member.instance_id for member in before.members}
        new = [
            member
            for member in now.members
            if member.instance_id not in known
            and member.group == old.group
            and member.status == "Running"
            and member.launch_time > old.launch_time
        ]
        if old.node_name != _eks_name(old.instance_id):
            same_host = [member for member in new if member.node_name == old.node_name]
            return max(same_host, key=lambda m: m.launch_time, default=None)
        group = [member for member in before.members if member.group == old.group]
        gone = sorted(
            member.instance_id
            for member in group
            if member.instance_id == instance_id or (member.status not in _GONE and _is_gone(now, member.instance_id))
        )
        # Instances that were leaving before we began get their replacements first, unless those were coming already.
        leaving = sum(member.status in _GONE for member in group) - sum(member.status in _COMING for member in group)
        leaving = max(leaving, 0)
        if len(new) < len(gone) + leaving:
            return None
        return sorted(new, key=lambda m: (m.launch_time, m.instance_id))[leaving + gone.index(instance_id)]

    def _refusal(self, error: ClientError) -> ReplaceResult:
        code, message = error.response["Error"].get("Code", ""), error.response["Error"].get("Message", "")
        status = error.response.get("ResponseMetadata", {}).get("HTTPStatusCode", 0)
        if code in EXPIRED:
            self._drop_client()
        if error.operation_name != "BatchReplaceClusterNodes":
            # Getting credentials failed (AssumeRole, say), and that comes before anything is sent to SageMaker.
            return _result(Outcome.REFUSED, code, message, retryable=True)
        if code in REFUSALS and 400 <= status < 500:
            return _result(Outcome.REFUSED, code, message, retryable=code in AGAIN_LATER)
        return _result(Outcome.UNKNOWN, code or f"HTTP {status}", message)

    def _settled_listing(self) -> tuple[list[dict[str, Any]], _Details]:
        previous: frozenset[tuple[str, str]] | None = None
        for _ in range(LIST_READS):
            listed, pages = self._list_once()
            ids = frozenset((item["InstanceId"], item["InstanceGroupName"]) for item in listed)
            unique = len(ids) == len(listed)
            if unique and (pages == 1 or ids == previous):
                details = self._learn_details([item["InstanceId"] for item in listed])
                if details is not None:
                    return listed, details
            previous = ids if unique else None
        raise InventoryUnreadable(
            f"the instances of {self._cluster} changed between reads {LIST_READS} times; try again when it is settled"
        )

    def _list_once(self) -> tuple[list[dict[str, Any]], int]:
        listed: list[dict[str, Any]] = []
        token: str | None = None
        for page in range(1, PAGES_AT_MOST + 1):
            more = {} if token is None else {"NextToken": token}
            answer = self._read("list_cluster_nodes", "ClusterNodeSummaries", MaxResults=100, **more)
            # A node without an instance id is still being provisioned: there is nothing yet that could be named.
            listed += [item for item in answer["ClusterNodeSummaries"] if item.get("InstanceId")]
            token = answer.get("NextToken")
            if not token:
                return listed, page
        raise InventoryUnreadable(f"the listing of {self._cluster} did not end after {PAGES_AT_MOST} pages")

    def _learn_details(self, ids: list[str]) -> _Details | None:
        """Describe the instances not yet known; None when one of them is no longer there."""
        with self._lock:
            known = {i: self._details[i] for i in ids if i in self._details}
        missing = [i for i in ids if i not in known]
        if missing:
            with ThreadPoolExecutor(max_workers=DESCRIBE_WORKERS, thread_name_prefix="describe") as pool:
                for instance_id, details in zip(missing, pool.map(self._describe, missing), strict=True):
                    if details is None:
                        return None
                    known[instance_id] = details
        with self._lock:
            # Only what is listed is kept, and an instance that has no address yet is asked again next time.
            self._details = {i: details for i, details in known.items() if details[0]}
        return known

    def _describe(self, instance_id: str) -> tuple[str, str] | None:
        try:
            details = self._read("describe_cluster_node", "NodeDetails", NodeId=instance_id)["NodeDetails"]
        except _NotThere:
            return None
        return details.get("PrivatePrimaryIp", ""), details.get("PrivateDnsHostname", "").partition(".")[0]

    def _read(self, method: str, required: str, **arguments: Any) -> Any:
        """Send one reading call; repeated once with new credentials when the old ones have expired.

        An answer without the member `required` (a proxy's page, say) is no answer: an empty cluster would look like it.
        """
        for attempt in (1, 2):
            try:
                answer = getattr(self._get_client(), method)(ClusterName=self._cluster, **arguments)
            except ClientError as error:
                code = error.response["Error"].get("Code", "")
                if code in EXPIRED:
                    self._drop_client()
                    if attempt == 1:
                        continue
                if method == "describe_cluster_node" and code in ("ResourceNotFound", "ResourceNotFoundException"):
                    raise _NotThere from error
                raise InventoryUnreadable(f"{method} on {self._cluster}: {error}") from error
            except (BotoCoreError, ValueError) as error:
                raise InventoryUnreadable(f"{method} on {self._cluster}: {error}") from error
            if required not in answer:
                raise InventoryUnreadable(f"{method} on {self._cluster}: an answer without {required}")
            return answer
        raise AssertionError("both attempts return or raise")

    def _get_client(self) -> Any:
        with self._lock:
            if self._client is None:
                # A new session, not only a new client: the session is what holds on to looked-up credentials.
                session = boto3.session.Session(**self._session_arguments)
                self._client = session.client("sagemaker", endpoint_url=self._endpoint_url, config=self._config)
            return self._client

    def _drop_client(self) -> None:
        with self._lock:
            client, self._client = self._client, None
        if client is not None:
            client.close()


class _Actor:
    """Makes one replace call in the actor's role."""

    def __init__(self, provider: HyperPod, case_id: str) -> None:
        self._provider, self._case_id = provider, case_id

    def replace(self, instance_id: str) -> ReplaceResult:
        """Ask once, as `HyperPod.replace` does."""
        return self._provider.replace_as(self._case_id, instance_id)


class _NotThere(Exception):
    """An instance that was listed can no longer be described."""


def _read_answer(answer: dict[str, Any], instance_id: str) -> ReplaceResult:
    done = instance_id in (answer.get("Successful") or [])
    failed = [item for item in answer.get("Failed") or [] if item.get("NodeId") == instance_id]
    if done and not failed:
        return _result(Outcome.ACCEPTED, "", "")
    if failed and not done:
        code = failed[0].get("ErrorCode", "")
        retryable = code in NODE_AGAIN_LATER
        return _result(Outcome.REFUSED, code or "Failed", failed[0].get("Message", ""), retryable=retryable)
    what = "both lists name" if done else "neither list names"
    return _result(Outcome.UNKNOWN, "AnswerWithoutOutcome", f"a 200 in which {what} {instance_id}")


def _result(outcome: Outcome, code: str, message: str, *, retryable: bool = False) -> ReplaceResult:
    return ReplaceResult(outcome=outcome, code=code, message=message[:MESSAGE_LIMIT], retryable=retryable)


def _member(item: dict[str, Any], address: str, host: str, *, on_eks: bool) -> Member:
    instance_id = item["InstanceId"]
    if not host and address:
        host = "ip-" + address.replace(".", "-")
    return Member(
        instance_id=instance_id,
        group=item["InstanceGroupName"],
        node_name=_eks_name(instance_id) if on_eks else host,
        status=item["InstanceStatus"]["Status"],
        launch_time=item["LaunchTime"].timestamp(),
        address=address,
        instance_type=item["InstanceType"],
    )


def _short_groups(about: dict[str, Any], members: list[Member]) -> tuple[str, ...]:
    there = Counter(member.group for member in members if member.status not in _GONE)
    groups = about.get("InstanceGroups") or []
    return tuple(
        sorted(g["InstanceGroupName"] for g in groups if g.get("TargetCount", 0) > there[g["InstanceGroupName"]])
    )


def _find(inventory: Inventory, instance_id: str) -> Member | None:
    return next((member for member in inventory.members if member.instance_id == instance_id), None)


def _is_gone(now: Inventory, instance_id: str) -> bool:
    current = _find(now, instance_id)
    return current is None or current.status in _GONE


def _eks_name(instance_id: str) -> str:
    return f"hyperpod-{instance_id}"
