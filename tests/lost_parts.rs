//! Parts that are deleted after they were committed: no command says that the job is complete, and the ledger makes them again.

use std::fs;
use std::path::{Path, PathBuf};

use serde_json::Value;

use crate::commands::{run, small_job};
use crate::support::arg;

/// [`small_job`] with parts of this format; rows 3 and 9 are too long to be asked about.
fn job(folder: &Path, format: &str) -> (PathBuf, PathBuf) {
    let (job, output) = small_job(folder, &[3, 9]);
    let text = fs::read_to_string(&job).unwrap();
    fs::write(&job, text.replace("uri: out,", &format!("uri: out, format: {format},"))).unwrap();
    (job, output)
}

fn status(output: &Path) -> Value {
    run(&["status", arg(output), "--json"]).expect(0).json()
}

fn part(output: &Path, format: &str, number: u32) -> PathBuf {
    let extension = if format == "openai" { "jsonl" } else { "parquet" };
    output.join(format!("part-{number:05}.{extension}"))
}

fn success(output: &Path) -> Value {
    serde_json::from_slice(&fs::read(output.join("_SUCCESS")).unwrap()).unwrap()
}

#[test]
fn a_lost_part_is_made_again_byte_for_byte() {
    for format in ["parquet", "openai"] {
        let folder = tempfile::tempdir().unwrap();
        let (job, output) = job(folder.path(), format);
        run(&["run", arg(&job), "--quiet"]).expect(3);
        let lost = part(&output, format, 4);
        let bytes = fs::read(&lost).unwrap();
        for with_success in [true, false] {
            fs::remove_file(&lost).unwrap();
            if !with_success {
                fs::remove_file(output.join("_SUCCESS")).unwrap();
            }
            let seen = status(&output);
            assert_eq!(seen["state"], "running", "{seen}");
            assert_eq!(
                seen["lost_parts"][0],
                arg(Path::new(lost.file_name().unwrap())),
                "{seen}"
            );
            let said = run(&["status", arg(&output)]).expect(0).stdout;
            assert!(said.contains("is missing: `gristmill run` builds it again"), "{said}");
            // What would need it, or do away with what it is made from.
            run(&["retry", arg(&output)]).expect(2).one_line(&["is not finished"]);
            run(&["clean", arg(&output), "--yes"]).expect(2);
            let run_again = run(&["run", arg(&job), "--quiet"]).expect(3);
            assert!(
                run_again.stderr.contains("was missing and has been built again"),
                "{}",
                run_again.stderr
            );
            assert_eq!(fs::read(&lost).unwrap(), bytes, "{format}");
            run(&["verify", arg(&output), "--inputs"]).expect(0);
            assert_eq!(status(&output)["lost_parts"], Value::Array(vec![]));
        }
        assert_eq!(success(&output)["rows"], 40);
    }
}

/// As `verify` advises.
#[test]
fn a_damaged_part_is_moved_away_and_made_again() {
    let folder = tempfile::tempdir().unwrap();
    let (job, output) = job(folder.path(), "parquet");
    run(&["run", arg(&job), "--quiet"]).expect(3);
    let part = part(&output, "parquet", 4);
    let bytes = fs::read(&part).unwrap();
    fs::write(&part, &bytes[..bytes.len() / 2]).unwrap();
    let verified = run(&["verify", arg(&output)]).expect(1).stderr;
    assert!(
        verified.contains("move it away, then `gristmill run` builds it again"),
        "{verified}"
    );
    fs::rename(&part, folder.path().join("damaged")).unwrap();
    run(&["run", arg(&job), "--quiet"]).expect(3);
    assert_eq!(fs::read(&part).unwrap(), bytes);
    run(&["verify", arg(&output), "--inputs"]).expect(0);
}

#[test]
fn a_part_that_cannot_be_made_again_leaves_the_job_unfinished() {
    let folder = tempfile::tempdir().unwrap();
    let (job, output) = job(folder.path(), "parquet");
    run(&["run", arg(&job), "--quiet"]).expect(3);
    run(&["clean", arg(&output), "--yes"]).expect(0);
    let lost = part(&output, "parquet", 4);
    let bytes = fs::read(&lost).unwrap();
    fs::remove_file(&lost).unwrap();
    for gone in [false, true] {
        if gone {
            fs::remove_file(output.join("_SUCCESS")).unwrap();
        }
        run(&["run", arg(&job), "--quiet"]).expect(1).one_line(&[
            "part-00004.parquet` is missing and cannot be built again",
            "restore it from a backup",
        ]);
        assert_eq!(output.join("_SUCCESS").exists(), !gone);
    }
    fs::write(&lost, bytes).unwrap();
    run(&["run", arg(&job), "--quiet"]).expect(3);
    run(&["verify", arg(&output)]).expect(0);
}

/// A retry puts the part of a shard that it does anew; a part that it does not touch must be there already.
#[test]
fn a_retry_over_a_lost_part_ends() {
    let folder = tempfile::tempdir().unwrap();
    let (job, output) = job(folder.path(), "parquet");
    run(&["run", arg(&job), "--quiet"]).expect(3);
    run(&["retry", arg(&output)]).expect(0);
    // Row 3 lies in the first part.
    fs::remove_file(part(&output, "parquet", 0)).unwrap();
    run(&["run", arg(&job), "--quiet"]).expect(3);
    run(&["verify", arg(&output), "--inputs"]).expect(0);

    run(&["retry", arg(&output)]).expect(0);
    let other = part(&output, "parquet", 7);
    let bytes = fs::read(&other).unwrap();
    fs::remove_file(&other).unwrap();
    run(&["run", arg(&job), "--quiet"])
        .expect(1)
        .one_line(&["part-00007.parquet` is missing", "does not include this shard"]);
    fs::write(&other, bytes).unwrap();
    run(&["run", arg(&job), "--quiet"]).expect(3);
    run(&["verify", arg(&output), "--inputs"]).expect(0);
    assert_eq!(success(&output)["generation"], 2);
}
