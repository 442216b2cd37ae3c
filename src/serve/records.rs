//! The records of files and batches in object storage.
//!
//! A record is created once and never changed, so that any number of processes may serve the same
//! store, and each may be killed at any time. A batch's state follows from which of its records
//! exist ([`Stages`]) and from the ledger of its job.

use bytes::Bytes;
use chrono::{DateTime, Utc};
use serde::Serialize;
use serde::de::DeserializeOwned;
use serde_json::{Map, Value};
use url::Url;

use super::id;
use super::keys::Tenant;
use super::record::{
    BatchRecord, CancelRequest, CheckedInput, Creation, EndedBatch, FileRecord, Results, UploadEnd, UploadRecord,
};
use crate::dataset::store::location::Location;
use crate::ledger::store::{CreateOutcome, ListedObject};
use crate::ledger::{Ledger, LedgerError, Store};

/// Maximum size of a record.
const RECORD_BYTES_MAX: u64 = 1 << 20;
/// Version of the records that this gristmill writes, and the newest that it reads.
const VERSION: u64 = 1;
/// Maximum number of unfinished batches that are looked at.
const OPEN_MAX: usize = 100_000;

type Result<T, E = LedgerError> = std::result::Result<T, E>;

/// The records that a batch got after its creation.
#[derive(Debug, Default)]
pub(super) struct Stages {
    pub checked: Option<CheckedInput>,
    pub cancel: Option<CancelRequest>,
    pub results: Option<Results>,
    pub ended: Option<EndedBatch>,
}

/// Marks the time at which a file, an upload or the job of a batch is looked at.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct DueMark {
    key: String,
    /// Of the file, the upload or the batch.
    pub id: String,
}

/// A record after a try to create it.
#[derive(Debug)]
pub(super) enum Created<T> {
    Ours(T),
    /// Another process has created it before.
    Theirs(T),
}

/// Names a batch among all tenants.
#[derive(Debug, Clone, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub(super) struct BatchKey {
    pub tenant: Tenant,
    pub id: String,
}

impl BatchKey {
    pub(super) fn new(tenant: &Tenant, id: impl Into<String>) -> BatchKey {
        BatchKey {
            tenant: tenant.clone(),
            id: id.into(),
        }
    }

    fn record(&self) -> String {
        format!("{}/{}.json", batches(&self.tenant), self.id)
    }

    pub(super) fn stage(&self, stage: &str) -> String {
        // Not below `work/`, which people may clean up.
        format!("tenants/{}/stages/{}/{stage}.json", self.tenant.as_str(), self.id)
    }

    fn work(&self) -> String {
        format!("tenants/{}/work/{}", self.tenant.as_str(), self.id)
    }

    fn output(&self) -> String {
        format!("{}/output", self.work())
    }

    fn open_mark(&self) -> String {
        format!("open/{}/{}", self.tenant.as_str(), self.id)
    }
}

fn batches(tenant: &Tenant) -> String {
    format!("tenants/{}/batches", tenant.as_str())
}

fn files(tenant: &Tenant) -> String {
    format!("tenants/{}/files", tenant.as_str())
}

fn file_record(tenant: &Tenant, id: &str) -> String {
    format!("{}/{id}.json", files(tenant))
}

/// The records below a root in object storage. Cheap to clone.
#[derive(Debug, Clone)]
pub(super) struct Records {
    root: Location,
    pub(super) store: Store,
}

impl Records {
    /// Checks that the store honours put-if-absent.
    pub(super) async fn open(root: Location) -> Result<Records> {
        let store = Store::new(&root)?;
        store.check().await?;
        Ok(Records { root, store })
    }

    pub(super) async fn read<T: DeserializeOwned>(&self, key: &str) -> Result<Option<T>> {
        let bytes = self.store.get(key, RECORD_BYTES_MAX).await?;
        bytes.map(|bytes| self.decode(key, &bytes)).transpose()
    }

    fn decode<T: DeserializeOwned>(&self, key: &str, bytes: &Bytes) -> Result<T> {
        let damaged = |why: String| LedgerError::damaged(format!("`{}`: {why}", self.store.address(key)));
        let value: Value = serde_json::from_slice(bytes).map_err(|error| damaged(error.to_string()))?;
        match value["v"].as_u64() {
            Some(found) if found > VERSION => Err(LedgerError::Newer {
                key: self.store.address(key),
                found,
                known: VERSION as u32,
            }),
            _ => serde_json::from_value(value).map_err(|error| damaged(error.to_string())),
        }
    }

    /// Creates a record, unless there is one already. Returns the record that is there now.
    pub(super) async fn create<T: Serialize + DeserializeOwned>(&self, key: &str, record: T) -> Result<T> {
        match self.try_create(key, record).await? {
            Created::Ours(record) | Created::Theirs(record) => Ok(record),
        }
    }

    async fn try_create<T: Serialize + DeserializeOwned>(&self, key: &str, record: T) -> Result<Created<T>> {
        match self.store.create(key, encode(&record)).await? {
            CreateOutcome::Ours => Ok(Created::Ours(record)),
            CreateOutcome::Theirs(bytes) => self.decode(key, &bytes).map(Created::Theirs),
        }
    }

    pub(super) async fn file(&self, tenant: &Tenant, id: &str) -> Result<Option<FileRecord>> {
        self.read(&file_record(tenant, id)).await
    }

    pub(super) async fn create_file(&self, tenant: &Tenant, record: FileRecord) -> Result<FileRecord> {
        self.create(&file_record(tenant, &record.id), record).await
    }

    pub(super) async fn delete_file_record(&self, tenant: &Tenant, id: &str) -> Result<()> {
        self.store.delete(&file_record(tenant, id)).await
    }

    pub(super) async fn delete_content(&self, tenant: &Tenant, id: &str) -> Result<()> {
        self.store.delete(&content(tenant, id)).await
    }

    /// Where the content of an uploaded file lies.
    pub(super) fn content(&self, tenant: &Tenant, id: &str) -> Location {
        self.root.join(&content(tenant, id))
    }

    /// Records of files, newest first, after the file `after`.
    pub(super) async fn list_files(&self, tenant: &Tenant, after: Option<&str>) -> Result<Vec<String>> {
        self.list_ids(&files(tenant), after, usize::MAX).await
    }

    /// Ids of batches, newest first, after the batch `after`.
    pub(super) async fn list_batches(&self, tenant: &Tenant, after: Option<&str>, limit: usize) -> Result<Vec<String>> {
        self.list_ids(&batches(tenant), after, limit).await
    }

    async fn list_ids(&self, prefix: &str, after: Option<&str>, limit: usize) -> Result<Vec<String>> {
        let after = after.map(|id| format!("{prefix}/{id}.json"));
        let listed = self.store.list_page(prefix, after.as_deref(), limit).await?;
        Ok(listed.iter().filter_map(id_of).collect())
    }

    pub(super) async fn batch(&self, key: &BatchKey) -> Result<Option<BatchRecord>> {
        self.read(&key.record()).await
    }

    /// Creates a batch, which must have a mark among the unfinished ones before it has a record:
    /// after a crash in between, nobody forgets it.
    pub(super) async fn create_batch(&self, key: &BatchKey, record: BatchRecord) -> Result<BatchRecord> {
        self.store.create(&key.open_mark(), Bytes::from_static(b"{}")).await?;
        self.create(&key.record(), record).await
    }

    /// The unfinished batches of all tenants, sorted.
    pub(super) async fn open_batches(&self) -> Result<Vec<BatchKey>> {
        self.marked_open("open").await
    }

    /// The unfinished batches of a tenant, among them some that have just ended, and some whose
    /// creator died before it wrote their record.
    pub(super) async fn open_batches_of(&self, tenant: &Tenant) -> Result<Vec<BatchKey>> {
        self.marked_open(&format!("open/{}", tenant.as_str())).await
    }

    async fn marked_open(&self, prefix: &str) -> Result<Vec<BatchKey>> {
        let listed = self.store.list_page(prefix, None, OPEN_MAX).await?;
        let key_of = |object: ListedObject| {
            let mut parts = object.key.split('/').skip(1);
            let tenant = Tenant::new(parts.next()?).ok()?;
            let id = parts.next().filter(|text| id::is_id(id::BATCH, text))?;
            Some(BatchKey::new(&tenant, id))
        };
        let mut keys: Vec<BatchKey> = listed.into_iter().filter_map(key_of).collect();
        // The store sorts `a-b/` before `a/`.
        keys.sort_unstable();
        Ok(keys)
    }

    /// Removes the mark of a batch that has ended.
    pub(super) async fn close_batch(&self, key: &BatchKey) -> Result<()> {
        self.store.delete(&key.open_mark()).await
    }

    /// The records that a batch got after its creation.
    pub(super) async fn stages(&self, key: &BatchKey) -> Result<Stages> {
        // The last record is read first: whoever sees it also sees those that were written before.
        let ended = self.stage(key, "ended").await?;
        let (checked, cancel, results) = futures::try_join!(
            self.stage(key, "checked"),
            self.stage(key, "cancel"),
            self.stage(key, "results"),
        )?;
        Ok(Stages {
            checked,
            cancel,
            results,
            ended,
        })
    }

    /// How the batch has ended; `None`: it has not.
    pub(super) async fn end_of(&self, key: &BatchKey) -> Result<Option<EndedBatch>> {
        self.stage(key, "ended").await
    }

    /// What the check of the batch's input has found; `None`: it was not checked yet, or has
    /// failed.
    pub(super) async fn checked_input(&self, key: &BatchKey) -> Result<Option<CheckedInput>> {
        self.stage(key, "checked").await
    }

    async fn stage<T: DeserializeOwned>(&self, key: &BatchKey, stage: &str) -> Result<Option<T>> {
        self.read(&key.stage(stage)).await
    }

    pub(super) async fn checked(&self, key: &BatchKey, record: CheckedInput) -> Result<CheckedInput> {
        self.create(&key.stage("checked"), record).await
    }

    pub(super) async fn cancel(&self, key: &BatchKey, record: CancelRequest) -> Result<CancelRequest> {
        self.create(&key.stage("cancel"), record).await
    }

    pub(super) async fn results(&self, key: &BatchKey, record: Results) -> Result<Results> {
        self.create(&key.stage("results"), record).await
    }

    pub(super) async fn ended(&self, key: &BatchKey, record: EndedBatch) -> Result<Created<EndedBatch>> {
        self.try_create(&key.stage("ended"), record).await
    }

    pub(super) async fn create_upload(&self, tenant: &Tenant, record: UploadRecord) -> Result<UploadRecord> {
        self.create(&upload(tenant, &record.id, "record"), record).await
    }

    pub(super) async fn upload(&self, tenant: &Tenant, id: &str) -> Result<Option<UploadRecord>> {
        self.read(&upload(tenant, id, "record")).await
    }

    pub(super) async fn end_upload(&self, tenant: &Tenant, id: &str, record: UploadEnd) -> Result<UploadEnd> {
        self.create(&upload(tenant, id, "end"), record).await
    }

    pub(super) async fn upload_end(&self, tenant: &Tenant, id: &str) -> Result<Option<UploadEnd>> {
        self.read(&upload(tenant, id, "end")).await
    }

    /// Where a part of an upload lies.
    pub(super) fn part(&self, tenant: &Tenant, upload: &str, part: &str) -> Location {
        self.root.join(&format!("{}/{part}", parts(tenant, upload)))
    }

    /// Removes all parts of an upload.
    pub(super) async fn delete_parts(&self, tenant: &Tenant, upload: &str) -> Result<()> {
        self.delete_below(&parts(tenant, upload)).await
    }

    /// Removes an upload, with its records.
    pub(super) async fn delete_upload(&self, tenant: &Tenant, upload: &str) -> Result<()> {
        self.delete_below(&format!("tenants/{}/uploads/{upload}", tenant.as_str()))
            .await
    }

    /// Removes the job of a batch that has ended. The batch's records stay.
    pub(super) async fn delete_work(&self, key: &BatchKey) -> Result<()> {
        self.delete_below(&key.work()).await
    }

    async fn delete_below(&self, prefix: &str) -> Result<()> {
        for object in self.store.list(prefix).await? {
            self.store.delete(&object.key).await?;
        }
        Ok(())
    }

    /// Marks a file, an upload or the job of a batch, to be looked at once the time `at` has come.
    pub(super) async fn note_due(&self, tenant: &Tenant, at: i64, id: &str) -> Result<DueMark> {
        let key = format!("{}/{at:012}-{id}", due(tenant));
        self.store.create(&key, Bytes::from_static(b"{}")).await?;
        let id = id.to_string();
        Ok(DueMark { key, id })
    }

    /// Up to `limit` of the marks after `last` whose time has come, the oldest first.
    pub(super) async fn due(
        &self,
        tenant: &Tenant,
        now: i64,
        last: Option<&DueMark>,
        limit: usize,
    ) -> Result<Vec<DueMark>> {
        let last = last.map(|mark| mark.key.as_str());
        let listed = self.store.list_page(&due(tenant), last, limit).await?;
        let mark_of = |object: ListedObject| {
            let (at, id) = object.key.rsplit('/').next()?.split_once('-')?;
            let is_due = at.parse::<i64>().is_ok_and(|at| at <= now);
            let is_known = [id::FILE, id::UPLOAD, id::BATCH]
                .iter()
                .any(|prefix| id::is_id(prefix, id));
            let id = id.to_string();
            (is_due && is_known).then_some(DueMark { key: object.key, id })
        };
        Ok(listed.into_iter().filter_map(mark_of).collect())
    }

    pub(super) async fn forget_due(&self, mark: &DueMark) -> Result<()> {
        self.store.delete(&mark.key).await
    }

    /// Removes the notes on repeated requests that were written before this time.
    pub(super) async fn delete_creations(&self, tenant: &Tenant, before: DateTime<Utc>) -> Result<()> {
        for object in self.store.list(&creations(tenant)).await? {
            if object.modified < before {
                self.store.delete(&object.key).await?;
            }
        }
        Ok(())
    }

    /// Records which batch a request creates. `hash` identifies the request.
    pub(super) async fn create_creation(&self, tenant: &Tenant, hash: &str, record: Creation) -> Result<Creation> {
        self.create(&creation(tenant, hash), record).await
    }

    /// As [`Records::create_creation`], but replaces an earlier record.
    pub(super) async fn replace_creation(&self, tenant: &Tenant, hash: &str, record: &Creation) -> Result<()> {
        self.store.replace(&creation(tenant, hash), encode(record)).await
    }

    pub(super) async fn creation(&self, tenant: &Tenant, hash: &str) -> Result<Option<Creation>> {
        self.read(&creation(tenant, hash)).await
    }

    /// Replaces the record of a file of results that existed while its batch ran. All processes write
    /// the same.
    pub(super) async fn replace_file(&self, tenant: &Tenant, record: &FileRecord) -> Result<()> {
        self.store
            .replace(&file_record(tenant, &record.id), encode(record))
            .await
    }

    /// The requests of an input that has other lines, too.
    pub(super) fn good_lines(&self, key: &BatchKey) -> Location {
        self.root.join(&format!("{}/requests.jsonl", key.work()))
    }

    /// The lines of the error file for the others.
    pub(super) fn refused_lines(&self, key: &BatchKey) -> Location {
        self.root.join(&format!("{}/refused.jsonl", key.work()))
    }

    /// The address below which everything of a tenant lies.
    pub(super) fn tenant_url(&self, tenant: &Tenant) -> Url {
        self.root.join(&format!("tenants/{}", tenant.as_str())).url
    }

    /// The output of a batch's job.
    pub(super) fn output(&self, key: &BatchKey) -> Location {
        self.root.join(&key.output())
    }

    /// The ledger of a batch's job; `None`: the job does not exist yet.
    pub(super) async fn ledger(&self, key: &BatchKey) -> Result<Option<Ledger>> {
        Ledger::open(&self.output(key)).await
    }
}

fn content(tenant: &Tenant, id: &str) -> String {
    format!("tenants/{}/content/{id}.jsonl", tenant.as_str())
}

fn upload(tenant: &Tenant, id: &str, record: &str) -> String {
    format!("tenants/{}/uploads/{id}/{record}.json", tenant.as_str())
}

fn parts(tenant: &Tenant, upload: &str) -> String {
    format!("tenants/{}/uploads/{upload}/parts", tenant.as_str())
}

fn creations(tenant: &Tenant) -> String {
    format!("tenants/{}/creations", tenant.as_str())
}

fn creation(tenant: &Tenant, hash: &str) -> String {
    format!("{}/{hash}.json", creations(tenant))
}

fn due(tenant: &Tenant) -> String {
    format!("tenants/{}/due", tenant.as_str())
}

fn id_of(object: &ListedObject) -> Option<String> {
    let name = object.key.rsplit('/').next()?.strip_suffix(".json")?;
    let is_known = id::is_id(id::FILE, name) || id::is_id(id::BATCH, name);
    is_known.then(|| name.to_string())
}

/// The record as JSON, with its version.
fn encode(record: &impl Serialize) -> Bytes {
    let mut fields = Map::new();
    fields.insert("v".into(), VERSION.into());
    // Records are structs of plain values, which always become objects.
    if let Ok(Value::Object(record)) = serde_json::to_value(record) {
        fields.extend(record);
    }
    Value::Object(fields).to_string().into()
}

#[cfg(test)]
pub(super) mod tests {
    use super::super::record::{EndStatus, InvalidLines};
    use super::*;
    use object_store::ObjectStoreExt;
    use object_store::memory::InMemory;
    use object_store::path::Path;
    use std::sync::Arc;
    use url::Url;

    pub(in crate::serve) fn root() -> Location {
        Location {
            store: Arc::new(InMemory::new()),
            path: Path::from("root"),
            url: Url::parse("memory:///root").unwrap(),
        }
    }

    fn tenant() -> Tenant {
        Tenant::new("a").unwrap()
    }

    fn file(id: String) -> FileRecord {
        FileRecord {
            id,
            created_at: 1,
            expires_at: Some(5),
            bytes: 2,
            filename: "x".into(),
            purpose: "batch".into(),
            results: None,
        }
    }

    pub(in crate::serve) fn batch(id: &str) -> BatchRecord {
        BatchRecord {
            id: id.into(),
            created_at: 1,
            endpoint: "/v1/completions".into(),
            input_file_id: "file-x".into(),
            completion_window: "1h".into(),
            window_seconds: 3_600,
            output_expires_after: None,
            metadata: None,
            invalid_lines: InvalidLines::Fail,
            early_output: false,
        }
    }

    #[tokio::test]
    async fn the_first_record_stays() {
        let records = Records::open(root()).await.unwrap();
        let key = BatchKey::new(&tenant(), id::new_id(id::BATCH).unwrap());
        let ended = |at, status| EndedBatch {
            at,
            status,
            errors: Vec::new(),
        };
        let first = ended(1, EndStatus::Completed);
        let created = records.ended(&key, first.clone()).await.unwrap();
        assert!(
            matches!(created, Created::Ours(ref record) if *record == first),
            "{created:?}"
        );
        let created = records.ended(&key, ended(2, EndStatus::Cancelled)).await.unwrap();
        assert!(
            matches!(created, Created::Theirs(ref record) if *record == first),
            "{created:?}"
        );
        assert_eq!(records.stages(&key).await.unwrap().ended, Some(first));
    }

    #[tokio::test]
    async fn a_record_of_a_newer_version_is_refused() {
        let root = root();
        let records = Records::open(root.clone()).await.unwrap();
        let id = id::new_id(id::FILE).unwrap();
        records.create_file(&tenant(), file(id.clone())).await.unwrap();
        assert!(records.file(&tenant(), &id).await.unwrap().is_some());
        let place = root.join(&file_record(&tenant(), &id));
        let text = String::from_utf8(place.read().await.unwrap().to_vec()).unwrap();
        let newer = text.replace(r#""v":1"#, r#""v":2"#);
        assert_ne!(newer, text);
        root.store.put(&place.path, newer.into()).await.unwrap();
        let error = records.file(&tenant(), &id).await.unwrap_err();
        assert!(matches!(error, LedgerError::Newer { found: 2, .. }), "{error}");
        for broken in ["", "x", "{}", r#"{"v":1}"#] {
            root.store.put(&place.path, broken.into()).await.unwrap();
            let error = records.file(&tenant(), &id).await.unwrap_err();
            assert!(matches!(error, LedgerError::Damaged { .. }), "{broken}: {error}");
        }
    }

    #[tokio::test]
    async fn lists_are_newest_first_and_of_one_tenant() {
        let records = Records::open(root()).await.unwrap();
        let mut ids = Vec::new();
        for _ in 0..5 {
            let id = id::new_id(id::BATCH).unwrap();
            let key = BatchKey::new(&tenant(), id.as_str());
            records.create_batch(&key, batch(&id)).await.unwrap();
            ids.insert(0, id);
            tokio::time::sleep(std::time::Duration::from_millis(3)).await;
        }
        let list = async |after: Option<&str>, limit| records.list_batches(&tenant(), after, limit).await.unwrap();
        assert_eq!(list(None, 9).await, ids);
        assert_eq!(list(Some(&ids[1]), 2).await, ids[2..4]);
        assert!(list(Some(&ids[4]), 2).await.is_empty());
        let other = Tenant::new("b").unwrap();
        assert!(records.list_batches(&other, None, 9).await.unwrap().is_empty());
        let open = records.open_batches().await.unwrap();
        assert_eq!(
            open.iter().map(|key| &key.id).collect::<Vec<_>>(),
            ids.iter().collect::<Vec<_>>()
        );
        records.close_batch(&open[0]).await.unwrap();
        assert_eq!(records.open_batches().await.unwrap(), open[1..]);
    }
}
