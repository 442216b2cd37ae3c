//! `gristmill jobs`: what lies below a folder or a bucket, and what that costs.

use std::fs;
use std::path::Path;

use gristmill::dataset::store::location::Location;
use object_store::ObjectStoreExt;
use serde_json::Value;

use crate::commands::{run, small_job};
use crate::proxy::{Plan, Proxy};
use crate::services::S3;
use crate::support::{Run, arg, gristmill, record};

/// A job in a folder of its own.
fn job_in_folder(home: &Path, name: &str) -> (std::path::PathBuf, std::path::PathBuf) {
    let folder = home.join(name);
    fs::create_dir_all(&folder).unwrap();
    small_job(&folder, &[])
}

fn found<'a>(list: &'a Value, end: &str) -> &'a Value {
    let jobs = list["jobs"].as_array().unwrap();
    let is_it = |job: &&Value| job["output"].as_str().unwrap().trim_end_matches('/').ends_with(end);
    jobs.iter().find(is_it).unwrap_or_else(|| panic!("no {end} in {list}"))
}

#[test]
fn each_job_below_a_folder_is_listed_and_nothing_hides_it() {
    let home = tempfile::tempdir().unwrap();
    let home = home.path();
    let none = run(&["jobs", arg(home)]).expect(0).stdout;
    assert!(
        none.contains("no job below `file://") && none.contains("1 folder"),
        "{none}"
    );
    let (finished, output) = job_in_folder(home, "a");
    run(&["run", arg(&finished), "--quiet"]).expect(0);
    run(&["run", arg(&finished), "--quiet", "--limit", "8"]).expect(0);
    let (going, _) = job_in_folder(home, "team/b c");
    run(&["submit", arg(&going), "--no-enqueue"]).expect(0);
    let (cancelled, its_output) = job_in_folder(home, "team/day=1");
    run(&["submit", arg(&cancelled), "--no-enqueue"]).expect(0);
    run(&["cancel", arg(&its_output)]).expect(0);
    // Whatever somebody else put there.
    let foreign = home.join("xy/out/_gristmill");
    fs::create_dir_all(&foreign).unwrap();
    fs::write(foreign.join("job.json"), "{\"v\": 1}").unwrap();
    std::os::unix::fs::symlink("/", home.join("team/link")).unwrap();
    // No address has control characters.
    fs::create_dir(home.join("x\u{1b}[2Jy")).unwrap();
    let data = home.join("data");
    fs::create_dir(&data).unwrap();
    (0..50).for_each(|n| fs::write(data.join(format!("part-{n}.parquet")), "x").unwrap());

    let listed = run(&["jobs", arg(home), "--json"]).expect(1).json();
    assert_eq!(listed["jobs"].as_array().unwrap().len(), 3, "{listed}");
    let a = found(&listed, "/a/out");
    assert_eq!(
        (&a["state"], &a["rows_done"], &a["rows"]["succeeded"], &a["trial"]),
        (&"finished".into(), &40.into(), &40.into(), &false.into())
    );
    let b = found(&listed, "/team/b%20c/out");
    assert_eq!(
        (&b["state"], &b["rows_done"], &b["rows"]["total"]),
        (&"running".into(), &0.into(), &40.into())
    );
    assert_eq!(found(&listed, "/team/day=1/out")["state"], "cancelled");
    // The same facts as `status`, which takes the address that is printed.
    let status = run(&["status", b["output"].as_str().unwrap(), "--json"])
        .expect(0)
        .json();
    assert_eq!((&status["id"], &status["created_at"]), (&b["id"], &b["created_at"]));
    let unread = listed["unread"].as_array().unwrap();
    let why: Vec<&str> = unread.iter().map(|one| one["error"].as_str().unwrap()).collect();
    assert_eq!(why.len(), 2, "{listed}");
    assert!(why[0].contains("1 folder in it cannot be named"), "{listed}");
    assert!(why[1].contains("is no valid record"), "{listed}");
    assert_eq!(listed["trial_folders"], 1);

    let table = run(&["jobs", arg(home)]).expect(1).stdout;
    assert!(!table.contains('\u{1b}'), "{table}");
    let line = |part: &str| {
        table
            .lines()
            .find(|line| line.contains(part))
            .unwrap_or_else(|| panic!("{part}: {table}"))
    };
    for (part, words) in [
        ("/a/out", "finished"),
        ("b%20c/out", "0 of 40"),
        ("day=1/out", "cancelled"),
        ("xy/out", "cannot be read: "),
    ] {
        assert!(line(part).contains(words), "{words}: {table}");
    }
    let at = |part: &str, word: &str| line(part).find(word).unwrap();
    assert_eq!(
        at("/a/out", "finished"),
        at("day=1/out", "cancelled"),
        "aligned:\n{table}"
    );
    assert!(table.contains("--trials lists them"), "{table}");

    let with = run(&["jobs", arg(home), "--trials", "--json"]).expect(1).json();
    let is_trial = |job: &&Value| job["trial"] == true;
    let trials: Vec<&Value> = with["jobs"].as_array().unwrap().iter().filter(is_trial).collect();
    assert_eq!((trials.len(), &trials[0]["rows"]["total"]), (1, &8.into()), "{with}");
    // An output alone is a list of one.
    let one = run(&["jobs", arg(&output), "--json"]).expect(0).json();
    assert_eq!(one["jobs"].as_array().unwrap().len(), 1, "{one}");
    run(&["jobs", arg(&home.join("nowhere"))])
        .expect(2)
        .one_line(&["nowhere", "is no folder"]);
}

/// Finished rows of a shard that nobody has published count, though no part has them: the same as `status` says.
#[test]
fn rows_of_begun_shards_count() {
    let home = tempfile::tempdir().unwrap();
    let (job, output) = job_in_folder(home.path(), "a");
    let text = fs::read_to_string(&job).unwrap();
    fs::write(&job, text.replace("shards: {rows: 4}", "shards: {rows: 40}")).unwrap();
    run(&["run", arg(&job), "--quiet"]).expect(0);
    // As a kill before publishing would leave it.
    let id = record(&output)["job"].as_str().unwrap().to_string();
    for file in ["_SUCCESS", "part-00000.parquet"] {
        fs::remove_file(output.join(file)).unwrap();
    }
    for folder in ["commits", "digests"] {
        fs::remove_dir_all(output.join(format!("_gristmill/{id}/{folder}"))).unwrap();
    }
    let status = run(&["status", arg(&output), "--json"]).expect(0).json();
    assert_eq!(
        (&status["state"], &status["rows"]["succeeded"]),
        (&"running".into(), &40.into())
    );
    let listed = run(&["jobs", arg(home.path()), "--json"]).expect(0).json();
    let job = found(&listed, "/a/out");
    assert_eq!((&job["state"], &job["rows"]), (&status["state"], &status["rows"]));
    assert_eq!(job["seconds"], status["seconds"]);
}

/// A bucket with thousands of objects: its jobs cost some requests each, and no part is listed.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_bucket_is_listed_by_its_folders() {
    let Some(s3) = S3::need("a_bucket_is_listed_by_its_folders") else {
        return;
    };
    let prefix = s3.folder("jobs");
    let folder = tempfile::tempdir().unwrap();
    let proxy = Proxy::start(&s3.endpoint, Plan::clean());
    let at_store = |arguments: &[&str]| Run::of(gristmill(arguments).envs(s3.variables(&proxy.url())));
    for name in ["a", "b"] {
        let (job, _) = small_job(folder.path(), &[]);
        let text = fs::read_to_string(&job)
            .unwrap()
            .replace("uri: out", &format!("uri: '{prefix}/{name}'"));
        fs::write(&job, text).unwrap();
        at_store(&["submit", arg(&job), "--no-enqueue"]).expect(0);
    }
    // What would be pages of parts: beside a job's record, and in a folder without one.
    let stores = gristmill::dataset::store::clients::Stores::new(s3.variables(&s3.endpoint));
    let place = |key: String| Location::parse_with(&format!("{prefix}/{key}"), Path::new("/"), &stores).unwrap();
    let keys = (0..2_100).flat_map(|n| [format!("a/part-{n:05}.parquet"), format!("c/{n:05}.parquet")]);
    let puts = futures::stream::iter(keys).map(|key| {
        let place = place(key);
        async move { place.store.put(&place.path, "x".into()).await.unwrap() }
    });
    use futures::StreamExt;
    puts.buffer_unordered(32).collect::<Vec<_>>().await;
    proxy.take_counters();
    let listed = at_store(&["jobs", &prefix, "--json"]).expect(0).json();
    let requests = proxy.take_counters().requests();
    assert_eq!(listed["jobs"].as_array().unwrap().len(), 2, "{listed}");
    // Three pages of `c`, a page of the prefix, and about ten requests a job; parts of `a` would be three pages more.
    assert!(requests <= 32, "{requests} requests");
    assert_eq!(found(&listed, "/a")["rows"]["total"], 40);
    let nothing = at_store(&["jobs", &s3.folder("none")]).expect(0).stdout;
    assert!(nothing.contains("no job below `s3://"), "{nothing}");
    at_store(&["jobs", "s3://no-such-bucket-here/"])
        .expect(2)
        .one_line(&["s3://no-such-bucket-here/", "NoSuchBucket"]);
}

/// One object a line, and the last one is what `status` says.
#[test]
fn watch_tells_machines_each_change() {
    let folder = tempfile::tempdir().unwrap();
    let (job, output) = small_job(folder.path(), &[3]);
    run(&["submit", arg(&job), "--no-enqueue"]).expect(0);
    let watching = gristmill(&["watch", arg(&output), "--json", "--every", "0.05"])
        .stdout(std::process::Stdio::piped())
        .spawn()
        .unwrap();
    std::thread::sleep(std::time::Duration::from_millis(500));
    run(&["run", arg(&job), "--quiet", "--log-interval", "0.05"]).expect(3);
    let watched = watching.wait_with_output().unwrap();
    assert_eq!(watched.status.code(), Some(3));
    let text = String::from_utf8(watched.stdout).unwrap();
    let lines: Vec<Value> = text.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
    assert!(lines.len() > 1, "{text}");
    assert_eq!(lines[0]["state"], "running");
    let mut before = Value::Null;
    for line in &lines {
        let mut line = line.clone();
        line["budget"]["used_seconds"] = Value::Null;
        assert_ne!(line, before, "nothing has changed");
        before = line;
    }
    let mut last = lines.last().unwrap().clone();
    let mut status = run(&["status", arg(&output), "--json"]).expect(0).json();
    let keys = |value: &Value| value.as_object().unwrap().keys().cloned().collect::<Vec<_>>();
    assert_eq!(keys(&last), keys(&status));
    assert_eq!(last["failures"]["looked_at"], 1, "{last}");
    for value in [&mut last, &mut status] {
        value["budget"]["used_seconds"] = Value::Null;
    }
    assert_eq!(last, status);
}
