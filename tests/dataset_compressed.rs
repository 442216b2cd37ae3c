//! Compressed lines: the rows of the file as it was before, read forward, and damage that is found at planning.

use std::fs;
use std::io::Write;
use std::path::Path;

use gristmill::dataset::lines::compression::{Codec, Compressed};
use gristmill::dataset::plan::Format;
use gristmill::dataset::{DatasetError, InputPlan, ShardReader, plan_inputs};
use proptest::prelude::*;

use crate::dataset_rows::{fields, read_all, request};

const CODECS: [(Codec, &str); 3] = [(Codec::Gzip, "gz"), (Codec::Zstd, "zst"), (Codec::Bzip2, "bz2")];

/// One member, frame or stream.
fn packed(codec: Codec, text: &[u8]) -> Vec<u8> {
    match codec {
        Codec::Gzip => {
            let mut writer = flate2::write::GzEncoder::new(Vec::new(), flate2::Compression::fast());
            writer.write_all(text).unwrap();
            writer.finish().unwrap()
        }
        Codec::Zstd => zstd::encode_all(text, 1).unwrap(),
        Codec::Bzip2 => {
            let mut writer = bzip2::write::BzEncoder::new(Vec::new(), bzip2::Compression::fast());
            writer.write_all(text).unwrap();
            writer.finish().unwrap()
        }
    }
}

async fn plan(dir: &Path, name: &str, carry: &[&str]) -> Result<InputPlan, String> {
    plan_inputs(&request(&[name], carry), dir)
        .await
        .map_err(|e| e.to_string())
}

#[tokio::test]
async fn every_format_of_lines_is_read_as_if_it_were_not_compressed() {
    let batch = r#"{"custom_id":"a","method":"POST","url":"/v1/chat/completions","body":{}}"#;
    for (name, text, format) in [
        ("a.jsonl", "{\"n\": 1}\n\n{\"n\": 2}\nbroken\n{\"n\": 4}", Format::Jsonl),
        ("a.ndjson", batch, Format::OpenaiBatch),
        ("a.txt", "one\r\n\nthree", Format::Text),
        ("a.csv", "n,t\n1,\"x\ny\"\n2,z\n3,w\n", Format::Csv),
        ("a.tsv", "n\tt\n1\tx,y\n", Format::Csv),
    ] {
        let dir = tempfile::tempdir().unwrap();
        fs::write(dir.path().join(name), text).unwrap();
        let plain = plan(dir.path(), name, &[]).await.unwrap();
        assert_eq!(plain.files[0].format, format);
        let (expected, _) = read_all(&plain, None).await.unwrap();
        for (codec, extension) in CODECS {
            // Two members that meet in the middle of a line.
            let (one, two) = text.as_bytes().split_at(text.len() / 2);
            let name = format!("{name}.{extension}");
            fs::write(
                dir.path().join(&name),
                [packed(codec, one), packed(codec, two)].concat(),
            )
            .unwrap();
            let found = plan(dir.path(), &name, &[]).await.unwrap();
            let bytes = text.len() as u64;
            assert_eq!(found.files[0].compressed, Some(Compressed { codec, bytes }));
            assert_eq!(
                (&found.shards, &found.layout.csv),
                (&plain.shards, &plain.layout.csv),
                "{name}"
            );
            let (rows, _) = read_all(&found, None).await.unwrap();
            let unnamed = |row: Result<_, String>| row.map_err(|why| why.split("`: ").last().unwrap().to_string());
            let rows: Vec<_> = fields(&rows).into_iter().map(unnamed).collect();
            let expected: Vec<_> = fields(&expected).into_iter().map(unnamed).collect();
            assert_eq!(rows, expected, "{name}");
        }
    }
}

#[tokio::test]
async fn what_is_no_whole_file_of_lines_is_refused_at_planning() {
    let dir = tempfile::tempdir().unwrap();
    let text: String = (0..200_000)
        .map(|n| format!("{{\"n\": {}}}\n", n * 7919 % 100_003))
        .collect();
    let refused = async |name: &str, bytes: &[u8], expected: &str| {
        fs::write(dir.path().join(name), bytes).unwrap();
        let error = plan(dir.path(), name, &[]).await.unwrap_err();
        assert!(
            error.contains(&format!("{name}` cannot be read: {expected}")) && !error.contains('\n'),
            "{error}"
        );
    };
    for (codec, extension) in CODECS {
        let whole = packed(codec, text.as_bytes());
        let name = format!("a.jsonl.{extension}");
        let cut = &whole[..whole.len() - 9];
        let middle = format!(
            "it ends in the middle of its {} data, behind byte {}",
            codec.as_str(),
            cut.len()
        );
        refused(&name, cut, &middle).await;
        let mut broken = whole.clone();
        broken[whole.len() / 2..][..50].fill(0x55);
        refused(
            &name,
            &broken,
            &format!("its {} data is damaged near byte ", codec.as_str()),
        )
        .await;
        let parquet = packed(codec, b"PAR1 and more");
        refused("a.parquet.gz", &parquet, "it is Parquet, compressed with").await;
        let twice = packed(codec, &packed(Codec::Gzip, b"{}\n"));
        refused(
            &name,
            &twice,
            "it is compressed with gzip twice, or by a method that is not supported",
        )
        .await;
    }
    refused(
        "a.jsonl.xz",
        b"\xfd7zXZ\0\0\0\0",
        "it is compressed with xz; decompress it first",
    )
    .await;
    // The name says so, the bytes do not: they are what they are.
    fs::write(dir.path().join("plain.csv.gz"), "n\n1\n").unwrap();
    let planned = plan(dir.path(), "plain.csv.gz", &[]).await.unwrap();
    assert_eq!((planned.total_rows, planned.files[0].compressed.is_none()), (1, true));
}

#[tokio::test]
async fn a_bomb_is_one_refusal_in_bounded_memory() {
    let dir = tempfile::tempdir().unwrap();
    let mut writer = zstd::Encoder::new(fs::File::create(dir.path().join("a.jsonl.zst")).unwrap(), 1).unwrap();
    writer.write_all(b"{\"t\": 1}\n").unwrap();
    (0..400).for_each(|_| writer.write_all(&[b' '; 1 << 20]).unwrap());
    writer.finish().unwrap();
    let before = crate::dataset_lines::peak_bytes();
    let error = plan(dir.path(), "a.jsonl.zst", &[]).await.unwrap_err();
    assert!(
        error.ends_with("decompressed, it has a line of more than 268435456 bytes"),
        "{error}"
    );
    let grown = crate::dataset_lines::peak_bytes() - before;
    assert!(grown < 120 << 20, "memory grew by {grown} bytes");
}

#[tokio::test]
async fn an_input_that_changed_stops_the_job() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("a.jsonl.gz");
    fs::write(&path, packed(Codec::Gzip, b"{\"a\":1}\n")).unwrap();
    let plan = plan(dir.path(), "a.jsonl.gz", &[]).await.unwrap();
    fs::write(&path, packed(Codec::Gzip, b"{\"a\":2}\n")).unwrap();
    let error = read_all(&plan, None).await.unwrap_err();
    assert!(matches!(error, DatasetError::InputChanged { .. }), "{error}");
}

/// Rows of some shards, read by one reader; answers what it decompressed.
async fn read_shards(plan: &InputPlan, shards: impl Iterator<Item = usize>) -> u64 {
    let reader = ShardReader::new(plan.files.clone(), plan.carry_schema.clone(), None);
    for number in shards {
        let shard = &plan.shards[number];
        let read = reader.read(shard).await.unwrap();
        for row in read.rows {
            assert_eq!(row.fields.unwrap()["n"], row.row);
        }
    }
    reader.decompressed_bytes()
}

#[tokio::test]
async fn shards_in_order_decompress_a_file_once() {
    let dir = tempfile::tempdir().unwrap();
    let text: String = (0..300_000)
        .map(|n| format!("{{\"n\": {n}, \"t\": \"{}\"}}\n", "x".repeat(n % 90)))
        .collect();
    for (codec, extension) in CODECS {
        let name = format!("a.jsonl.{extension}");
        fs::write(dir.path().join(&name), packed(codec, text.as_bytes())).unwrap();
        let mut request = request(&[&name], &[]);
        request.shard_rows = 4096;
        let plan = plan_inputs(&request, dir.path()).await.unwrap();
        let (size, shards) = (text.len() as u64, plan.shards.len());
        assert_eq!(shards, 300_000usize.div_ceil(4096));
        assert_eq!(read_shards(&plan, 0..shards).await, size, "{codec:?}");
        // One of two workers: what the other reads is passed over.
        assert!(read_shards(&plan, (0..shards).step_by(2)).await <= size, "{codec:?}");
        assert!(read_shards(&plan, (1..shards).step_by(2)).await <= size, "{codec:?}");
        // Back to a place before: from the start again.
        let again = read_shards(&plan, [shards - 1, 0, 1].into_iter()).await;
        assert!(again > size && again < size + size / 10, "{codec:?}: {again} of {size}");
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 24, ..ProptestConfig::default() })]
    #[test]
    fn shards_give_every_row_once_in_any_order(
        lines in prop::collection::vec(0usize..40_000, 1..60),
        order in prop::collection::vec(any::<prop::sample::Index>(), 0..12),
        which in 0usize..3,
    ) {
        let (codec, extension) = CODECS[which];
        let dir = tempfile::tempdir().unwrap();
        let text: String = lines.iter().enumerate().map(|(n, pad)| format!("{{\"n\": {n}, \"t\": \"{}\"}}\n", "x".repeat(*pad))).collect();
        let name = format!("a.jsonl.{extension}");
        fs::write(dir.path().join(&name), packed(codec, text.as_bytes())).unwrap();
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
        runtime.block_on(async {
            let plan = plan(dir.path(), &name, &[]).await.unwrap();
            assert_eq!(plan.total_rows, lines.len() as u64);
            let shards = plan.shards.len();
            read_shards(&plan, order.iter().map(|index| index.index(shards)).chain(0..shards)).await;
        });
    }
}
