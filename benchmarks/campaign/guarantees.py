"""What must hold over the whole campaign; each miss is listed with its cases, and makes the campaign fail.

Pure. Flow: score, healthy, simulated -> **guarantees** -> document, exit status.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from benchmarks.campaign.cases import COMPUTE, CROSS, FROM_START, ON_DISK, OTHER_RUN, Case
from benchmarks.campaign.causes import UNKNOWN, cause
from benchmarks.campaign.score import BROKEN, HINT, INCONCLUSIVE, NAMED, SOFTWARE, WRONG

Row = tuple[Case, dict[str, Any]]
#: Faults that a campaign must have injected, and clean comparisons that it must have made.
FAULTS, COMPARISONS = 2000, 100_000


@dataclass(frozen=True, slots=True)
class Guarantee:
    """One promise and how it went: of `cases` that it covers, those in `broken` missed it."""

    text: str
    cases: int
    broken: tuple[str, ...]

    @property
    def holds(self) -> bool:
        """Nothing that it covers missed it, and it covers something."""
        return self.cases > 0 and not self.broken


def _says(text: str, rows: Iterable[Row], good: Callable[[Case, dict[str, Any]], bool]) -> Guarantee:
    covered = list(rows)
    broken = [
        f"{case.key}: {result['outcome']}, first {result['first']}"
        for case, result in covered
        if not good(case, result)
    ]
    return Guarantee(text, len(covered), tuple(broken))


def _seen_next(case: Case, result: dict[str, Any]) -> bool:
    """In the exchange after the first strike (a state fault at rest rides one row later)."""
    return result["seen_step"] is not None and result["seen_step"] <= min(result["struck"][0] + 1, case.steps - 1)


def _right(case: Case, result: dict[str, Any]) -> bool:
    return result["outcome"] in (NAMED, INCONCLUSIVE)


def of_faults(rows: Sequence[Row]) -> list[Guarantee]:
    """The promises on injected faults."""
    struck = [(c, r) for c, r in rows if r["struck"]]
    after = [(c, r) for c, r in struck if c.group == CROSS]

    def place(*locations: str) -> list[Row]:
        return [(c, r) for c, r in after if c.location in locations]

    def three(some: Iterable[Row]) -> list[Row]:
        return [(c, r) for c, r in some if len(c.nodes) >= 3]

    def nodes(some: Iterable[Row]) -> list[Row]:
        return [(c, r) for c, r in some if len(c.nodes) >= 2]

    in_step = place("optimizer_weight", "optimizer_state")
    audited = nodes(
        (c, r) for c, r in place(*COMPUTE, "local_gradient") if any(s % c.replay_every == 0 for s in r["struck"])
    )
    lasting = [(c, r) for c, r in audited if c.location in COMPUTE and c.mode == "persistent"]
    transient = [(c, r) for c, r in audited if c.mode != "persistent" or c.location == "local_gradient"]
    some = [(c, r) for c, r in place("ring_forward", "tree_forward", "reduced_gradient", "reduced_gradient_some")]
    alike = [(c, r) for c, r in after if c.location == "reduced_gradient_all"]
    above = [(c, r) for c, r in alike if r["loud_step"] is not None]
    runs = [(c, r) for c, r in struck if c.group == OTHER_RUN and c.call == 0]
    begun = nodes((c, r) for c, r in struck if c.group == FROM_START and c.location in COMPUTE)
    return [
        _says("no healthy rank is named", rows, lambda c, r: r["outcome"] != WRONG),
        _says("every run came to its end", rows, lambda c, r: r["outcome"] != BROKEN),
        _says("each miss has a known cause", rows, lambda c, r: cause(c, r) != UNKNOWN),
        _says(
            "all ranks give the same verdicts, and no check of ours failed",
            rows,
            lambda c, r: r["agreed"] and not r["failures"],
        ),
        _says("weights and optimizer state struck in the step: seen in the next exchange", in_step, _seen_next),
        _says(
            "the same, at 3 nodes or more: the rank is named",
            three(in_step),
            lambda c, r: r["outcome"] == NAMED and r["first"]["suspects"] == [c.rank],
        ),
        _says(
            "weights struck at rest: seen before the next step",
            place("weights_at_rest"),
            lambda c, r: r["seen_step"] == r["struck"][0],
        ),
        _says(
            "optimizer state struck at rest: seen in the next exchange", place("optimizer_state_at_rest"), _seen_next
        ),
        _says(
            "a lasting compute fault that changes the local gradient, at 3 nodes or more: named within two audits",
            three(lasting),
            lambda c, r: r["outcome"] == NAMED,
        ),
        _says("the same at 2 nodes: seen, nobody named", [(c, r) for c, r in lasting if len(c.nodes) == 2], _right),
        _says(
            "a transient or intermittent compute fault on an audited step: seen, named or inconclusive",
            transient,
            _right,
        ),
        _says(
            "a compute fault that no replay repeats, on an audited step: named or inconclusive",
            nodes(runs),
            _right,
        ),
        _says(
            "a compute fault from step 0 is an outlier or seen, never silent",
            begun,
            lambda c, r: r["outcome"] in (HINT, NAMED, INCONCLUSIVE, SOFTWARE),
        ),
        _says(
            "a wrong reduced gradient on some ranks: seen at the same step, nobody healthy named",
            [(c, r) for c, r in some if not _alike_everywhere(c)],
            lambda c, r: r["seen_step"] == r["struck"][0] and _right(c, r),
        ),
        _says(
            "a wrong reduced gradient, the same on all ranks, one element above the bound: seen at the same step",
            above,
            lambda c, r: (
                r["seen_step"] in r["struck"]
                and r["seen_step"] <= r["loud_step"]  # earlier: a smaller change was seen already
                and r["first"]["check"] == "allreduce_conservation"
            ),
        ),
        _says(
            "checkpoint bytes that rot: found before they are loaded",
            [(c, r) for c, r in rows if c.group == ON_DISK],
            lambda c, r: r["outcome"] == INCONCLUSIVE,
        ),
    ]


def _alike_everywhere(case: Case) -> bool:
    """A send in the first half of a ring, or up a tree, is added up and handed to all ranks alike."""
    from sdcwatch.testing.simulated_reduce import ring_sends, tree_sends

    if case.location == "ring_forward":
        return case.hop % ring_sends(case.world) < case.world - 1
    if case.location == "tree_forward":
        sends = max(1, tree_sends(case.world, case.rank))
        return case.rank > 0 and case.hop % sends == 0
    return case.location == "reduced_gradient_some" and case.world == 1


def of_healthy(results: Sequence[dict[str, Any]], full: bool) -> list[Guarantee]:
    """The promises on healthy runs."""
    comparisons = sum(r["rank_rows"] for r in results)
    broken = tuple(f"{r['key']}: {v}" for r in results for v in r["false"])
    found = [Guarantee("healthy loops: no false verdict", len(results), broken)]
    if full:
        few = () if comparisons >= COMPARISONS else (f"{comparisons} comparisons",)
        found.append(Guarantee(f"at least {COMPARISONS:,} clean comparisons", len(results), few))
    return found


def of_simulated(results: Sequence[dict[str, Any]]) -> list[Guarantee]:
    """The promises on simulated groups."""
    broken = tuple(f"{r['ranks']} ranks: {r}" for r in results if r["false"] or r["wrong"] or r["right"] != r["faults"])
    return [
        Guarantee(
            "simulated groups up to 16,384 ranks: clean is clean, and each fault gets its one right answer",
            len(results),
            broken,
        )
    ]
