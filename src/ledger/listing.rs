//! Listings of a prefix: whole, or in pages where a prefix holds many objects.

use futures::{StreamExt, TryStreamExt};

use super::error::Result;
use super::store::{ListedObject, Store};
use super::store_error_kind::{StoreErrorKind, store_error_kind};

impl Store {
    /// All objects below `prefix`, sorted by key.
    pub async fn list(&self, prefix: &str) -> Result<Vec<ListedObject>> {
        let path = self.path(prefix);
        let mut found: Vec<ListedObject> = self
            .with_retries(prefix, "listing", || async {
                match self.shared.inner.list(Some(&path)).try_collect::<Vec<_>>().await {
                    Ok(all) => Ok(all.into_iter().filter_map(|meta| self.listed_object(&meta)).collect()),
                    Err(error) if matches!(store_error_kind(&error), StoreErrorKind::Missing) => Ok(Vec::new()),
                    Err(error) => Err(error),
                }
            })
            .await?;
        found.sort_by(|a, b| a.key.cmp(&b.key));
        Ok(found)
    }

    /// The first `limit` objects below `prefix` whose keys are greater than `after`, sorted by key.
    ///
    /// Remote stores list in the order of keys, so that the rest is not requested. A local folder
    /// has no order: all of its entries are read.
    pub async fn list_page(&self, prefix: &str, after: Option<&str>, limit: usize) -> Result<Vec<ListedObject>> {
        let path = self.path(prefix);
        let offset = after.map_or_else(|| path.clone(), |key| self.path(key));
        let read_max = if self.shared.folder.is_some() {
            usize::MAX
        } else {
            limit
        };
        let mut found: Vec<ListedObject> = self
            .with_retries(prefix, "listing", || async {
                let listing = self.shared.inner.list_with_offset(Some(&path), &offset);
                match listing.take(read_max).try_collect::<Vec<_>>().await {
                    Ok(all) => Ok(all.iter().filter_map(|meta| self.listed_object(meta)).collect()),
                    Err(error) if matches!(store_error_kind(&error), StoreErrorKind::Missing) => Ok(Vec::new()),
                    Err(error) => Err(error),
                }
            })
            .await?;
        found.sort_by(|a, b| a.key.cmp(&b.key));
        found.truncate(limit);
        Ok(found)
    }
}
