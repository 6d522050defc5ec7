"""Recorded answers: the same on every correct machine whatever its order of summation; and each check can fail."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

torch = pytest.importorskip("torch")

from sdcwatch.cli import main  # noqa: E402
from sdcwatch.errors import ConfigurationError  # noqa: E402
from sdcwatch.preflight import checks as preflight_checks  # noqa: E402
from sdcwatch.preflight import recorded  # noqa: E402
from sdcwatch.testing import BrokenDevice  # noqa: E402

CPU = torch.device("cpu")
#: Largest whole number up to which a type holds all of them.
EXACT = {"float32": 1 << 24, "bfloat16": 1 << 8, "float16": 1 << 11, "float64": 1 << 53}


@pytest.mark.parametrize("dtype", recorded.ANSWERS)
def test_no_order_of_summation_can_change_a_recorded_product(dtype: str) -> None:
    """The sum of absolute values bounds every partial sum, and none of it is ever rounded; no answer is a zero."""
    left, right = recorded.inputs(torch, dtype)
    most = int((left.abs() @ right.abs()).max())
    answer = recorded.ANSWERS[dtype]
    assert most <= answer.terms * ((2 << answer.bits) - 1) ** 2 <= EXACT[dtype]
    exact = left @ right
    assert bool((exact % 2 != 0).all())
    assert int(left[5] @ right[:, 9]) == sum(int(a) * int(b) for a, b in zip(left[5], right[:, 9], strict=True))
    assert recorded.digest(torch, exact.to(getattr(torch, dtype))) == answer.product
    if dtype == "float32":  # TF32 and even bf16 products of it are exact
        assert int(max(left.abs().max(), right.abs().max())) < EXACT["bfloat16"]


@pytest.mark.parametrize("dtype", recorded.ANSWERS)
def test_sums_taken_in_another_order_and_in_the_type_itself_give_the_recorded_bits(dtype: str) -> None:
    """Terms backwards, shuffled, in eight parts, and one by one with an accumulator as narrow as the type."""
    left, right = (m.to(getattr(torch, dtype)) for m in recorded.inputs(torch, dtype))
    order = torch.randperm(recorded.SIZE, generator=torch.Generator().manual_seed(1))
    one_by_one = torch.zeros_like(left)
    for k in order.tolist():
        one_by_one += left[:, k, None] * right[k]
    parts = [left[:, k::8] @ right[k::8] for k in range(8)]
    results = [
        left[:, order] @ right[order], left.flip(1) @ right.flip(0), sum(parts[1:], parts[0]),
        (right.t() @ left.t()).t(), one_by_one,
    ]  # fmt: skip
    assert {recorded.digest(torch, result) for result in results} == {recorded.ANSWERS[dtype].product}


def unit(values: torch.Tensor) -> float:
    """The largest power of two, at most 1, of which all values are multiples."""
    return next(2.0**-k for k in range(53) if bool((values * 2.0**k % 1 == 0).all()))


def test_no_order_of_summation_can_change_the_recorded_training() -> None:
    """Of every product that is returned or feeds one, the sum of absolute values has less than 24 bits."""
    batch, target, first, last = (t.double() for t in recorded.training_inputs(torch))
    weights, rate = [first, last], 2.0**-recorded.LOG_RATE
    found = []

    def exact(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
        assert float((left.abs() @ right.abs()).max()) / (unit(left) * unit(right)) < 1 << 24
        return left @ right

    for _ in range(recorded.STEPS):
        hidden = exact(batch, weights[0].t()).clamp(min=0)
        back = exact(target, weights[1]) * (hidden > 0)
        gradients = [exact(back.t(), batch), exact(target.t(), hidden)]
        found += [hidden, *gradients]
        weights = [w - rate * g for w, g in zip(weights, gradients, strict=True)]
        assert all(float(w.abs().max()) / unit(w) < 1 << 24 for w in weights)
    single = [(value + 0.0).float() for value in found + weights]
    assert recorded.digest(torch, *single) == recorded.TRAINING


def only(monkeypatch: pytest.MonkeyPatch, check: str) -> None:
    """Leaves one check in the plan."""
    plan = preflight_checks.plan
    monkeypatch.setattr(preflight_checks, "plan", lambda *a: {check: plan(*a)[check]})


@pytest.mark.parametrize(
    ("check", "fault"),
    [
        *((f"recorded_{dtype}", BrokenDevice(["mm"])) for dtype in recorded.ANSWERS),
        *((f"known_answer_{dtype}", BrokenDevice(["mm"])) for dtype in recorded.ANSWERS),
        ("known_answer_mantissa", BrokenDevice(["mm"])),
        ("repeat_matmul", BrokenDevice(["mm"], every=2)),
        ("recorded_training", BrokenDevice(["mm"])),
        ("recorded_training", BrokenDevice(["threshold_backward"], pattern="zero_block")),
        ("training_step", BrokenDevice(["native_layer_norm"], first=4)),
        ("training_step", BrokenDevice(["gelu_backward"], pattern="bit_flip", every=5)),
        ("memory_pattern", BrokenDevice(["copy_"], pattern="bit_flip", least=1 << 20, first=3)),
        ("memory_pattern", BrokenDevice(["copy_"], pattern="stuck_at", least=1 << 20)),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_each_check_fails_on_a_device_that_errs(
    check: str, fault: BrokenDevice, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """One unit in the last place of one entry, a wrong backward, a held memory bit: exit status 1, with a sentence."""
    only(monkeypatch, check)
    with fault:
        status = main(["preflight", "--json", "--seconds", "0.01", "--device", "cpu"])
    assert fault.strikes
    (found,) = json.loads(capsys.readouterr().out)["devices"][0]["checks"]
    assert (status, found["check"], found["outcome"]) == (1, check, "fail"), found["detail"]
    assert found["detail"]


@pytest.mark.parametrize("check", ["recorded_float32", "recorded_training"])
def test_inputs_that_are_not_the_recorded_ones_prove_nothing(
    check: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Whatever made them other, their answer is not on record: could not judge."""
    only(monkeypatch, check)
    healthy = recorded.entries
    monkeypatch.setattr(recorded, "entries", lambda t, name, *rest: healthy(t, name + "?", *rest))
    assert main(["preflight", "--json", "--seconds", "0.01", "--device", "cpu"]) == 3
    assert "not the recorded ones" in capsys.readouterr().out


def test_a_host_that_errs_like_its_device_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """Answer and reference are wrong alike: held against each other they agree, against the record they do not."""

    def doubled(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
        return torch.matmul(left, right) * 2

    monkeypatch.setattr(torch.Tensor, "__matmul__", doubled)
    assert next(preflight_checks.known_answer(torch, CPU, doubled, "float32")) is None
    said = next(recorded.product(torch, CPU, doubled, "float32"))
    assert said is not None
    assert "wrong alike" in said


PROGRAM = """
import contextlib, os, sys
os.environ["ONEDNN_DEFAULT_FPMATH_MODE"] = "BF16"
from sdcwatch.cli import main
fault = contextlib.nullcontext()
if sys.argv[1:2] == ["broken"]:
    from sdcwatch.testing import BrokenDevice
    fault = BrokenDevice(["mm"])
with fault:
    status = main(["preflight", "--seconds", "0.01", "--device", "cpu"])
print(os.environ["ONEDNN_DEFAULT_FPMATH_MODE"])
sys.exit(status)
"""


@pytest.mark.integration
@pytest.mark.parametrize(("device", "status", "said"), [("healthy", 0, "pass"), ("broken", 1, "FAIL")])
def test_the_command_ends_with_the_judgement(device: str, status: int, said: str) -> None:
    """A process of its own: 0 and 1 come out, and an image's switch for coarse products is no fault of the machine."""
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, device], capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == status, done.stderr
    lines = done.stdout.splitlines()
    assert lines[-2].startswith(f"preflight: {said} in")
    assert lines[-1] == "STRICT"


def test_a_broken_device_strikes_as_told_and_no_longer_than_that() -> None:
    """Only the named operators, from the first call on, each second one; afterwards all is right again."""
    ones = torch.ones(4, 4)
    with BrokenDevice(["mm"], first=1, every=2) as fault:
        wrong = [not torch.equal(ones @ ones, torch.full((4, 4), 4.0)) for _ in range(6)]
        assert torch.equal(ones + ones, torch.full((4, 4), 2.0))
    assert wrong == [False, True, False, True, False, True]
    assert fault.strikes == 3
    assert torch.equal(ones @ ones, torch.full((4, 4), 4.0))
    with pytest.raises(ConfigurationError, match="no operator 'mmm'"):
        BrokenDevice(["mmm"])
    with pytest.raises(ConfigurationError, match="none of bit_flip"):
        BrokenDevice(["mm"], pattern="no such")
