//! Table of contents: first what the tests share, then a file a row of the table in `tests/README.md`.

mod bucket;
mod job;
mod metadata;
mod scene;
mod services;
mod suite;
mod worker_set;

mod brokers;
mod controls;
mod failpoints;
mod kills;
mod leaving;
mod limits;
mod liveness;
mod lost_queues;
mod membership;
mod one_machine;
mod orders;
mod other_models;
mod parts;
mod pauses;
mod poison;
mod proxied;
mod requests;
mod skew;
mod stores;
mod two_jobs;
