//! The batch service as its clients see it: OpenAI's own client, requests that no client sends, webhooks, limits, and kills.

use crate::skips::lacks;
use crate::support::cases_of;

/// Each group of cases runs beside the others; `serve/run.py` says what a case shows.
fn cases(names: &[&str], requests: u32) {
    cases_of(
        "serve/run.py",
        names,
        &["--requests", &requests.to_string(), "--kills", "3"],
    );
}

#[test]
fn the_official_client_gets_each_answer_once() {
    cases(&["round_trip", "text_completions", "uploads"], 200);
}

#[test]
fn batches_end_as_they_should() {
    cases(
        &[
            "broken_lines",
            "kept_lines",
            "early_output",
            "cancel",
            "turns",
            "expiry",
        ],
        100,
    );
}

#[test]
fn repeated_and_odd_requests_are_answered() {
    cases(&["retries", "lists", "tenants", "odd_requests"], 10);
}

#[test]
fn kills_lose_and_repeat_no_request() {
    cases(&["kills"], 100);
}

#[test]
fn services_and_workers_share_a_broker() {
    if std::env::var_os("GRISTMILL_TEST_RABBITMQ").is_none() {
        return lacks("services_and_workers_share_a_broker", "RabbitMQ");
    }
    cases(&["broker", "broker_away"], 100);
}

#[test]
fn batches_end_without_a_worker() {
    if std::env::var_os("GRISTMILL_TEST_RABBITMQ").is_none() {
        return lacks("batches_end_without_a_worker", "RabbitMQ");
    }
    cases(&["no_worker"], 60);
}

#[test]
fn the_official_client_verifies_webhooks() {
    cases_of("serve/webhooks.py", &["ends", "files"], &[]);
}

#[test]
fn webhooks_are_tried_until_they_are_taken() {
    cases_of("serve/webhooks.py", &["down_at_first", "given_up", "hanging"], &[]);
}

#[test]
fn webhooks_survive_kills_and_are_shared() {
    cases_of("serve/webhooks.py", &["killed", "kills", "two_services"], &[]);
}

#[test]
fn tenants_stay_within_their_limits() {
    cases_of("serve/webhooks.py", &["open_batches", "queued"], &[]);
}

#[test]
fn the_dashboard_shows_the_batches_of_a_tenant() {
    cases_of("serve/dashboard.py", &["batches", "cancelled", "listeners"], &[]);
}

#[test]
fn the_dashboard_shows_jobs_below_a_folder() {
    cases_of("serve/dashboard.py", &["outputs", "keys"], &[]);
}

#[test]
fn requests_get_responses_and_errors_in_the_words_of_the_api() {
    cases_of(
        "serve/rows.py",
        &["responses", "errors", "closed_schemas", "job_files"],
        &[],
    );
}
