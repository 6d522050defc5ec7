"""The dashboard of the watchers: would a fault be seen, would the page arrive, would the node be replaced.

Upper half: ranks' checks, agents, scrapes and rules. Lower half: the remediation service. The scrape jobs' names are
variables, because they belong to the scrape config. Flow: **health** -> build -> JSON.
"""

from __future__ import annotations

from annotations import annotations
from grafana_foundation_sdk.builders import dashboard as builder
from links import HEALTH, JOB_OF
from panels import Panel, Query, frame, place, text_variable
from promql import END, outliers, worst

_AGENTS = 'job="$agents"'
_NODE = "training_node"
_NO_SERVICE = "no remediation service is scraped"
_NOTHING_YET = "nothing of this kind happened since the service started"


def _top_nodes(metric: str) -> str:
    """A gauge of the agents, on the nodes where it was largest in the range."""
    return outliers(_NODE, _NODE, metric, f"max by ({_NODE}) (max_over_time({metric}[$__range] {END}))")


def _counts(title: str, question: str, metric: str, label: str, *, width: int = 8, empty: str = _NOTHING_YET) -> Panel:
    return Panel(
        title,
        question,
        "none",
        [Query(f"sum by ({label}) ({metric})", "{{" + label.replace(", ", "}} {{") + "}}")],
        width=width,
        minimum=0,
        steps=True,
        empty=empty,
    )


WATCHING = (
    Panel(
        "Agents that answer",
        "Can Prometheus see every node? Scraped agents, and those of them that answer.",
        "none",
        [Query(f"count(up{{{_AGENTS}}})", "scraped"), Query(f"sum(up{{{_AGENTS}}})", "answer")],
        width=8,
        minimum=0,
        steps=True,
    ),
    Panel(
        "Oldest scrape",
        "Would an event be fetched soon? Age of the newest scrape as the agents saw it, on the nodes where it is "
        "oldest. An event waits at most this long.",
        "s",
        [
            Query(
                "time() - "
                + outliers(
                    _NODE,
                    _NODE,
                    "sdc_agent_last_scrape_timestamp_seconds",
                    f"time() - max by ({_NODE}) (sdc_agent_last_scrape_timestamp_seconds {END})",
                ),
                "{{training_node}}",
            )
        ],
        width=8,
        minimum=0,
    ),
    Panel(
        "Scrape time",
        "Are the agents slow to answer? Longest and median time of a scrape.",
        "s",
        [
            Query(f"max(scrape_duration_seconds{{{_AGENTS}}})", "longest"),
            Query(f"quantile(0.5, scrape_duration_seconds{{{_AGENTS}}})", "median"),
        ],
        width=8,
        minimum=0,
    ),
    Panel(
        "Events that no scrape has seen",
        "Is an event stuck on a node? More than 0 for longer than a scrape interval means that the path is broken.",
        "none",
        [Query(_top_nodes("sdc_agent_events_pending"), "{{training_node}}")],
        width=8,
        minimum=0,
        steps=True,
    ),
    Panel(
        "Ranks expected and alive",
        "Are all ranks watched? Ranks that jobs say they have, and living rank processes that agents see.",
        "none",
        [
            Query("sum(max by (training_job, training_cluster) (sdc_world_size))", "expected"),
            Query("sum(sdc_agent_ranks_seen)", "alive"),
        ],
        width=8,
        minimum=0,
        steps=True,
    ),
    Panel(
        "Series scraped",
        "Does our export stay small? Series of all agents, and of the largest one; at most 15 rank series a rank.",
        "none",
        [
            Query(f"sum(scrape_samples_scraped{{{_AGENTS}}})", "all agents"),
            Query(f"max(scrape_samples_scraped{{{_AGENTS}}})", "largest agent"),
        ],
        width=8,
        minimum=0,
        steps=True,
    ),
    Panel(
        "Seconds in checks and in steps",
        "What does a second of training cost in checks? Seconds per second on the costliest node, by check, and in "
        "steps as a whole.",
        "percentunit",
        [
            Query(
                "max by (check) (max by (training_node, check) (rate(sdc_check_seconds_total[$__rate_interval])))",
                "{{check}}",
            ),
            Query("max(rate(sdc_step_seconds_total[$__rate_interval]))", "steps, checks included"),
        ],
        minimum=0,
    ),
    Panel(
        "Oldest check",
        "Did a check stop running while training goes on? Age of the check that ran longest ago, in the jobs where "
        "it is oldest.",
        "s",
        [
            Query(
                worst(
                    "training_job",
                    "time() - min by (training_job) (sdc_last_check_timestamp_seconds)",
                    f"time() - min by (training_job) (sdc_last_check_timestamp_seconds {END})",
                ),
                "{{training_job}}",
            )
        ],
        minimum=0,
        links=(JOB_OF,),
    ),
    Panel(
        "Skips by reason",
        "Why do checks not run? Skips per second over all jobs.",
        "ops",
        [
            Query(
                "sum by (check, reason) (max by (training_job, check, reason) "
                "(rate(sdc_skips_total[$__rate_interval])))",
                "{{check}} {{reason}}",
            )
        ],
        width=8,
        minimum=0,
        empty="no check was skipped",
    ),
    Panel(
        "Refused and lost by agents",
        "Do agents drop anything? Series refused, lines that could not be read, requests refused, pushes that the OTLP "
        "collector did not take, since the agents began. Only refused requests may be harmless.",
        "none",
        [
            Query(
                "sum by (reason) (sdc_agent_series_dropped_total)",
                "series: {{reason}}",
            ),
            Query("sum(sdc_agent_parse_errors_total)", "unreadable lines"),
            Query(
                "sum by (reason) (sdc_agent_requests_refused_total)",
                "requests: {{reason}}",
            ),
            Query('sum by (result) (sdc_agent_otlp_requests_total{result!="taken"})', "OTLP: {{result}}"),
        ],
        width=8,
        minimum=0,
        steps=True,
    ),
    Panel(
        "Clocks",
        "Could a node's clock hide an event? Time of the newest step, by its own node's clock, less Prometheus's time: "
        "above zero a clock runs ahead. An event from more than 60 s ahead does not page.",
        "s",
        [
            Query("max(sdc_last_step_timestamp_seconds) - time()", "most ahead"),
            Query("quantile(0.5, sdc_last_step_timestamp_seconds) - time()", "median"),
        ],
        width=8,
    ),
    Panel(
        "Versions",
        "Does every part run the version that it should? Agents and services, by version.",
        "none",
        [
            Query("count by (version) (sdc_build_info)", "agent {{version}}"),
            Query("count by (version) (sdc_remediation_build_info)", "service {{version}}"),
        ],
        width=8,
        minimum=0,
        steps=True,
    ),
    Panel(
        "Watchdog",
        "Do the rules run? SDCWatchdog fires always; a gap is a time in which nothing could have paged.",
        "none",
        [Query('count(ALERTS{alertname="SDCWatchdog",alertstate="firing"}) > bool 0', "SDCWatchdog")],
        kind="states",
        width=16,
        words=[("0", "silent", "red"), ("1", "firing", "green")],
    ),
)

ACTING = (
    Panel(
        "Stopped",
        "Would the service act? 1 while a pause or the kill switch stops every action.",
        "none",
        [Query("max(sdc_remediation_stopped)", "service")],
        kind="states",
        width=8,
        words=[("0", "may act", "green"), ("1", "stopped", "red")],
        empty=_NO_SERVICE,
    ),
    Panel(
        "Mode",
        "What is each action allowed to do by default?",
        "none",
        [Query("max by (action, mode) (sdc_remediation_mode) == 1", "{{action}}: {{mode}}")],
        kind="states",
        width=8,
        words=[("1", "on", "blue")],
        empty=_NO_SERVICE,
    ),
    Panel(
        "Age of the worker's last round",
        "Does the service work, or only answer? More than two minutes is an alert.",
        "s",
        [Query("time() - max(sdc_remediation_last_round_timestamp_seconds)", "age")],
        width=8,
        minimum=0,
        empty=_NO_SERVICE,
    ),
    _counts(
        "Open cases",
        "Which cases are open, in which state?",
        "sdc_remediation_cases > 0",
        "state",
        empty="no case is open",
    ),
    Panel(
        "Time in state",
        "Does a case get on? Longest time that an open case has been in its state.",
        "s",
        [
            Query("max by (state) (sdc_remediation_state_seconds) > 0", "{{state}}"),
        ],
        width=8,
        minimum=0,
        empty="no case is open",
    ),
    _counts(
        "Closed cases",
        "How did cases end?",
        "sdc_remediation_closed_cases",
        "outcome",
        empty="no case is closed",
    ),
    Panel(
        "Trouble",
        "Does anything need a person? Overdue cases, requests with unknown outcome, errors in the service's own work.",
        "none",
        [
            Query("sum(sdc_remediation_overdue_cases)", "overdue cases"),
            Query("sum(sdc_remediation_unknown_outcomes_total)", "unknown outcomes"),
            Query("sum by (where) (sdc_remediation_errors_total)", "errors: {{where}}"),
        ],
        width=8,
        minimum=0,
        steps=True,
        empty=_NO_SERVICE,
    ),
    Panel(
        "Budget left",
        "How many replacements may still be made? At 0 cases wait.",
        "none",
        [Query("min by (budget) (sdc_remediation_budget_left)", "{{budget}}")],
        width=8,
        minimum=0,
        steps=True,
        empty=_NO_SERVICE,
    ),
    Panel(
        "Gates that said no",
        "What holds cases back? Gates that failed, since the service began.",
        "none",
        [Query('sum by (gate) (sdc_remediation_gates_total{result="fail"})', "{{gate}}")],
        width=8,
        minimum=0,
        steps=True,
        empty="no gate has failed",
    ),
    _counts(
        "Calls to the provider",
        "Does the provider take our calls? By call and answer.",
        "sdc_remediation_provider_calls_total",
        "call, code",
    ),
    _counts(
        "Deliveries from Alertmanager",
        "Do alerts arrive? Webhook deliveries by the status that the service gave.",
        "sdc_remediation_deliveries_total",
        "code",
    ),
    _counts(
        "Alerts in deliveries", "What became of the alerts that arrived?", "sdc_remediation_alerts_total", "result"
    ),
    _counts(
        "Proof from agents",
        "Do agents answer when they are asked for the event? Answers by result.",
        "sdc_remediation_agent_answers_total",
        "result",
        width=12,
    ),
    _counts(
        "Requests without a right",
        "Does somebody knock who must not come in? Requests refused for their credential, by reason.",
        "sdc_remediation_auth_failures_total",
        "reason",
        width=12,
    ),
)


def health() -> builder.Dashboard:
    """The dashboard, not yet JSON."""
    built = frame(
        HEALTH,
        "Exporter and remediation health: silent data corruption",
        "Whether a fault would be seen, the page would arrive, and the node would be replaced.",
    ).with_variable(text_variable("agents", "Agents' scrape job", "sdcwatch"))
    for mark in annotations(""):
        built = built.annotation(mark)
    for panel in place((*WATCHING, *ACTING)):
        built = built.with_panel(panel)
    return built
