//! Tables of addresses, accepted and refused: attacks beside ordinary setups.

use std::fs;
use std::os::unix::fs::symlink;

use super::*;
use crate::dataset::store::clients::Stores;

fn access(accept: &[&str], inputs: &[&str]) -> Access {
    let owned = |texts: &[&str]| texts.iter().map(|text| text.to_string()).collect::<Vec<_>>();
    let (accept, accept_inputs) = (owned(accept), owned(inputs));
    let options = AccessOptions {
        accept: &accept,
        accept_inputs: &accept_inputs,
        ..AccessOptions::default()
    };
    Access::new(&options, Path::new("/")).unwrap()
}

/// The location of an output that a message names; `None`: the text cannot be a location.
fn location(text: &str) -> Option<Location> {
    let options = [("AWS_SKIP_SIGNATURE", "true"), ("AZURE_STORAGE_SKIP_SIGNATURE", "true")];
    let stores = Stores::new(options.map(|(name, value)| (name.to_string(), value.to_string())));
    Location::parse_with(text, Path::new("/"), &stores).ok()
}

fn takes_output(access: &Access, text: &str) -> bool {
    location(text).is_some_and(|output| access.output_refusal(&output).is_none())
}

#[track_caller]
fn reads(access: &Access, output: &str, input: &str) -> bool {
    let output = location(output).unwrap_or_else(|| panic!("{output}"));
    access.inputs_refusal(&output, [input]).is_none()
}

#[test]
fn a_prefix_ends_where_a_part_of_the_path_does() {
    for (prefix, address, accepted) in [
        ("s3://b/a", "s3://b/a", true),
        ("s3://b/a", "s3://b/a/", true),
        ("s3://b/a/", "s3://b/a", true),
        ("s3://b/a", "s3://b/a/x/y", true),
        ("s3://b/a", "S3://b/a/x", true),
        ("S3://b/a", "s3a://b/a/x", true),
        ("s3://b", "s3://b/anything", true),
        ("s3://", "s3://any/thing", true),
        ("s3://b/a%20b", "s3://b/a b/x", true),
        ("s3://b/a", "s3://b/./a/x", true),
        ("s3://b/a", "s3://b/ab", false),
        ("s3://b/a", "s3://b/", false),
        ("s3://b/a", "s3://b/A/x", false),
        ("s3://b/a", "s3://bb/a/x", false),
        ("s3://b/a", "s3://b/a/../c", false),
        ("s3://b/a", "s3://b/a/%2e%2e/c", false),
        ("s3://b/a", "s3://b/a/.%2E/c", false),
        ("s3://b/a", "s3://b/a%2f..%2fc", false),
        ("s3://b/a", "s3://b/a%2Fx", false),
        ("s3://b/a", "s3://b/a/x%5c..%5c..%5cc", false),
        ("s3://b/a", "s3://b/a/x%00", false),
        ("s3://b/a", "s3://user@b/a/x", false),
        ("s3://b/a", "s3://b@evil/a/x", false),
        ("s3://b/a", "s3://b:9000/a/x", false),
        ("s3://b/a", "gs://b/a/x", false),
        ("s3://b/a", "s3://b.evil.com/a/x", false),
        ("s3://", "gs://any/thing", false),
        ("s3://", "s3://../private/x", false),
        ("s3://", "s3://%2e%2e/private/x", false),
        ("s3://", "s3://b%2f..%2fprivate/x", false),
        ("https://data.example.com/x", "https://data.example.com/x/y.jsonl", true),
        ("https://data.example.com/x", "https://DATA.example.com:443/x/y", true),
        ("https://data.example.com/x", "http://data.example.com/x/y", false),
        ("https://data.example.com/x", "https://data.example.com:8443/x/y", false),
        (
            "https://data.example.com/x",
            "https://data.example.com.evil.com/x/y",
            false,
        ),
        (
            "https://data.example.com/x",
            "https://evil.com/data.example.com/x/y",
            false,
        ),
        (
            "https://data.example.com/x",
            "https://data.example.com@evil.com/x/y",
            false,
        ),
        ("https://data.example.com/x", "https://data.example.com/xy", false),
        ("http://169.254.169.254/x", "http://0xa9fea9fe/x/y", true),
        ("az://c/a", "azure://c/a/x", true),
        (
            "abfss://c@acct.dfs.core.windows.net/a",
            "abfss://c@acct.dfs.core.windows.net/a/x",
            true,
        ),
        (
            "abfss://c@acct.dfs.core.windows.net/a",
            "abfss://d@acct.dfs.core.windows.net/a/x",
            false,
        ),
    ] {
        let access = access(&[prefix], &[]);
        // The same as an input, which is refused without being opened.
        assert_eq!(
            reads(&access, "s3://out/o", address),
            accepted,
            "{prefix} and input {address}"
        );
        if location(address).is_some() {
            assert_eq!(
                takes_output(&access, address),
                accepted,
                "{prefix} and output {address}"
            );
        }
    }
}

#[test]
fn without_options_inputs_come_from_the_outputs_own_bucket() {
    let access = access(&[], &[]);
    for (output, input, accepted) in [
        ("s3://b/out", "s3://b/in/x.parquet", true),
        ("s3://b/out", "s3a://b/in/x.parquet", false),
        ("gs://b/out", "gs://b/in/x.parquet", true),
        ("s3://b/out", "s3://private/x.parquet", false),
        ("s3://b/out", "gs://b/in/x.parquet", false),
        ("s3://b/out", "file:///etc/shadow", false),
        ("s3://b/out", "FILE:///etc/shadow", false),
        ("s3://b/out", "/etc/shadow", false),
        ("s3://b/out", "etc/shadow", false),
        ("s3://b/out", "file://localhost/etc/shadow", false),
        ("s3://b/out", " file:///etc/shadow", false),
        ("s3://b/out", "http://169.254.169.254/latest/meta-data/", false),
        ("s3://b/out", "http://2852039166/latest/", false),
        ("s3://b/out", "https://example.com/x.jsonl", false),
        ("s3://b/out", "http://metadata.google.internal/x", false),
        ("s3://b/out", "http://localhost:8080/x", false),
        ("s3://b/out", "memory:///x", false),
        ("s3://b/out", "", false),
        (
            "https://s3.eu-west-1.amazonaws.com/b/out",
            "https://s3.eu-west-1.amazonaws.com/b/in/x.parquet",
            true,
        ),
        (
            "https://s3.eu-west-1.amazonaws.com/b/out",
            "https://s3.eu-west-1.amazonaws.com/private/x.parquet",
            false,
        ),
        (
            "https://s3.eu-west-1.amazonaws.com/b/out",
            "https://s3.eu-west-1.amazonaws.com/private/a%2Fb%2Fc",
            false,
        ),
        // An accepted local output belongs to the worker's user, so files and buckets that it names
        // are accepted.
        ("/data/out", "/data/in/x.parquet", true),
        ("/data/out", "s3://b/in/x.parquet", true),
        ("/data/out", "http://localhost/x.jsonl", false),
    ] {
        assert_eq!(reads(&access, output, input), accepted, "{output} and {input}");
    }
}

#[test]
fn without_options_outputs_are_in_buckets() {
    let access = access(&[], &[]);
    for (output, accepted) in [
        ("s3://b/out", true),
        ("gs://b/out", true),
        ("https://s3.eu-west-1.amazonaws.com/b/out", true),
        ("http://169.254.169.254/latest", false),
        ("https://example.com/out", false),
        ("memory:///out", false),
        ("s3://../b/out", false),
        ("FILE:///no/such/folder", false),
        ("/no/such/folder", false),
    ] {
        assert_eq!(takes_output(&access, output), accepted, "{output}");
    }
}

#[test]
fn a_refusal_names_the_option_that_would_allow_it() {
    let none = access(&[], &[]);
    let output = location("s3://b/out").unwrap();
    for (input, option) in [
        ("s3://data/in/x.parquet", "`--accept-inputs s3://data/`"),
        ("file:///data/in/x.parquet", "`--accept-inputs /data/in/`"),
        ("https://h:8080/x.jsonl", "`--accept-inputs https://h:8080/`"),
    ] {
        let why = none.inputs_refusal(&output, [input]).unwrap();
        assert!(why.contains(option) && why.contains(input), "{why}");
        // And the suggested prefix works.
        let prefix = option.trim_matches('`').split(' ').nth(1).unwrap();
        assert!(reads(&access(&[], &[prefix]), "s3://b/out", input), "{prefix}");
        let inputs = ["s3://b/in/x.parquet", input, input];
        assert!(none.prefixes_to_accept(&output, inputs).iter().eq([prefix]), "{prefix}");
    }
    let listed = access(&["s3://b/a/"], &[]);
    let why = listed.output_refusal(&output).unwrap();
    assert!(why.contains("`--accept s3://b/`"), "{why}");
    let long = format!("s3://data/{}", "x".repeat(10_000));
    assert!(none.inputs_refusal(&output, [long.as_str()]).unwrap().len() < 600);
}

#[test]
fn inputs_may_be_listed_without_outputs() {
    let access = access(&["s3://labels/"], &["s3://data/"]);
    assert!(reads(&access, "s3://labels/o", "s3://data/x"));
    assert!(takes_output(&access, "s3://labels/o"));
    assert!(!takes_output(&access, "s3://data/o"));
    assert!(!reads(&access, "s3://labels/o", "s3://other/x"));
}

#[test]
fn links_are_followed_before_local_paths_are_compared() {
    let folder = tempfile::tempdir().unwrap();
    let root = folder.path().canonicalize().unwrap();
    let (data, secret) = (root.join("data"), root.join("secret"));
    fs::create_dir_all(data.join("in")).unwrap();
    fs::create_dir(&secret).unwrap();
    symlink(&secret, data.join("link")).unwrap();
    symlink(&data, root.join("alias")).unwrap();
    let text = |path: &Path| path.to_str().unwrap().to_string();
    for prefix in [
        text(&data),
        text(&root.join("alias")) + "/",
        format!("file://{}", text(&data)),
    ] {
        let access = access(&[&prefix], &[]);
        let reads = |path: &str| reads(&access, "s3://b/out", &format!("{}/{path}", text(&root)));
        for inside in [
            "data/in/x.jsonl",
            "alias/in/x.jsonl",
            "data/not/yet",
            "data/link/../in/x",
        ] {
            assert!(reads(inside), "{prefix} and {inside}");
        }
        for outside in [
            "data/link/x",
            "alias/link/x",
            "secret/x",
            "data/../secret/x",
            "data2/x",
            "data/in/../../secret/x",
        ] {
            assert!(!reads(outside), "{prefix} and {outside}");
        }
    }
}

#[test]
fn a_local_output_is_its_users_own_or_listed() {
    let folder = tempfile::tempdir().unwrap();
    let root = folder.path().canonicalize().unwrap();
    let output = root.join("out");
    fs::create_dir_all(output.join("_gristmill")).unwrap();
    let record = output.join("_gristmill/job.json");
    fs::write(&record, "{}").unwrap();
    let text = output.to_str().unwrap();
    assert!(takes_output(&access(&[], &[]), text));
    assert!(
        !takes_output(&access(&["s3://b/"], &[]), text),
        "a list is the whole list"
    );
    // As another user could have left it.
    let mode = std::os::unix::fs::PermissionsExt::from_mode(0o666);
    fs::set_permissions(&record, mode).unwrap();
    assert!(!takes_output(&access(&[], &[]), text));
    assert!(takes_output(&access(&[root.to_str().unwrap()], &[]), text));
    let jobs = [text.to_string()];
    let options = AccessOptions {
        jobs: &jobs,
        ..AccessOptions::default()
    };
    assert!(
        takes_output(&Access::new(&options, Path::new("/")).unwrap(), text),
        "named by `--job`"
    );
}

#[test]
fn models_that_are_fetched_must_be_listed() {
    let listing = |models: &[&str]| {
        let models: Vec<String> = models.iter().map(|text| text.to_string()).collect();
        let options = AccessOptions {
            accept_models: &models,
            ..AccessOptions::default()
        };
        Access::new(&options, Path::new("/")).unwrap()
    };
    for (models, address, accepted) in [
        (&[][..], "hf://org/name", false),
        (&[], "s3://bucket/model", false),
        (&["hf://org/"], "hf://org/name", true),
        (&["hf://org/name"], "hf://org/name", true),
        (&["hf://"], "hf://org/name", true),
        (&["hf://org/na"], "hf://org/name", false),
        (&["hf://Org/"], "hf://org/name", false),
        (&["hf://other/"], "hf://org/name", false),
        (&["s3://"], "hf://org/name", false),
        (&["/models/"], "hf://org/name", false),
        (&["s3://bucket/"], "s3://bucket/model", true),
        (&["hf://"], "s3://bucket/model", false),
    ] {
        let why = listing(models).fetched_model_refusal(address);
        assert_eq!(why.is_none(), accepted, "{models:?} {address}: {why:?}");
        if let Some(why) = why {
            assert!(why.contains(&format!("`--accept-models {address}`")), "{why}");
        }
    }
    assert_eq!(Access::everything().fetched_model_refusal("hf://org/name"), None);
}

#[test]
fn models_are_confined_if_outputs_or_models_are() {
    let models = ["/models/".to_string()];
    let confined = AccessOptions {
        accept_models: &models,
        ..AccessOptions::default()
    };
    let confined = Access::new(&confined, Path::new("/")).unwrap();
    assert_eq!(confined.model_refusal(Path::new("/models/llama")), None);
    let why = confined.model_refusal(Path::new("/home/other/model")).unwrap();
    assert!(why.contains("`--accept-models /home/other/model`"), "{why}");
    assert!(confined.model_refusal(Path::new("/models/../etc")).is_some());
    assert_eq!(access(&[], &[]).model_refusal(Path::new("/anywhere")), None);
    assert!(
        access(&["s3://b/"], &[])
            .model_refusal(Path::new("/anywhere"))
            .is_some()
    );
}

#[test]
fn invalid_prefixes_are_refused_with_their_option() {
    for (text, words) in [
        ("s3://b/*", "wildcard"),
        ("https://", "names no host"),
        ("file://elsewhere/x", "local"),
        ("", "empty"),
        ("s3://b/%2fx", "no name"),
        ("https://me:hush@host/", "password"),
        ("bogus://b/x", "`bogus://`"),
    ] {
        let texts = [text.to_string()];
        let options = AccessOptions {
            accept_inputs: &texts,
            ..AccessOptions::default()
        };
        let why = Access::new(&options, Path::new("/")).unwrap_err();
        assert!(
            why.contains("`--accept-inputs`") && why.contains(words),
            "{text}: {why}"
        );
        assert!(!why.contains("hush"), "{why}");
    }
}

/// Two teams share one bucket and one queue: neither's worker touches the other's objects.
#[test]
fn tenants_reach_their_own_prefix_alone() {
    for (mine, others) in [("a", "b"), ("b", "a")] {
        let access = access(&[&format!("s3://shared/{mine}/")], &[]);
        assert!(takes_output(&access, &format!("s3://shared/{mine}/out")));
        assert!(!takes_output(&access, &format!("s3://shared/{others}/out")));
        assert!(reads(
            &access,
            &format!("s3://shared/{mine}/out"),
            &format!("s3://shared/{mine}/in.jsonl")
        ));
        assert!(!reads(
            &access,
            &format!("s3://shared/{mine}/out"),
            &format!("s3://shared/{others}/in.jsonl")
        ));
        assert!(!reads(&access, &format!("s3://shared/{mine}/out"), "/etc/shadow"));
    }
}

#[test]
fn redirects_are_followed_only_to_listed_addresses() {
    let access = access(&[], &["https://data.example.com/"]);
    for (to, followed) in [
        ("https://data.example.com/other/x?signature=1", true),
        ("https://cdn.example.com/x", false),
        ("http://127.0.0.1/x", false),
    ] {
        assert_eq!(access.may_follow(&Url::parse(to).unwrap()), followed, "{to}");
    }
}

#[test]
fn the_end_of_a_job_is_posted_only_to_listed_addresses() {
    let may_post = |access: &Access, url: &str| access.on_finish_refusal(&Url::parse(url).unwrap()).is_none();
    // A prefix for reading does not permit posting.
    let reader = access(&["https://hooks.example/"], &["https://hooks.example/"]);
    assert!(!may_post(&reader, "https://hooks.example/done"));
    assert!(!may_post(&Access::default(), "https://hooks.example/done"));
    let listed = [
        "https://hooks.example/team-a".to_string(),
        "http://127.0.0.1:8080/".to_string(),
    ];
    let options = AccessOptions {
        accept_on_finish: &listed,
        ..AccessOptions::default()
    };
    let teller = Access::new(&options, Path::new("/")).unwrap();
    for (url, open) in [
        ("https://hooks.example/team-a", true),
        ("https://hooks.example/team-a/done", true),
        ("https://HOOKS.example:443/team-a/done", true),
        ("http://127.0.0.1:8080/x", true),
        ("https://hooks.example/team-ab", false),
        ("https://hooks.example/team-a/../b", false),
        ("https://hooks.example/team-a/%2e%2e/b", false),
        ("http://hooks.example/team-a", false),
        ("https://hooks.example:8443/team-a", false),
        ("https://u@hooks.example/team-a", false),
        ("https://hooks.example.evil/team-a", false),
        ("http://127.0.0.1:8081/x", false),
    ] {
        assert_eq!(may_post(&teller, url), open, "{url}");
    }
    // Nor does a prefix for posting permit reading.
    assert!(!reads(&teller, "s3://b/out", "https://hooks.example/team-a/rows.jsonl"));
    let why = teller
        .on_finish_refusal(&Url::parse("https://other.example/x").unwrap())
        .unwrap();
    assert!(why.contains("`--accept-on-finish https://other.example/`"), "{why}");
    for bad in ["s3://", "s3://b/", "/data/", "https://h/*"] {
        let listed = [bad.to_string()];
        let options = AccessOptions {
            accept_on_finish: &listed,
            ..AccessOptions::default()
        };
        let why = Access::new(&options, Path::new("/")).unwrap_err();
        assert!(why.contains("--accept-on-finish"), "{bad}: {why}");
    }
}
