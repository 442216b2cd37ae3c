//! Any bytes as a Parquet footer: an answer or one line, in bounded memory.
#![no_main]

use gristmill::dataset::parquet::footer::decode_footer;
use libfuzzer_sys::fuzz_target;

fuzz_target!(|data: &[u8]| {
    if let Err(why) = decode_footer(data, 1 << 20) {
        assert!(!why.is_empty());
    }
});
