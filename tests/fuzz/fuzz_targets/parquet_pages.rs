//! Any bytes as a column chunk's pages.
#![no_main]

use gristmill::dataset::parquet::pages::{check_pages, parse_header};
use libfuzzer_sys::fuzz_target;

fuzz_target!(|data: &[u8]| {
    if let Ok((_, length)) = parse_header(data) {
        assert!(length <= data.len());
    }
    let _ = check_pages(data, 1 << 20, |_| None);
});
