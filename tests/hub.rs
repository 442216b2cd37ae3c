//! Models from a hub and from a bucket, through job files and the built program: `hub.py` has both servers, and says what a case
//! shows.

use crate::support::cases_of;

fn cases(names: &[&str]) {
    cases_of("hub.py", names, &[]);
}

#[test]
fn a_model_is_fetched_once_and_pinned() {
    cases(&["fetched", "moved", "inspected"]);
}

#[test]
fn an_adapter_is_fetched_once_and_pinned() {
    cases(&["adapter"]);
}

#[test]
fn downloads_are_resumed_and_verified() {
    cases(&["resumed", "corrupted"]);
}

#[test]
fn what_cannot_be_fetched_is_said_in_a_line() {
    cases(&["gated", "missing", "offline", "full"]);
}

#[test]
fn the_cache_is_shared_with_hugging_faces_own_client() {
    cases(&["shared"]);
}

#[test]
fn several_processes_fetch_once() {
    cases(&["together"]);
}

#[test]
fn a_model_in_a_bucket_is_fetched_once() {
    cases(&["bucket"]);
}
