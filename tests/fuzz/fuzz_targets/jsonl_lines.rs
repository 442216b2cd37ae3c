//! Any bytes as lines: scanning and reading never panic and see the same rows.
#![no_main]

use bytes::Bytes;
use gristmill::dataset::lines::cutter::Piece;
use gristmill::dataset::lines::reader::{IdHasher, parse_piece, scan_piece};
use gristmill::dataset::plan::Format;
use libfuzzer_sys::fuzz_target;

fuzz_target!(|data: &[u8]| {
    for format in [Format::Jsonl, Format::OpenaiBatch, Format::Text] {
        let piece = Piece::Lines {
            start: 0,
            bytes: Bytes::copy_from_slice(data),
        };
        let rows = parse_piece(&piece, format).len();
        assert_eq!(scan_piece(piece, format, &IdHasher::default()).rows.len(), rows);
    }
});
