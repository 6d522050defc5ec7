"""`Fault`: one fault as a value: where, when, how often and what shape. Checked strictly; it does nothing by itself.

Flow: **fault** -> faults (the plan) -> places (hooks that strike).
"""

from __future__ import annotations

from dataclasses import dataclass

from sdcwatch.errors import ConfigurationError
from sdcwatch.testing.patterns import PATTERNS

#: Places that this rank's device computes wrong: training and every replay that it runs, its own or another rank's.
COMPUTE = ("forward", "backward")
#: Places that several ranks must know of, because what one rank does reaches the others.
SHARED = ("ring_forward", "tree_forward", "reduced_gradient_some", "reduced_gradient_all")
LOCATIONS = (
    "input_batch",
    *COMPUTE,
    "local_gradient",
    *SHARED,
    "reduced_gradient",
    "optimizer_weight",
    "optimizer_state",
    "weights_at_rest",
    "optimizer_state_at_rest",
)
MODES = ("persistent", "intermittent", "transient", "once")
_KINDS: dict[str, type] = {
    "step": int, "rank": int, "parameter": int, "seed": int, "call": int, "hop": int, "instance": str, "marker": str,
}  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """One fault.

    Attributes:
        location: one of `LOCATIONS`.
            `input_batch`: the batch, as the training step's forward reads it (replays run from the bytes before it).
            `forward`, `backward`: the device computes a wrong activation or gradient, in replays too.
            `local_gradient`: one parameter's gradient before the reduce.
            `ring_forward`, `tree_forward`: what this rank passes on inside an all-reduce; the collective is simulated,
            so every rank installs such a fault. `hop` says at which of its sends.
            `reduced_gradient`: what the collective handed back here; `_some`: to this rank and those after it, half of
            all or one more; `_all`: to all ranks, the same wrong value.
            `optimizer_weight`, `optimizer_state`: inside `optimizer.step`.
            `weights_at_rest`, `optimizer_state_at_rest`: memory, between two steps.
        step: first training step that is hit.
        mode: `persistent` hits every step from there on; `intermittent` the first, and of what follows about one in
            two, as the seed decides; `transient` one step only; `once` the
            first time in that step that its place is passed, so a repeated backward is right.
        rank, instance: whom it hits; a fault with an instance follows that machine, whatever rank it runs.
        pattern: a name of `sdcwatch.testing.patterns.PATTERNS`.
        parameter: which parameter (index in module order; taken modulo their number).
        seed: decides the elements and bits.
        call: which run of a step a `forward` or `backward` fault hits (0: training, 1: this rank's own replay, 2: the
            replay for another rank, with one micro-batch a step); None: each of them (intermittent: about one in two).
        hop: for `ring_forward` and `tree_forward`, which send is wrong; taken modulo their number.
        marker: a file that a transient fault creates when it fires and that keeps it from firing again after a restart;
            one for each fault.
    """

    location: str
    step: int
    mode: str = "persistent"
    rank: int | None = None
    instance: str | None = None
    pattern: str = "scale"
    parameter: int = 0
    seed: int = 0
    call: int | None = None
    hop: int = 0
    marker: str | None = None

    def __post_init__(self) -> None:
        for name, allowed in (("location", LOCATIONS), ("mode", MODES), ("pattern", tuple(PATTERNS))):
            if getattr(self, name) not in allowed:
                raise ConfigurationError(f"fault's {name} is {getattr(self, name)!r}, none of {', '.join(allowed)}")
        if (self.rank is None) == (self.instance is None):
            raise ConfigurationError("a fault names either rank or instance")
        for name, kinds in _KINDS.items():
            value = getattr(self, name)
            if value is not None and (not isinstance(value, kinds) or isinstance(value, bool)):
                raise ConfigurationError(f"fault's {name} is {value!r}; it must be {kinds.__name__}")
        if self.marker is not None and self.mode not in ("transient", "once"):
            raise ConfigurationError("a fault with a marker fires once: give it mode transient or once")
        if self.call is not None and self.location not in COMPUTE:
            raise ConfigurationError(f"only {' and '.join(COMPUTE)} run more than once a step: leave out call")
        if self.location in SHARED and self.rank is None:
            raise ConfigurationError(f"every rank takes part in {self.location}: name the rank, not the instance")

    def hits(self, rank: int, size: int, instance: str | None) -> bool:
        """Whether this fault has to be installed on a rank of a group of `size`."""
        if self.location in ("ring_forward", "tree_forward", "reduced_gradient_all"):
            return self.rank is not None and self.rank < size
        if self.location == "reduced_gradient_some":
            return self.rank is not None and (rank - self.rank) % size < (size + 1) // 2
        return self.rank == rank or (self.instance is not None and self.instance == instance)
