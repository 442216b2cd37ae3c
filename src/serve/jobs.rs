//! The service's batches as the dashboard's jobs.

use std::sync::Arc;

use async_trait::async_trait;
use serde_json::Value;
use url::Url;

use super::batches::request_cancel;
use super::id;
use super::keys::Tenant;
use super::record::{BatchRecord, EndStatus};
use super::records::{BatchKey, Stages};
use super::service::Service;
use crate::dashboard::{ApiError, Command, Frame, JobIds, JobSource, Kind, Rights, Rows, Tokens, Viewer};
use crate::ledger::{Ledger, LedgerError};

/// The batches of the tenant who looks.
pub(super) struct BatchSource {
    pub service: Arc<Service>,
}

/// Who looks at a tenant's batches.
pub(super) fn viewer_of(tenant: &Tenant) -> Viewer {
    Viewer(tenant.as_str().to_string())
}

/// The tenant who looks. Its name was a tenant's when the request was let in.
fn tenant_of(viewer: &Viewer) -> Result<Tenant, LedgerError> {
    Tenant::new(&viewer.0).map_err(LedgerError::stop)
}

#[async_trait]
impl JobSource for BatchSource {
    fn is_id(&self, text: &str) -> bool {
        id::is_id(id::BATCH, text)
    }

    async fn list(&self, viewer: &Viewer, after: Option<&str>, limit: usize) -> Result<JobIds, LedgerError> {
        let tenant = tenant_of(viewer)?;
        let mut ids = self.service.records.list_batches(&tenant, after, limit + 1).await?;
        let has_more = ids.len() > limit;
        ids.truncate(limit);
        Ok(JobIds { ids, has_more })
    }

    async fn frame(&self, viewer: &Viewer, id: &str) -> Result<Option<Frame>, LedgerError> {
        let key = BatchKey::new(&tenant_of(viewer)?, id);
        let Some(record) = self.service.records.batch(&key).await? else {
            return Ok(None);
        };
        let stages = self.service.records.stages(&key).await?;
        Ok(Some(frame_of(record, &stages)))
    }

    async fn ledger(&self, viewer: &Viewer, id: &str) -> Result<Option<Ledger>, LedgerError> {
        let key = BatchKey::new(&tenant_of(viewer)?, id);
        self.service.records.ledger(&key).await
    }

    fn may_read_inputs(&self, viewer: &Viewer, ledger: &Ledger) -> bool {
        let Ok(tenant) = tenant_of(viewer) else { return false };
        let own = self.service.records.tenant_url(&tenant);
        ledger.job().inputs.iter().all(|input| is_below(&input.url, &own))
    }

    async fn command(&self, viewer: &Viewer, id: &str, command: Command) -> Result<(), ApiError> {
        if command != Command::Cancel {
            return Err(ApiError::conflict(
                "a batch's files are recorded when it ends: submit the requests again as a new batch",
            ));
        }
        let tenant = tenant_of(viewer)?;
        match self.service.view(&tenant, id).await? {
            Some(batch) => {
                let requested = request_cancel(&self.service, &tenant, &batch).await?;
                requested.map_err(ApiError::conflict)
            }
            None => Err(ApiError::conflict(format!("batch `{id}` is gone"))),
        }
    }
}

/// Whether an address lies below another one.
fn is_below(url: &str, folder: &Url) -> bool {
    let Ok(url) = Url::parse(url) else { return false };
    let folder = folder.as_str().trim_end_matches('/');
    let rest = url.as_str().strip_prefix(folder);
    rest.is_some_and(|rest| rest.starts_with('/'))
}

fn frame_of(record: BatchRecord, stages: &Stages) -> Frame {
    let checked = stages.checked.as_ref();
    let state = match (&stages.ended, &stages.results) {
        (Some(ended), _) => Some(match ended.status {
            EndStatus::Completed => "finished",
            EndStatus::Failed => "failed",
            EndStatus::Expired => "expired",
            EndStatus::Cancelled => "cancelled",
        }),
        (None, _) if stages.cancel.is_some() => Some("cancelling"),
        (None, Some(_)) => Some("finishing"),
        (None, None) => None,
    };
    let errors = stages.ended.iter().flat_map(|ended| &ended.errors);
    let name = record.metadata.as_ref().and_then(|metadata| metadata.get("name"));
    let name = name.and_then(Value::as_str).filter(|name| !name.is_empty());
    Frame {
        name: name.unwrap_or(&record.id).to_string(),
        kind: Kind::Batch,
        model: checked.map(|checked| checked.model.clone()),
        output: None,
        state: state.map(str::to_string),
        note: errors.map(|error| error.message.clone()).next(),
        created_at: record.created_at,
        ended_at: stages.ended.as_ref().map(|ended| ended.at),
        refused: checked
            .and_then(|checked| checked.refused)
            .map_or(0, |refused| refused.lines),
        without_ledger: recorded_rows(stages),
        is_final: stages.ended.is_some(),
        rights: Rights {
            cancel: state.is_none(),
            change: false,
        },
        id: record.id,
    }
}

/// Rows and tokens as the batch's records have them, for a batch whose job is not there.
fn recorded_rows(stages: &Stages) -> (Rows, Tokens) {
    let mut rows = Rows {
        total: stages.checked.as_ref().map_or(0, |checked| checked.requests),
        ..Rows::default()
    };
    let Some(results) = &stages.results else {
        return (rows, Tokens::default());
    };
    (rows.succeeded, rows.errored) = (results.completed, results.failed);
    (rows.expired, rows.cancelled) = (results.expired, results.cancelled);
    let tokens = Tokens {
        prompt: results.usage.input_tokens,
        cached: results.usage.cached_tokens,
        completion: results.usage.output_tokens,
    };
    (rows, tokens)
}

#[cfg(test)]
mod tests {
    use super::super::record::{BatchError, CancelRequest, CheckedInput, EndedBatch, RefusedLines};
    use super::super::view;
    use super::*;
    use serde_json::json;

    fn record(metadata: Value) -> BatchRecord {
        BatchRecord {
            metadata: metadata.as_object().cloned(),
            ..view::tests::record()
        }
    }

    #[test]
    fn records_give_what_no_ledger_says() {
        let mut stages = Stages::default();
        let frame = frame_of(record(json!({"name": "nightly"})), &stages);
        assert_eq!(
            (frame.name.as_str(), frame.state, frame.rights.cancel),
            ("nightly", None, true)
        );
        stages.checked = Some(CheckedInput {
            at: 200,
            model: "demo".into(),
            requests: 9,
            samples: 1,
            tokens: 0,
            refused: Some(RefusedLines { lines: 2, bytes: 7 }),
        });
        let frame = frame_of(record(json!({"name": 7})), &stages);
        assert_eq!((frame.name.as_str(), frame.refused), ("batch_x", 2));
        assert_eq!(
            (frame.model.as_deref(), frame.without_ledger.0.total),
            (Some("demo"), 9)
        );
        stages.cancel = Some(CancelRequest { at: 250 });
        let frame = frame_of(record(Value::Null), &stages);
        assert_eq!(
            (frame.state.as_deref(), frame.rights.cancel),
            (Some("cancelling"), false)
        );
        let error = BatchError {
            code: "empty_file".into(),
            line: None,
            message: "no request".into(),
            param: None,
        };
        stages.ended = Some(EndedBatch {
            at: 300,
            status: EndStatus::Failed,
            errors: vec![error],
        });
        let frame = frame_of(record(Value::Null), &stages);
        assert_eq!(
            (frame.state.as_deref(), frame.note.as_deref()),
            (Some("failed"), Some("no request"))
        );
        assert!(frame.is_final && frame.ended_at == Some(300) && !frame.rights.change);
    }

    #[test]
    fn inputs_of_other_tenants_are_not_read() {
        let own = Url::parse("s3://b/batches/tenants/a").unwrap();
        assert!(is_below("s3://b/batches/tenants/a/content/file-x.jsonl", &own));
        for other in [
            "s3://b/batches/tenants/ab/content/file-x.jsonl",
            "s3://b/batches/tenants/b/content/file-x.jsonl",
            "s3://b/batches/tenants/a/../b/content/file-x.jsonl",
            "s3://other/batches/tenants/a/x",
            "file:///etc/passwd",
            "s3://b/batches/tenants/a",
            "",
        ] {
            assert!(!is_below(other, &own), "{other}");
        }
    }
}
