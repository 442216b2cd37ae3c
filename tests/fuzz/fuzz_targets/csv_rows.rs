//! Any bytes as CSV: cutting never panics and gives the same pieces however the bytes come, and scanning and reading see the same rows.
#![no_main]

use bytes::Bytes;
use gristmill::dataset::csv::layout::{CsvColumn, CsvTable, CsvType};
use gristmill::dataset::csv::reader::{CsvRowReader, scan_piece};
use gristmill::dataset::csv::records::CsvCutter;
use gristmill::dataset::lines::cutter::Piece;
use libfuzzer_sys::fuzz_target;

/// The pieces of bytes that come `size` at a time, as one; `None`: they are refused.
fn cut(data: &[u8], size: usize) -> Option<Vec<u8>> {
    let (mut cutter, mut pieces) = (CsvCutter::new(0, 1, b','), Vec::new());
    for part in data.chunks(size) {
        cutter.push(part, &mut pieces).ok()?;
    }
    cutter.finish(&mut pieces).ok()?;
    let bytes = |piece: Piece| match piece {
        Piece::Lines { bytes, .. } => bytes.to_vec(),
        Piece::TooLong { .. } => unreachable!("no input is so long"),
    };
    Some(pieces.into_iter().flat_map(bytes).collect())
}

fuzz_target!(|data: &[u8]| {
    let whole = cut(data, usize::MAX);
    assert_eq!(whole, cut(data, 3));
    assert!(whole.is_none_or(|bytes| bytes == data));
    for columns in 1..4 {
        let column = |n: usize| CsvColumn {
            name: format!("c{n}"),
            kind: [CsvType::String, CsvType::Int64, CsvType::Float64][n % 3],
        };
        let table = CsvTable {
            delimiter: ',',
            columns: (0..columns).map(column).collect(),
        };
        let piece = Piece::Lines {
            start: 0,
            bytes: Bytes::copy_from_slice(data),
        };
        let rows = CsvRowReader::new(table.clone(), |_| true).rows(&piece, 1, |_| true).rows.len();
        assert_eq!(scan_piece(piece, &table, false).rows.len(), rows);
    }
});
