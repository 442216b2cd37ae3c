//! Any text as a job file: it is read and checked, or refused in one line.
#![no_main]

use std::path::Path;

use gristmill::job::{Job, JobFile};
use libfuzzer_sys::fuzz_target;

fuzz_target!(|text: &str| {
    for name in ["job.yaml", "job.json"] {
        let checked = JobFile::parse(text, name).and_then(|parsed| Job::check(parsed, name, Path::new(".")));
        if let Err(error) = checked {
            assert!(!error.to_string().contains('\n'), "{error}");
        }
    }
});
