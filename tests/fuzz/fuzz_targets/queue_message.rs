//! Bytes that a broker delivers: any of them decode or are refused, and what decodes survives the wire.
#![no_main]

use gristmill::queue::Message;
use libfuzzer_sys::fuzz_target;

fuzz_target!(|bytes: &[u8]| {
    if let Ok(message) = Message::decode(bytes) {
        let again = Message::decode(&message.encode().expect("a message encodes")).expect("and decodes");
        assert_eq!(again, message);
    }
});
