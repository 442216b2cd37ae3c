//! Notifies a web address that a job is done: one signed POST in the form of Standard Webhooks,
//! with bounded retries.
//!
//! The address may come from a record that a stranger wrote. So redirects are not followed, and
//! nothing is sent to link-local addresses and metadata services, whatever name leads there. Only
//! the status of a response is read.

use std::time::{Duration, SystemTime, UNIX_EPOCH};

use base64::Engine;
use base64::prelude::BASE64_STANDARD;
use serde_json::{Value, json};
use url::Url;

use crate::dataset::store::clients::redacted;
use crate::dataset::store::error::cause;
use crate::dataset::store::hosts::is_link_local_url;
use crate::dataset::store::web::{post_client, refusal};
use crate::ledger::{self, Ledger};
use crate::report::summary::Summary;
use crate::signing::Signing;

/// Maximum number of tries.
const TRIES_MAX: u32 = 4;
/// Timeout of one try.
const TRY_TIMEOUT: Duration = Duration::from_secs(5);
/// Pause before the second try; it doubles with each further one.
const FIRST_PAUSE: Duration = Duration::from_secs(1);
/// Timeout of all tries and pauses together: a worker that is told to stop must leave within 30 s.
const TOTAL_TIMEOUT: Duration = Duration::from_secs(20);

/// The notice that a job is done.
#[derive(Debug, Clone)]
pub(crate) struct Notice {
    /// `JOB-GENERATION`: a repeated notice has the same id.
    pub id: String,
    /// JSON that an `on_finish` command reads on stdin, or that is posted.
    pub body: Value,
}

/// Why a try failed.
#[derive(Debug)]
struct PostError {
    why: String,
    /// Whether another try would fail the same way.
    is_permanent: bool,
}

impl Notice {
    /// Builds the notice of a finished job.
    ///
    /// # Errors
    /// The ledger cannot be read.
    pub(crate) async fn of(ledger: &Ledger) -> ledger::Result<Notice> {
        let status = ledger.quick_status().await?;
        let id = format!("{}-{}", status.job, ledger.generation());
        let summary = Summary::of(&status, ledger.store().url().as_str());
        let mut body = json!(summary);
        body["finish_id"] = id.as_str().into();
        body["id"] = json!(status.job);
        body["state"] = json!(status.state);
        body["generation"] = ledger.generation().into();
        Ok(Notice { id, body })
    }

    /// Posts the notice, signed with `keys`.
    ///
    /// # Errors
    /// The notice was not accepted; the error is one line.
    pub(crate) async fn post(&self, url: &Url, keys: &Signing) -> Result<(), String> {
        if is_link_local_url(url) {
            return Err("it is a link-local address or a metadata service; nothing is posted there".into());
        }
        let client = post_client(url, TRY_TIMEOUT).map_err(|error| cause(&error))?;
        let mut last = String::new();
        let tries = async {
            for round in 0..TRIES_MAX {
                if round > 0 {
                    tokio::time::sleep(FIRST_PAUSE * (1 << (round - 1))).await;
                }
                match self.try_post(&client, url, keys).await {
                    Ok(()) => return Ok(()),
                    Err(PostError {
                        why,
                        is_permanent: true,
                    }) => return Err(why),
                    Err(PostError { why, .. }) => last = why,
                }
            }
            Err(format!("after {TRIES_MAX} tries: {last}"))
        };
        let posted = tokio::time::timeout(TOTAL_TIMEOUT, tries).await;
        posted.unwrap_or_else(|_| Err(format!("no answer within {} s", TOTAL_TIMEOUT.as_secs())))
    }

    async fn try_post(&self, client: &reqwest::Client, url: &Url, keys: &Signing) -> Result<(), PostError> {
        let now = SystemTime::now()
            .duration_since(UNIX_EPOCH)
            .unwrap_or_default()
            .as_secs();
        let body = self.body.to_string();
        let mut request = client
            .post(url.clone())
            .header("content-type", "application/json")
            .header("webhook-id", &self.id)
            .header("webhook-timestamp", now);
        if keys.is_on() {
            request = request.header("webhook-signature", signatures(keys, &self.id, now, &body));
        }
        let response = request.body(body).send().await.map_err(|error| match refusal(&error) {
            Some(refusal) => PostError {
                why: refusal.to_string(),
                is_permanent: true,
            },
            None => PostError {
                why: cause(&error),
                is_permanent: false,
            },
        })?;
        let status = response.status();
        match status.as_u16() {
            200..=299 => Ok(()),
            300..=399 => Err(PostError {
                why: format!("it answered {status}: redirects are not followed, so name the address itself"),
                is_permanent: true,
            }),
            code => Err(PostError {
                why: format!("it answered {status}"),
                is_permanent: code < 500 && !matches!(code, 408 | 425 | 429),
            }),
        }
    }
}

/// For each key, `v1,` and the base64 of HMAC-SHA-256 over id, time and body.
pub(crate) fn signatures(keys: &Signing, id: &str, seconds: u64, body: &str) -> String {
    let tags = keys.tags(format!("{id}.{seconds}.{body}").as_bytes());
    let tags: Vec<String> = tags
        .iter()
        .map(|tag| format!("v1,{}", BASE64_STANDARD.encode(tag)))
        .collect();
    tags.join(" ")
}

/// The message for a notice that was not accepted.
pub(crate) fn webhook_error(url: &Url, why: &str) -> String {
    format!(
        "could not notify `on_finish.url` `{}`: {why}; the job's result is unaffected",
        redacted(url)
    )
}

#[cfg(test)]
mod tests {
    use std::io::{Read, Write};
    use std::net::TcpListener;
    use std::sync::{Arc, Mutex};

    use super::*;

    /// A server that sends these answers, one per request, and records the first bytes of each
    /// request.
    fn server(answers: &'static [&'static str]) -> (Url, Arc<Mutex<Vec<String>>>) {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let url = format!("http://127.0.0.1:{}/done", listener.local_addr().unwrap().port());
        let seen = Arc::new(Mutex::new(Vec::new()));
        let recorded = seen.clone();
        std::thread::spawn(move || {
            for (stream, answer) in listener.incoming().zip(answers) {
                let mut stream = stream.unwrap();
                let mut bytes = vec![0; 64 << 10];
                let length = stream.read(&mut bytes).unwrap();
                recorded
                    .lock()
                    .unwrap()
                    .push(String::from_utf8_lossy(&bytes[..length]).into_owned());
                let head = format!("HTTP/1.1 {answer}\r\nContent-Length: 0\r\nConnection: close\r\n\r\n");
                stream.write_all(head.as_bytes()).unwrap();
            }
        });
        (Url::parse(&url).unwrap(), seen)
    }

    fn notice() -> Notice {
        Notice {
            id: "0123456789abcdef0123-0".into(),
            body: json!({"job": "j"}),
        }
    }

    /// The expected signatures were made with Python's `hmac`, `hashlib` and `base64`.
    #[test]
    fn a_signature_is_that_of_standard_webhooks() {
        let keys = Signing::parse("0123456789abcdef0123456789abcdef\nanother key, of thirty-two bytes").unwrap();
        assert_eq!(
            signatures(&keys, "0123456789abcdef0123-0", 1_700_000_000, "{\"job\":\"j\"}"),
            "v1,Yoo/9ObbsAVucHSkT1KNCikHkAlMuBH0p1S4LuNFf3A= v1,Fm/NCBOe7DUSgjxgc3VB26+WGz3pxff25fFJwcF1/Qk="
        );
    }

    #[tokio::test]
    async fn server_errors_are_retried() {
        let (url, seen) = server(&["503 Busy", "204 Taken"]);
        notice().post(&url, &Signing::default()).await.unwrap();
        let seen = seen.lock().unwrap();
        assert_eq!(seen.len(), 2);
        assert!(
            seen.iter()
                .all(|request| request.contains("webhook-id: 0123456789abcdef0123-0")),
            "{seen:?}"
        );
    }

    #[tokio::test]
    async fn permanent_errors_are_not_retried() {
        for (answer, expected) in [
            (&["404 Not Found", "200 OK"], "it answered 404"),
            (
                &["301 Moved\r\nLocation: http://127.0.0.1:1/", "200 OK"],
                "redirects are not followed",
            ),
        ] {
            let (url, seen) = server(answer);
            let why = notice().post(&url, &Signing::default()).await.unwrap_err();
            assert!(why.contains(expected), "{why}");
            assert_eq!(seen.lock().unwrap().len(), 1, "{why}");
        }
    }

    #[tokio::test]
    async fn nothing_is_posted_to_a_metadata_service() {
        for address in [
            "http://169.254.169.254/x",
            "http://[fd00:ec2::254]/x",
            "http://metadata.google.internal/x",
        ] {
            let why = notice()
                .post(&Url::parse(address).unwrap(), &Signing::default())
                .await
                .unwrap_err();
            assert!(why.contains("metadata service"), "{why}");
        }
    }
}
