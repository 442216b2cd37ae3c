//! Queue addresses: any text is an address or one line; the password shows in neither.
#![no_main]

use gristmill::queue::QueueUrl;
use libfuzzer_sys::fuzz_target;

fuzz_target!(|text: &str| {
    match text.parse::<QueueUrl>() {
        Err(error) => assert!(!error.to_string().contains('\n')),
        Ok(url) => {
            // The shown form is an address itself, and shows the same.
            let shown = url.to_string();
            let again: QueueUrl = shown.parse().expect("what is shown is an address");
            assert_eq!(again.to_string(), shown);
        }
    }
});
