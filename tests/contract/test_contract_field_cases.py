"""Which test holds which of the known failures of others, from the training loop to the dashboard: all are there."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

TESTS = Path(__file__).parents[1]
#: Number of the case, what it is, and the tests of the whole kind.
CASES: dict[str, tuple[str, ...]] = {
    "1 buffers that differ by design": (
        "exporter/field_cases/test_field_software.py::test_buffers_that_differ_by_design_are_no_mismatch",
    ),
    "2 a check inside no_sync": (
        "exporter/field_cases/test_field_software.py::test_under_no_sync_the_check_waits_for_the_sync_step",
        "exporter/field_cases/test_field_software.py::test_a_parameter_used_only_in_a_no_sync_micro_step_is_no_mismatch",
        "exporter/field_cases/test_field_software.py::test_replicas_that_code_parted_are_software",
        "exporter/field_cases/test_field_software.py::test_a_reduce_that_ddp_did_not_finish_is_its_own_error_and_no_verdict",
    ),
    "3 loss scales that drift apart": (
        "exporter/field_cases/test_field_software.py::test_loss_scales_that_drift_apart_are_named_as_such",
        "exporter/field_cases/test_field_audits.py::test_a_loss_scale_that_overflows_costs_one_audit_and_accuses_nobody",
    ),
    "4 a skipped step, a dropped batch": (
        "exporter/field_cases/test_field_software.py::test_one_rank_that_goes_its_own_way_neither_hangs_nor_blames",
        "exporter/field_cases/test_field_software.py::test_step_numbers_that_drift_apart_split_no_cadence",
        "exporter/field_cases/test_field_values.py::test_a_backward_that_ddp_does_not_reduce_is_none_of_ours",
        "exporter/test_verdict_transport.py::test_a_loop_that_numbers_its_steps_otherwise_is_software",
    ),
    "5 a gradient-norm abort across ranks": (
        "exporter/field_cases/test_field_values.py::test_nan_on_all_ranks_is_counted_and_aborts_nothing",
        "exporter/field_cases/test_field_values.py::test_a_dropped_batch_is_no_outlier",
        "exporter/field_cases/test_field_values.py::test_two_replicas_name_nobody",
        "exporter/field_cases/test_field_values.py::test_mixed_devices_are_not_compared_before_the_reduce",
    ),
    "6 NaN and signed zero": (
        "exporter/field_cases/test_field_values.py::test_nan_payloads_and_signed_zeros_are_bits",
        "exporter/field_cases/test_field_values.py::test_equal_nan_bits_are_agreement_on_real_ranks",
    ),
    "7 tied weights": (
        "exporter/field_cases/test_field_values.py::test_tied_weights_count_once",
        "exporter/test_coverage.py::test_tied_parameters_are_counted_once",
    ),
    "8 schemas that differ per rank": (
        "exporter/field_cases/test_field_software.py::test_schemas_that_differ_are_one_clear_error_on_all_ranks",
        "exporter/field_cases/test_field_software.py::test_ignored_parameters_of_one_rank_are_not_compared",
        "exporter/field_cases/test_field_software.py::test_parameters_frozen_after_the_wrap_neither_hang_nor_blame",
        "exporter/test_start.py::test_schema_digest_sees_names_shapes_and_dtypes",
    ),
    "9 odd tensors": (
        "exporter/field_cases/test_field_values.py::test_odd_tensors_are_hashed_by_value",
        "exporter/field_cases/test_field_values.py::test_tensors_without_bytes_are_skipped_and_never_raise",
        "exporter/field_cases/test_field_audits.py::test_odd_parameters_train_on_real_ranks",
    ),
    "10 a resume on rank 0 only": (
        "exporter/field_cases/test_field_software.py::test_a_resume_that_only_rank_0_loaded_is_software_though_it_is_outvoted",
    ),
    "11 a step that is not deterministic": (
        "exporter/field_cases/test_field_replay.py::test_a_step_that_is_not_deterministic_is_skipped_and_never_judged",
    ),
    "12 a replay that changes training": (
        "exporter/field_cases/test_field_replay.py::test_an_audit_leaves_training_as_it_was",
        "exporter/test_replay.py::test_a_replay_leaves_no_trace",
        "exporter/test_replay.py::test_a_replay_leaves_the_attributes_of_modules_alone",
    ),
    "13 a corrupt checkpoint on any node": (
        "exporter/field_cases/test_field_software.py::test_a_corrupt_checkpoint_is_the_same_nan_everywhere_and_accuses_nobody",
        "exporter/test_same_step.py::test_after_a_replacement_the_same_step_accuses_nobody_and_steps_back",
    ),
    "14 uninitialised padding": (
        "exporter/field_cases/test_field_software.py::test_uninitialised_padding_is_not_compared",
    ),
    "15 uneven inputs": (
        "exporter/field_cases/test_field_software.py::test_under_join_nothing_of_ours_is_collective",
        "exporter/field_cases/test_field_software.py::test_uneven_inputs_without_join_end_as_they_do_without_the_monitor",
        "exporter/test_monitor_bit_identity.py::test_weights_equal_under_join_with_uneven_inputs",
    ),
    "16 one rank raises inside a check": (
        "exporter/field_cases/test_field_software.py::test_our_own_exception_on_one_rank_is_counted_and_all_go_on",
        "exporter/test_monitor_lifecycle.py::test_an_exception_in_a_check_of_ours_on_one_rank_is_counted_and_training_goes_on",
    ),
    "17 a second thread or communicator": (
        "exporter/field_cases/test_field_values.py::test_collectives_come_only_from_the_training_thread_and_after_backward",
        "exporter/field_cases/test_field_values.py::test_a_backward_that_ddp_does_not_reduce_is_none_of_ours",
    ),
    "18 a host read per tensor": (
        "exporter/field_cases/test_field_values.py::test_host_reads_do_not_grow_with_the_model_and_are_none_off_cadence",
    ),
    "19 cold start, zero variance, warm-up, resume": (
        "exporter/field_cases/test_field_values.py::test_the_norm_of_a_real_run_is_unsuspected_from_its_first_step",
        "exporter/test_norm_history.py::test_false_rate_over_ten_thousand_gaussian_steps",
        "exporter/test_norm_history.py::test_what_healthy_runs_do_is_not_flagged",
        "exporter/test_norm_history.py::test_a_resume_begins_without_a_flag_whatever_the_norm",
    ),
    "20 one huge value blinds the detector": (
        "exporter/field_cases/test_field_values.py::test_a_real_spike_is_seen_after_a_huge_one",
        "exporter/test_norm_history.py::test_one_outlier_does_not_blind_it_to_the_next",
    ),
    "21 where a NaN began": (
        "exporter/field_cases/test_field_values.py::test_the_rank_where_a_nan_began_is_known_after_the_all_reduce",
        "exporter/test_verdict_gradient.py::test_the_rank_whose_gradient_became_nan_is_the_origin_and_only_a_hint",
    ),
    "22 two processes claim one rank": (
        "exporter/field_cases/test_field_values.py::test_a_second_process_that_claims_a_rank_is_refused",
        "exporter/test_spool_rank.py::test_a_second_process_cannot_be_the_same_rank",
    ),
    "23 rows in the wrong slots": (
        "exporter/field_cases/test_field_values.py::test_rows_in_the_wrong_slots_blame_nobody",
        "exporter/test_verdict_transport.py::test_a_row_that_is_not_its_ranks_own_blames_nobody",
    ),
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
    "36 many nodes suspected at once": (
        "remediation/test_service_field_cases.py::test_ten_suspected_nodes_are_a_bad_detector_and_none_is_touched",
        "remediation/test_service_field_cases.py::test_a_slow_drip_of_suspects_ends_at_the_breaker",
    ),
    "37 a rank is not a node": (
        "remediation/test_service_field_cases.py::test_the_node_that_a_rank_ran_on_then_is_meant_not_where_it_runs_now",
    ),
    "38 labels of the scraper": (
        "remediation/test_service_alerts.py::test_scrape_labels_are_not_read",
        "remediation/test_service_alerts.py::test_every_label_that_is_kept_has_a_strict_form",
        "remediation/test_service_cases.py::test_a_node_name_that_does_not_fit_the_instance_is_refused",
    ),
    "39 a name reused by a new instance": (
        "remediation/test_service_cases.py::test_a_name_reused_by_a_new_instance_is_refused",
        "remediation/test_service_cases.py::test_an_instance_launched_after_the_fault_is_refused",
    ),
    "40 stale work after a restart": (
        "remediation/test_service_cases.py::test_a_service_that_was_down_for_days_replays_nothing",
        "remediation/test_service_field_cases.py::test_what_a_pause_of_days_held_up_is_not_done_when_it_ends",
        "remediation/test_service_cases.py::test_stale_evidence_expires",
    ),
    "41 an ended drain, a foreign cordon": (
        "remediation/test_service_field_cases.py::"
        "test_a_case_ended_between_quarantine_and_replacement_replaces_nothing",
        "remediation/test_action_acts.py::test_a_node_that_others_took_out_of_service_holds_the_case",
    ),
    "42 label text in a command": (
        "remediation/test_service_alerts.py::test_a_hostile_node_name_opens_nothing",
        "remediation/test_action_acts.py::test_a_hostile_job_name_or_comment_in_slurms_output_is_not_taken_for_ours",
        "remediation/test_hyperpod_action_outcomes.py::test_nothing_is_sent_for_what_is_no_instance_id",
        "remediation/test_service_hostile_labels.py::test_no_label_starts_a_process_or_opens_a_connection",
        "remediation/test_service_hostile_labels.py::test_a_hostile_job_name_of_a_proven_event_reaches_no_command",
    ),
    "43 a success with failures inside": (
        "remediation/test_hyperpod_action_outcomes.py::test_answers_are_read_to_the_end",
        "remediation/test_hyperpod_action_outcomes.py::"
        "test_of_an_answer_about_26_ids_only_the_one_that_was_asked_for_counts",
        "remediation/test_hyperpod_action_outcomes.py::test_26_ids_in_one_call_are_never_sent",
        "remediation/test_simulator_wire.py::test_replace_refuses_what_botocore_lets_through",
        "remediation/test_hyperpod_action_outcomes.py::test_each_fault_has_its_outcome",
        "remediation/test_service_cases.py::test_it_is_not_done_before_another_instance_runs",
    ),
    "44 credentials that expired": (
        "remediation/test_hyperpod_action_outcomes.py::test_expired_credentials_are_looked_up_again",
        "remediation/test_service_field_cases.py::test_a_refusal_at_the_first_use_costs_an_attempt_and_never_the_case",
        "remediation/test_service_cases.py::test_refusals_end_after_three_attempts",
    ),
    "45 two replicas, a short lease, a locked database, a kill": (
        "remediation/test_service_schedules.py::test_nothing_is_replaced_twice_or_wrongly_whatever_happens",
        "remediation/test_service_kills.py::test_five_kills_replace_one_node_each_and_once",
        "remediation/test_service_kills.py::test_two_processes_on_postgresql_are_killed_and_replace_once",
        "remediation/test_service_database.py::test_who_slept_through_its_lease_cannot_write",
        "remediation/test_service_alerts.py::test_a_locked_database_is_a_503_and_the_retry_succeeds",
        "remediation/test_service_field_cases.py::test_a_database_that_locks_right_after_the_call_costs_no_second_call",
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


def test_no_field_case_is_left_out() -> None:
    """One row a case, from the first to the last, in order."""
    assert [int(case.split()[0]) for case in CASES] == list(range(1, 47))
