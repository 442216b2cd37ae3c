//! Any bytes as each record of a ledger: read, or refused in one line that names the key.
#![no_main]

use std::path::Path;

use gristmill::dataset::store::location::Location;
use gristmill::ledger::entry::LogEntry;
use gristmill::ledger::order::ControlRecord;
use gristmill::ledger::record::{
    AttemptEnd, AttemptRecord, Commit, Digest, Generation, Record, RetriedRows, Spend, Success, decode,
};
use gristmill::ledger::{JobRecord, Store};
use libfuzzer_sys::fuzz_target;

fn read<R: Record>(store: &Store, bytes: &[u8]) {
    if let Err(error) = decode::<R>(store, "a/b.json", bytes) {
        let line = error.to_string();
        assert!(line.contains("a/b.json") && !line.contains('\n'), "{line}");
    }
}

fuzz_target!(|bytes: &[u8]| {
    let output = Location::parse("/tmp", Path::new("/")).expect("a folder");
    let store = Store::new(&output).expect("a store");
    let _ = LogEntry::decode(&store, "a/b.json", bytes);
    read::<JobRecord>(&store, bytes);
    read::<AttemptRecord>(&store, bytes);
    read::<AttemptEnd>(&store, bytes);
    read::<Commit>(&store, bytes);
    read::<Digest>(&store, bytes);
    read::<Success>(&store, bytes);
    read::<Generation>(&store, bytes);
    read::<RetriedRows>(&store, bytes);
    read::<Spend>(&store, bytes);
    read::<ControlRecord>(&store, bytes);
});
