"""What the verdict engine says: frozen records that are the same on every rank that read the same rows.

Nothing here measures, exports or acts. Flow: judge -> **Judgement** -> contain, event, metrics.
"""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

ATTRIBUTED, INCONCLUSIVE, SOFTWARE, UNDEFINED = "attributed", "inconclusive", "software", "undefined"
CLEAN, DIFFERS = "clean", "differs"

GRADIENT_NORM, GRADIENT_CHECKSUM = "gradient_norm", "gradient_checksum"
ALLREDUCE_CONSERVATION, WEIGHT_CHECKSUM, REPLAY = "allreduce_conservation", "weight_checksum", "replay"
#: Checks whose numbers travel in every row.
ROW_CHECKS = (GRADIENT_NORM, GRADIENT_CHECKSUM, ALLREDUCE_CONSERVATION, WEIGHT_CHECKSUM)

REDUCE, OPTIMIZER_COMPUTE, BACKWARD_COMPUTE = "reduce", "optimizer compute", "backward compute"
WEIGHTS_AT_REST, STATE_AT_REST, CODE, TRANSPORT = "weights at rest", "optimizer state at rest", "code", "transport"

#: From this code on a judgement contains: `on_fault` acts.
CONTAINS_FROM = 5

_NOTHING: Mapping[str, Any] = MappingProxyType({})


@dataclass(frozen=True, slots=True)
class Verdict:
    """One check of one step that found the replicas not to agree. A clean check produces none.

    Attributes:
        step: training step of the exchange that showed it.
        check: name of the check.
        kind: `attributed`, `inconclusive` or `software` (`undefined` never becomes a verdict, only a result).
        suspects: ranks that it names; empty unless `attributed`.
        differing: ranks outside the majority, or all ranks where no strict majority is.
        candidates: ranks that could be at fault where none can be named.
        persistence: `persistent` or `transient` for an attributed replay, else None.
        path: where the fault entered, one of the words of docs/contracts.md.
        contains: the state is proven to differ, so `on_fault` acts.
        new: a transition, which is one event; False while the same difference lasts.
        last_clean_step: newest step whose state this leaves clean; None when none is known.
        trust_needed: what a resume must ask of a checkpoint: `verified` or `checked`.
        sentence: one sentence for a person.
        evidence: values that JSON can hold, identical on all ranks; digests are 16 hex digits.
    """

    step: int
    check: str
    kind: str
    suspects: tuple[int, ...] = ()
    differing: tuple[int, ...] = ()
    candidates: tuple[int, ...] = ()
    persistence: str | None = None
    path: str = CODE
    contains: bool = False
    new: bool = True
    last_clean_step: int | None = None
    trust_needed: str = "checked"
    sentence: str = ""
    evidence: Mapping[str, Any] = field(default_factory=lambda: _NOTHING)


@dataclass(frozen=True, slots=True)
class Judgement:
    """All that one exchange showed.

    Attributes:
        verdicts: new and lasting verdicts.
        checks: check -> `clean`, `differs`, `undefined` or `skipped:<reason>`; a check that was not due is absent.
        group_sizes: check -> how many ranks share each rank's fingerprint.
        code: severity, 0 (clean) to 6 (attributed and containing); from `CONTAINS_FROM` on it contains.
        digest: 63-bit digest of step, checks, kinds and suspects, for the second collective.
        step: the group's step number.
        size: number of ranks.
        deviations: robust deviation (>= 0, in MADs) of each rank's local gradient norm; a hint, never a proof.
        nonfinite_origin: ranks whose local gradient alone holds Inf or NaN; a hint.
        calibration_outliers: ranks of the one rank or node that failed all its calibration edges; never halts.
        num_sets: replica sets that were judged apart; 1 where all ranks hold the same state.
    """

    verdicts: tuple[Verdict, ...]
    checks: tuple[tuple[str, str], ...]
    group_sizes: Mapping[str, tuple[int, ...]]
    code: int
    digest: int
    step: int
    size: int
    deviations: tuple[float, ...] = ()
    nonfinite_origin: tuple[int, ...] = ()
    calibration_outliers: tuple[int, ...] = ()
    num_sets: int = 1

    def distinct(self, check: str) -> int:
        """Distinct fingerprints of a check in `group_sizes`: 1 where every set agrees, one more for each split."""
        return round(sum(n / size for size, n in Counter(self.group_sizes[check]).items())) - self.num_sets + 1

    @classmethod
    def void(cls, step: int, size: int = 0) -> Judgement:
        """A judgement that says nothing, for a rank whose own judging failed: it still takes part in `combine`."""
        checks = tuple((check, "skipped:error") for check in ROW_CHECKS)
        return cls((), checks, {}, 0, digest_of(step, ()), step, size)


def severity(verdicts: Iterable[Verdict], checks: Iterable[tuple[str, str]] = ()) -> int:
    """The code of a judgement; whatever contains ranks above whatever does not."""
    code = 1 if any(result == UNDEFINED for _, result in checks) else 0
    for verdict in verdicts:
        plain, containing = {ATTRIBUTED: (4, 6), INCONCLUSIVE: (3, 5), SOFTWARE: (2, 2)}[verdict.kind]
        code = max(code, containing if verdict.contains else plain)
    return code


def digest_of(step: int, verdicts: Iterable[Verdict]) -> int:
    """A 63-bit digest of what the ranks must agree on before any of them acts."""
    content = [step, sorted([v.check, v.kind, list(v.suspects), v.step] for v in verdicts)]
    raw = hashlib.blake2b(json.dumps(content).encode(), digest_size=8).digest()
    return int.from_bytes(raw, "little") >> 1
