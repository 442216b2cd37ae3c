//! How parts are written, through the built program: compression and row groups, as pyarrow and DuckDB find them.

use std::fs;
use std::path::{Path, PathBuf};

use crate::commands::run;
use crate::support::{arg, demo_job, py, record};

/// A job over 250 rows in one shard; `output` says more of its parts.
fn job(folder: &Path, output: &str) -> (PathBuf, PathBuf) {
    let rows: String = (0..250)
        .map(|n| format!("{{\"id\": {n}, \"text\": \"ticket\"}}\n"))
        .collect();
    fs::write(folder.join("rows.jsonl"), rows).unwrap();
    let rest = format!(
        "context: 128\ninput: {{uri: rows.jsonl}}\nprompt: {{text: '{{{{ text }}}} ->'}}\n\
         generate: {{max_tokens: 1, temperature: 0}}\noutput: {{uri: out, carry: [id]{output}}}\n"
    );
    demo_job(folder, "parts", &rest)
}

#[test]
fn parts_are_compressed_and_cut_as_the_job_says() {
    let folder = tempfile::tempdir().unwrap();
    let folder = folder.path();
    for (output, codec, groups, version) in [
        ("", "ZSTD", 1, 1),
        (", compression: zstd", "ZSTD", 1, 1),
        (", compression: zstd, compression_level: 19", "ZSTD", 1, 3),
        (", compression: snappy", "SNAPPY", 1, 3),
        (
            ", compression: gzip, compression_level: 9, row_group_rows: 100",
            "GZIP",
            3,
            3,
        ),
        (", compression: none, row_group_rows: 125", "UNCOMPRESSED", 2, 3),
    ] {
        let (path, out) = job(folder, output);
        run(&["run", arg(&path), "--quiet"]).expect(0);
        let script = format!(
            "import duckdb, pyarrow.parquet as pq\nm = pq.read_metadata('out/part-00000.parquet')\n\
             found = {{m.row_group(g).column(c).compression for g in range(m.num_row_groups) for c in range(m.num_columns)}}\n\
             assert (found, m.num_row_groups) == ({{'{codec}'}}, {groups}), (found, m.num_row_groups)\n\
             assert duckdb.sql(\"select id from 'out/*.parquet' order by row\").fetchall() == [(n,) for n in range(250)]"
        );
        py(folder, &script);
        run(&["verify", arg(&out), "--inputs"]).expect(0);
        assert_eq!(record(&out)["v"], version, "{output}");
        fs::remove_dir_all(&out).unwrap();
    }
}

#[test]
fn parts_are_written_as_they_were_begun() {
    let folder = tempfile::tempdir().unwrap();
    let (path, output) = job(folder.path(), ", compression: snappy");
    run(&["submit", arg(&path), "--no-enqueue"]).expect(0);
    let (path, _) = job(folder.path(), ", compression: gzip");
    run(&["run", arg(&path)])
        .expect(2)
        .one_line(&["`output.compression` was \"snappy\" and is \"gzip\""]);
    for (output, words) in [
        (", compression: lz4", "`output.compression` is `lz4`, not"),
        (
            ", compression: snappy, compression_level: 3",
            "`output.compression_level` is for `zstd` and `gzip`",
        ),
        (
            ", format: openai, compression: gzip",
            "`output.compression` is for `parquet` output",
        ),
    ] {
        let (path, _) = job(folder.path(), output);
        run(&["plan", arg(&path)]).expect(2).one_line(&[words]);
    }
    assert!(!output.join("part-00000.parquet").exists());
}
