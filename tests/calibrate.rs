//! `gristmill calibrate`: a model's channels measured on a job's prompts, and what follows for jobs in 8 bits.

use std::fs;
use std::path::Path;

use gristmill::device::Precision;
use gristmill::worker::model::ModelFiles;

use crate::commands::run;
use crate::support::{arg, copy_folder, job_in, root};

#[test]
fn a_calibrated_model_labels_as_well_and_is_another_model() {
    let folder = tempfile::tempdir().unwrap();
    let model = folder.path().join("model");
    copy_folder(&root().join("jobs/demo/model"), &model);
    let (job, _) = job_in(folder.path(), "label-tickets.yaml", |text| {
        let model = format!("\nmodel: {}\n", model.display());
        let text = text.replace("precision: f32", "precision: int8");
        text.lines()
            .map(|line| if line.starts_with("model:") { model.trim() } else { line })
            .collect::<Vec<_>>()
            .join("\n")
    });
    let hash = |precision| ModelFiles::open(model.clone()).unwrap().hash(precision).unwrap();
    let (f32_before, int8_before) = (hash(Precision::F32), hash(Precision::Int8));
    assert_eq!(f32_before, int8_before);
    run(&["run", arg(&job), "--limit", "50", "--quiet"]).expect(0);

    let done = run(&["calibrate", arg(&job), "--rows", "64", "--json"])
        .expect(0)
        .json();
    assert_eq!(done["rows"], 64, "{done}");
    assert!(done["tokens"].as_u64() > Some(64 * 50), "{done}");
    let written = model.join("channels.safetensors");
    assert_eq!(
        Path::new(done["file"].as_str().unwrap()),
        written.canonicalize().unwrap()
    );
    assert_eq!(hash(Precision::F32), f32_before, "F32 has no use for it");
    assert_ne!(hash(Precision::Int8), int8_before);

    let refused = run(&["run", arg(&job), "--limit", "50", "--quiet"]).expect(2);
    let words = "began with another model, or another `channels.safetensors` beside it";
    assert!(refused.stderr.contains(words), "{}", refused.stderr);
    let labelled = run(&["run", arg(&job), "--limit", "400", "--quiet", "--json"])
        .expect(0)
        .json();
    let right = labelled["agreement"]["equal"].as_u64().unwrap();
    println!("{right} of 400 categories right, calibrated");
    // F32 has 381 right.
    assert!((379..=400).contains(&right), "{labelled}");

    let again = run(&["calibrate", arg(&job), "--rows", "64"]).expect(0);
    assert!(again.stdout.contains("measured    64 prompts"), "{}", again.stdout);
    let bytes = fs::read(&written).unwrap();
    fs::write(&written, &bytes[..bytes.len() / 2]).unwrap();
    let broken = run(&["run", arg(&job), "--limit", "60", "--quiet"]).expect(2);
    assert!(broken.stderr.contains("channels.safetensors"), "{}", broken.stderr);
    assert_eq!(broken.stderr.trim_end().lines().count(), 1, "{}", broken.stderr);
}
