"""Which ranks must hold the same state: read from how the model is wrapped.

`DistributedDataParallel` holds everything on every rank: one replica set of all of them. FSDP2 (`fully_shard`) over a
mesh with a replicate dimension (HSDP) holds each shard on the ranks of one set; over a mesh without one, every shard
exists once and there is nothing to compare it with. It only reads: no hook, no collective, no tensor. Flow: monitor ->
**replication** -> start, epoch.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.fsdp import FSDPModule
from torch.nn.parallel import DistributedDataParallel

from sdcwatch.errors import ConfigurationError
from sdcwatch.shards import local

Sets = tuple[tuple[int, ...], ...]


class ShardedReplicas:
    """A model under `fully_shard`, asked the questions that DDP answers.

    Attributes:
        module: the model itself; its parameters are `DTensor`s.
        process_group: the job's default group: all ranks take part in the exchange of rows.
        sets: the ranks that hold the same shard; each rank is in exactly one set.
        parameters: the trainable ones whose shards are held by those sets, in module order.
        replicated: False where every set is one rank: nothing can be compared.

    Raises:
        ConfigurationError: no parameter is sharded yet, or over a mesh that is not the whole job.
    """

    def __init__(self, root: FSDPModule) -> None:
        self.module: torch.nn.Module = root  # type: ignore[assignment]
        self.process_group: dist.ProcessGroup = dist.distributed_c10d._get_default_group()
        everyone = tuple(range(dist.get_world_size()))
        found: dict[Sets, list[tuple[str, torch.nn.Parameter]]] = {}
        for name, parameter in self.module.named_parameters():
            sets = _sets_of(parameter)
            if parameter.requires_grad and sets and tuple(sorted(sum(sets, ()))) == everyone:
                found.setdefault(sets, []).append((name, parameter))
        if not found:
            raise ConfigurationError(
                "no trainable parameter of this FSDP2 model is sharded over all ranks of the job: call fully_shard "
                "with a mesh of all ranks before making the Monitor"
            )

        def weight(sets: Sets) -> tuple[bool, int]:
            # A set that can be compared before one that cannot; of those, the one that holds most.
            return len(sets[0]) > 1, sum(local(p).numel() * p.element_size() for _, p in found[sets])

        self.sets = max(found, key=weight)
        self.parameters = found[self.sets]
        self.replicated = len(self.sets[0]) > 1
        self._units = tuple(_units(self.module))

    @property
    def require_backward_grad_sync(self) -> bool:
        """Whether a backward now reduces over shards and replicas, as `set_requires_gradient_sync` left it."""
        return all(unit.reduce_grads and unit.all_reduce_grads for unit in self._units)


Wrapper = DistributedDataParallel | ShardedReplicas


def unwrap(model: torch.nn.Module) -> Wrapper:
    """Finds what replicates the model that the user trains: `DDP(m)`, `fully_shard(m)`, or `torch.compile` of one.

    Raises:
        ConfigurationError: neither, DDP inside another DDP, or a DDP group smaller than the job.
    """
    inner = getattr(model, "_orig_mod", model)
    if isinstance(inner, FSDPModule):
        return ShardedReplicas(inner)
    if not isinstance(inner, DistributedDataParallel):
        raise ConfigurationError(
            f"Monitor needs a DistributedDataParallel model, got {type(model).__name__}: wrap it first, "
            "ddp_model = DistributedDataParallel(model), and pass ddp_model (fully_shard(model, mesh) works as well)"
        )
    held, all_ranks = dist.get_world_size(inner.process_group), dist.get_world_size()
    if held != all_ranks:
        raise ConfigurationError(
            f"this model's process group holds {held} of {all_ranks} ranks: "
            "replica groups smaller than the job are not supported; give DDP the default group"
        )
    if any(isinstance(m, DistributedDataParallel) for m in inner.module.modules()):
        raise ConfigurationError(
            "this DistributedDataParallel model holds another one: two reducers in one backward are not supported; "
            "wrap the whole model once"
        )
    return inner


def replicated_parameters(wrapper: Wrapper) -> list[tuple[str, torch.nn.Parameter]]:
    """The parameters whose gradients are reduced over replicas: named, once each, in module order."""
    if isinstance(wrapper, ShardedReplicas):
        return list(wrapper.parameters)
    ignored = set(getattr(wrapper, "parameters_to_ignore", ()))
    return [(n, p) for n, p in wrapper.module.named_parameters() if p.requires_grad and n not in ignored]


def replica_sets(wrapper: Wrapper) -> Sets:
    """The ranks that must hold the same state: one set under DDP."""
    if isinstance(wrapper, ShardedReplicas):
        return wrapper.sets
    return (tuple(range(dist.get_world_size(wrapper.process_group))),)


def _sets_of(parameter: torch.Tensor) -> Sets:
    """Ranks that hold the same shard of one parameter, read from its mesh; empty where it is no `DTensor`."""
    mesh, placements = getattr(parameter, "device_mesh", None), getattr(parameter, "placements", None)
    if mesh is None or placements is None:
        return ()
    if any(placement.is_partial() for placement in placements):
        return ()
    copies = [i for i, placement in enumerate(placements) if placement.is_replicate()]
    return sets_in(mesh.mesh, copies)


def sets_in(mesh: torch.Tensor, copies: Sequence[int]) -> Sets:
    """The ranks of a mesh that differ in the dimensions `copies` only.

    Args:
        mesh: rank numbers, one dimension for each of the mesh's.
        copies: dimensions along which the same values are held.
    """
    parts = [i for i in range(mesh.ndim) if i not in copies]
    held = math.prod(mesh.shape[i] for i in copies)
    rows = mesh.permute(*parts, *copies).reshape(-1, held).tolist()
    return tuple(sorted(tuple(sorted(row)) for row in rows))


def _units(root: torch.nn.Module) -> Iterator[Any]:
    """FSDP2's own records of what it reduces together; it offers no public way to read what its setters set."""
    for module in root.modules():
        if isinstance(module, FSDPModule):
            state: Any = module._get_fsdp_state()
            groups = getattr(state, "_fsdp_param_groups", None)
            if groups is None:  # torch before 2.12 or so had one a module
                one = getattr(state, "_fsdp_param_group", None)
                groups = [] if one is None else [one]
            yield from groups
