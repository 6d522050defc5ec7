"""Replay: the live gradients again, bit for bit, and no trace in the module or the process, also when it raises."""

from __future__ import annotations

import contextlib
import random
from collections import namedtuple
from typing import Any

import pytest
import torch
from sdcwatch.checks.gradients import LocalGradients
from sdcwatch.checks.replay import Recorder, combine_digests, first_difference, rng_state, run, signature
from sdcwatch.fingerprint import combine, digest_bytes, fingerprint
from torch import nn

CPU = torch.device("cpu")
Pair = namedtuple("Pair", ["x", "y"])


class Net(nn.Module):
    """Convolution, batch norm and dropout, a tied weight, a bias that is never used, and a rebound buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Conv2d(3, 6, 3), nn.BatchNorm2d(6), nn.GELU(), nn.Flatten(), nn.Dropout(0.3))
        self.first = nn.Linear(6 * 4, 24)
        self.second = nn.Linear(24, 24)
        self.second.weight = self.first.weight
        self.unused = nn.Linear(2, 2)
        self.register_buffer("mean", torch.zeros(()))
        self.register_buffer("wide", torch.ones(1).expand(4))
        self.mean: torch.Tensor

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.second(torch.tanh(self.first(self.body(x))))
        self.mean = 0.9 * self.mean + hidden.detach().mean().float()
        return hidden


def loss_fn(model: Any, batch: Any) -> torch.Tensor:
    noise = random.random()
    if "numpy" in __import__("sys").modules:
        import numpy

        noise += float(numpy.random.rand())
    # a gradient of -0.0 tells a gradient that was added to zeros from one that was not
    negative_zero = model.unused.weight.sum() * -0.0
    return ((model(batch["x"]) * torch.rand(24)).float().square().mean() + negative_zero) * noise


class Run:
    """One live step of `Net`, watched, ready to be replayed."""

    def __init__(
        self,
        *,
        micro: int = 1,
        autocast: bool = False,
        seed: float = 1.0,
        auxiliary: bool = False,
        zeroed: bool = False,
    ) -> None:
        torch.manual_seed(0)
        self.module = Net()
        self.parameters = [p for p in self.module.parameters() if p.requires_grad]
        if zeroed:
            for parameter in self.parameters:
                parameter.grad = torch.zeros_like(parameter)
        self.recorder = Recorder(CPU, self.module, self.parameters)
        self.recorder.begin()
        self.local = LocalGradients(self.parameters, reducing=lambda: True, first=lambda: None)
        self.local.begin(due=True, audited=True)
        for number in range(micro):
            batch = {"x": torch.randn(4, 3, 4, 4, generator=torch.Generator().manual_seed(number))}
            with torch.autocast("cpu", torch.bfloat16) if autocast else contextlib.nullcontext():
                loss = self.recorder.loss(loss_fn, self.module, batch, audited=True)
            total = loss * seed / micro
            if auxiliary:
                total = total + 0.37 * loss.exp()
            total.backward()
            batch["x"].zero_()
        payload = self.recorder.pack()
        assert payload is not None, self.recorder.failure
        self.payload = payload

    def again(self, loss: Any = loss_fn) -> Any:
        return run(self.payload, module=self.module, loss_fn=loss, parameters=self.parameters, device=CPU)

    def trace(self) -> list[int]:
        """Everything that a replay must leave as it was."""
        state = rng_state(CPU)
        numpy = repr(state.get("numpy"))
        return [
            fingerprint(self.parameters),
            fingerprint(p.grad for p in self.parameters),
            fingerprint(self.module.buffers()),
            combine(id(b) for b in self.module.buffers()),
            combine(p._version for p in self.parameters),
            fingerprint([state["torch"]]),
            digest_bytes(repr(state["python"]).encode()),
            digest_bytes(numpy.encode()),
            combine(int(m.training) for m in self.module.modules()),
            torch.get_deterministic_debug_mode(),
            int(torch.utils.deterministic.fill_uninitialized_memory),  # type: ignore[attr-defined]
            int(torch.is_autocast_enabled("cpu")),
            int(torch.is_grad_enabled()),
        ]


MODES: dict[str, dict[str, Any]] = {
    "plain": {},
    "accumulation": {"micro": 3},
    "autocast": {"autocast": True},
    "scaler": {"seed": 1234.5},
    "auxiliary": {"auxiliary": True},
    "zeroed": {"zeroed": True},
    "all": {"micro": 3, "autocast": True, "seed": 1234.5, "auxiliary": True, "zeroed": True},
}


@pytest.mark.parametrize("mode", MODES)
def test_replayed_gradients_are_the_live_ones_bit_for_bit(mode: str) -> None:
    """Dropout, batch norm, python's and numpy's random, whatever the loop does to the loss afterwards."""
    live = Run(**MODES[mode])
    found = live.again()
    used = live.local.digests()
    assert len(used) == len(live.parameters) - 1
    assert {i: found.digests[i] for i in used} == used
    assert first_difference(used, found.digests) is None
    assert found.digest == combine_digests(used)
    assert live.again() == found


class Broken(Exception):
    """What a user's loss function may raise."""


def halfway(model: nn.Module, batch: Any) -> torch.Tensor:
    loss_fn(model, batch)
    model.eval()
    torch.use_deterministic_algorithms(False)
    random.seed(3)
    raise Broken


def switching(model: nn.Module, batch: Any) -> torch.Tensor:
    loss = loss_fn(model, batch)
    model.eval()
    for buffer in model.buffers():
        if buffer.stride() != (0,):
            buffer.data.add_(1)
    return loss


@pytest.mark.parametrize("ambient", ["default", "warn", "error"])
@pytest.mark.parametrize("loss", [loss_fn, switching, halfway])
def test_a_replay_leaves_no_trace(loss: Any, ambient: str) -> None:
    """Parameters, buffers, gradients, RNG, flags and autocast, also when it raises halfway (field case 12)."""
    live = Run(micro=2, autocast=True)
    live.module.body[1].eval()
    try:
        torch.set_deterministic_debug_mode(ambient)
        before = live.trace()
        with pytest.raises(Broken) if loss is halfway else contextlib.nullcontext():
            live.again(loss)
        assert live.trace() == before
    finally:
        torch.set_deterministic_debug_mode("default")


class Counting(nn.Module):
    """Keeps plain state of its own, and a table that belongs to a cached length."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 4)
        self.calls, self.scale, self.warm, self.mode, self.last = 0, 1.0, False, "cold", None
        self.length, self.table = 0, torch.zeros(0)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        self.scale *= 0.5
        self.warm, self.mode, self.last = True, f"call {self.calls}", self.calls
        if len(x) != self.length or self.calls > 1:
            self.length, self.table = len(x), torch.ones(len(x), 1)
        if self.calls > 1:
            self.late = self.calls
        return self.inner(x) * self.table * self.scale


@pytest.mark.parametrize("raises", [False, True])
def test_a_replay_leaves_the_attributes_of_modules_alone(raises: bool) -> None:
    """A forward that counts its calls, or caches a table, must go on as if no replay had been, also when it raises."""
    module = nn.Sequential(Counting())
    recorder = Recorder(CPU)
    recorder.begin()
    recorder.loss(lambda m, b: m(b).sum(), module, torch.ones(3, 4), audited=True).backward()
    before = dict(module[0].__dict__)

    def loss(model: nn.Module, batch: Any) -> torch.Tensor:
        total = model(batch).sum()
        assert model[0].calls == 2
        if raises:
            raise Broken
        return total

    payload = recorder.pack()
    assert payload is not None
    with pytest.raises(Broken) if raises else contextlib.nullcontext():
        run(payload, module=module, loss_fn=loss, parameters=list(module.parameters()), device=CPU)
    after = module[0].__dict__
    assert after.keys() == before.keys()
    assert [name for name in before if after[name] is not before[name]] == []
    assert (module[0].calls, module[0].scale, module[0].mode, module[0].last) == (1, 0.5, "call 1", 1)


def test_a_different_parameter_is_named() -> None:
    """The first one whose gradient differs, also where only one side has it."""
    live = Run()
    other = live.again(lambda model, batch: loss_fn(model, batch) + model.second.bias.sum())
    index = next(i for i, p in enumerate(live.parameters) if p is live.module.second.bias)
    assert first_difference(live.local.digests(), other.digests) == index
    assert first_difference({0: 1, 2: 3}, {0: 1}) == 2
    assert first_difference({}, {}) is None


@pytest.mark.parametrize(
    "batch",
    [
        torch.ones(2, 3),
        {"x": torch.ones(2, 3), "names": ["a", "b"], "weight": 2.5},
        [[torch.ones(2, 3), (torch.zeros(1), None)], "text"],
        Pair(torch.ones(2, 3), {"deep": [torch.arange(3)]}),
        (torch.ones(2, 6)[:, ::2], torch.ones(1, 3).expand(2, 3)),
    ],
    ids=["tensor", "dict", "nested", "namedtuple", "views"],
)
def test_a_batch_of_any_structure_comes_back(batch: Any) -> None:
    """Types, text, numbers and strides are what the loss function gets again."""
    seen: list[Any] = []
    parameter = nn.Parameter(torch.ones(3))

    def loss(model: nn.Module, given: Any) -> torch.Tensor:
        seen.append(given)
        return parameter.square().sum()

    recorder = Recorder(CPU)
    recorder.loss(loss, nn.Identity(), batch, audited=True).backward()
    payload = recorder.pack()
    assert payload is not None
    run(payload, module=nn.Identity(), loss_fn=loss, parameters=[parameter], device=CPU)
    assert signature(seen[1]) == signature(batch)
    assert repr(seen[1]) == repr(batch)


def test_a_slice_travels_without_what_it_was_cut_from() -> None:
    """Batches are often views of a whole data set."""
    recorder = Recorder(CPU)
    data = torch.randn(1_000_000, requires_grad=False)
    parameter = nn.Parameter(torch.ones(4))
    loss = recorder.loss(lambda _, b: (b["x"] * parameter).sum(), nn.Identity(), {"x": data[8:12]}, audited=True)
    loss.backward()
    payload = recorder.pack()
    assert payload is not None
    assert len(payload) < 100_000


class Unpicklable:
    """Its own code runs when it is packed."""

    def __reduce__(self) -> Any:
        raise KeyError("no")


@pytest.mark.parametrize("odd", [lambda: 0, Unpicklable(), (i for i in range(3))], ids=["lambda", "raises", "iterator"])
def test_a_batch_that_cannot_travel_never_breaks_training(odd: Any) -> None:
    """The loss is computed as ever; the audit is a skip (`reason=batch`)."""
    recorder = Recorder(CPU)
    parameter = nn.Parameter(torch.ones(2))
    loss = recorder.loss(lambda m, b: parameter.sum(), nn.Identity(), {"x": odd}, audited=True)
    loss.backward()
    assert float(loss.detach()) == 2.0
    assert recorder.failure == "batch"
    assert recorder.pack() is None
    recorder.begin()
    assert recorder.failure is None


def test_a_loss_function_that_raises_raises_to_the_user() -> None:
    """An error of the user's is never taken for one of ours."""
    with pytest.raises(Broken):
        Recorder(CPU).loss(halfway, Net(), {"x": torch.randn(4, 3, 4, 4)}, audited=True)


@pytest.mark.parametrize("result", [{"loss": torch.ones(())}, torch.ones(()), 3.0])
def test_what_is_no_differentiable_loss_cannot_be_replayed(result: Any) -> None:
    """It is handed back as it is."""
    recorder = Recorder(CPU)
    assert recorder.loss(lambda m, b: result, nn.Identity(), torch.ones(1), audited=True) is result
    assert recorder.failure == "batch"


def test_a_loss_without_backward_gives_no_payload() -> None:
    """A micro-batch that the loop dropped was not differentiated."""
    recorder = Recorder(CPU)
    parameter = nn.Parameter(torch.ones(2))
    recorder.loss(lambda m, b: parameter.sum(), nn.Identity(), 1, audited=True)
    assert recorder.pack() is None


def test_off_audit_nothing_is_kept() -> None:
    """A batch is kept on audited steps only."""
    recorder = Recorder(CPU)
    parameter = nn.Parameter(torch.ones(2))
    (recorder.loss(lambda m, b: parameter.sum(), nn.Identity(), 1, audited=False) * 512.0).backward()
    assert recorder.pack() is None


def test_signature_tells_structures_apart() -> None:
    """Shape, dtype, stride and structure: another signature calibrates again."""
    batches = [
        torch.ones(2, 3), torch.ones(3, 2), torch.ones(3, 2).t(), torch.ones(2, 3).double(), [torch.ones(2, 3)],
        (torch.ones(2, 3),), {"x": torch.ones(2, 3)}, {"y": torch.ones(2, 3)}, "text", None,
    ]  # fmt: skip
    assert len({signature(b) for b in batches}) == len(batches)


def test_gradients_of_a_replay_are_freed_as_they_appear(monkeypatch: pytest.MonkeyPatch) -> None:
    """What autograd keeps of each parameter's gradient is one zero, in the last or only micro-batch and before it."""
    kept: list[int] = []
    original = torch.autograd.grad

    def grad(*args: Any, **kwargs: Any) -> Any:
        found = original(*args, **kwargs)
        kept.extend(gradient.untyped_storage().nbytes() for gradient in found if gradient is not None)
        return found

    for live in (Run(), Run(micro=3)):
        monkeypatch.setattr(torch.autograd, "grad", grad)
        assert live.again().digests == live.local.digests()
        monkeypatch.undo()
    assert kept
    assert set(kept) == {4}


@pytest.mark.parametrize("when", ["never", "after the loss", "in loss_fn", "after backward"])
def test_a_batch_that_the_loop_wrote_to_before_its_backward_is_told(when: str) -> None:
    """Autograd may read it, and no replay can know; what loss_fn does itself is done again by every replay."""
    parameter = nn.Parameter(torch.ones(3))
    batch = {"x": torch.ones(3)}

    def loss_of(_: Any, given: Any) -> torch.Tensor:
        if when == "in loss_fn":
            given["x"].mul_(2)
        return (given["x"] * parameter).sum()

    recorder = Recorder(CPU, nn.Identity(), [parameter])
    recorder.begin()
    loss = recorder.loss(loss_of, nn.Identity(), batch, audited=True)
    if when == "after the loss":
        batch["x"].data.zero_()
    loss.backward()
    if when == "after backward":
        batch["x"].zero_()
    assert recorder.unchanged is (when != "after the loss")
