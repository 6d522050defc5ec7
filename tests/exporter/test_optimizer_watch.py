"""Parameters and optimizer state at both ends of `optimizer.step`, for every optimizer that torch has."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from sdcwatch.checks import weights as checked_weights
from sdcwatch.checks.weights import (
    OptimizerWatch,
    covered_bytes,
    hyperparameters_digest,
    state_fingerprint,
    state_tensors,
    versions,
)
from sdcwatch.fingerprint import fingerprint
from sdcwatch.testing.patterns import apply
from torch import nn
from torch import optim as o

MAKE: dict[str, Callable[[list[nn.Parameter]], o.Optimizer]] = {
    "sgd": lambda p: o.SGD(p, lr=0.1),
    "sgd_momentum": lambda p: o.SGD(p, lr=0.1, momentum=0.9),
    "sgd_fused": lambda p: o.SGD(p, lr=0.1, momentum=0.9, fused=True),
    "adam": lambda p: o.Adam(p, lr=0.1, amsgrad=True),
    "adam_tensor_lr": lambda p: o.Adam(p, lr=torch.tensor(0.1)),
    "adamw_fused": lambda p: o.AdamW(p, lr=0.1, fused=True),
    "adagrad": lambda p: o.Adagrad(p, lr=0.1),
    "adagrad_fused": lambda p: o.Adagrad(p, lr=0.1, fused=True),
    "adamax": lambda p: o.Adamax(p, lr=0.1),
    "rmsprop": lambda p: o.RMSprop(p, lr=0.1, centered=True, momentum=0.5),
    "lbfgs": lambda p: o.LBFGS(p, lr=0.1, max_iter=3),
    "nadam": lambda p: o.NAdam(p, lr=0.1),
    "radam": lambda p: o.RAdam(p, lr=0.1),
    "adadelta": lambda p: o.Adadelta(p),
    "asgd": lambda p: o.ASGD(p, lr=0.1),
    "rprop": lambda p: o.Rprop(p, lr=0.1),
    "adafactor": lambda p: o.Adafactor(p),
    "muon": lambda p: o.Muon([q for q in p if q.ndim == 2]),
}


def run(optimizer: o.Optimizer, parameters: list[nn.Parameter], steps: int = 2) -> None:
    generator = torch.Generator().manual_seed(1)
    for _ in range(steps):
        batch = torch.randn(6, 4, generator=generator)

        def closure(batch: torch.Tensor = batch) -> torch.Tensor:
            optimizer.zero_grad()
            loss = (batch @ parameters[0].T + parameters[1]).square().sum()
            loss.backward()
            return loss

        if isinstance(optimizer, o.LBFGS):
            optimizer.step(closure)
        else:
            closure()
            optimizer.step()


def make(name: str) -> tuple[o.Optimizer, list[nn.Parameter]]:
    generator = torch.Generator().manual_seed(0)
    parameters = [nn.Parameter(torch.randn(3, 4, generator=generator)), nn.Parameter(torch.zeros(3))]
    return MAKE[name](parameters), parameters


def watching(optimizer: o.Optimizer, parameters: list[nn.Parameter], **changes: Any) -> OptimizerWatch:
    options: dict[str, Any] = {
        "current_step": lambda: 7, "due": lambda: True, "gate": lambda: None, "guard": lambda _, measure: measure(),
    }  # fmt: skip
    return OptimizerWatch(optimizer, parameters, **{**options, **changes})


def leaves(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, dict):
        for item in value.values():
            yield from leaves(item)
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from leaves(item)


@pytest.mark.parametrize("name", MAKE)
def test_one_ulp_in_any_state_tensor_is_seen(name: str) -> None:
    """Every tensor in `optimizer.state`, however deep, reaches the fingerprint."""
    optimizer, parameters = make(name)
    run(optimizer, parameters)
    clean = state_fingerprint(optimizer, parameters)
    assert clean == state_fingerprint(optimizer, parameters)
    found = [t for t in leaves(dict(optimizer.state)) if t.numel()]
    assert bool(found) is (name != "sgd")
    for tensor in found:
        before = tensor.detach().clone()
        apply("ulp", tensor, seed=3)
        assert state_fingerprint(optimizer, parameters) != clean
        tensor.data.copy_(before)
    assert state_fingerprint(optimizer, parameters) == clean


@pytest.mark.parametrize("name", MAKE)
def test_replicas_that_do_the_same_agree(name: str) -> None:
    """Two optimizers of the same history have equal state, hyperparameters and measures."""
    both = []
    for _ in range(2):
        optimizer, parameters = make(name)
        watched = watching(optimizer, parameters)
        run(optimizer, parameters)
        both.append((watched.newest, state_fingerprint(optimizer, parameters), hyperparameters_digest(optimizer)))
    assert both[0] == both[1]
    assert both[0][0] is not None


@pytest.mark.parametrize("name", MAKE)
def test_a_step_is_measured_at_both_ends(name: str) -> None:
    """Weights move between begin and end; the end is what stands in the parameters now; writes are counted."""
    optimizer, parameters = make(name)
    watched = watching(optimizer, parameters)
    before = fingerprint(parameters)
    run(optimizer, parameters, steps=1)
    measure = watched.newest
    assert measure is not None
    assert (measure.step, watched.calls) == (7, 1)
    assert measure.begin.weights == before != measure.weights_end == fingerprint(parameters)
    assert measure.state_end == state_fingerprint(optimizer, parameters)
    assert (measure.begin.state == measure.state_end) is (name == "sgd")
    # fused kernels write parameters without telling autograd, on every rank alike
    assert (measure.versions_end > measure.begin.versions) is ("fused" not in name)


@pytest.mark.parametrize("key", ["step", "lr", "eta"])
def test_numbers_in_the_state_count_exactly(key: str) -> None:
    """Some optimizers keep plain numbers; the last bit of one is seen."""
    optimizer, parameters = make("sgd")
    optimizer.state[parameters[0]][key] = 0.1
    clean = state_fingerprint(optimizer, parameters)
    optimizer.state[parameters[0]][key] = 0.1 + 2**-56
    assert state_fingerprint(optimizer, parameters) != clean


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("adam", lambda g: g.update(lr=g["lr"] * (1 + 2**-52))),
        ("adam", lambda g: g.update(betas=(0.9, 0.99))),
        ("adam", lambda g: g.update(weight_decay=0.1)),
        ("adam", lambda g: g.update(maximize=True)),
        ("adam", lambda g: g.update(lr=torch.tensor(g["lr"]))),
        ("adam_tensor_lr", lambda g: g["lr"].mul_(1 + 2**-20)),
        ("sgd", lambda g: g.update(params=g["params"][:1])),
    ],
)
def test_hyperparameters_that_differ_have_another_digest(name: str, change: Callable[[Any], object]) -> None:
    """Learning rate as number or tensor, betas, flags, and how many parameters a group has."""
    optimizer, _ = make(name)
    clean = hyperparameters_digest(optimizer)
    change(optimizer.param_groups[0])
    assert hyperparameters_digest(optimizer) != clean


def test_a_numpy_learning_rate_counts() -> None:
    """Schedules written with numpy leave its scalars in the groups."""
    numpy = pytest.importorskip("numpy")
    optimizer, _ = make("sgd")
    digests = set()
    for value in (0.1, 0.2):
        optimizer.param_groups[0]["lr"] = numpy.float32(value)
        digests.add(hyperparameters_digest(optimizer))
    assert len(digests) == 2


def test_raw_memory_writes_do_not_move_the_versions() -> None:
    """That is how corruption is told from user code."""
    _, parameters = make("sgd")
    before = versions(parameters)
    apply("bit_flip", parameters[0], seed=0)
    assert versions(parameters) == before
    with torch.no_grad():
        parameters[0].add_(1)
    assert versions(parameters) == before + 1


def test_the_gradient_as_the_step_began_is_in_the_measure() -> None:
    """After clipping, before the step."""
    optimizer, parameters = make("sgd")
    watched = watching(optimizer, parameters)
    for parameter in parameters:
        parameter.grad = torch.ones_like(parameter)
    clean = fingerprint(p.grad for p in parameters)
    optimizer.step()
    assert watched.newest is not None
    assert watched.newest.begin.gradient == clean


def test_a_step_that_is_not_due_leaves_no_old_measure() -> None:
    """The next row says that nothing was measured; the call still counts."""
    due = [True]
    optimizer, parameters = make("sgd")
    watched = watching(optimizer, parameters, due=lambda: due[0])
    run(optimizer, parameters, steps=1)
    due[0] = False
    run(optimizer, parameters, steps=1)
    assert (watched.newest, watched.calls) == (None, 2)
    watched.close()
    run(optimizer, parameters, steps=1)
    assert watched.calls == 2


def test_a_gate_that_raises_stops_the_step_before_it_writes() -> None:
    """A sticky halt reaches the user out of `optimizer.step`."""

    def gate() -> None:
        raise ArithmeticError("halted")

    optimizer, parameters = make("sgd")
    watching(optimizer, parameters, gate=gate)
    before = fingerprint(parameters)
    with pytest.raises(ArithmeticError):
        run(optimizer, parameters, steps=1)
    assert fingerprint(parameters) == before


def test_a_measure_that_fails_leaves_no_half_measure() -> None:
    """The guard swallows it; the step itself runs."""
    optimizer, parameters = make("sgd_momentum")
    watched = watching(optimizer, parameters, guard=lambda _, measure: None)
    before = fingerprint(parameters)
    run(optimizer, parameters, steps=1)
    assert watched.newest is None
    assert fingerprint(parameters) != before


def test_state_of_parameters_that_ddp_does_not_reduce_is_not_compared() -> None:
    """Experts and a rank's own parameters differ by design; a difference there says nothing about a replica."""
    optimizer, parameters = make("sgd_momentum")
    run(optimizer, parameters)
    assert sum(t is not None for t in state_tensors(optimizer, parameters[:1])) == 1


@pytest.mark.parametrize("name", MAKE)
def test_every_byte_of_state_is_counted_as_covered(name: str) -> None:
    """Coverage is the sum of what the optimizer holds, with nothing left out and nothing counted twice."""
    optimizer, parameters = make(name)
    run(optimizer, parameters)
    held = sum(t.numel() * t.element_size() for t in leaves(dict(optimizer.state)))
    assert covered_bytes(state_tensors(optimizer, parameters)) == (held, 0)


def test_every_optimizer_that_torch_has_is_in_the_list() -> None:
    """A new one in torch makes this red until it has been tried; SparseAdam takes no dense gradient."""
    classes = {v for v in vars(o).values() if isinstance(v, type) and issubclass(v, o.Optimizer)} - {o.Optimizer}
    tried = {type(make(name)[0]) for name in MAKE}
    assert {c.__name__ for c in classes - tried} == {"SparseAdam"}


def test_the_state_of_sparse_gradients_is_covered() -> None:
    """SparseAdam's moments are dense: one ulp in either is seen, and all bytes count."""
    table = nn.Embedding(8, 4, sparse=True)
    optimizer = o.SparseAdam(list(table.parameters()), lr=0.1)
    table(torch.tensor([1, 5])).square().sum().backward()
    optimizer.step()
    parameters = [table.weight]
    clean = state_fingerprint(optimizer, parameters)
    tensors = [t for t in leaves(dict(optimizer.state)) if t.numel()]
    assert covered_bytes(state_tensors(optimizer, parameters)) == (sum(t.numel() * 4 for t in tensors), 0)
    for tensor in tensors:
        before = tensor.clone()
        apply("ulp", tensor, seed=1)
        assert state_fingerprint(optimizer, parameters) != clean
        tensor.data.copy_(before)


def test_state_is_not_compared_where_the_step_itself_exchanged_data(monkeypatch: pytest.MonkeyPatch) -> None:
    """After a broadcast inside the step a rank holds another one's work, so its own is not vouched for."""
    issued = iter([3, 4])
    monkeypatch.setattr(checked_weights, "collectives_issued", lambda: next(issued))
    optimizer, parameters = make("adam")
    watch = watching(optimizer, parameters)
    run(optimizer, parameters, steps=1)
    assert watch.newest is not None
    assert (watch.newest.begin.state, watch.newest.state_end) == (None, None)
    assert watch.newest.weights_end == fingerprint(parameters)
