//! Any bytes as an Arrow file, planned and read. Start from a corpus of small real files.
#![no_main]

#[path = "../table_file.rs"]
mod table_file;

use libfuzzer_sys::fuzz_target;

fuzz_target!(|data: &[u8]| table_file::plan_and_read("a.arrow", data));
