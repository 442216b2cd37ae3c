//! Memory and time over a Parquet file of 1,000,000 rows in 200 row groups. Run it with
//! `cargo test --release --test dataset_memory -- --ignored --nocapture`.

use std::fs;
use std::path::Path;
use std::sync::Arc;
use std::time::Instant;

use arrow::array::{ArrayRef, Int64Array, RecordBatch, StringArray};
use gristmill::dataset::{PlanRequest, ShardReader, plan_inputs};
use parquet::arrow::ArrowWriter;
use parquet::file::properties::WriterProperties;

const ROWS: u64 = 1_000_000;
const GROUPS: u64 = 200;

fn peak_bytes() -> u64 {
    let status = fs::read_to_string("/proc/self/status").unwrap();
    let line = status.lines().find(|l| l.starts_with("VmHWM:")).unwrap();
    line.split_whitespace().nth(1).unwrap().parse::<u64>().unwrap() * 1024
}

/// `groups` row groups; every row with a text of its own of about 400 bytes.
fn write(path: &Path, groups: u64) {
    let group_rows = ROWS / groups;
    let word = |n: u64| n.wrapping_mul(0x9e37_79b9_7f4a_7c15);
    let text = |n: u64| {
        (0..20)
            .map(|k| format!("{:019} ", word(n * 20 + k)))
            .collect::<String>()
    };
    let batch = |from: u64, rows: u64| {
        let ids: ArrayRef = Arc::new(Int64Array::from_iter_values((from..from + rows).map(|n| n as i64)));
        let texts: ArrayRef = Arc::new(StringArray::from_iter_values((from..from + rows).map(text)));
        RecordBatch::try_from_iter([("id", ids), ("text", texts)]).unwrap()
    };
    let properties = WriterProperties::builder()
        .set_max_row_group_row_count(Some(group_rows as usize))
        .set_max_row_group_bytes(None)
        .set_dictionary_enabled(false)
        .set_offset_index_disabled(true)
        .set_compression(parquet::basic::Compression::SNAPPY)
        .build();
    let mut writer =
        ArrowWriter::try_new(fs::File::create(path).unwrap(), batch(0, 0).schema(), Some(properties)).unwrap();
    for from in (0..ROWS).step_by(5000) {
        writer.write(&batch(from, 5000)).unwrap();
    }
    writer.close().unwrap();
}

async fn check(groups: u64) {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("a.parquet");
    // Written by another process's worth of memory: the peak before reading is what counts from.
    write(&path, groups);
    fs::write("/proc/self/clear_refs", "5").unwrap();
    let before = peak_bytes();
    let request = PlanRequest {
        uris: vec!["a.parquet".into()],
        format: None,
        columns: Some(vec!["text".into()]),
        carry: vec!["id".into()],
        reserved: vec![],
        shard_rows: 4096,
        output_row_bytes: 200,
        limit: None,
    };
    let start = Instant::now();
    let plan = plan_inputs(&request, dir.path()).await.unwrap();
    let planned = start.elapsed();
    assert_eq!(plan.total_rows, ROWS);
    let reader = ShardReader::new(plan.files.clone(), plan.carry_schema.clone(), request.columns.clone());
    let mut rows = 0;
    for shard in &plan.shards {
        rows += reader.read(shard).await.unwrap().rows.len() as u64;
    }
    assert_eq!(rows, ROWS);
    let grown = peak_bytes().saturating_sub(before);
    println!(
        "{groups} row groups, {} MB: planned in {planned:.2?}, all {} shards read after {:.2?}, memory grew by {} MB",
        fs::metadata(&path).unwrap().len() >> 20,
        plan.shards.len(),
        start.elapsed(),
        grown >> 20
    );
    assert!(grown < 300 << 20, "memory grew by {grown} bytes");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
#[ignore = "writes and reads 400 MB; run by hand, alone"]
async fn a_million_rows_in_200_row_groups() {
    check(GROUPS).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
#[ignore = "writes and reads 400 MB; run by hand, alone"]
async fn a_million_rows_in_one_row_group() {
    check(1).await;
}
