//! The proxy before a tiny store in memory: each fault does what its name says, and plans repeat.

use std::collections::BTreeMap;
use std::io::{Read, Write};
use std::net::{TcpListener, TcpStream};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use crate::proxy::{Fault, Kind, Plan, Proxy, Request, Rule};

/// A store that knows PUT and GET, one request a connection.
struct Tiny {
    url: String,
    objects: Arc<Mutex<BTreeMap<String, String>>>,
    hosts: Arc<Mutex<Vec<String>>>,
}

impl Tiny {
    fn start() -> Tiny {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let url = format!("http://{}", listener.local_addr().unwrap());
        let (objects, hosts) = (Arc::<Mutex<_>>::default(), Arc::<Mutex<_>>::default());
        let (stored, seen) = (objects.clone(), hosts.clone());
        std::thread::spawn(move || {
            for stream in listener.incoming() {
                Tiny::serve(stream.unwrap(), &stored, &seen);
            }
        });
        Tiny { url, objects, hosts }
    }

    fn serve(mut stream: TcpStream, objects: &Mutex<BTreeMap<String, String>>, hosts: &Mutex<Vec<String>>) {
        let text = read_message(&mut stream);
        let (head, body) = text.split_once("\r\n\r\n").unwrap();
        let mut words = head.split(' ');
        let (method, path) = (words.next().unwrap(), words.next().unwrap().to_string());
        hosts.lock().unwrap().push(header(head, "host").unwrap().to_string());
        let answer = match method {
            "PUT" => {
                objects.lock().unwrap().insert(path, body.to_string());
                String::new()
            }
            _ => objects.lock().unwrap().get(&path).cloned().unwrap_or_default(),
        };
        let head = format!(
            "HTTP/1.1 200 OK\r\ncontent-length: {}\r\nconnection: close\r\n\r\n",
            answer.len()
        );
        stream.write_all(format!("{head}{answer}").as_bytes()).unwrap();
    }

    fn get(&self, path: &str) -> Option<String> {
        self.objects.lock().unwrap().get(path).cloned()
    }
}

fn header<'a>(head: &'a str, name: &str) -> Option<&'a str> {
    head.lines()
        .filter_map(|line| line.split_once(": "))
        .find(|(found, _)| found.eq_ignore_ascii_case(name))
        .map(|(_, value)| value)
}

fn read_message(stream: &mut TcpStream) -> String {
    let mut bytes = Vec::new();
    let mut chunk = [0; 4096];
    loop {
        let got = stream.read(&mut chunk).unwrap();
        bytes.extend_from_slice(&chunk[..got]);
        let text = String::from_utf8(bytes.clone()).unwrap();
        if let Some((head, body)) = text.split_once("\r\n\r\n") {
            let length = header(head, "content-length").map_or(0, |value| value.parse().unwrap());
            if body.len() >= length || got == 0 {
                return text;
            }
        }
        assert!(got > 0, "the client left in the middle of its request");
    }
}

/// One request through the proxy: status and body, or the error that ended it.
fn ask(proxy: &Proxy, method: &str, path: &str, headers: &str, body: &str) -> std::io::Result<(u16, String)> {
    let address = proxy.url().trim_start_matches("http://").to_string();
    let mut stream = TcpStream::connect(&address)?;
    let length = body.len();
    write!(
        stream,
        "{method} {path} HTTP/1.1\r\nhost: {address}\r\n{headers}content-length: {length}\r\n\r\n{body}"
    )?;
    let mut bytes = Vec::new();
    let mut chunk = [0; 4096];
    loop {
        match stream.read(&mut chunk)? {
            0 => break,
            got => bytes.extend_from_slice(&chunk[..got]),
        }
        let text = String::from_utf8_lossy(&bytes).to_string();
        if let Some((head, got)) = text.split_once("\r\n\r\n")
            && header(head, "content-length").is_some_and(|length| got.len() >= length.parse().unwrap())
        {
            return Ok((head.split(' ').nth(1).unwrap().parse().unwrap(), got.to_string()));
        }
    }
    Err(std::io::ErrorKind::UnexpectedEof.into())
}

fn put(proxy: &Proxy, path: &str, body: &str) -> std::io::Result<u16> {
    ask(proxy, "PUT", path, "", body).map(|(status, _)| status)
}

fn only(fault: Fault) -> Plan {
    Plan::new(1, vec![Rule::always(fault)])
}

#[test]
fn without_faults_everything_passes_and_is_counted() {
    let store = Tiny::start();
    let proxy = Proxy::start(&store.url, Plan::clean());
    assert_eq!(
        put(&proxy, "/b/out/_gristmill/j/shards/000001/log/000000.json", "x").unwrap(),
        200
    );
    let signed = "authorization: AWS4-HMAC-SHA256 Credential=KEY/20260101/us-east-1/s3/aws4_request, Signature=0\r\n";
    let found = ask(
        &proxy,
        "GET",
        "/b/out/_gristmill/j/shards/000001/log/000000.json",
        signed,
        "",
    )
    .unwrap();
    assert_eq!(found, (200, "x".to_string()));
    ask(&proxy, "GET", "/b?list-type=2&prefix=out", "", "").unwrap();
    let counters = proxy.take_counters();
    assert_eq!(counters.requests(), 3);
    assert_eq!(counters.of_kind(Kind::Log), 2);
    assert_eq!(counters.of_kind(Kind::List), 1);
    assert_eq!(counters.of_method("PUT"), 1);
    assert_eq!(counters.access_keys, BTreeMap::from([("KEY".to_string(), 1)]));
    assert_eq!(counters.faults(), 0);
    assert_eq!(proxy.counters().requests(), 0);
    // Signatures cover the host that the client named.
    let address = proxy.url().trim_start_matches("http://").to_string();
    assert!(store.hosts.lock().unwrap().iter().all(|host| *host == address));
}

#[test]
fn faults_before_applying_leave_the_store_alone() {
    let store = Tiny::start();
    let proxy = Proxy::start(&store.url, Plan::clean());
    for (fault, status) in [
        (Fault::ErrorBefore(503), Some(503)),
        (Fault::SlowDown, Some(429)),
        (Fault::ResetBefore, None),
    ] {
        proxy.set_plan(only(fault));
        assert_eq!(put(&proxy, "/b/key", "x").ok(), status, "{fault:?}");
        assert_eq!(store.get("/b/key"), None, "{fault:?}");
        assert_eq!(proxy.take_counters().faults, BTreeMap::from([(fault.name(), 1)]));
    }
    // A conflict only where there is a condition.
    proxy.set_plan(only(Fault::Conflict));
    assert_eq!(
        ask(&proxy, "PUT", "/b/key", "if-none-match: *\r\n", "x").unwrap().0,
        409
    );
    assert_eq!(put(&proxy, "/b/free", "x").unwrap(), 200);
}

#[test]
fn a_reset_is_a_reset() {
    let store = Tiny::start();
    let proxy = Proxy::start(&store.url, only(Fault::ResetBefore));
    let error = put(&proxy, "/b/key", "x").unwrap_err();
    assert_eq!(error.kind(), std::io::ErrorKind::ConnectionReset);
}

#[test]
fn faults_after_applying_leave_the_object_there() {
    let store = Tiny::start();
    let proxy = Proxy::start(&store.url, Plan::clean());
    for (number, (fault, status)) in [(Fault::ErrorAfter(500), Some(500)), (Fault::ResetAfter, None)]
        .into_iter()
        .enumerate()
    {
        proxy.set_plan(only(fault));
        let path = format!("/b/{number}");
        assert_eq!(put(&proxy, &path, "x").ok(), status, "{fault:?}");
        assert_eq!(store.get(&path).as_deref(), Some("x"), "{fault:?}");
    }
}

#[test]
fn truncation_cuts_the_body() {
    let store = Tiny::start();
    let proxy = Proxy::start(&store.url, Plan::clean());
    put(&proxy, "/b/key", &"x".repeat(1000)).unwrap();
    proxy.set_plan(only(Fault::Truncate));
    assert!(ask(&proxy, "GET", "/b/key", "", "").is_err());
    proxy.set_plan(Plan::clean());
    assert_eq!(ask(&proxy, "GET", "/b/key", "", "").unwrap().1.len(), 1000);
}

#[test]
fn stalls_and_delays_take_their_time() {
    let store = Tiny::start();
    let time = Duration::from_millis(300);
    let proxy = Proxy::start(&store.url, only(Fault::StallAfter(time)));
    let began = Instant::now();
    assert_eq!(put(&proxy, "/b/stalled", "x").unwrap(), 200);
    assert!(began.elapsed() >= time);

    proxy.set_plan(only(Fault::Delayed(time)));
    let began = Instant::now();
    assert_eq!(put(&proxy, "/b/late", "x").unwrap(), 500);
    assert_eq!(store.get("/b/late"), None);
    while store.get("/b/late").is_none() {
        assert!(
            began.elapsed() < Duration::from_secs(20),
            "the delayed put never arrived"
        );
        std::thread::sleep(Duration::from_millis(20));
    }
    assert!(began.elapsed() >= time);
}

#[test]
fn a_client_that_leaves_a_stall_before_applying_changes_nothing() {
    let store = Tiny::start();
    let proxy = Proxy::start(&store.url, only(Fault::StallBefore(Duration::from_millis(300))));
    let address = proxy.url().trim_start_matches("http://").to_string();
    let mut stream = TcpStream::connect(&address).unwrap();
    write!(
        stream,
        "PUT /b/key HTTP/1.1\r\nhost: {address}\r\ncontent-length: 1\r\n\r\nx"
    )
    .unwrap();
    std::thread::sleep(Duration::from_millis(100));
    drop(stream);
    std::thread::sleep(Duration::from_millis(600));
    assert_eq!(proxy.counters().faults(), 1);
    assert_eq!(store.get("/b/key"), None);
}

fn request(method: &str, target: &str) -> Request {
    Request {
        method: method.into(),
        target: target.into(),
        conditional: true,
    }
}

#[test]
fn the_same_seed_makes_the_same_faults_and_the_share_holds() {
    let faults = |seed| {
        let mut plan = Plan::mixed(seed, 0.2, Duration::from_secs(2));
        (0..10_000)
            .map(|_| plan.decide(&request("PUT", "/b/key")))
            .collect::<Vec<_>>()
    };
    assert_eq!(faults(7), faults(7));
    assert_ne!(faults(7), faults(8));
    // Truncation does not fit a put: 11 of 12 kinds remain.
    let struck = faults(7).iter().flatten().count();
    assert!((1_500..2_100).contains(&struck), "{struck}");
}

#[test]
fn scripts_count_requests() {
    let mut plan = Plan::new(
        0,
        vec![Rule::always(Fault::SlowDown).on("PUT").at("/log/").skip(2).times(1)],
    );
    let mut ask = |method: &str, target: &str| plan.decide(&request(method, target));
    assert_eq!(ask("PUT", "/b/log/0"), None);
    assert_eq!(ask("GET", "/b/log/0"), None);
    assert_eq!(ask("PUT", "/b/data/0"), None);
    assert_eq!(ask("PUT", "/b/log/1"), None);
    assert_eq!(ask("PUT", "/b/log/2"), Some(Fault::SlowDown));
    assert_eq!(ask("PUT", "/b/log/3"), None);
    let mut bounded = Plan::new(0, vec![Rule::always(Fault::SlowDown)]).at_most(2);
    let struck = (0..5).filter_map(|_| bounded.decide(&request("PUT", "/b/k"))).count();
    assert_eq!(struck, 2);
}

#[test]
fn keys_have_kinds() {
    for (target, kind) in [
        ("/b/out/part-00042.parquet", Kind::Part),
        ("/b/out/_SUCCESS", Kind::Success),
        ("/b/out/_gristmill/job.json", Kind::Job),
        ("/b/out/_gristmill/j/shards/000042/data/a-0.parquet", Kind::Data),
        ("/b/out/_gristmill/j/shards/000042/attempts/a.json", Kind::Attempt),
        ("/b/out/_gristmill/j/commits/000000/000042.json", Kind::Commit),
        ("/b/out/_gristmill/j/control/000.json", Kind::Control),
        ("/b/out/_gristmill/j/gen/001.json", Kind::Generation),
        ("/b/out/_gristmill/j/gen/001/shards/000042/log/000000.json", Kind::Log),
        ("/b/out/_gristmill/j/spend/w.json", Kind::Spend),
        ("/b/out/_gristmill/tmp/probe", Kind::Stage),
        ("/b/input.parquet", Kind::Other),
        ("/b?list-type=2&prefix=out%2F_gristmill", Kind::List),
    ] {
        assert_eq!(Kind::of(target), kind, "{target}");
    }
}
