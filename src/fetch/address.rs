//! Where a model lies: a local folder, a repository of the hub, or a folder in an object store.

use std::fmt::{self, Display, Formatter};
use std::path::{Path, PathBuf};

use crate::dataset::store::location::Location;
use crate::fetch::error::FetchError;

/// The scheme of the hub's addresses.
const HUB: &str = "hf://";
/// The revision of an address that names none.
const DEFAULT_REVISION: &str = "main";
/// Maximum length of a repository's name or a revision, in bytes.
const NAME_BYTES_MAX: usize = 200;

/// Where a model lies.
#[derive(Debug, Clone)]
pub enum ModelAddress {
    Folder(PathBuf),
    Hub(HubModel),
    Store(Location),
}

/// A model in a revision of a repository of the hub.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct HubModel {
    /// `organisation/name`, or the name alone for a few old repositories.
    pub repository: String,
    /// A branch, a tag or a commit.
    pub revision: String,
}

impl ModelAddress {
    /// Reads an address. A path is relative to `base_dir`.
    ///
    /// # Errors
    /// The text is no address of a model.
    pub fn parse(text: &str, base_dir: &Path) -> Result<ModelAddress, FetchError> {
        if let Some(rest) = text.strip_prefix(HUB) {
            return HubModel::parse(rest).map(ModelAddress::Hub).ok_or_else(|| {
                FetchError::refused(
                    &text,
                    "is no model on the hub: write `hf://organisation/name`, with `@revision` for another than the main branch",
                )
            });
        }
        let location = Location::parse(text, base_dir)?;
        if location.is_web() {
            return Err(FetchError::refused(
                &location.url,
                "models are not fetched from web servers: name one on the hub as `hf://organisation/name`, or a folder, also in \
                 a bucket",
            ));
        }
        Ok(match location.local_path() {
            Some(folder) => ModelAddress::Folder(folder),
            None => ModelAddress::Store(location),
        })
    }
}

impl HubModel {
    fn parse(text: &str) -> Option<HubModel> {
        let (repository, revision) = text.split_once('@').unwrap_or((text, DEFAULT_REVISION));
        let repository = repository.trim_end_matches('/');
        let is_word = |word: &str| {
            let fits = |c: char| c.is_ascii_alphanumeric() || matches!(c, '-' | '_' | '.');
            word.starts_with(|c: char| c.is_ascii_alphanumeric()) && word.chars().all(fits)
        };
        // Both become names of folders in the cache, where `--` separates the parts of a name.
        let is_repository = repository.split('/').count() <= 2
            && repository.split('/').all(is_word)
            && !repository.contains("--")
            && !repository.contains("..");
        let is_revision = revision.split('/').all(is_word) && !revision.contains("..");
        let fits = is_repository && is_revision && text.len() <= NAME_BYTES_MAX;
        fits.then(|| HubModel {
            repository: repository.to_string(),
            revision: revision.to_string(),
        })
    }

    /// Whether the revision is a commit, whose files never change.
    pub fn is_pinned(&self) -> bool {
        is_commit(&self.revision)
    }

    /// The repository's address, without a revision.
    pub fn repository_address(&self) -> String {
        format!("{HUB}{}", self.repository)
    }

    /// The same model at a commit.
    pub fn at(&self, commit: &str) -> HubModel {
        HubModel {
            repository: self.repository.clone(),
            revision: commit.to_string(),
        }
    }
}

impl Display for HubModel {
    fn fmt(&self, f: &mut Formatter<'_>) -> fmt::Result {
        write!(f, "{HUB}{}@{}", self.repository, self.revision)
    }
}

/// Whether a text is a commit's hash.
pub(super) fn is_commit(text: &str) -> bool {
    text.len() == 40 && text.bytes().all(|c| c.is_ascii_digit() || (b'a'..=b'f').contains(&c))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn addresses_of_the_hub_are_read() {
        let commit = "0123456789abcdef0123456789abcdef01234567";
        for (text, repository, revision) in [
            ("Qwen/Qwen3-8B", "Qwen/Qwen3-8B", "main"),
            ("Qwen/Qwen3-8B/", "Qwen/Qwen3-8B", "main"),
            ("gpt2@v1.0", "gpt2", "v1.0"),
            ("a/b@refs/pr/3", "a/b", "refs/pr/3"),
            (&format!("a/b@{commit}"), "a/b", commit),
        ] {
            let model = HubModel::parse(text).unwrap();
            assert_eq!(
                (model.repository.as_str(), model.revision.as_str()),
                (repository, revision)
            );
            assert_eq!(model.is_pinned(), text.contains(commit));
        }
        for text in [
            "",
            "a/b/c",
            "../b",
            "a/..",
            "a/b@",
            "a/b@..",
            "a/b@x/../y",
            "a/b@/x",
            "a--b/c",
            "a/b c",
            "a/b?x",
            "/a/b",
            "a/b@x..y",
        ] {
            assert_eq!(HubModel::parse(text), None, "{text}");
        }
    }

    #[test]
    fn other_addresses_are_folders_and_buckets() {
        let parse = |text: &str| ModelAddress::parse(text, Path::new("/base"));
        assert!(matches!(parse("a/b"), Ok(ModelAddress::Folder(path)) if path == Path::new("/base/a/b")));
        assert!(matches!(parse("file:///m"), Ok(ModelAddress::Folder(path)) if path == Path::new("/m")));
        assert!(matches!(parse("s3://bucket/m"), Ok(ModelAddress::Store(_))));
        for text in ["https://huggingface.co/a/b", "ftp://x/y", "hf://", "hf://a/b/c", ""] {
            let why = parse(text).unwrap_err().to_string();
            assert!(why.contains(text), "{why}");
        }
    }
}
