"""Every place of the injector x transient and persistent x heal and halt: do the final weights equal a clean run's?

    make campaign-heal                        everything, and the table in docs/healing.md
    python benchmarks/heal/campaign.py --only kill --sizes 4 --out DIRECTORY

A run is lived as a job lives: where it halts, its latch is released, the bad node has been replaced (the fault is gone)
and the next life resumes from the checkpoint that may be trusted; where processes are killed, it is started again.
Writes `heal.json`. Exit status 1 where a run hangs, or ends otherwise than the row says it must.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))
import life
import ranks
from sdcwatch.checkpoints.manifest import list_checkpoints, verify
from sdcwatch.errors import CheckpointError
from sdcwatch.latch import files as latches
from sdcwatch.testing import corrupt_file

DOCUMENT = Path(__file__).parents[2] / "docs" / "healing.md"
BEGIN, END = "<!-- campaign: begin -->\n", "<!-- campaign: end -->\n"
MOST_LIVES = 4
#: Audits run on steps 0, 3, 6, 9 (`REPLAY_EVERY`), a checkpoint is written after 1, 3, 5, 7, 9, 11.
BETWEEN, AUDITED = 5, 6
COMPUTE = ("forward", "backward", "local_gradient", "input_batch")
REDUCE = ("reduced_gradient", "reduced_gradient_some", "reduced_gradient_all")
STATE = ("optimizer_weight", "weights_at_rest", "optimizer_state", "optimizer_state_at_rest")


@dataclass(frozen=True)
class Case:
    """One run. `must_equal`: its final weights have to be those of a clean run; otherwise only that it ends."""

    section: str
    name: str
    when: str
    on_fault: str
    size: int
    faults: tuple[dict[str, Any], ...] = ()
    kill: dict[str, Any] | None = None
    ranks_per_node: int = 1
    rot: bool = False
    must_equal: bool = True


@dataclass
class Result:
    """What became of a case. `recomputed`: steps whose gradients were computed more than once."""

    case: Case
    equal: bool = False
    lives: int = 0
    recomputed: int = 0
    healed: int = 0
    events: list[str] = field(default_factory=list)
    suspects: list[int] = field(default_factory=list)
    trouble: str = ""
    seconds: float = 0.0

    @property
    def fine(self) -> bool:
        return not self.trouble and (self.equal or not self.case.must_equal)


def cases(sizes: list[int]) -> Iterator[Case]:
    """All of them, in the order of the table."""
    for size in sizes:
        yield from of_faults("heal", size)
        for during in ("check", "heal", "checkpoint", "halt"):
            yield from of_kill(during, size)
        yield from of_faults("halt", size)


def of_faults(on_fault: str, size: int) -> Iterator[Case]:
    for place in (*STATE, *REDUCE, *COMPUTE):
        yield from of_place(place, on_fault, size)
    yield Case("fault", "checkpoint bytes", "persistent", on_fault, size, rot=True)


def of_place(place: str, on_fault: str, size: int) -> Iterator[Case]:
    # Before a batch norm a bias has a gradient of rounding noise: what is wrong there alike on all ranks no sum shows.
    fault = {"location": place, "rank": 1, "pattern": "scale", "parameter": int(place != "reduced_gradient_all")}
    if place in COMPUTE:
        once = {**fault, "mode": "once"}
        yield Case("fault", place, "once, audited step", on_fault, size, ({**once, "step": AUDITED},))
        blind = Case(
            "fault", place, "once, between audits", on_fault, size, ({**once, "step": BETWEEN},), must_equal=False
        )
        yield blind
        yield Case(
            "fault",
            place,
            "persistent",
            on_fault,
            size,
            ({**fault, "step": BETWEEN},),
            must_equal=place != "input_batch",
        )
        return
    mode = "once" if place in REDUCE else "transient"
    yield Case("fault", place, "once", on_fault, size, ({**fault, "mode": mode, "step": BETWEEN},))
    yield Case("fault", place, "persistent", on_fault, size, ({**fault, "step": BETWEEN},))


def of_kill(during: str, size: int) -> Iterator[Case]:
    fault = {"location": "reduced_gradient", "rank": 1, "pattern": "scale", "mode": "once", "step": BETWEEN}
    faults = (fault,) if during in ("heal", "halt") else ()
    on_fault = "halt" if during == "halt" else "heal"
    victims = {"one rank": [1], "all ranks": list(range(size)), "a node": list(range(2, size)) or [1]}
    if during == "checkpoint":  # one rank writes it
        victims = {"the writing rank": [0], "a node": [0, 1]}
    for who, dead in victims.items():
        kill = {"during": during, "ranks": dead, "step": BETWEEN}
        yield Case("kill", f"kill -9 of {who}", f"during a {during}", on_fault, size, faults, kill, ranks_per_node=2)


def lived(case: Case, root: Path, clean: str) -> Result:
    """Runs one case to its end."""
    result, begin = Result(case), time.monotonic()
    (root / "checkpoints").mkdir(parents=True)
    trained = 0
    for number in range(MOST_LIVES):
        job: dict[str, Any] = {"on_fault": case.on_fault, "ranks_per_node": case.ranks_per_node}
        if number == 0:
            job |= {"faults": case.faults, "kill": case.kill}
            if case.rot:
                job["stop_after"] = life.STEPS - 3
        found = ranks.run(life.train, case.size, str(root), job)
        result.lives += 1
        values = [value for kind, value in found if kind == "value"]
        killed = case.kill is not None and number == 0
        bad = [f"rank {r} {kind}: {value}" for r, (kind, value) in enumerate(found) if kind != "value"]
        if any(kind == "hung" for kind, _ in found) or (bad and not killed):
            result.trouble = "; ".join(bad)
            break
        if killed and not any(kind == "died" and value == -9 for kind, value in found):
            result.trouble = f"nobody was killed: {found}"
            break
        if values:
            trained += max(v["steps"] for v in values)
            # counters go on after a restart
            result.healed = int(max(v["heals"]["healed"] for v in values))
            result.events += [e for e in values[0]["events"] if e not in result.events]
            result.suspects = sorted({*result.suspects, *values[0]["suspects"]})
        digests = {v["digest"] for v in values}
        if len(values) == case.size and None not in digests:
            result.equal = digests == {clean}
            break
        between_lives(case, root, number)
    else:
        result.trouble = f"not finished after {MOST_LIVES} lives"
    result.recomputed = max(0, trained - life.STEPS) + result.healed
    result.seconds = round(time.monotonic() - begin, 1)
    return result


def between_lives(case: Case, root: Path, number: int) -> None:
    """What people and machines do after a halt: the latch is released once the node has been replaced."""
    folders = [root / "checkpoints", *root.glob("spool-*/*/campaign-heal")]
    for folder in folders:
        latch = latches.standing((folder,))
        if latch is not None:
            for place in folders:
                latches.release(place, latch.latch_id, by="campaign", reason="node replaced")
    if case.rot and number == 0:
        newest = list_checkpoints(root / "checkpoints")[-1]
        corrupt_file(newest.path, pattern="bit_flip", seed=number)
        try:
            verify(newest.path)
        except CheckpointError:
            return
        raise AssertionError("a corrupted checkpoint verifies")


def table(results: list[Result]) -> str:
    """The generated part of docs/healing.md."""
    lines = [
        "Written by `make campaign-heal`: accumulation of 4, clipping, dropout, batch norm, AdamW; audits every 3\n"
        f"steps, a checkpoint every 2, {life.STEPS} steps; `once` is right when repeated. *Equal*: parameters and\n"
        "optimizer state, to the bit. *Repeated*: steps computed more than once. After a halt the latch is released,\n"
        "and the fault is gone with its node. Where sizes differ, both are given, as under *ranks*.\n\n"
        "| fault | when | `on_fault` | ranks | equal | healed | lives | repeated | seen as |\n"
        "|---|---|---|---|---|---|---|---|---|\n",
    ]
    rows: dict[tuple[str, str, str], list[Result]] = {}
    for r in results:
        rows.setdefault((r.case.name, r.case.when, r.case.on_fault), []).append(r)
    for (name, when, on_fault), group in rows.items():

        def each(values: list[Any]) -> str:
            return " / ".join(map(str, values)) if len(set(values)) > 1 else str(values[0])

        seen = "; ".join(dict.fromkeys(e for r in group for e in r.events)) or "nothing"
        if group[0].case.rot:
            seen = "bytes that are not the manifest's: an older one is taken"
        if group[0].case.kill:
            seen = "-"
        cells = [
            name,
            when,
            on_fault,
            each([r.case.size for r in group]),
            each(["yes" if r.equal else "**no**" for r in group]),
            each([r.healed for r in group]),
            each([r.lives for r in group]),
            each(["-" if r.case.kill else r.recomputed for r in group]),
            seen,
        ]
        lines.append(f"| {' | '.join(map(str, cells))} |\n")
    return "".join(lines)


def write(results: list[Result], folder: Path) -> None:
    """After each case, so that a run that is ended leaves what it has."""
    folder.mkdir(parents=True, exist_ok=True)
    content = [{**asdict(r), "fine": r.fine} for r in results]
    (folder / "heal.json").write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")


def stored(content: dict[str, Any]) -> Result:
    """A result as `heal.json` has it."""
    case = Case(**content.pop("case"))
    content.pop("fine")
    return Result(case, **content)


def write_document(results: list[Result]) -> None:
    text = DOCUMENT.read_text(encoding="utf-8")
    head, _, rest = text.partition(BEGIN)
    tail = rest.partition(END)[2]
    DOCUMENT.write_text(f"{head}{BEGIN}{table(results)}{END}{tail}", encoding="utf-8")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--sizes", type=int, nargs="+", default=[3, 4])
    parser.add_argument("--only", default="", help="cases whose section, name and when hold this text")
    parser.add_argument("--out", type=Path, default=Path(__file__).parents[1] / "out")
    parser.add_argument("--document", action="store_true", help="also write the table in docs/healing.md")
    parser.add_argument(
        "--results",
        type=Path,
        nargs="+",
        help="run nothing: the table from earlier runs, later files replace earlier ones",
    )
    parser.add_argument("--minutes", type=float, default=60.0, help="begin no further case after this long")
    arguments = parser.parse_args()
    if arguments.results:
        found: dict[tuple[str, str, str, int], Result] = {}
        for path in arguments.results:
            for r in map(stored, json.loads(path.read_text(encoding="utf-8"))):
                found[r.case.name, r.case.when, r.case.on_fault, r.case.size] = r
        write_document(list(found.values()))
        return 0
    wanted = [c for c in cases(arguments.sizes) if arguments.only in f"{c.section} {c.name} {c.when} {c.on_fault}"]
    folder, begin = Path(tempfile.mkdtemp(prefix="campaign-heal-")), time.monotonic()
    results: list[Result] = []
    try:
        clean = {size: clean_digest(size, folder / f"clean-{size}") for size in sorted({c.size for c in wanted})}
        for number, case in enumerate(wanted):
            if time.monotonic() - begin > arguments.minutes * 60:
                print(f"stopped after {arguments.minutes:g} minutes, {len(wanted) - number} cases left", flush=True)
                break
            result = lived(case, folder / str(number), clean[case.size])
            results.append(result)
            print(
                f"[{number + 1}/{len(wanted)}] {'ok ' if result.fine else 'BAD'} {case.size} ranks, {case.on_fault}, "
                f"{case.name}, {case.when}: equal={result.equal} lives={result.lives} healed={result.healed} "
                f"repeated={result.recomputed} {result.seconds} s {'; '.join(result.events)} {result.trouble}",
                flush=True,
            )
            shutil.rmtree(folder / str(number), ignore_errors=True)
            write(results, arguments.out)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    bad = [r for r in results if not r.fine]
    if arguments.document and len(results) == len(wanted):
        write_document(results)
    print(f"{len(results) - len(bad)} of {len(wanted)} cases as they must be, {time.monotonic() - begin:.0f} s")
    return 1 if bad or len(results) < len(wanted) else 0


def clean_digest(size: int, root: Path) -> str:
    """Final parameters and optimizer state of a run in which nothing is wrong."""
    (root / "checkpoints").mkdir(parents=True)
    found = ranks.run(life.train, size, str(root), {"on_fault": "observe"})
    digests = {value["digest"] if kind == "value" else str(value) for kind, value in found}
    assert len(digests) == 1, found
    assert not any(v["events"] for _, v in found), found
    return str(digests.pop())


if __name__ == "__main__":
    sys.exit(main())
