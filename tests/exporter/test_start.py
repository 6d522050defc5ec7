"""Start of an epoch: one rank's mistake is one clear error on all ranks, and a membership lists who is there."""

from __future__ import annotations

import dataclasses
import math
import re
from typing import Any

import pytest
import torch
from sdcwatch.errors import ConfigurationError
from sdcwatch.identity import Identity
from sdcwatch.settings import Settings
from sdcwatch.watch import replication, start
from torch import nn


class Peers:
    """An exchange whose answer is given: what each rank brought."""

    def __init__(self, *brought: start.Brought) -> None:
        self._brought = brought

    def everyone(self, value: Any) -> list[Any]:
        return list(self._brought)


def who(rank: int, node: str | None = None, **changes: Any) -> Identity:
    node = node or f"n{rank}"
    return Identity(
        **{
            "job": "j", "cluster": "c", "node": node, "instance": f"i-{node}", "host": node, "gpu_uuid": f"GPU-{rank}",
            "rank": rank, "local_rank": 0, **changes,
        }
    )  # fmt: skip


def brings(rank: int, **changes: Any) -> start.Brought:
    base: dict[str, Any] = {
        "identity": who(rank), "facts": {"torch": "2"}, "environment": 1, "schema": 2,
        "settings": start.shared(Settings()), "epoch": f"e{rank}", "replays": True,
    }  # fmt: skip
    return start.Brought(**{**base, **changes})


def join(*brought: start.Brought, error: Exception | None = None) -> start.Membership | None:
    exchange: Any = Peers(*brought)
    return start.join(exchange, brought[0], error)


def test_ranks_that_agree_share_one_membership() -> None:
    """The epoch is the lowest rank's; digests and nodes stand in rank order."""
    found = join(brings(0), brings(1, environment=9), brings(2))
    assert found is not None
    assert found.epoch == "e0"
    assert [i.rank for i in found.identities] == [0, 1, 2]
    assert found.group.environments == (1, 9, 1)
    assert len(set(found.group.instances)) == 3
    assert found.replays
    assert not join(brings(0), brings(1, replays=False)).replays  # type: ignore[union-attr]


def test_reporters_are_the_lowest_ranks_of_two_nodes() -> None:
    """A named node does not report on itself; one node has one reporter."""
    found = join(*(brings(r, identity=who(r, f"n{r // 2}", gpu_uuid=f"GPU-{r}")) for r in range(6)))
    assert found is not None
    assert found.nodes == {"i-n0": [0, 1], "i-n1": [2, 3], "i-n2": [4, 5]}
    assert found.reporters() == (0, 2)
    assert found.reporters(frozenset({"i-n0"})) == (2, 4)
    assert found.reporters(frozenset({"i-n0", "i-n1", "i-n2"})) == ()


@pytest.mark.parametrize(
    ("odd", "message"),
    [
        ({"error": "set SDCWATCH_JOB"}, "rank 1: set SDCWATCH_JOB"),
        ({"settings": ("halt", 1, 10, 200, 1000)}, r"on_fault differs between ranks .*rank 0: observe, rank 1: halt"),
        ({"settings": ("observe", 2, 10, 200, 1000)}, "check_every differs"),
        ({"settings": ("observe", 1, 10, 0, 1000)}, "replay_every differs"),
        ({"schema": 3}, r"rank\(s\) \[1\] are not those of rank 0"),
        ({"identity": who(1, job="other")}, "different jobs or clusters"),
        ({"identity": who(1, cluster="other")}, "different jobs or clusters"),
        ({"identity": who(1, "n0", gpu_uuid="GPU-0")}, "ranks 0 and 1 both run on GPU-0"),
    ],
)
def test_one_ranks_difference_is_the_same_error_on_all(odd: dict[str, Any], message: str) -> None:
    """Settings, schema and identities that cannot be compared (field case 8): no hang, one text."""
    with pytest.raises(ConfigurationError, match=message):
        join(brings(0), brings(1, **odd), brings(2))


def test_the_rank_with_the_mistake_gets_its_own_error() -> None:
    """Its type survives there."""
    own = ConfigurationError("mine")
    with pytest.raises(ConfigurationError) as caught:
        join(brings(0, error="mine"), brings(1), error=own)
    assert caught.value is own


def test_a_latch_on_one_rank_stops_all_with_86() -> None:
    """Before any other difference is looked at."""
    with pytest.raises(SystemExit) as stop:
        join(brings(0, error="x"), brings(1, halted=True), error=ConfigurationError("x"))
    assert stop.value.code == 86


def test_switched_off_on_one_rank_is_off_on_all() -> None:
    """Otherwise the others would wait for its rows."""
    assert join(brings(0), start.Brought(disabled=True), brings(2)) is None


def test_ranks_without_a_gpu_may_share_a_node() -> None:
    """The made-up CPU UUIDs may repeat where local ranks do."""
    assert join(*(brings(r, identity=who(r, "n0", gpu_uuid="CPU-n0-0")) for r in range(2))) is not None


def test_instance_digest_changes_with_every_field() -> None:
    """A row in another rank's slot never carries the right digest."""
    base = who(0)
    changed = [
        dataclasses.replace(base, **{f.name: 9 if f.type == "int" else "x"}) for f in dataclasses.fields(Identity)
    ]
    assert len({start.instance_digest(i) for i in [base, *changed]}) == len(changed) + 1


def test_schema_digest_sees_names_shapes_and_dtypes() -> None:
    """Replicas that differ in one of them cannot be compared."""
    schemas = [
        [("a", nn.Parameter(torch.zeros(2, 3)))],
        [("b", nn.Parameter(torch.zeros(2, 3)))],
        [("a", nn.Parameter(torch.zeros(3, 2)))],
        [("a", nn.Parameter(torch.zeros(2, 3, dtype=torch.float64)))],
        [],
    ]
    assert len({start.schema_digest(s) for s in schemas}) == len(schemas)


def test_epoch_ids_are_fresh_and_well_formed() -> None:
    """`e<unix milliseconds>-<8 hex>`."""
    found = {start.new_epoch() for _ in range(50)}
    assert len(found) == 50
    assert all(re.fullmatch(r"e\d{13}-[0-9a-f]{8}", e) for e in found)


@pytest.mark.parametrize(
    ("optimizer", "message"),
    [([1, 2], "watches one optimizer, got 2"), ("adam", "optimizer is str"), (None, "optimizer is NoneType")],
)
def test_what_is_no_single_optimizer_is_refused(optimizer: Any, message: str) -> None:
    """Lists and wrappers get told what to pass."""
    with pytest.raises(ConfigurationError, match=message):
        start.check_optimizer(optimizer)


def test_a_model_without_ddp_is_told_to_wrap_it() -> None:
    """The message shows the line to write."""
    with pytest.raises(ConfigurationError, match="ddp_model = DistributedDataParallel"):
        replication.unwrap(nn.Linear(2, 2))


def look(rank: int, size: int) -> list[Any]:
    from torch.nn.parallel import DistributedDataParallel

    net = nn.Sequential(nn.Linear(2, 2, bias=False), nn.Linear(2, 2), nn.Linear(2, 2, bias=False), nn.Linear(2, 2))
    net[2].weight = net[0].weight
    net[1].bias.requires_grad_(False)
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(net, ["3.weight"])
    ddp = DistributedDataParallel(net)
    names = [n for n, _ in replication.replicated_parameters(replication.unwrap(ddp))]
    try:
        replication.unwrap(
            DistributedDataParallel(nn.Sequential(DistributedDataParallel(nn.Linear(2, 2)), nn.Linear(2, 2)))
        )
    except ConfigurationError as error:
        return [names, str(error)]
    return [names, ""]


def test_what_ddp_reduces_is_found_and_nested_ddp_refused(ranks: Any) -> None:
    """Tied parameters once, frozen and ignored ones not at all."""
    names, message = ranks(look, 1)[0]
    assert names == ["0.weight", "1.weight", "3.bias"]
    assert "wrap the whole model once" in message


@pytest.mark.parametrize(
    ("shape", "copies", "sets"),
    [
        ((4,), [], ((0,), (1,), (2,), (3,))),
        ((4,), [0], ((0, 1, 2, 3),)),
        ((3, 2), [0], ((0, 2, 4), (1, 3, 5))),
        ((2, 3), [0], ((0, 3), (1, 4), (2, 5))),
        ((2, 2, 2), [0], ((0, 4), (1, 5), (2, 6), (3, 7))),
        ((2, 2, 2), [0, 2], ((0, 1, 4, 5), (2, 3, 6, 7))),
    ],
)
def test_replica_sets_differ_in_the_replicate_dimensions_only(
    shape: tuple[int, ...], copies: list[int], sets: Any
) -> None:
    """HSDP, HSDP with tensor parallelism, and a mesh without replicas."""
    mesh = torch.arange(math.prod(shape)).reshape(shape)
    assert replication.sets_in(mesh, copies) == sets


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"loss_fn": 3}, "loss_fn is int"),
        ({"checkpoint_dir": __file__}, "is no folder"),
        ({"replay_every": -1}, "replay_every is -1"),
        ({"replay_evry": 1}, "did you mean replay_every"),
    ],
)
def test_a_mistake_shows_in_a_run_of_one_process_too(
    given: dict[str, Any], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without a process group nothing is watched, and a setting that cannot work is an error all the same."""
    import torch
    from sdcwatch import Monitor

    model = torch.nn.Linear(2, 2)
    with pytest.raises(ConfigurationError, match=message):
        Monitor(model, torch.optim.SGD(model.parameters(), 0.1), **given)
    monkeypatch.setenv("SDCWATCH_DISABLE", "1")
    assert not Monitor(model, torch.optim.SGD(model.parameters(), 0.1), **given).enabled


def test_an_optimizer_that_steps_none_of_the_model_is_refused() -> None:
    """Made before the model was wrapped anew, say: every check of it would be empty."""
    import torch
    from sdcwatch.settings import Settings
    from sdcwatch.watch.start import check_given

    model, other = torch.nn.Linear(2, 2), torch.nn.Linear(2, 2)
    parameters = list(model.named_parameters())
    check_given(torch.optim.SGD(model.parameters(), 0.1), parameters, None, Settings())
    with pytest.raises(ConfigurationError, match="steps no parameter of this model"):
        check_given(torch.optim.SGD(other.parameters(), 0.1), parameters, None, Settings())
