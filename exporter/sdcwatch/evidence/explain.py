"""Weighs the rival explanations of a replay verdict: what speaks for each, what against it, what is missing.

Each fact is one sentence with a weight of 1 to 3 for or against an explanation; an explanation's standing is their
sum. It is an ordering for a person who decides what to try next, and no probability: nothing here accuses, contains or
replaces. Pure; standard library only. Flow: form -> **explain** -> command.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from sdcwatch.evidence.facts import Side, sides

HARDWARE, NONDETERMINISM, ENVIRONMENT = "hardware", "nondeterminism", "environment"
LOSS_FN, SOFTWARE, LIBRARY = "loss_fn", "software", "library bug"
#: Explanation -> what it says.
EXPLANATIONS = {
    HARDWARE: "a device or its memory computes wrong",
    NONDETERMINISM: "the model does not give the same bits twice, on any machine",
    ENVIRONMENT: "versions, flags or hardware models differ between the nodes",
    LOSS_FN: "loss_fn or its batch is not what the training step ran",
    SOFTWARE: "code that ran on one rank only",
    LIBRARY: "a kernel or library that is wrong alike wherever it is used",
}
_SIGNS = {
    "compile_count": "compiled graphs",
    "optimizer_steps": "optimizer steps",
    "versions_now": "version counters of the weights",
    "loss_scale": "loss scale",
    "hyperparameters": "hyperparameters",
    "schema": "parameter names, shapes or dtypes",
}


@dataclass(slots=True)
class Explanation:
    """One rival.

    Attributes:
        name, meaning: of `EXPLANATIONS`.
        weight: sum of the facts' weights.
        supports, opposes: (weight, sentence) of each fact.
    """

    name: str
    meaning: str
    supports: list[tuple[int, str]] = field(default_factory=list)
    opposes: list[tuple[int, str]] = field(default_factory=list)

    @property
    def weight(self) -> int:
        return sum(n for n, _ in self.supports) - sum(n for n, _ in self.opposes)


@dataclass(frozen=True, slots=True)
class Weighed:
    """All rivals, the strongest first, and what keeps the first from being proven."""

    explanations: tuple[Explanation, ...]
    unproven: tuple[str, ...]


class _Scale:
    def __init__(self) -> None:
        self.rivals = {name: Explanation(name, meaning) for name, meaning in EXPLANATIONS.items()}

    def speaks_for(self, name: str, weight: int, sentence: str) -> None:
        self.rivals[name].supports.append((weight, sentence))

    def against(self, names: str | Sequence[str], weight: int, sentence: str) -> None:
        for name in (names,) if isinstance(names, str) else names:
            self.rivals[name].opposes.append((weight, sentence))


@dataclass(frozen=True, slots=True)
class _Case:
    """The parts of a manifest that several rules read."""

    manifest: Mapping[str, Any]
    event: Mapping[str, Any]
    row: str
    sides: tuple[Side, ...]
    rows: Sequence[Mapping[str, Any]]

    def runs(self, name: str) -> list[Mapping[str, Any]]:
        return [run for run in self.manifest["gradients"] if run["run"] == name]

    def where(self, ranks: Sequence[int]) -> str:
        named = {r["rank"]: r["node"] for r in self.event["ranks"]}
        return ", ".join(f"rank {r} (node {named.get(r, '?')})" for r in ranks)


def weigh(manifest: Mapping[str, Any], replayed: Sequence[Mapping[str, Any]] = ()) -> Weighed:
    """Orders the explanations.

    Args:
        manifest: of an evidence file.
        replayed: results of `sdcwatch evidence replay --json` of the same file, on other machines.

    Raises:
        KeyError, TypeError: a manifest that no rank writes.
    """
    event = manifest["event"]
    case = _Case(manifest, event, str(event["evidence"].get("row", "")), sides(manifest), manifest["rows"]["rows"])
    scale = _Scale()
    rules: tuple[Callable[[_Case, _Scale], None], ...] = (_pattern, _itself, _calibration, _environment, _signs)
    for rule in rules:
        rule(case, scale)
    _elsewhere(replayed, scale)
    order = sorted(scale.rivals.values(), key=lambda one: -one.weight)
    return Weighed(tuple(order), tuple(_unproven(case, replayed)))


def _pattern(case: _Case, scale: _Scale) -> None:
    """Which replays failed, and which did not."""
    evidence, suspects = case.event["evidence"], case.event["suspects"]
    failing, judged = evidence.get("num_failing", 0), evidence.get("num_judged", 0)
    if case.row == "all edges of one":
        text = f"every replay that {case.where(suspects)} shared disagreed with another node, and no other did"
        scale.speaks_for(HARDWARE, 3, text)
        scale.against((NONDETERMINISM, LIBRARY), 3, f"{judged - failing} of {judged} replays of the same code agreed")
        scale.against(LOSS_FN, 2, "replays run loss_fn on both ends, and they agreed everywhere else")
        scale.speaks_for(SOFTWARE, 1, "code that touches one rank only would look alike")
    elif case.row == "one edge, third node":
        scale.speaks_for(HARDWARE, 2, f"a third node ran the micro-batch too, and {case.where(suspects)} stands alone")
        scale.speaks_for(NONDETERMINISM, 1, "one replay of one micro-batch is a small sample")
        scale.against(LIBRARY, 2, "two other nodes ran the same libraries to the same bits")
        scale.against(LOSS_FN, 2, "the nodes ran the same loss_fn on the same bytes")
    elif case.row in ("one edge, no third", "not reproducible", "two nodes", "some edges of one"):
        scale.speaks_for(HARDWARE, 1, "replays of the same bytes differ between nodes that agreed before")
        scale.speaks_for(NONDETERMINISM, 1, "nobody could say which of them is wrong")
        scale.against(LOSS_FN, 2, "the nodes ran the same loss_fn on the same bytes")
        if case.row == "some edges of one":
            scale.speaks_for(
                HARDWARE, 1, "one rank had a part in each failing replay: a fault that depends on the data"
            )
    elif case.row == "originals, few ranks":
        text = f"{case.where(case.event['differing'])} trained on another gradient than two nodes replayed"
        scale.speaks_for(HARDWARE, 2, f"{text}: a fault that did not repeat looks so")
        scale.speaks_for(LOSS_FN, 1, f"{text}: so does a batch or a loss that was changed on that rank only")
        scale.against((NONDETERMINISM, LIBRARY), 2, "its replays on two nodes agree with each other")
    elif case.row == "originals, most ranks":
        text = "most ranks trained on another gradient than their replays give, and the replays agree with each other"
        scale.speaks_for(LOSS_FN, 3, text)
        scale.against(HARDWARE, 3, "one device cannot change what other ranks computed before the reduce")
        scale.against(NONDETERMINISM, 2, "the replays agree with each other")
    elif failing:
        text = f"{failing} of {judged} replays disagree, in no pattern that one node explains"
        scale.speaks_for(NONDETERMINISM, 3, text)
        scale.against(HARDWARE, 2 + (2 * failing >= judged), text)
        scale.speaks_for(SOFTWARE, 1, "so does code that runs differently at each call")


def _itself(case: _Case, scale: _Scale) -> None:
    """Whether the owner's replay repeats what it trained on."""
    original, own = case.runs("original"), case.runs("self")
    if not original or not own or not case.manifest["calibration"]["original_shown"] or len(case.sides) < 2:
        return
    owner = case.where([case.manifest["owner"]])
    if original[0]["digest"] == own[0]["digest"]:
        text = f"{owner} gave the same gradient in training and in its own replay"
        scale.against(NONDETERMINISM, 1, text)
        scale.against(LOSS_FN, 1, text)
    else:
        text = f"{owner} did not repeat its own gradient"
        scale.speaks_for(NONDETERMINISM, 1, text)
        scale.speaks_for(HARDWARE, 1, f"{text}, as a device that errs now and then")


def _calibration(case: _Case, scale: _Scale) -> None:
    known = case.manifest["calibration"]
    if known["edge_shown"]:
        text = "the same two nodes had replayed this kind of micro-batch to the same bits before"
        scale.against(NONDETERMINISM, 2 if case.row in ("all edges of one", "one edge, third node") else 1, text)
        scale.against((ENVIRONMENT, LIBRARY), 1, text)
    else:
        scale.speaks_for(NONDETERMINISM, 1, "these two nodes had not been seen to agree before")
        scale.speaks_for(ENVIRONMENT, 1, "these two nodes had not been seen to agree before")
    if known["num_nondeterministic"]:
        scale.speaks_for(
            NONDETERMINISM, 2, "replay had already been turned off for another kind of micro-batch of this job"
        )


def _environment(case: _Case, scale: _Scale) -> None:
    values = {row["environment"] for row in case.rows if "environment" in row}
    mine, owner = case.manifest["environment"], case.manifest["environment_of_owner"]
    names = sorted(n for n in mine.keys() | owner.keys() if mine.get(n) != owner.get(n))
    if len(values) > 1 or names:
        listed = f" ({', '.join(names)})" if names else ""
        scale.speaks_for(ENVIRONMENT, 3, f"the ranks' environments differ{listed}")
        scale.against(HARDWARE, 2, f"the ranks' environments differ{listed}")
    elif values:
        text = (
            f"{len(case.rows)} of {case.manifest['rows']['num_rows']} ranks are on record, with one environment digest"
        )
        scale.against(ENVIRONMENT, 3, text)


def _signs(case: _Case, scale: _Scale) -> None:
    differing = [
        words for name, words in _SIGNS.items() if len({str(row[name]) for row in case.rows if name in row}) > 1
    ]
    if differing:
        scale.speaks_for(SOFTWARE, 3, f"the ranks differ in what only code changes: {', '.join(differing)}")
    else:
        scale.against(SOFTWARE, 2, f"the ranks are equal in {', '.join(_SIGNS.values())}")
    weights = {row["weights_now"] for row in case.manifest["audit_rows"]["rows"] if "weights_now" in row}
    if len(weights) == 1:
        scale.against(SOFTWARE, 1, "all replays on record ran on the same weights")
    if case.manifest["compiled"]:
        scale.speaks_for(LIBRARY, 1, "the model is compiled: kernels are generated on each node by itself")


def _elsewhere(replayed: Sequence[Mapping[str, Any]], scale: _Scale) -> None:
    """What other machines gave."""
    for result in replayed:
        if result["outcome"] == "majority":
            text = "another machine gave what the witnesses gave"
            scale.speaks_for(HARDWARE, 3, text)
            scale.against((NONDETERMINISM, LIBRARY, ENVIRONMENT), 2, text)
        elif result["outcome"] == "suspect":
            text = "another machine gave what the suspect gave"
            scale.against(HARDWARE, 6, text)
            for name in (LIBRARY, ENVIRONMENT):
                scale.speaks_for(name, 3, text)
        elif result["outcome"] == "neither":
            scale.speaks_for(NONDETERMINISM, 2, "another machine gave a gradient that is not on record")
            scale.speaks_for(ENVIRONMENT, 1, "another machine gave a gradient that is not on record")


def _unproven(case: _Case, replayed: Sequence[Mapping[str, Any]]) -> list[str]:
    """Why the first explanation is not proven, each with what would settle it."""
    found = []
    suspects = case.event["suspects"]
    if not suspects:
        found.append(f"the verdict names nobody: {case.event['sentence']}")
    if case.manifest["num_nodes"] < 3:
        found.append(f"{case.manifest['num_nodes']} nodes took part; with fewer than three nobody can say who is right")
    if case.event["persistence"] != "persistent":
        found.append(
            "the fault was seen in one replay; a later audit that fails on the same rank would make it lasting"
        )
    nodes = ", ".join(
        sorted({r["node"] for r in case.event["ranks"] if r["rank"] in (suspects or case.event["candidates"])})
    )
    found.append(
        f"no known-answer test is on record: run `sdcwatch preflight` on {nodes or 'the nodes of the job'}; a fail "
        "there accuses the device without this model"
    )
    if not any(result["outcome"] in ("majority", "suspect") for result in replayed):
        batch = case.manifest["batch"] is not None
        how = (
            "run `sdcwatch evidence replay` on one" if batch else "set evidence_data to keep the micro-batch next time"
        )
        found.append(f"no machine outside the job has run this micro-batch: {how}, of the same hardware and versions")
    found.append("what every replica computes wrong alike cannot be seen here: the witnesses could share one fault")
    return found
