//! The hub over a source that counts how often it is asked.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::time::Duration;

use async_trait::async_trait;
use futures::StreamExt;

use super::hub::LISTENERS_MAX;
use super::*;
use crate::ledger::{Ledger, LedgerError};

/// Jobs `a0`, `a1`, … of the viewer `a`; the first one has ended.
#[derive(Default)]
struct Counting {
    frames: AtomicU64,
    lists: AtomicU64,
    is_away: std::sync::atomic::AtomicBool,
}

fn frame(id: &str) -> Frame {
    let has_ended = id == "a0";
    Frame {
        id: id.into(),
        kind: Kind::Batch,
        name: id.into(),
        model: None,
        output: None,
        state: has_ended.then(|| "finished".into()),
        note: None,
        created_at: 1,
        ended_at: has_ended.then_some(2),
        refused: 0,
        without_ledger: Default::default(),
        is_final: has_ended,
        rights: Rights {
            cancel: true,
            change: false,
        },
    }
}

#[async_trait]
impl JobSource for Counting {
    fn is_id(&self, text: &str) -> bool {
        text.len() == 2
    }

    async fn list(&self, viewer: &Viewer, _: Option<&str>, _: usize) -> Result<JobIds, LedgerError> {
        self.lists.fetch_add(1, Relaxed);
        let ids = if viewer.0 == "a" {
            vec!["a0".into(), "a1".into()]
        } else {
            Vec::new()
        };
        Ok(JobIds { ids, has_more: false })
    }

    async fn frame(&self, viewer: &Viewer, id: &str) -> Result<Option<Frame>, LedgerError> {
        self.frames.fetch_add(1, Relaxed);
        tokio::time::sleep(Duration::from_millis(20)).await;
        if self.is_away.load(Relaxed) {
            return Err(LedgerError::denied("the bucket `secret` is away"));
        }
        Ok(id.starts_with(&viewer.0).then(|| frame(id)))
    }

    async fn ledger(&self, _: &Viewer, _: &str) -> Result<Option<Ledger>, LedgerError> {
        Ok(None)
    }

    fn may_read_inputs(&self, _: &Viewer, _: &Ledger) -> bool {
        false
    }

    async fn command(&self, _: &Viewer, _: &str, _: Command) -> Result<(), ApiError> {
        Err(ApiError::conflict("not now"))
    }
}

fn hub() -> (Arc<Counting>, Arc<Hub>, Viewer) {
    let source = Arc::new(Counting::default());
    let hub = Arc::new(Hub::new(source.clone(), true));
    (source, hub, Viewer("a".into()))
}

#[tokio::test]
async fn many_who_look_cost_one_reading() {
    let (source, hub, viewer) = hub();
    let looks = (0..50).map(|_| hub.job(&viewer, "a1"));
    let jobs = futures::future::join_all(looks).await;
    assert!(
        jobs.iter()
            .all(|job| job.as_ref().is_ok_and(|job| job.state == "validating"))
    );
    assert_eq!(source.frames.load(Relaxed), 1);
    let pages = futures::future::join_all((0..50).map(|_| hub.first_page(&viewer))).await;
    assert!(
        pages
            .iter()
            .all(|page| page.as_ref().is_ok_and(|page| page.jobs().len() == 2))
    );
    assert_eq!((source.lists.load(Relaxed), source.frames.load(Relaxed)), (1, 2));
    // What was changed is read again, and so is what is old. What has ended is not.
    hub.note_change(&viewer, "a1").await;
    hub.job(&viewer, "a1").await.unwrap();
    assert_eq!(source.frames.load(Relaxed), 3);
    tokio::time::sleep(Duration::from_millis(2_100)).await;
    for id in ["a0", "a0", "a1"] {
        hub.job(&viewer, id).await.unwrap();
    }
    assert_eq!(source.frames.load(Relaxed), 4);
}

#[tokio::test]
async fn jobs_of_others_are_not_there() {
    let (source, hub, _) = hub();
    let other = Viewer("b".into());
    for id in ["a1", "zz", "", "../etc"] {
        let error = hub.job(&other, id).await.unwrap_err();
        assert!(format!("{error:?}").contains("404"), "{id}: {error:?}");
    }
    assert_eq!(source.frames.load(Relaxed), 2, "only ids reach the source");
    assert!(hub.first_page(&other).await.unwrap().jobs().is_empty());
}

#[tokio::test]
async fn an_ended_job_has_one_event_and_an_end() {
    let (_, hub, viewer) = hub();
    let response = hub.clone().job_events(viewer.clone(), "a0".into()).await.unwrap();
    assert_eq!(response.headers()["content-type"], "text/event-stream");
    let bytes = axum::body::to_bytes(response.into_body(), 1 << 20).await.unwrap();
    let text = String::from_utf8(bytes.to_vec()).unwrap();
    let (first, rest) = text.split_once("\n\n").unwrap();
    assert!(
        first.starts_with("event: job\ndata: {\"id\":\"a0\"") && first.contains("\"detail\":{"),
        "{first}"
    );
    assert_eq!(rest, "event: end\ndata: {}\n\n");
    assert!(hub.clone().job_events(viewer, "zz".into()).await.is_err());
}

#[tokio::test]
async fn listeners_are_limited_and_end_with_the_server() {
    let (_, hub, viewer) = hub();
    let mut listeners = Vec::new();
    for _ in 0..LISTENERS_MAX {
        let mut stream = hub
            .clone()
            .list_events(viewer.clone())
            .await
            .unwrap()
            .into_body()
            .into_data_stream();
        let first = stream.next().await.unwrap().unwrap();
        assert!(first.starts_with(b"event: jobs\ndata: {\"data\":["), "{first:?}");
        listeners.push(stream);
    }
    let refused = hub.clone().list_events(viewer.clone()).await.unwrap_err();
    assert!(format!("{refused:?}").contains("503"), "{refused:?}");
    // One that leaves makes room.
    listeners.pop();
    tokio::time::timeout(Duration::from_secs(10), async {
        while hub.listeners.available_permits() == 0 {
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
    })
    .await
    .unwrap();
    hub.close();
    for mut stream in listeners {
        let ended = tokio::time::timeout(Duration::from_secs(10), stream.next())
            .await
            .unwrap();
        assert!(ended.is_none(), "{ended:?}");
    }
}

#[tokio::test]
async fn a_store_that_is_away_is_told_without_its_name() {
    let (source, hub, viewer) = hub();
    source.is_away.store(true, Relaxed);
    let error = format!("{:?}", hub.job(&viewer, "a1").await.unwrap_err());
    assert!(error.contains("503") && !error.contains("secret"), "{error}");
    let page = hub.list(&viewer, None, 20).await.unwrap();
    assert!(page.jobs().iter().all(|job| job.state == "unreadable"));
    let shown = serde_json::to_string(page.jobs()).unwrap();
    assert!(
        shown.contains("does not answer") && !shown.contains("secret"),
        "{shown}"
    );
    source.is_away.store(false, Relaxed);
    assert_eq!(hub.job(&viewer, "a1").await.unwrap().state, "validating");
}
