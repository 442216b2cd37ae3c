//! A real S3 store: conditional puts, listings, credentials and encryption, with and without faults before it.

use std::collections::BTreeSet;
use std::io::{Read, Write};
use std::path::Path as FsPath;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use bytes::Bytes;
use futures::future::join_all;
use futures::{StreamExt, TryStreamExt, stream};
use gristmill::dataset::store::clients::Stores;
use gristmill::dataset::store::location::Location;
use gristmill::ledger::store::{CreateOutcome, Store};
use object_store::{Error, ObjectStore, ObjectStoreExt, PutMode, PutOptions, UpdateVersion};

use crate::proxy::{Fault, Plan, Proxy, Rule};
use crate::services::{S3, TokenService, folder, need, session};
use crate::support::{Run, gristmill, is_full, passed};

const WRITERS: usize = 8;

/// `place` through a client of its own, with `more` variables over the store's.
fn open(s3: &S3, endpoint: &str, place: &str, more: &[(&str, &str)]) -> Location {
    let more = more.iter().map(|(name, value)| (name.to_string(), value.to_string()));
    let stores = Stores::new(s3.variables(endpoint).into_iter().chain(more));
    Location::parse_with(place, FsPath::new("/"), &stores).unwrap()
}

/// Lets `WRITERS` clients create each of `keys` keys at once; the winners each key had, and what stands there.
async fn race(stores: &[Store], keys: usize) -> Vec<(usize, Bytes)> {
    stream::iter(0..keys)
        .map(|key| async move {
            let key = format!("keys/{key:06}");
            let creates = stores.iter().enumerate().map(|(writer, store)| {
                let key = &key;
                async move {
                    let bytes = Bytes::from(format!("{key} by {writer}"));
                    // An error means that nobody knows: the same bytes again, as the ledger does.
                    for _ in 0..5 {
                        if let Ok(created) = store.create(key, bytes.clone()).await {
                            return created == CreateOutcome::Ours;
                        }
                    }
                    panic!("`{key}` cannot be created")
                }
            });
            let winners: Vec<bool> = join_all(creates).await;
            let stands = stores[0].get(&key, 1_000).await.unwrap().unwrap();
            let winner = winners.iter().position(|won| *won).expect("somebody won");
            assert_eq!(
                stands,
                Bytes::from(format!("{key} by {winner}")),
                "who won stands there"
            );
            (winners.into_iter().filter(|won| *won).count(), stands)
        })
        .buffered(4)
        .collect()
        .await
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn eight_writers_a_key_have_one_winner() {
    let Some(s3) = S3::need("eight_writers_a_key_have_one_winner") else {
        return;
    };
    let began = Instant::now();
    let keys = if is_full() { 2_000 } else { 200 };
    let place = s3.folder("race");
    let writer = || Store::new(&open(&s3, &s3.endpoint, &place, &[])).unwrap();
    let stores: Vec<Store> = std::iter::repeat_with(writer).take(WRITERS).collect();
    let outcomes = race(&stores, keys).await;
    assert!(outcomes.iter().all(|(winners, _)| *winners == 1), "{outcomes:?}");
    // It was a race: not the same writer every time.
    let winners: BTreeSet<u8> = outcomes.iter().map(|(_, stands)| stands[stands.len() - 1]).collect();
    assert!(winners.len() > 1, "{winners:?}");
    let figures = serde_json::json!({"keys": keys, "writers": WRITERS});
    passed("eight_writers_a_key_have_one_winner", None, began, figures);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn one_winner_a_key_also_behind_faults() {
    let Some(s3) = S3::need("one_winner_a_key_also_behind_faults") else {
        return;
    };
    let seed = std::time::SystemTime::now()
        .duration_since(std::time::UNIX_EPOCH)
        .unwrap()
        .as_nanos() as u64;
    println!("seed {seed}");
    let stall = Duration::from_secs(2);
    let proxy = Proxy::start(&s3.endpoint, Plan::mixed(seed, 0.2, stall));
    let place = s3.folder("faults");
    let writer = || {
        let short = [("GRISTMILL_STORE_TIMEOUT", "1")];
        Store::new(&open(&s3, &proxy.url(), &place, &short)).unwrap()
    };
    let stores: Vec<Store> = std::iter::repeat_with(writer).take(WRITERS).collect();
    let outcomes = race(&stores, 20).await;
    assert!(
        outcomes.iter().all(|(winners, _)| *winners == 1),
        "seed {seed}: {outcomes:?}"
    );
    let counters = proxy.counters();
    assert!(counters.faults() > 20, "{counters:?}");
    // Two requests a create without faults; the broken ones, and a bound on what each of them costs.
    let creates = (20 * WRITERS) as u64;
    assert!(
        counters.requests() <= 3 * creates + 4 * counters.faults(),
        "{counters:?}"
    );
    // Puts that were late change nothing.
    tokio::time::sleep(stall + Duration::from_millis(500)).await;
    let direct = Store::new(&open(&s3, &s3.endpoint, &place, &[])).unwrap();
    for (key, (_, stands)) in outcomes.iter().enumerate() {
        let now = direct.get(&format!("keys/{key:06}"), 1_000).await.unwrap().unwrap();
        assert_eq!(now, *stands, "seed {seed}");
    }
}

#[tokio::test]
async fn an_update_wants_the_tag_of_what_stands_there() {
    let Some(s3) = S3::need("an_update_wants_the_tag_of_what_stands_there") else {
        return;
    };
    let place = open(&s3, &s3.endpoint, &s3.folder("update"), &[]);
    let put = |bytes: &'static str, mode: PutMode| {
        let options = PutOptions::from(mode);
        place.store.put_opts(&place.path, bytes.into(), options)
    };
    let first = put("first", PutMode::Create).await.unwrap();
    assert!(matches!(
        put("other", PutMode::Create).await,
        Err(Error::AlreadyExists { .. })
    ));
    let at = |e_tag| UpdateVersion { e_tag, version: None };
    put("second", PutMode::Update(at(first.e_tag.clone()))).await.unwrap();
    let late = put("third", PutMode::Update(at(first.e_tag))).await;
    assert!(matches!(late, Err(Error::Precondition { .. })), "{late:?}");
    assert_eq!(place.read().await.unwrap(), "second");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn listings_of_more_than_a_page_are_whole() {
    let Some(s3) = S3::need("listings_of_more_than_a_page_are_whole") else {
        return;
    };
    let place = open(&s3, &s3.endpoint, &s3.folder("list"), &[]);
    let names: BTreeSet<String> = (0..1_050).map(|n| format!("{n:05}")).collect();
    stream::iter(&names)
        .map(|name| {
            let path = place.join(name).path;
            let store = &place.store;
            async move { store.put(&path, "x".into()).await }
        })
        .buffer_unordered(32)
        .try_collect::<Vec<_>>()
        .await
        .unwrap();
    let listed: Vec<_> = place.store.list(Some(&place.path)).try_collect().await.unwrap();
    let found: BTreeSet<String> = listed
        .iter()
        .filter_map(|meta| meta.location.filename().map(str::to_string))
        .collect();
    assert_eq!(found, names);
    let folder = place.store.list_with_delimiter(Some(&place.path)).await.unwrap();
    assert_eq!(folder.objects.len(), names.len());
}

#[tokio::test]
async fn a_profile_opens_the_store() {
    let Some(s3) = S3::need("a_profile_opens_the_store") else {
        return;
    };
    let home = tempfile::tempdir().unwrap();
    let aws = home.path().join(".aws");
    std::fs::create_dir(&aws).unwrap();
    let keys = format!(
        "[lab]\naws_access_key_id={}\naws_secret_access_key={}\n",
        s3.key, s3.secret
    );
    std::fs::write(aws.join("credentials"), keys).unwrap();
    let config = format!("[profile lab]\nregion=us-east-1\nendpoint_url={}\n", s3.endpoint);
    std::fs::write(aws.join("config"), config).unwrap();
    let variables = [
        ("HOME", home.path().to_str().unwrap()),
        ("AWS_PROFILE", "lab"),
        ("AWS_ALLOW_HTTP", "true"),
    ];
    let stores = Stores::new(variables.map(|(name, value)| (name.to_string(), value.to_string())));
    let place = Location::parse_with(&s3.folder("profile"), FsPath::new("/"), &stores).unwrap();
    place.store.put(&place.path, "x".into()).await.unwrap();
    assert_eq!(place.read().await.unwrap(), "x");
}

#[test]
fn a_wrong_secret_is_one_clear_line() {
    let Some(s3) = S3::need("a_wrong_secret_is_one_clear_line") else {
        return;
    };
    let wrong = "wr0ng-but-still-secret";
    let run = Run::of(
        gristmill(&["status", &s3.folder("denied")])
            .envs(s3.variables(&s3.endpoint))
            .env("AWS_SECRET_ACCESS_KEY", wrong),
    );
    assert_ne!(run.code, Some(0));
    assert_eq!(run.stderr.trim().lines().count(), 1, "{}", run.stderr);
    assert!(run.stderr.contains("SignatureDoesNotMatch"), "{}", run.stderr);
    for secret in [wrong, &s3.secret] {
        assert!(!run.stderr.contains(secret) && !run.stdout.contains(secret), "{run:?}");
    }
}

/// What AWS's container services are to a pod: gives out a new session each time, which claims to end in so many seconds.
fn credentials_server(token: &str, seconds: i64) -> (String, Arc<Mutex<Vec<String>>>) {
    let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let url = format!("http://{}/credentials", listener.local_addr().unwrap());
    let given = Arc::new(Mutex::new(Vec::new()));
    let (keys, token) = (given.clone(), token.to_string());
    std::thread::spawn(move || {
        for stream in listener.incoming() {
            let mut stream = stream.unwrap();
            let mut request = [0; 4096];
            let length = stream.read(&mut request).unwrap();
            let request = String::from_utf8_lossy(&request[..length]).to_ascii_lowercase();
            assert!(request.contains(&format!("authorization: {token}")), "{request}");
            let mut session = session();
            keys.lock()
                .unwrap()
                .push(session["AccessKeyId"].as_str().unwrap().to_string());
            session["Expiration"] = (chrono::Utc::now() + chrono::TimeDelta::seconds(seconds))
                .to_rfc3339()
                .into();
            let body = session.to_string();
            let head = format!(
                "HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: {}\r\nconnection: close\r\n\r\n",
                body.len()
            );
            stream.write_all(format!("{head}{body}").as_bytes()).unwrap();
        }
    });
    (url, given)
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn credentials_are_renewed_in_mid_run() {
    let Some(s3) = S3::need("credentials_are_renewed_in_mid_run") else {
        return;
    };
    if need("credentials_are_renewed_in_mid_run", "GRISTMILL_TEST_SERVICES_DIR").is_none() {
        return;
    }
    let folder = tempfile::tempdir().unwrap();
    let token = folder.path().join("token");
    std::fs::write(&token, "pod").unwrap();
    // They are renewed from five minutes before they end.
    for (seconds, sessions) in [(240, 3), (600, 1)] {
        let (url, given) = credentials_server("pod", seconds);
        let proxy = Proxy::start(&s3.endpoint, Plan::clean());
        let mut variables = s3.variables(&proxy.url());
        variables.retain(|(name, _)| !name.contains("KEY"));
        variables.push(("AWS_CONTAINER_CREDENTIALS_FULL_URI".into(), url));
        let token = token.display().to_string();
        variables.push(("AWS_CONTAINER_AUTHORIZATION_TOKEN_FILE".into(), token));
        let stores = Stores::new(variables);
        let place = Location::parse_with(&s3.folder("renewed"), FsPath::new("/"), &stores).unwrap();
        for _ in 0..3 {
            place.store.put(&place.path, "x".into()).await.unwrap();
            // Longer than a client goes on with credentials that are about to end.
            tokio::time::sleep(Duration::from_millis(200)).await;
        }
        let used: BTreeSet<String> = proxy.counters().access_keys.into_keys().collect();
        let given: BTreeSet<String> = given.lock().unwrap().iter().cloned().collect();
        assert_eq!(used, given, "each request is signed with the newest credentials");
        assert_eq!(used.len(), sessions, "credentials that end in {seconds} s");
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_web_identity_is_renewed_with_the_token_of_the_day() {
    const NAME: &str = "a_web_identity_is_renewed_with_the_token_of_the_day";
    let Some(s3) = S3::need(NAME) else { return };
    let Some(ca) = need(NAME, "GRISTMILL_TEST_CA") else {
        return;
    };
    if need(NAME, "GRISTMILL_TEST_SERVICES_DIR").is_none() {
        return;
    }
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("token");
    let mut service = TokenService::start();
    let proxy = Proxy::start(&s3.endpoint, Plan::clean());
    let mut variables = s3.variables(&proxy.url());
    variables.retain(|(name, _)| !name.contains("KEY"));
    for (name, value) in [
        ("AWS_WEB_IDENTITY_TOKEN_FILE", file.to_str().unwrap()),
        ("AWS_ROLE_ARN", "arn:aws:iam::000000000000:role/test"),
        ("AWS_ENDPOINT_URL_STS", &service.url),
        ("AWS_CA_BUNDLE", &ca),
    ] {
        variables.push((name.into(), value.into()));
    }
    let stores = Stores::new(variables);
    let place = Location::parse_with(&s3.folder("identity"), FsPath::new("/"), &stores).unwrap();
    for token in ["monday", "tuesday"] {
        std::fs::write(&file, token).unwrap();
        place.store.put(&place.path, token.into()).await.unwrap();
        let (shown, key) = service.served();
        assert_eq!(shown, token);
        assert_eq!(proxy.take_counters().access_keys.into_keys().collect::<Vec<_>>(), [key]);
        tokio::time::sleep(Duration::from_millis(200)).await;
    }
}

#[tokio::test]
async fn encryption_is_asked_for() {
    let Some(s3) = S3::need("encryption_is_asked_for") else {
        return;
    };
    if need("encryption_is_asked_for", "GRISTMILL_TEST_SERVICES_DIR").is_none() {
        return;
    }
    let text = "a text that must not lie on the disk as it is";
    for (encryption, on_disk) in [(None, true), (Some(("AWS_SERVER_SIDE_ENCRYPTION", "AES256")), false)] {
        let address = s3.folder("encrypted");
        let place = open(&s3, &s3.endpoint, &address, encryption.as_slice());
        place.store.put(&place.path, text.into()).await.unwrap();
        assert_eq!(place.read().await.unwrap(), text);
        let file = folder()
            .join("minio/data")
            .join(&s3.bucket)
            .join(place.path.as_ref())
            .join("xl.meta");
        let bytes = std::fs::read(&file).unwrap_or_else(|e| panic!("{}: {e}", file.display()));
        let found = bytes.windows(text.len()).any(|window| window == text.as_bytes());
        assert_eq!(found, on_disk, "{encryption:?}");
    }
}

#[tokio::test]
async fn busy_answers_are_tried_again_and_a_stall_ends() {
    let Some(s3) = S3::need("busy_answers_are_tried_again_and_a_stall_ends") else {
        return;
    };
    let proxy = Proxy::start(&s3.endpoint, Plan::clean());
    let place = open(
        &s3,
        &proxy.url(),
        &s3.folder("busy"),
        &[("GRISTMILL_STORE_TIMEOUT", "1")],
    );
    let put = || place.store.put(&place.path, "x".into());
    for fault in [Fault::ErrorBefore(503), Fault::SlowDown, Fault::ResetBefore] {
        proxy.set_plan(Plan::new(0, vec![Rule::always(fault).times(2)]));
        put().await.unwrap_or_else(|e| panic!("{fault:?}: {e}"));
        assert_eq!(proxy.take_counters().requests(), 3, "{fault:?}");
    }
    proxy.set_plan(Plan::new(0, vec![Rule::always(Fault::ErrorBefore(500))]));
    put().await.unwrap_err();
    assert_eq!(proxy.take_counters().requests(), 9, "it is tried again eight times");
    // A create is not repeated by the client when nobody knows whether it was applied: that is the ledger's to settle.
    proxy.set_plan(Plan::new(
        0,
        vec![Rule::always(Fault::StallBefore(Duration::from_secs(5)))],
    ));
    let began = Instant::now();
    let create = PutOptions::from(PutMode::Create);
    let stalled = place.store.put_opts(&place.join("new").path, "x".into(), create).await;
    assert!(stalled.is_err());
    assert!(began.elapsed() < Duration::from_secs(4), "{:?}", began.elapsed());
}
