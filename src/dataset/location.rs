//! Where something lies: a path or URL, and the object store that holds it.

use std::path::{Path as FsPath, PathBuf};
use std::sync::Arc;

use object_store::local::LocalFileSystem;
use object_store::path::Path;
use object_store::{ObjectStore, ObjectStoreExt};
use url::Url;

/// A place in an object store.
#[derive(Debug, Clone)]
pub struct Location {
    pub store: Arc<dyn ObjectStore>,
    /// Key within the store.
    pub path: Path,
    /// The whole address, for messages and records.
    pub url: Url,
}

/// An address that names no place.
#[derive(Debug, thiserror::Error)]
pub enum LocationError {
    #[error("`{text}` is not a usable address: {why}")]
    Address { text: String, why: String },
    #[error("cannot open the store of `{url}`")]
    Store {
        url: String,
        #[source]
        source: Box<object_store::Error>,
    },
}

impl Location {
    /// Opens `text`: a URL with a scheme that object_store knows, or a path relative to `base_dir`.
    ///
    /// Options of remote stores come from the environment (`AWS_…`, `GOOGLE_…`, `AZURE_…`).
    pub fn parse(text: &str, base_dir: &FsPath) -> Result<Location, LocationError> {
        let bad = |why: String| LocationError::Address {
            text: text.to_string(),
            why,
        };
        if text.trim().is_empty() {
            return Err(bad("it is empty".into()));
        }
        if let Some((scheme, _)) = text.split_once("://")
            && scheme != "file"
        {
            let url = Url::parse(text).map_err(|e| bad(e.to_string()))?;
            let options = std::env::vars().map(|(k, v)| (k.to_ascii_lowercase(), v));
            let opened = object_store::parse_url_opts(&url, options);
            let (store, path) = opened.map_err(|source| LocationError::Store {
                url: url.to_string(),
                source: Box::new(source),
            })?;
            return Ok(Location {
                store: Arc::from(store),
                path,
                url,
            });
        }
        let fs_path = match text.strip_prefix("file://") {
            Some(_) => {
                let url = Url::parse(text).map_err(|e| bad(e.to_string()))?;
                url.to_file_path().map_err(|()| bad("not a local file URL".into()))?
            }
            None => base_dir.join(text),
        };
        let fs_path = normalize(&std::path::absolute(&fs_path).map_err(|e| bad(e.to_string()))?);
        let url = Url::from_file_path(&fs_path).map_err(|()| bad("not an absolute path".into()))?;
        // Keys are the path's components as they are: object_store percent-encodes what a key cannot hold.
        let path = Path::from_absolute_path(&fs_path).map_err(|e| bad(e.to_string()))?;
        let store = LocalFileSystem::new().with_fsync(true);
        Ok(Location {
            store: Arc::new(store),
            path,
            url,
        })
    }

    /// The local path, where it is one.
    pub fn local_path(&self) -> Option<PathBuf> {
        (self.url.scheme() == "file")
            .then(|| self.url.to_file_path().ok())
            .flatten()
    }

    /// The place of `name` below this one.
    pub fn join(&self, name: &str) -> Location {
        let mut url = self.url.clone();
        if let Ok(mut segments) = url.path_segments_mut() {
            segments.pop_if_empty().extend(name.split('/'));
        }
        let path = name.split('/').fold(self.path.clone(), |p, part| p.join(part));
        Location {
            store: self.store.clone(),
            path,
            url,
        }
    }

    /// Reads the whole object.
    pub async fn read(&self) -> Result<bytes::Bytes, object_store::Error> {
        self.store.get(&self.path).await?.bytes().await
    }
}

/// Resolves `.` and `..` by text alone (the path need not exist).
fn normalize(path: &FsPath) -> PathBuf {
    let mut out = PathBuf::new();
    for part in path.components() {
        match part {
            std::path::Component::ParentDir => {
                out.pop();
            }
            std::path::Component::CurDir => {}
            part => out.push(part),
        }
    }
    out
}
