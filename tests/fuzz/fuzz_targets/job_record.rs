//! Any JSON as the job in a ledger's record: it is one that a job file can make, or refused in one line.
#![no_main]

use gristmill::job::Job;
use libfuzzer_sys::fuzz_target;

fuzz_target!(|text: &str| {
    let Ok(value) = serde_json::from_str(text) else { return };
    match Job::from_record(&value, "job.json") {
        Ok(job) => {
            let _ = job.recorded_columns(&value, "job.json");
            assert!((1..=1024).contains(&job.generate.n) && !job.input.uris.is_empty());
        }
        Err(error) => assert!(!error.to_string().contains('\n'), "{error}"),
    }
});
