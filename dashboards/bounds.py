"""Is a query's answer small however large the job is? Reads the query, never runs it.

A query passes when the labels that its answer can be told apart by hold none that grows with ranks, nodes or jobs, or
when a topk limits them. Over a range, topk chooses anew at every step, so its argument must be pinned with `@ end()`.
Labels of our metrics come from the two catalogues; of any other metric nothing is known, and all may grow.
Flow: *.json -> queries -> **bounds** -> the tests.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import promql_parser as promql
from sdcwatch.catalog import METRICS
from sdcwatch_remediation.catalog import CATALOG

#: Labels with few values, whatever the fleet: everything enumerated, and what names a version or an alert.
FEW = frozenset(
    (
        *("check", "state", "reason", "outcome", "verdict", "covered", "severity", "alertname", "version", "code"),
        *("gate", "result", "budget", "action", "mode", "where", "call"),
    )
)
#: A query about one of these is about one device: it has one rank and node at a time, and few over its life.
ONE_DEVICE = frozenset(("gpu_uuid", "UUID", "uuid"))
#: What an unknown metric may carry.
ANYTHING = frozenset(("*",))
#: The largest k of topk that a reader can still read.
MOST = 50
_SETS = ("and", "or", "unless")


def unbounded(expr: str, *, instant: bool) -> list[str]:
    """Why the answer of a query, variables filled in, may grow with the fleet; empty: it does not.

    Args:
        instant: one answer at the end of the range; a topk needs no pin then.
    """
    problems: list[str] = []
    left = _labels(promql.parse(expr), instant, problems) - FEW
    if left:
        problems.append(f"one series for each {', '.join(sorted(left))}: aggregate it, or take topk")
    return problems


def _labels(node: Any, instant: bool, problems: list[str]) -> frozenset[str]:
    """Labels by which the series of a (part of a) query differ, as far as they are not limited."""
    if isinstance(node, promql.VectorSelector):
        return _of_selector(node)
    if isinstance(node, promql.MatrixSelector):
        return _of_selector(node.vector_selector)
    if isinstance(node, (promql.ParenExpr, promql.UnaryExpr, promql.SubqueryExpr)):
        return _labels(node.expr, instant, problems)
    if isinstance(node, promql.Call):
        found = frozenset[str]().union(*(_labels(argument, instant, problems) for argument in node.args))
        return found | {node.args[1].val} if node.func.name == "label_replace" else found
    if isinstance(node, promql.AggregateExpr):
        return _of_aggregate(node, instant, problems)
    if isinstance(node, promql.BinaryExpr):
        return _of_binary(node, instant, problems)
    return frozenset()


def _of_selector(node: Any) -> frozenset[str]:
    pinned = {m.name for m in node.matchers.matchers if m.op == promql.MatchOp.Equal}
    if pinned & ONE_DEVICE:
        return frozenset()
    if node.name in METRICS:
        return frozenset(METRICS[node.name].all_labels) - pinned
    for metric in CATALOG:
        if metric.name == node.name:
            return (frozenset(metric.labels) | {"instance"}) - pinned
    return ANYTHING


def _of_aggregate(node: Any, instant: bool, problems: list[str]) -> frozenset[str]:
    inner = _labels(node.expr, instant, problems)
    word = str(node.op)
    if word in ("topk", "bottomk"):
        most = float(str(node.param))
        if most > MOST:
            problems.append(f"{word}({most:g}) is more than anybody reads; at most {MOST}")
        if not instant and not all(_selectors_pinned(node.expr)):
            problems.append(f"{word} over a range chooses anew at every step: pin its selectors with `@ end()`")
        return frozenset()
    if node.modifier is None:
        return frozenset()
    named = frozenset(node.modifier.labels)
    if node.modifier.type == promql.AggModifierType.Without:
        return inner - named
    return named if inner == ANYTHING else named & inner


def _of_binary(node: Any, instant: bool, problems: list[str]) -> frozenset[str]:
    left, right = (_labels(side, instant, problems) for side in (node.lhs, node.rhs))
    word = str(node.op)
    matching = node.modifier.matching if node.modifier is not None else None
    if word == "or":
        return left | right
    if word == "and" and matching is not None and matching.labels and not right - FEW:
        return frozenset()  # only what the few series of the right side share
    if word in _SETS:
        return left
    card = node.modifier.card if node.modifier is not None else None
    if card == promql.VectorMatchCardinality.OneToMany:
        return right
    return left or right


def _selectors_pinned(node: Any) -> Iterator[bool]:
    if isinstance(node, promql.MatrixSelector):
        node = node.vector_selector
    if isinstance(node, promql.VectorSelector):
        yield node.at is not None
    elif isinstance(node, promql.Call):
        for argument in node.args:
            yield from _selectors_pinned(argument)
    elif isinstance(node, promql.BinaryExpr):
        yield from _selectors_pinned(node.lhs)
        yield from _selectors_pinned(node.rhs)
    elif isinstance(node, (promql.ParenExpr, promql.UnaryExpr, promql.SubqueryExpr, promql.AggregateExpr)):
        yield from _selectors_pinned(node.expr)
