//! SIGKILL at random moments, and two runs at once: every row once, whatever happens.

use std::path::Path;
use std::process::Stdio;
use std::time::{Duration, Instant};

use crate::support::{Run, arg, check_output, gristmill, job_in, root};

const KILLS: usize = 50;
/// Longest span in which a life is cut, in milliseconds: no machine takes longer to start.
const SPAN_MS_MAX: u64 = 30_000;

/// A small generator of its own, so that a failing run can be repeated from the printed seed.
struct Lcg(u64);

impl Lcg {
    fn below(&mut self, n: u64) -> u64 {
        self.0 = self
            .0
            .wrapping_mul(6_364_136_223_846_793_005)
            .wrapping_add(1_442_695_040_888_963_407);
        (self.0 >> 33) % n
    }
}

/// Log records and attempts below `folder`.
fn written(folder: &Path) -> usize {
    let is_ledger = folder.ends_with("log") || folder.ends_with("attempts");
    // No run has come far enough to make it.
    let Ok(entries) = std::fs::read_dir(folder) else {
        return 0;
    };
    entries
        .map(|entry| entry.unwrap().path())
        .map(|path| {
            if path.is_dir() {
                written(&path)
            } else {
                usize::from(is_ledger)
            }
        })
        .sum()
}

#[test]
fn fifty_kills_lose_and_repeat_nothing() {
    let folder = tempfile::tempdir().unwrap();
    let (job, output) = job_in(folder.path(), "label-tickets.yaml", |text| {
        text.replace("rows: 256", "rows: 50")
    });
    let seed = std::time::SystemTime::now()
        .duration_since(std::time::UNIX_EPOCH)
        .unwrap()
        .as_nanos() as u64;
    println!("seed {seed}");
    let mut random = Lcg(seed);
    let (mut kills, mut finished_early) = (0, 0);
    // The span in which a life is cut adapts to the machine: it shrinks where jobs end before they are killed often enough, and
    // grows where lives end in their start. Only those that have written something since the last one count.
    let mut span_ms = 1_500;
    let began = Instant::now();
    while kills < KILLS {
        assert!(
            began.elapsed() < Duration::from_secs(900),
            "{kills} kills in 15 minutes"
        );
        if output.join("_SUCCESS").exists() {
            // The job ended before it was killed often enough: start over with shorter lives, counting on.
            finished_early += 1;
            span_ms = (span_ms / 2).max(150);
            check_output(&output, &root().join("jobs/demo/tickets.parquet"), "ticket_id");
            std::fs::remove_dir_all(&output).unwrap();
        }
        let before = written(&output);
        let mut child = gristmill(&["run", arg(&job), "--quiet", "--log-interval", "0.05"])
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .spawn()
            .unwrap();
        std::thread::sleep(Duration::from_millis(20 + random.below(span_ms)));
        let is_alive = child.try_wait().unwrap().is_none();
        if is_alive {
            child.kill().unwrap();
        }
        child.wait().unwrap();
        if written(&output) > before {
            kills += usize::from(is_alive)
        } else {
            span_ms = (2 * span_ms).min(SPAN_MS_MAX)
        }
    }
    println!("{kills} kills, {finished_early} jobs finished in between");
    let run = Run::of(&mut gristmill(&["run", arg(&job), "--json"])).expect(0);
    assert_eq!(run.json()["rows"]["succeeded"], 2000);
    check_output(&output, &root().join("jobs/demo/tickets.parquet"), "ticket_id");
    Run::of(&mut gristmill(&["verify", arg(&output)])).expect(0);
    let again = Run::of(&mut gristmill(&["run", arg(&job)])).expect(0);
    assert!(again.stderr.contains("already done"), "{}", again.stderr);
}

#[test]
fn two_runs_at_once_write_each_row_once() {
    let folder = tempfile::tempdir().unwrap();
    let (job, output) = job_in(folder.path(), "label-tickets.yaml", |text| {
        text.replace("rows: 256", "rows: 100")
    });
    let start = || {
        gristmill(&["run", arg(&job), "--json", "--log-interval", "0.1"])
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .unwrap()
    };
    let children = [start(), start()];
    for child in children {
        let out = child.wait_with_output().unwrap();
        assert_eq!(out.status.code(), Some(0), "{}", String::from_utf8_lossy(&out.stderr));
    }
    check_output(&output, &root().join("jobs/demo/tickets.parquet"), "ticket_id");
    Run::of(&mut gristmill(&["verify", arg(&output)])).expect(0);
}
