//! A model in a folder of an object store: its files with their sizes and ETags, and their bytes.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt::Write;

use futures::{StreamExt, TryStreamExt};
use object_store::path::Path as Key;
use object_store::{GetOptions, GetRange, ObjectMeta};

use super::download::{Part, Trouble};
use super::error::FetchError;
use super::needed::TEMPLATES;
use crate::dataset::store::clients::redacted;
use crate::dataset::store::error::cause;
use crate::dataset::store::location::Location;

/// A folder in a store, as it was listed.
pub(super) struct Folder {
    location: Location,
    files: BTreeMap<String, ObjectMeta>,
}

impl Folder {
    /// Lists the folder's own files, and its further chat templates.
    pub(super) async fn open(location: &Location) -> Result<Folder, FetchError> {
        let address = redacted(&location.url);
        let mut files = BTreeMap::new();
        for folder in ["", TEMPLATES] {
            let listed = match folder {
                "" => location.clone(),
                folder => location.join(folder),
            };
            let found = listed.store.list_with_delimiter(Some(&listed.path)).await;
            let found = found.map_err(|error| {
                FetchError::failed(&address, format!("the store cannot be listed: {}", cause(&error)))
            })?;
            for object in found.objects {
                if let Some(name) = name_below(&location.path, &object.location) {
                    files.insert(name, object);
                }
            }
        }
        if files.is_empty() {
            return Err(FetchError::refused(&address, "there is no such folder, or it is empty"));
        }
        let location = location.clone();
        Ok(Folder { location, files })
    }

    pub(super) fn address(&self) -> String {
        redacted(&self.location.url)
    }

    pub(super) fn names(&self) -> BTreeSet<String> {
        self.files.keys().cloned().collect()
    }

    pub(super) fn size(&self, name: &str) -> u64 {
        self.files.get(name).map_or(0, |file| file.size)
    }

    /// A text that differs whenever one of the files differs.
    pub(super) fn state(&self) -> String {
        let mut state = String::new();
        for (name, file) in &self.files {
            let version = file.version.as_deref().unwrap_or_default();
            let etag = file.e_tag.as_deref().unwrap_or_default();
            let modified = file.last_modified.timestamp_micros();
            // Writing to a text succeeds.
            let _ = writeln!(state, "{name:?} {} {etag:?} {version:?} {modified}", file.size);
        }
        state
    }

    /// Opens a file's bytes from `offset` on, of the version that was listed.
    pub(super) async fn open_file(&self, name: &str, offset: u64) -> Result<Part, Trouble> {
        let Some(file) = self.files.get(name) else {
            return Err(FetchError::refused(&self.address(), format!("has no file `{name}`")).into());
        };
        let options = GetOptions {
            if_match: file.e_tag.clone(),
            range: (offset > 0).then_some(GetRange::Offset(offset)),
            ..GetOptions::default()
        };
        let found = self.location.store.get_opts(&file.location, options).await;
        let found = found.map_err(|error| match error {
            object_store::Error::Precondition { .. } | object_store::Error::NotFound { .. } => {
                let why = format!("`{name}` was replaced or removed while the model was fetched: run it again");
                Trouble::Final(FetchError::failed(&self.address(), why))
            }
            object_store::Error::PermissionDenied { .. } | object_store::Error::Unauthenticated { .. } => {
                let why = format!("`{name}` may not be read: {}", cause(&error));
                Trouble::Final(FetchError::refused(&self.address(), why))
            }
            error => Trouble::Passing(cause(&error)),
        })?;
        let start = found.range.start;
        let bytes = found.into_stream().map_err(|error| cause(&error)).boxed();
        Ok(Part { start, bytes })
    }
}

/// The name of an object relative to a folder.
fn name_below(folder: &Key, object: &Key) -> Option<String> {
    let parts: Vec<String> = object
        .prefix_match(folder)?
        .map(|part| part.as_ref().to_string())
        .collect();
    (!parts.is_empty()).then(|| parts.join("/"))
}
