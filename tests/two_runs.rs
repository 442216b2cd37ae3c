//! Two runs of one job at once, and what `status` says while they work.

use std::fs;
use std::path::Path;
use std::time::{Duration, Instant};

use serde_json::Value;

use crate::support::{Run, arg, gristmill, job_in, record};

/// What `status` says once rows are finished and their time is written down.
fn once_begun(output: &Path) -> Value {
    let began = Instant::now();
    loop {
        let seen = Run::of(&mut gristmill(&["status", arg(output), "--json"]));
        if seen.code == Some(0) {
            let status = seen.json();
            if status["seconds"].as_f64() > Some(0.0) && status["tokens"]["completion"].as_u64() > Some(0) {
                return status;
            }
        }
        assert!(began.elapsed() < Duration::from_secs(120), "{seen:?}");
        std::thread::sleep(Duration::from_millis(50));
    }
}

#[test]
fn two_runs_share_a_job_say_so_and_add_up() {
    let folder = tempfile::tempdir().unwrap();
    let (job, output) = job_in(folder.path(), "label-tickets.yaml", |text| {
        text.replace("tickets.parquet}", "tickets.parquet, limit: 400}")
    });
    let mut first = gristmill(&["run", arg(&job), "--quiet", "--log-interval", "0.2"])
        .spawn()
        .unwrap();
    let status = once_begun(&output);
    // While it works, it is well, and its speed and cost are known.
    assert_eq!(
        (&status["state"], &status["shards"]["stuck"]),
        (&"running".into(), &0.into()),
        "{status}"
    );
    assert!(status["tokens_per_second"].as_f64() > Some(0.0), "{status}");
    assert!(status["usd"].as_f64() > Some(0.0), "{status}");
    let second = Run::of(&mut gristmill(&["run", arg(&job), "--log-interval", "0.2"])).expect(0);
    assert!(
        second.stderr.contains("if it still runs, the two share the job"),
        "{}",
        second.stderr
    );
    assert_eq!(first.wait().unwrap().code(), Some(0));
    let id = record(&output)["job"].as_str().unwrap().to_string();
    let spends = fs::read_dir(output.join(format!("_gristmill/{id}/spend"))).unwrap();
    let seconds: Vec<f64> = spends
        .map(|file| fs::read(file.unwrap().path()).unwrap())
        .map(|bytes| {
            serde_json::from_slice::<Value>(&bytes).unwrap()["device_seconds"]
                .as_f64()
                .unwrap()
        })
        .collect();
    assert_eq!(seconds.len(), 2);
    let done = Run::of(&mut gristmill(&["status", arg(&output), "--json"]))
        .expect(0)
        .json();
    assert_eq!(done["rows"]["succeeded"], 400);
    // The result may have been written before the other run wrote its last step down: the status adds up both all the same.
    let (sum, said) = (seconds.iter().sum::<f64>(), done["seconds"].as_f64().unwrap());
    assert!((said - sum).abs() < 0.01, "{seconds:?}, {said}");
}
