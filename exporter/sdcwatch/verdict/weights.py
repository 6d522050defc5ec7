"""The weight check: parameters and optimizer state stay bit-identical, and where they part says who did it.

One row shows, in order of time, the state as the newest optimizer step began, as it ended, and as it stands now. The
first of them at which ranks part decides the verdict. Only the optimizer's own step can name a rank. Flow: columns ->
**weights** -> engine.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from sdcwatch.verdict.columns import Columns
from sdcwatch.verdict.group import Group
from sdcwatch.verdict.history import History
from sdcwatch.verdict.outcome import Outcome, lasting, still_apart
from sdcwatch.verdict.partition import UNIFORM, Partition, leavers, majority, outside, product, splits
from sdcwatch.verdict.records import (
    ATTRIBUTED,
    CLEAN,
    CODE,
    DIFFERS,
    INCONCLUSIVE,
    OPTIMIZER_COMPUTE,
    REDUCE,
    SOFTWARE,
    STATE_AT_REST,
    WEIGHT_CHECKSUM,
    WEIGHTS_AT_REST,
    Verdict,
)
from sdcwatch.verdict.sentences import capital, listing, others, spread, who
from sdcwatch.verdict.signs import CONFIGURATION, WORDS, counters, of_weights

_BEGIN, _END, _NOW, _CONFIG = "begin", "end", "now", "configuration"
_FIELDS = {
    _CONFIG: (),
    _BEGIN: ("weights_begin", "state_begin"),
    _END: ("weights_end", "state_end"),
    _NOW: ("weights_now",),
}


@dataclass(frozen=True, slots=True)
class _Stage:
    """One moment of a row: who agreed before it, who agrees at it, and what is new about the state there."""

    name: str
    before: Partition
    after: Partition
    first: bool  # the part of the state that splits was never seen equal in this epoch
    path: str
    version_fields: tuple[str, str]  # version counters at the moment before and at this one; "" is the last row's


@dataclass(frozen=True, slots=True)
class _Run:
    """One run of the check: what every stage's verdict is drawn from."""

    history: History
    group: Group
    step: int
    columns: Columns
    signs: tuple[str, ...]
    fresh: bool  # the row describes an optimizer step that no earlier row described


def judge_weights(history: History, group: Group, step: int, columns: Columns, gradient_differs: bool) -> Outcome:
    """Compares parameters and optimizer state as the rows of one step show them.

    Args:
        gradient_differs: the reduced gradient of this very step differs between ranks.
    """
    fresh = bool(columns.labels("optimizer_step_of")) or (
        columns.rows[0].optimizer_step_of is not None and columns.rows[0].optimizer_step_of != history.optimizer_step_of
    )
    signs = of_weights(columns, history.counters)
    # What differed as the last row was taken (a learning rate, say) is what the optimizer step in between ran under.
    seen_before = tuple(sign for sign in history.signs if sign not in signs)
    run = _Run(history, group, step, columns, signs + seen_before, fresh)
    ran = not columns.absent("weights_now") or (fresh and not columns.absent("weights_end"))
    stepped = fresh or columns.integers("optimizer_steps") != history.optimizer_steps
    events = history.opened(WEIGHT_CHECKSUM)
    new: list[Verdict] = []
    equal_throughout, part = not _configuration(columns), UNIFORM
    for stage in _stages(run):
        part = stage.after
        # As the row begins, `part` still holds what the previous row left; only what this row measured counts here.
        equal_throughout = equal_throughout and (stage.name == _CONFIG or not part)
        if splits(stage.before, part):
            new.append(_verdict(run, stage, gradient_differs))
        events = still_apart(events, part, group)
    lasts = lasting(events, step)
    still = still_apart(new, part, group)
    after = replace(_remember(run, equal_throughout and ran), signs=signs)
    if ran and (stepped or not history.counters):
        # Until an optimizer step is compared, what happened since the last one can still come to light in it.
        after = replace(after, counters=counters(columns))
    after = after.with_open(WEIGHT_CHECKSUM, lasts + still)
    result = (CLEAN if equal_throughout else DIFFERS) if ran or not equal_throughout else "skipped:disabled"
    return Outcome(result, (*lasts, *new), after, part if ran else None)


def _configuration(columns: Columns) -> Partition:
    return product(*(columns.labels(name) for name in CONFIGURATION))


def _stages(run: _Run) -> Iterator[_Stage]:
    history, columns = run.history, run.columns
    weights, state = history.weights or UNIFORM, history.state or UNIFORM
    seen_weights, seen_state = history.weights is not None, history.state is not None
    config = _configuration(columns)
    before = product(history.config or UNIFORM, weights, state)
    after = product(config, weights, state)
    yield _Stage(_CONFIG, before, after, history.config is None, CODE, ("", ""))
    moves: list[tuple[str, str, str | None, tuple[str, str]]] = []
    if run.fresh:
        moves.append((_BEGIN, "weights_begin", "state_begin", ("", "versions_begin")))
        moves.append((_END, "weights_end", "state_end", ("versions_begin", "versions_end")))
    moves.append((_NOW, "weights_now", None, ("versions_end" if run.fresh else "", "versions_now")))
    for name, weight_field, state_field, versions in moves:
        old_weights, old_state, before = weights, state, after
        first = False
        if not columns.absent(weight_field):
            weights = columns.labels(weight_field)
            first = not seen_weights and splits(old_weights, weights)
            seen_weights = True
        if state_field is not None and not columns.absent(state_field):
            state = columns.labels(state_field)
            first = first or (not seen_state and splits(old_state, state))
            seen_state = True
        after = product(config, weights, state)
        at_rest = WEIGHTS_AT_REST if splits(old_weights, weights) else STATE_AT_REST
        yield _Stage(name, before, after, first, OPTIMIZER_COMPUTE if name == _END else at_rest, versions)


def _remember(run: _Run, clean: bool) -> History:
    history, columns = run.history, run.columns
    weights, state = history.weights, history.state
    if not columns.absent("weights_now"):
        weights = columns.labels("weights_now")
    elif run.fresh and not columns.absent("weights_end"):
        weights = columns.labels("weights_end")
    if run.fresh and not columns.absent("state_end"):
        state = columns.labels("state_end")
    newest = columns.rows[0].optimizer_step_of if not columns.labels("optimizer_step_of") else None
    return replace(
        history,
        config=_configuration(columns),
        weights=weights,
        state=state,
        versions_now=columns.integers("versions_now"),
        optimizer_steps=columns.integers("optimizer_steps"),
        optimizer_step_of=newest if newest is not None else history.optimizer_step_of,
        weights_clean_step=run.step if clean else history.weights_clean_step,
    )


def _verdict(run: _Run, stage: _Stage, gradient_differs: bool) -> Verdict:
    signs = run.signs
    if stage.first and stage.name != _CONFIG:
        signs = (*signs, "first_check")
    signs += _code_wrote(run, stage)
    differing = outside(stage.after, run.group)
    base = Verdict(
        step=run.step,
        check=WEIGHT_CHECKSUM,
        kind=SOFTWARE,
        differing=differing,
        last_clean_step=run.history.checked,
        evidence=_evidence(run, stage, signs),
    )
    if signs:
        return replace(base, sentence=_software_sentence(run, stage, differing, signs))
    if stage.name != _END:
        return _at_rest(run, stage, base)
    doubts = _doubts(run, gradient_differs)
    suspects = leavers(stage.before, stage.after, run.group)
    if majority(stage.after, run.group) is None:
        doubts.append("no strict majority of ranks and nodes agrees")
    elif not suspects:
        doubts.append("the ranks that parted were apart from the majority before")
    if doubts:
        path = OPTIMIZER_COMPUTE if run.columns.same("gradient_begin") else REDUCE
        sentence = (
            f"{capital(who(run.group, differing))} differ after the optimizer step of step {_optimizer_step(run)}, and "
            f"nobody can be named: {listing(doubts)}."
        )
        return replace(base, kind=INCONCLUSIVE, candidates=differing, path=path, contains=True, sentence=sentence)
    sentence = (
        f"{capital(who(run.group, suspects))} computed a different optimizer step from the same gradient and the same "
        f"weights as {others(run.group, differing)}."
    )
    return replace(base, kind=ATTRIBUTED, suspects=suspects, path=OPTIMIZER_COMPUTE, contains=True, sentence=sentence)


def _code_wrote(run: _Run, stage: _Stage) -> tuple[str, ...]:
    """The sign that version counters give: code wrote to the parameters between the moment before and this one.

    They moved differently on different ranks, or they moved at all while the weights should have been at rest: a
    flipped bit moves none, and clipping moves only those of gradients.
    """
    begin, end = stage.version_fields
    if not end:
        return ()
    moved = run.columns.moved(run.columns.integers(begin) if begin else run.history.versions_now, end)
    if moved is None or not any(moved):
        return ()
    if len(set(moved)) > 1:
        return ("versions",)
    return ("written",) if stage.path == WEIGHTS_AT_REST and _no_step_between(run, stage) else ()


def _no_step_between(run: _Run, stage: _Stage) -> bool:
    """Whether no optimizer step lies between a stage and the moment before it."""
    if stage.version_fields[0]:
        return True
    # From the last row to this one: as the newest step begins it is the only one that may be counted.
    steps = run.columns.moved(run.history.optimizer_steps, "optimizer_steps")
    return steps is not None and set(steps) == {int(stage.name == _BEGIN)}


def _at_rest(run: _Run, stage: _Stage, base: Verdict) -> Verdict:
    what = "weights" if stage.path == WEIGHTS_AT_REST else "optimizer state"
    when = {
        _BEGIN: f"before the optimizer step of step {_optimizer_step(run)} began",
        _NOW: f"after the newest optimizer step and before step {run.step} used it",
    }[stage.name]
    sentence = (
        f"The {what} of {who(run.group, base.differing)} changed {when}: memory, or code that ran there only; "
        "nobody can be named unless a known-answer test fails there."
    )
    return replace(
        base, kind=INCONCLUSIVE, candidates=base.differing, path=stage.path, contains=True, sentence=sentence
    )


def _doubts(run: _Run, gradient_differs: bool) -> list[str]:
    """Why a difference after an optimizer step names nobody, although no sign says software."""
    columns, history = run.columns, run.history
    doubts = []
    if not columns.same("gradient_begin"):
        doubts.append("the gradient already differed, or was not measured, as the optimizer step began")
    if columns.absent("weights_begin") or columns.absent("state_begin"):
        doubts.append("the weights and optimizer state were not measured as the optimizer step began")
    ran = columns.rows[0].optimizer_step_of
    needed = history.weights_clean_step if history.weights_clean_step is not None else ran
    since = history.gradient_clean_since
    if gradient_differs or since is None or needed is None or since > needed:
        doubts.append("the reduced gradient was not seen clean at every step since the weights last agreed")
    return doubts


def _software_sentence(run: _Run, stage: _Stage, differing: tuple[int, ...], signs: tuple[str, ...]) -> str:
    what = listing([WORDS[sign] for sign in signs])
    if stage.name == _CONFIG:
        rest = "" if len(differing) == run.group.size else f" and {others(run.group, differing)}"
        return f"{capital(who(run.group, differing))}{rest} differ in {what}: software, no node is blamed."
    return (
        f"The weights or optimizer state of {who(run.group, differing)} differ, and with them {what}: software, no "
        "node is blamed."
    )


def _optimizer_step(run: _Run) -> int | str:
    step = run.columns.rows[0].optimizer_step_of
    return "unknown" if step is None else step


def _evidence(run: _Run, stage: _Stage, signs: tuple[str, ...]) -> dict[str, object]:
    shown = [name for name in signs if name in CONFIGURATION or name in ("hyperparameters", "environment")]
    fields = (*_FIELDS[stage.name], *shown, *(("gradient_begin",) if stage.name == _END else ()))
    return {
        "stage": stage.name,
        "signs": list(signs),
        "optimizer_step_of": run.columns.rows[0].optimizer_step_of,
        "gradient_clean_since": run.history.gradient_clean_since,
        "values": {name: spread(run.columns.values(name)) for name in fields if not run.columns.absent(name)},
    }
