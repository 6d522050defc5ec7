"""No order of faults, attempts and passing time makes `HyperPod` replace an instance twice, or lie about it."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from sdcwatch_remediation.actions.hyperpod import HyperPod
from sdcwatch_remediation.records import Outcome
from sdcwatch_remediation.simulator import Simulator, SimulatorConfig
from sdcwatch_remediation.simulator.faults import MENU, NODE_CODES

REPLACE = "BatchReplaceClusterNodes"
KINDS = sorted(set(MENU) - {"slow_answer", "paging_changes"})
"""Those two concern time-outs and listings; they have tests of their own."""

faults = st.builds(
    lambda kind, code: ("fault", {"kind": kind, "code": code}), st.sampled_from(KINDS), st.sampled_from(NODE_CODES)
)
steps = st.one_of(
    faults,
    st.tuples(st.just("replace"), st.integers(0, 2)),
    st.tuples(st.just("others"), st.integers(0, 2)),
    st.tuples(st.just("advance"), st.sampled_from([1, 30, 61, 400])),
)


@pytest.fixture(scope="module")
def world() -> Iterator[tuple[Simulator, HyperPod]]:
    """A simulator of three workers and two spares, and a provider for it."""
    config = SimulatorConfig.of_size("demo", nodes=3, spares=2, clock_factor=0.0, clock_start=1_790_000_000.0)
    with Simulator(config) as simulator:
        provider = HyperPod(
            "demo", region="us-west-2", endpoint_url=simulator.url, access_key_id="a", secret_access_key="b"
        )
        yield simulator, provider
        provider.close()


@settings(
    max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow]
)
@example(script=[("fault", {"kind": "drop_after"}), ("replace", 0), ("replace", 0), ("advance", 400), ("replace", 0)])
@example(script=[("fault", {"kind": "replaced_by_others"}), ("replace", 0), ("advance", 61), ("replace", 0)])
@example(script=[("fault", {"kind": "error_after"}), ("fault", {"kind": "throttle"}), ("replace", 1), ("replace", 1)])
@given(script=st.lists(steps, min_size=2, max_size=10))
def test_an_instance_is_replaced_at_most_once_and_the_outcome_never_lies(
    world: tuple[Simulator, HyperPod], script: list[tuple[str, object]]
) -> None:
    """One request a call; refused means no effect, accepted means an effect; and one replacement an id at most."""
    simulator, provider = world
    simulator.reset()
    ids = [str(node["instance_id"]) for node in simulator.state()["nodes"]]
    for what, value in script:
        if what == "fault":
            assert isinstance(value, dict)
            simulator.order(**value)
        elif what == "advance":
            assert isinstance(value, int)
            simulator.advance(value)
        elif what == "others":
            assert isinstance(value, int)
            if any(n["instance_id"] == ids[value] and n["status"] == "Running" for n in simulator.state()["nodes"]):
                simulator.others_replace(ids[value])
        else:
            assert isinstance(value, int)
            sent = len(simulator.calls(REPLACE))
            outcome = provider.replace(ids[value]).outcome
            calls = simulator.calls(REPLACE)
            assert len(calls) == sent + 1
            had_effect = calls[-1].affected == (ids[value],)
            assert outcome is not (Outcome.REFUSED if had_effect else Outcome.ACCEPTED)
    assert all(count == 1 for count in simulator.replacements().values())


def test_calls_at_the_same_time_replace_once(world: tuple[Simulator, HyperPod]) -> None:
    """Of eight calls for one instance at once exactly one is accepted, and the others are refused as in use."""
    simulator, provider = world
    simulator.reset()
    victim = str(simulator.state()["nodes"][0]["instance_id"])
    with ThreadPoolExecutor(8) as pool:
        results = list(pool.map(provider.replace, [victim] * 8))
    assert sorted(result.code for result in results) == [""] + ["InstanceIdInUse"] * 7
    assert simulator.replacements() == {victim: 1}
