"""Which test holds which of the known failures of others on the way from a rank to a page; each is still there."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

TESTS = Path(__file__).parents[1]
#: Number of the case, what it is, and the tests of the whole kind.
CASES: dict[str, tuple[str, ...]] = {
    "24 port clash, an agent that cannot bind": (
        "exporter/agent/test_agent_process.py::test_a_busy_port_is_one_sentence_for_the_training_log",
        "exporter/agent/test_agent_process.py::test_a_busy_port_is_a_clear_error",
        "exporter/agent/test_agent_process.py::test_starting_never_raises",
    ),
    "25 a monitor closed and made again in one process": (
        "exporter/test_monitor_lifecycle.py::test_a_second_monitor_is_refused_until_the_first_is_closed",
    ),
    "26 forks, signals, garbage collection": (
        "exporter/field_cases/test_field_export.py::test_workers_forked_in_mid_update_neither_hang_nor_export",
        "exporter/test_spool_rank.py::test_a_forked_child_writes_nothing_and_holds_no_claim",
        "exporter/test_spool_rank.py::test_a_forked_child_that_closes_does_not_end_the_rank",
    ),
    "27 a dead process keeps its last value": (
        "exporter/agent/test_agent_merge.py::test_a_newer_epoch_replaces_the_older_one_of_the_same_rank",
        "exporter/agent/test_agent_merge.py::test_a_dead_ranks_series_stay_until_its_epoch_expires",
        "exporter/agent/test_agent_process.py::test_counters_survive_kill_9_of_the_agent_and_of_a_rank",
        "exporter/test_rank_metrics_store.py::test_another_identitys_file_is_not_taken_over",
    ),
    "28 an unreachable collector": (
        "exporter/otlp/test_otlp_events.py::test_a_black_hole_delays_neither_the_exit_nor_a_scrape",
        "exporter/otlp/test_otlp_events.py::test_an_outage_loses_nothing",
    ),
    "29 names on two roads": (
        "exporter/otlp/test_otlp_roads.py::test_names_labels_and_values_are_the_same_on_both_roads",
        "contract/test_contract_alerts.py::test_every_metric_that_is_named_is_exported",
    ),
    "30 cardinality": (
        "exporter/test_rank_metrics_store.py::test_series_stop_at_their_cap_and_the_refused_are_counted",
        "exporter/agent/test_agent_merge.py::test_caps_hold_whatever_ranks_write",
        "exporter/agent/test_agent_merge.py::test_a_crash_loop_cannot_fill_the_spool",
    ),
    "31 the first increment": (
        "alert_rules/test_alert_timelines.py::test_the_page_comes_at_the_next_evaluation_however_slow",
        "alert_rules/test_alert_rules.py::test_cases_hold_at_both_evaluation_intervals",
    ),
    "32 a series that vanishes, a hold that outlives it": (
        "alert_rules/test_alert_timelines.py::test_the_page_comes_at_the_next_evaluation_however_slow",
        "e2e/alert_path/test_alert_path_once.py::test_every_rank_dies_after_the_event_and_the_page_arrives",
        "e2e/alert_path/test_alert_path_webhook.py::test_an_alert_that_outlives_the_replacement_opens_nothing",
    ),
    "33 firing, resolved, firing": (
        "e2e/alert_path/test_alert_path_webhook.py::test_firing_resolved_and_firing_again_around_a_reload_is_one_case",
    ),
    "34 twins": (
        "e2e/alert_path/test_alert_path_webhook.py::test_twins_that_do_not_know_of_each_other_are_one_case",
        "e2e/alert_path/test_alert_path_ha.py::test_one_page_and_one_case_whichever_half_is_gone",
        "remediation/test_service_alerts.py::test_twins_at_once_open_one_case",
    ),
    "35 5xx, 4xx and one bad alert in a batch": (
        "e2e/alert_path/test_alert_path_webhook.py::test_one_bad_alert_in_a_batch_costs_the_others_nothing",
        "e2e/alert_path/test_alert_path_webhook.py::test_what_the_service_could_not_take_is_delivered_when_it_can",
        "remediation/test_service_alerts.py::test_a_batch_is_judged_alert_by_alert",
    ),
    "46 an unresolved data source": (
        "dashboards/test_dashboard_files.py::test_provisioning_names_no_fixed_data_source",
        "dashboards/test_dashboard_files.py::test_a_committed_dashboard_has_nothing_to_complain_about",
        "dashboards/test_dashboard_files.py::test_lint_finds_what_the_sdk_lets_pass",
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_a_field_case_has_its_tests(case: str) -> None:
    """A test that was renamed or dropped would leave a failure that others have had without a guard."""
    for named in CASES[case]:
        path, _, function = named.partition("::")
        tree = ast.parse((TESTS / path).read_text(encoding="utf-8"))
        assert function in {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)}, named
