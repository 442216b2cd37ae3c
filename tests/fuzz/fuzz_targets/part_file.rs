//! Any bytes as a part or data object: refused in one line, or decoded in bounded memory.
#![no_main]

use bytes::Bytes;
use gristmill::dataset::part_in;
use libfuzzer_sys::fuzz_target;

fuzz_target!(|data: &[u8]| {
    match part_in::open(&Bytes::copy_from_slice(data)) {
        Ok(reader) => {
            if let Ok(batches) = reader.build() {
                batches.take_while(Result::is_ok).for_each(drop);
            }
        }
        Err(why) => assert!(!why.is_empty()),
    }
});
