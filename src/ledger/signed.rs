//! Signed records: with a signing key set, records that direct workers must carry a signature that
//! is bound to their address.
//!
//! These records are the job itself (inputs, model, prompts), each retry (rows, `max_tokens`) and
//! each command (stop, extend, pin). All other records are about results and only lead a worker to
//! objects of the same job: anybody who can write to the output can damage these.
//!
//! See docs/decisions/009-signature-is-the-last-field.md.

use bytes::Bytes;

use super::Ledger;
use super::error::{LedgerError, Result};
use super::keys::JOB;
use super::record::{Record, encode};
use super::store::Store;
use crate::signing::Purpose;

impl Ledger {
    /// Encodes a record and signs it for `key`. Without a signing key this fails for a signed job:
    /// workers with the key would reject the unsigned record as foreign, and leave the job.
    pub(super) fn encode_signed<R: Record>(&self, key: &str, record: &R) -> Result<Bytes> {
        if self.inner.job_is_signed && !self.store().signing.is_on() {
            return Err(LedgerError::stop(format!(
                "job `{}` (`{}`) is signed, and its commands and retries need a signing key, which is not set here: set \
                 `GRISTMILL_SIGNING_KEY` or `GRISTMILL_SIGNING_KEY_FILE`",
                self.job().name,
                self.store().url()
            )));
        }
        Ok(self.store().sign(key, encode(record)?))
    }
}

impl Store {
    /// Signs the `bytes` of a record for `key` of this output. Without a signing key, returns them
    /// unchanged.
    pub(super) fn sign(&self, key: &str, bytes: Bytes) -> Bytes {
        self.signing.sign(Purpose::Record, &self.signed_address(key), bytes)
    }

    /// Checks that the record in `bytes` was signed for `key` of this output.
    pub(super) fn check_signature(&self, key: &str, bytes: &[u8]) -> Result<()> {
        let Err(why) = self.signing.check(Purpose::Record, &self.signed_address(key), bytes) else {
            return Ok(());
        };
        let remedy = match key {
            JOB => "add the key that it was signed with, or submit the job anew, to an output of its own",
            _ => {
                "add the key that it was signed with, or remove it if nobody with the right to control the job wrote it"
            }
        };
        Err(LedgerError::damaged(format!("`{}` {why}: {remedy}", self.address(key))))
    }

    /// The address of `key`, to which a signature is bound. It is a URL instead of a path, because
    /// messages name the output by its URL.
    fn signed_address(&self, key: &str) -> String {
        format!("{}/{key}", self.url().as_str().trim_end_matches('/'))
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use object_store::ObjectStore;
    use object_store::memory::InMemory;
    use serde_json::json;

    use super::super::order::{JobCommand, StopWhy};
    use super::super::record::{Generation, RetriedShard, Tally, VERSION};
    use super::super::{Id, JobDraft, JobIdentity, Retry, RowSet};
    use super::*;
    use crate::dataset::plan::{Format, InputFile, Segment, Shard};
    use crate::dataset::store::location::Location;
    use crate::signing::Signing;

    const KEY: &str = "0123456789abcdef0123456789abcdef";
    const OTHER: &str = "another key, of thirty-two bytes";

    /// The output `memory:///{name}` of a process with these keys.
    fn store(objects: &Arc<dyn ObjectStore>, name: &str, keys: &str) -> Store {
        let location = Location {
            store: objects.clone(),
            path: name.into(),
            url: format!("memory:///{name}").parse().unwrap(),
        };
        let mut store = Store::with_retry(&location, Retry::default()).unwrap();
        store.signing = match keys {
            "" => Signing::default(),
            keys => Signing::parse(keys).unwrap(),
        };
        store
    }

    fn draft() -> JobDraft {
        let segment = Segment {
            input: 0,
            first_row: 0,
            rows: 4,
            bytes: None,
            line: None,
            picks: None,
        };
        JobDraft {
            layout: Default::default(),
            name: "signed".into(),
            identity: JobIdentity {
                job_hash: "job".into(),
                model_hash: "model".into(),
                tokenizer_hash: "tokenizer".into(),
                template_hash: None,
                kv_cache: None,
                precision: "f32".into(),
            },
            resolved: json!({}),
            inputs: vec![InputFile {
                url: "memory:///in.parquet".into(),
                format: Format::Parquet,
                size: 1,
                etag: None,
                version: None,
                sha256: None,
                rows: 4,
                compressed: None,
                partition: Vec::new(),
            }],
            shards: vec![Shard {
                first_row: 0,
                rows: 4,
                segments: vec![segment],
            }],
            columns: json!(null),
            needs_newest_version: false,
            part_extension: "parquet".into(),
            limits: Default::default(),
            usd_per_hour: None,
        }
    }

    async fn begun(store: Store) -> Ledger {
        Ledger::create_or_resume_in(store, draft()).await.unwrap().0
    }

    /// The error from opening the job and reading its commands at this store, if any.
    async fn refusal(store: Store) -> Option<String> {
        let opened = async { Ledger::open_in(store).await?.expect("a job").control().await };
        match opened.await {
            Ok(_) => None,
            Err(LedgerError::Damaged { message }) => Some(message),
            Err(other) => panic!("{other:?}"),
        }
    }

    /// As [`refusal`], with the key, after `change` of the object at `key`.
    async fn refusal_after(
        objects: &Arc<dyn ObjectStore>,
        key: &str,
        change: impl Fn(String) -> String,
    ) -> Option<String> {
        let store = store(objects, "out", KEY);
        let bytes = store.get(key, u64::MAX).await.unwrap().expect("it is there");
        let text = String::from_utf8(bytes.to_vec()).unwrap();
        store.replace(key, change(text).into()).await.unwrap();
        let found = refusal(store.clone()).await;
        store.replace(key, bytes).await.unwrap();
        found
    }

    fn unsigned(text: String) -> String {
        format!("{}}}\n", &text[..text.rfind(",\"signature\":").expect("it is signed")])
    }

    #[tokio::test]
    async fn records_that_direct_workers_need_a_valid_signature() {
        let objects: Arc<dyn ObjectStore> = Arc::new(InMemory::new());
        let ledger = begun(store(&objects, "out", KEY)).await;
        let mut control = ledger.control().await.unwrap();
        assert!(
            control
                .try_append(JobCommand::stop(StopWhy::Cancelled, false))
                .await
                .unwrap()
        );
        let retry = Generation {
            v: VERSION,
            job: ledger.job().job.clone(),
            generation: 1,
            nonce: Id::random().unwrap(),
            max_tokens: None,
            shards: vec![RetriedShard {
                shard: 0,
                rows: RowSet::from_range(0..2),
                tally: Tally {
                    errored: 2,
                    ..Tally::default()
                },
            }],
            blocks: Vec::new(),
        };
        let key = ledger.keys().generation(1);
        let bytes = ledger.encode_retry(&retry, &key).await.unwrap();
        ledger.store().create(&key, bytes).await.unwrap();

        for keys in [KEY, "", &format!("{OTHER}\n{KEY}")] {
            assert_eq!(refusal(store(&objects, "out", keys)).await, None, "{keys}");
        }
        let why = refusal(store(&objects, "out", OTHER)).await.unwrap();
        assert!(
            why.contains("_gristmill/job.json") && why.contains("another key"),
            "{why}"
        );
        let control_key = ledger.keys().control(0);
        for (key, old, new) in [
            (JOB, "in.parquet", "my.parquet"),
            (&key, "\"generation\":1", "\"generation\":1,\"max_tokens\":9"),
            (&control_key, "cancelled", "budget"),
        ] {
            let why = refusal_after(&objects, key, |text| text.replace(old, new))
                .await
                .expect(key);
            assert!(why.contains(key) && why.contains("it was changed"), "{why}");
            let why = refusal_after(&objects, key, unsigned).await.expect(key);
            assert!(why.contains(key) && why.contains("is not signed"), "{why}");
        }
        // The same bytes at another address carry the signature for the first address.
        let (here, there) = (store(&objects, "out", KEY), store(&objects, "other", KEY));
        let bytes = here.get(JOB, u64::MAX).await.unwrap().unwrap();
        there.create(JOB, bytes).await.unwrap();
        let bytes = here.get(JOB, u64::MAX).await.unwrap().unwrap();
        assert!(
            here.check_signature(&control_key, &bytes).is_err(),
            "another key of the same output"
        );
        let why = refusal(there).await.unwrap();
        assert!(why.contains("copied from another place"), "{why}");
    }

    #[tokio::test]
    async fn commands_to_a_signed_job_need_the_key() {
        let objects: Arc<dyn ObjectStore> = Arc::new(InMemory::new());
        begun(store(&objects, "out", KEY)).await;
        let ledger = Ledger::open_in(store(&objects, "out", "")).await.unwrap().unwrap();
        let mut control = ledger.control().await.unwrap();
        let error = control
            .try_append(JobCommand::stop(StopWhy::Cancelled, false))
            .await
            .unwrap_err();
        assert!(error.to_string().contains("GRISTMILL_SIGNING_KEY"), "{error}");
        assert_eq!(refusal(store(&objects, "out", KEY)).await, None, "nothing was written");
        // A job without a signature takes commands from anybody.
        let mut control = begun(store(&objects, "plain", "")).await.control().await.unwrap();
        assert!(
            control
                .try_append(JobCommand::stop(StopWhy::Cancelled, false))
                .await
                .unwrap()
        );
    }
}
