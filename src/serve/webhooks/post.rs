//! One try to deliver an event: a signed post, of whose answer only the status is read.

use std::time::Duration;

use serde_json::{Value, json};

use super::config::{Webhook, event_name};
use crate::dataset::store::error::cause;
use crate::dataset::store::web::refusal;
use crate::notice::signatures;
use crate::serve::id;
use crate::serve::record::EndedBatch;

/// Maximum time of one try, until the status has arrived.
pub(super) const TRY_TIMEOUT: Duration = Duration::from_secs(10);
/// What the ids of events begin with.
const EVENT: &str = "evt_";

/// What a webhook answered.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Answer {
    Taken,
    /// It wants this event no more.
    Gone,
    Failed(String),
}

/// The event that a batch has ended.
#[derive(Debug)]
pub(super) struct Event {
    /// Follows from the batch, which ends once: each try of any process sends the same id.
    id: String,
    body: String,
}

impl Event {
    pub(super) fn new(batch: &str, ended: &EndedBatch) -> Event {
        let id = format!("{EVENT}{}", batch.strip_prefix(id::BATCH).unwrap_or(batch));
        let body = json!({
            "id": id,
            "object": "event",
            "created_at": ended.at,
            "type": event_name(ended.status),
            "data": {"id": batch},
        });
        Event {
            id,
            body: Value::to_string(&body),
        }
    }

    /// Posts the event, signed at `now` (seconds since 1970).
    pub(super) async fn post(&self, webhook: &Webhook, now: u64) -> Answer {
        let request = webhook
            .client
            .post(webhook.url.clone())
            .header("content-type", "application/json")
            .header("webhook-id", &self.id)
            .header("webhook-timestamp", now)
            .header(
                "webhook-signature",
                signatures(&webhook.secrets, &self.id, now, &self.body),
            );
        let response = match request.body(self.body.clone()).send().await {
            Ok(response) => response,
            Err(error) if error.is_timeout() => {
                return Answer::Failed(format!("no answer within {} s", TRY_TIMEOUT.as_secs()));
            }
            Err(error) => {
                // The address may hold a secret.
                let error = error.without_url();
                let why = refusal(&error).map_or_else(|| cause(&error), ToString::to_string);
                return Answer::Failed(why);
            }
        };
        let status = response.status();
        match status.as_u16() {
            200..=299 => Answer::Taken,
            410 => Answer::Gone,
            300..=399 => Answer::Failed(format!("it answered {status}, and redirects are not followed")),
            _ => Answer::Failed(format!("it answered {status}")),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::serve::record::EndStatus;
    use crate::signing::Signing;

    const SECRET: &str = "whsec_AAECAwQFBgcICQoLDA0ODxAREhMUFRYXGBkaGxwdHh8=";
    const BATCH: &str = "batch_0123456789abcdefghijklmnop";

    fn event() -> Event {
        let ended = EndedBatch {
            at: 1_764_000_000,
            status: EndStatus::Completed,
            errors: Vec::new(),
        };
        Event::new(BATCH, &ended)
    }

    /// The signature was made by the Python package `standardwebhooks`, and OpenAI's accepts it.
    #[test]
    fn an_event_has_the_form_that_the_official_client_verifies() {
        let event = event();
        let body = concat!(
            r#"{"id":"evt_0123456789abcdefghijklmnop","object":"event","created_at":1764000000,"#,
            r#""type":"batch.completed","data":{"id":"batch_0123456789abcdefghijklmnop"}}"#
        );
        assert_eq!(event.body, body);
        let secrets = Signing::parse_secrets(SECRET).unwrap();
        assert_eq!(
            signatures(&secrets, &event.id, 1_764_000_123, &event.body),
            "v1,Nv34Xe04fLXjeWgtL6ZBIorLqVh5KVnwLT4G+Nfh1L0="
        );
    }

    #[tokio::test]
    async fn the_status_decides() {
        use std::io::{Read, Write};
        let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
        let port = listener.local_addr().unwrap().port();
        let answers = [
            "204 No Content",
            "410 Gone",
            "302 Found\r\nLocation: /",
            "404 Not Found",
            "500 Oh",
        ];
        std::thread::spawn(move || {
            for (stream, answer) in listener.incoming().zip(answers) {
                let mut stream = stream.unwrap();
                let length = stream.read(&mut vec![0; 64 << 10]).unwrap();
                assert!(length > 0);
                let head = format!("HTTP/1.1 {answer}\r\nContent-Length: 0\r\nConnection: close\r\n\r\n");
                stream.write_all(head.as_bytes()).unwrap();
            }
        });
        let text = format!("http://127.0.0.1:{port}/hidden");
        let webhook = Webhook::for_test(&text, SECRET);
        let event = event();
        let mut found = Vec::new();
        for _ in answers {
            found.push(event.post(&webhook, 1).await);
        }
        let failed = |why: &str| Answer::Failed(why.into());
        assert_eq!(
            found,
            [
                Answer::Taken,
                Answer::Gone,
                failed("it answered 302 Found, and redirects are not followed"),
                failed("it answered 404 Not Found"),
                failed("it answered 500 Internal Server Error"),
            ]
        );
        // Nobody listens any more.
        let Answer::Failed(why) = event.post(&webhook, 1).await else {
            panic!("nobody has answered");
        };
        assert!(!why.contains("hidden"), "{why}");
    }
}
