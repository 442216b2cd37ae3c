//! The store as the tests see it: directly, never through a proxy, with no code of gristmill.

use object_store::aws::{AmazonS3, AmazonS3Builder};
use object_store::path::Path;
use object_store::{ObjectStore, ObjectStoreExt};

use crate::services::S3;

/// The bucket of this run, for blocking code.
pub(super) struct Bucket {
    store: AmazonS3,
    runtime: tokio::runtime::Runtime,
}

impl Bucket {
    pub(super) fn open(settings: &S3) -> Bucket {
        let store = AmazonS3Builder::new()
            .with_endpoint(&settings.endpoint)
            .with_allow_http(true)
            .with_region("us-east-1")
            .with_bucket_name(&settings.bucket)
            .with_access_key_id(&settings.key)
            .with_secret_access_key(&settings.secret)
            .build()
            .expect("the store's settings are right");
        let runtime = tokio::runtime::Builder::new_current_thread()
            .enable_all()
            .build()
            .unwrap();
        Bucket { store, runtime }
    }

    /// Whether something lies at `key`; an unreachable store says no.
    pub(super) fn has(&self, key: &str) -> bool {
        self.runtime.block_on(self.store.head(&Path::from(key))).is_ok()
    }

    /// What lies at `key`.
    pub(super) fn get(&self, key: &str) -> Option<Vec<u8>> {
        self.runtime.block_on(async {
            let found = self.store.get(&Path::from(key)).await.ok()?;
            Some(found.bytes().await.ok()?.to_vec())
        })
    }

    /// Keys below `prefix`, sorted.
    pub(super) fn list(&self, prefix: &str) -> Vec<String> {
        use futures::TryStreamExt;
        let path = Path::from(prefix);
        let listed = self.store.list(Some(&path)).map_ok(|meta| meta.location.to_string());
        let mut keys: Vec<String> = self
            .runtime
            .block_on(listed.try_collect())
            .expect("the store can be listed");
        keys.sort();
        keys
    }

    pub(super) fn put(&self, key: &str, bytes: Vec<u8>) {
        self.runtime
            .block_on(self.store.put(&Path::from(key), bytes.into()))
            .expect("the store can be written to");
    }

    pub(super) fn delete(&self, key: &str) {
        self.runtime
            .block_on(self.store.delete(&Path::from(key)))
            .expect("the store can be written to");
    }
}
