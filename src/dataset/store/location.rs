//! The location of an object: a path or URL, and the object store that holds it.

use std::path::{Path as FsPath, PathBuf};
use std::sync::Arc;

use object_store::local::LocalFileSystem;
use object_store::path::Path;
use object_store::{ObjectStore, ObjectStoreExt, ObjectStoreScheme};
use url::Url;

use super::clients::{OpenError, Stores, has_valid_bucket, redacted};

/// A location in an object store.
#[derive(Clone)]
pub struct Location {
    pub store: Arc<dyn ObjectStore>,
    /// Key within the store.
    pub path: Path,
    /// The full address, for messages and records.
    pub url: Url,
}

/// An address that cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum LocationError {
    #[error("`{text}` is not a usable address: {why}")]
    Address { text: String, why: String },
    #[error("cannot open the store of `{url}`: {why}")]
    Store { url: String, why: OpenError },
}

impl std::fmt::Debug for Location {
    /// Shows only the address, since clients hold credentials.
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_tuple("Location").field(&self.url.as_str()).finish()
    }
}

impl Location {
    /// Opens `text`: a URL with a scheme that object_store knows, or a path relative to `base_dir`.
    ///
    /// Options of remote stores come from the environment (`AWS_…`, `GOOGLE_…`, `AZURE_…`).
    pub fn parse(text: &str, base_dir: &FsPath) -> Result<Location, LocationError> {
        Location::parse_with(text, base_dir, Stores::of_process())
    }

    /// Like [`Location::parse`], with the clients and options of `stores`.
    pub fn parse_with(text: &str, base_dir: &FsPath, stores: &Stores) -> Result<Location, LocationError> {
        let url = Location::url_of(text, base_dir)?;
        if url.scheme() != "file" {
            let (store, path) = stores.open(&url).map_err(|why| LocationError::Store {
                url: redacted(&url),
                why,
            })?;
            return Ok(Location { store, path, url });
        }
        let bad = |why: String| LocationError::Address {
            text: redacted_text(text),
            why,
        };
        let fs_path = url.to_file_path().map_err(|()| bad("not a local file URL".into()))?;
        // A key consists of the path's components; object_store percent-encodes characters that are
        // invalid in keys.
        let path = Path::from_absolute_path(&fs_path).map_err(|e| bad(e.to_string()))?;
        let store = LocalFileSystem::new().with_fsync(true);
        Ok(Location {
            store: Arc::new(store),
            path,
            url,
        })
    }

    /// The full URL of `text`. For a path, this is the `file://` URL relative to `base_dir`,
    /// without `.` and `..`. Opens nothing.
    pub fn url_of(text: &str, base_dir: &FsPath) -> Result<Url, LocationError> {
        let bad = |why: String| LocationError::Address {
            text: redacted_text(text),
            why,
        };
        if text.trim().is_empty() {
            return Err(bad("it is empty".into()));
        }
        if text == "~" || text.starts_with("~/") {
            return Err(bad(
                "`~` is not expanded: write the folder's full path, or `${env:HOME}/…` in a job file".into(),
            ));
        }
        let scheme = text.split_once("://").map(|(scheme, _)| scheme.to_ascii_lowercase());
        let is_file = scheme.as_deref() == Some("file");
        if scheme.is_some() && !is_file {
            let url = Url::parse(text).map_err(|e| bad(e.to_string()))?;
            // Addresses are written to records and logs, and secrets must not be. Except in web
            // addresses, a `?` is a glob's wildcard, unless `sig=` follows, which marks a signed
            // URL.
            let signed = |query: &str| url.scheme().starts_with("http") || query.contains("sig=");
            if url.password().is_some() || url.query().is_some_and(signed) {
                return Err(bad(
                    "it holds a password or a query: give credentials by environment, not in addresses".into(),
                ));
            }
            let is_bucket = matches!(
                url.scheme(),
                "s3" | "s3a" | "gs" | "az" | "adl" | "azure" | "abfs" | "abfss"
            );
            if is_bucket && !has_valid_bucket(&url) {
                return Err(bad("it names no bucket: give `scheme://bucket/key`".into()));
            }
            return Ok(url);
        }
        let fs_path = if is_file {
            let url = Url::parse(text).map_err(|e| bad(e.to_string()))?;
            url.to_file_path().map_err(|()| bad("not a local file URL".into()))?
        } else {
            base_dir.join(text)
        };
        let fs_path = normalize(&std::path::absolute(&fs_path).map_err(|e| bad(e.to_string()))?);
        Url::from_file_path(&fs_path).map_err(|()| bad("not an absolute path".into()))
    }

    /// The local path, if the location is local.
    pub fn local_path(&self) -> Option<PathBuf> {
        (self.url.scheme() == "file")
            .then(|| self.url.to_file_path().ok())
            .flatten()
    }

    /// Whether the location is on a web server, which allows only reads.
    pub fn is_web(&self) -> bool {
        matches!(ObjectStoreScheme::parse(&self.url), Ok((ObjectStoreScheme::Http, _)))
    }

    /// The location of `name` below this one.
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

    /// The location of the key `path`, which a listing of this location returned. `None` if no URL
    /// can express the key.
    pub fn location_of_key(&self, path: &Path) -> Option<Location> {
        let mut url = self.url.clone();
        let below = path.prefix_match(&self.path)?;
        url.path_segments_mut()
            .ok()?
            .pop_if_empty()
            .extend(below.map(|part| part.as_ref().to_string()));
        let (_, named) = ObjectStoreScheme::parse(&url).ok()?;
        (named == *path).then(|| Location {
            store: self.store.clone(),
            path: path.clone(),
            url,
        })
    }

    /// The location `…/folder/name{suffix}` for this location `…/name`; `None` if this is a whole
    /// store.
    pub fn in_sibling_folder(&self, folder: &str, suffix: &str) -> Option<Location> {
        // Keys and addresses are encoded already, so only their text is changed.
        let with_sibling_folder = |text: &str| {
            let text = text.trim_end_matches('/');
            let (above, name) = text.rsplit_once('/').unwrap_or(("", text));
            format!("{above}/{folder}/{name}{suffix}")
        };
        if self.path.as_ref().is_empty() {
            return None;
        }
        let mut url = self.url.clone();
        url.set_path(&with_sibling_folder(url.path()));
        Some(Location {
            store: self.store.clone(),
            path: Path::parse(with_sibling_folder(self.path.as_ref())).ok()?,
            url,
        })
    }

    /// Reads the whole object.
    pub async fn read(&self) -> Result<bytes::Bytes, object_store::Error> {
        self.store.get(&self.path).await?.bytes().await
    }
}

/// An address for messages, without credentials before an `@` and without its query. The text may
/// be an invalid URL.
fn redacted_text(text: &str) -> String {
    if let Ok(url) = Url::parse(text) {
        return redacted(&url);
    }
    let text = text.split('?').next().unwrap_or_default();
    match (text.split_once("://"), text.rsplit_once('@')) {
        (Some((scheme, _)), Some((_, host))) => format!("{scheme}://…@{host}"),
        _ => text.to_string(),
    }
}

/// Resolves `.` and `..` without access to the file system: the path need not exist.
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn addresses_with_secrets_are_refused_without_showing_them() {
        let stores = Stores::new([]);
        for text in [
            "https://me:hush@host/data.parquet",
            "https://host/data.parquet?sig=hush",
            "az://container/data?sv=1&sig=hush",
            "https://me:hush@[bad/x",
        ] {
            let why = Location::parse_with(text, FsPath::new("/"), &stores).unwrap_err();
            let (shown, debug) = (why.to_string(), format!("{why:?}"));
            assert!(!shown.contains("hush") && !debug.contains("hush"), "{text}: {shown}");
        }
    }

    #[test]
    fn invalid_bucket_names_are_refused() {
        let of = |text: &str| Location::url_of(text, FsPath::new("/")).map_err(|error| error.to_string());
        for text in [
            "s3://../x",
            "s3://./x",
            "s3:///x",
            "s3://%2e%2e/x",
            "gs://..%2f/x",
            "az://a..b/x",
            "abfss://-x@account/x",
        ] {
            let why = of(text).unwrap_err();
            assert!(why.contains(text) && why.contains("names no bucket"), "{why}");
        }
        for text in [
            "s3://a.b-c_d/x",
            "az://$web/x",
            "abfss://files@account.dfs.core.windows.net/x",
            "gs://b",
        ] {
            assert!(of(text).is_ok(), "{text}");
        }
    }

    #[test]
    fn a_question_mark_of_a_glob_is_no_query() {
        let stores = Stores::new([]);
        Location::parse_with("s3://bucket/part-?.parquet", FsPath::new("/"), &stores).unwrap();
    }

    #[test]
    fn a_location_in_a_sibling_folder_has_the_name_and_the_suffix() {
        let stores = Stores::new([]);
        for (text, beside, key) in [
            ("s3://bucket/a/b", "s3://bucket/a/_limit/b-9", "a/_limit/b-9"),
            ("s3://bucket/a/b/", "s3://bucket/a/_limit/b-9", "a/_limit/b-9"),
            ("s3://bucket/b/", "s3://bucket/_limit/b-9", "_limit/b-9"),
            (
                "https://s3.eu-west-1.amazonaws.com/bucket/b",
                "https://s3.eu-west-1.amazonaws.com/bucket/_limit/b-9",
                "_limit/b-9",
            ),
            (
                "/data/a b/c#é",
                "file:///data/a%20b/_limit/c%23%C3%A9-9",
                "data/a b/_limit/c#é-9",
            ),
            ("/b", "file:///_limit/b-9", "_limit/b-9"),
        ] {
            let location = Location::parse_with(text, FsPath::new("/"), &stores).unwrap();
            let found = location.in_sibling_folder("_limit", "-9").unwrap();
            assert_eq!((found.url.as_str(), found.path.as_ref()), (beside, key), "{text}");
        }
        for text in [
            "s3://bucket",
            "s3://bucket/",
            "/",
            "https://s3.eu-west-1.amazonaws.com/bucket/",
        ] {
            let location = Location::parse_with(text, FsPath::new("/"), &stores).unwrap();
            assert!(location.in_sibling_folder("_limit", "-9").is_none(), "{text}");
        }
    }

    #[test]
    fn addresses_of_listed_keys_parse_back_to_the_keys() {
        let stores = Stores::new([]);
        let bucket = Location::parse_with("s3://bucket/a b/", FsPath::new("/"), &stores).unwrap();
        for (key, address) in [
            ("a b/c", Some("s3://bucket/a%20b/c")),
            ("a b/day=1/é", Some("s3://bucket/a%20b/day=1/%C3%A9")),
            ("a b/50%25 #?", Some("s3://bucket/a%20b/50%2525%20%23%3F")),
            ("other/c", None),
        ] {
            let found = bucket.location_of_key(&Path::parse(key).unwrap());
            assert_eq!(found.as_ref().map(|location| location.url.as_str()), address, "{key}");
            if let Some(found) = found {
                let again = Location::parse_with(found.url.as_str(), FsPath::new("/"), &stores).unwrap();
                assert_eq!(again.path.as_ref(), key);
            }
        }
    }

    #[test]
    fn debug_output_shows_no_credentials() {
        let keys = [("AWS_ACCESS_KEY_ID", "key"), ("AWS_SECRET_ACCESS_KEY", "hush")];
        let stores = Stores::new(keys.map(|(name, value)| (name.to_string(), value.to_string())));
        let location = Location::parse_with("s3://bucket/a", FsPath::new("/"), &stores).unwrap();
        assert_eq!(format!("{location:?}"), "Location(\"s3://bucket/a\")");
    }
}
