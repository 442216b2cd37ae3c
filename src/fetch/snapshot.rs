//! A model of the hub or of an object store, as a folder on this machine.

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};

use futures::{StreamExt, TryStreamExt};

use super::address::{HubModel, is_commit};
use super::cache::{self, RepositoryCache, StoreCache};
use super::download::{Check, Progress, Source, WantedFile, download};
use super::error::FetchError;
use super::hub::{Repository, is_offline};
use super::needed::{self, ADAPTER_CONFIG, CONFIG, INDEX};
use super::store::Folder;
use crate::dataset::store::location::Location;
use crate::report::summary::{counted, show_size};

/// Files that are fetched at once.
const FILES_AT_ONCE: usize = 4;
/// Files whose hash and size are asked for at once.
const FACTS_AT_ONCE: usize = 8;
/// Maximum size of an index of weights, which is read to learn their names.
const INDEX_BYTES_MAX: u64 = 64 << 20;

/// A model's folder on this machine, and where its missing files come from.
pub struct Snapshot {
    /// The folder.
    pub dir: PathBuf,
    /// The address of exactly these files, if the model's own may lead to others tomorrow.
    pub pinned: Option<String>,
    /// Warnings for the user.
    pub warnings: Vec<String>,
    remote: Remote,
}

/// Where missing files come from.
enum Remote {
    /// All files are there.
    Whole,
    Hub(Box<Repository>, RepositoryCache),
    Store(Folder, StoreCache),
}

impl Snapshot {
    /// Opens a model of the hub. A commit whose files are all there needs no request.
    ///
    /// # Errors
    /// The hub does not know the model, refuses it or does not answer; or it must not be asked, and
    /// the cache does not have the model.
    pub async fn of_hub(model: &HubModel) -> Result<Snapshot, FetchError> {
        let Some(folder) = cache::hub_cache() else {
            let why = "there is no folder for the hub's cache: set `HF_HUB_CACHE`";
            return Err(FetchError::refused(model, why));
        };
        let cache = RepositoryCache::new(&folder, &model.repository);
        if model.is_pinned() && cache.is_whole(&model.revision) {
            return Ok(Snapshot::whole(&cache, &model.revision, model, Vec::new()));
        }
        if is_offline() {
            return Snapshot::of_cache(model, &cache);
        }
        let repository = Repository::open(model).await?;
        let pinned = repository.model().clone();
        if !model.is_pinned() {
            cache
                .set_commit_of(&model.revision, &pinned.revision)
                .map_err(|error| FetchError::cache(model, &folder, &error))?;
        }
        if cache.is_whole(&pinned.revision) {
            return Ok(Snapshot::whole(&cache, &pinned.revision, model, Vec::new()));
        }
        Ok(Snapshot {
            dir: cache.snapshot(&pinned.revision),
            pinned: Some(pinned.to_string()),
            warnings: Vec::new(),
            remote: Remote::Hub(Box::new(repository), cache),
        })
    }

    /// Opens a model in an object store.
    ///
    /// # Errors
    /// The folder is not there, or the store refuses it or does not answer.
    pub async fn of_store(location: &Location) -> Result<Snapshot, FetchError> {
        let folder = Folder::open(location).await?;
        let address = folder.address();
        let Some(cache) = cache::store_cache() else {
            let why = "there is no folder for a cache: set `GRISTMILL_CACHE`";
            return Err(FetchError::refused(&address, why));
        };
        let names = folder.names();
        let cache = StoreCache::new(&cache, &address, &folder.state());
        let dir = cache.snapshot();
        Ok(Snapshot {
            remote: if has_all(&dir, &names) {
                Remote::Whole
            } else {
                Remote::Store(folder, cache)
            },
            dir,
            pinned: None,
            warnings: Vec::new(),
        })
    }

    fn whole(cache: &RepositoryCache, commit: &str, model: &HubModel, warnings: Vec<String>) -> Snapshot {
        Snapshot {
            dir: cache.snapshot(commit),
            pinned: Some(model.at(commit).to_string()),
            warnings,
            remote: Remote::Whole,
        }
    }

    /// Opens a model of the hub without asking the hub.
    fn of_cache(model: &HubModel, cache: &RepositoryCache) -> Result<Snapshot, FetchError> {
        let refused = |what: &str| {
            let why = format!(
                "{what}, and the hub must not be asked (`HF_HUB_OFFLINE`): unset it, or run this once where the hub can be \
                 reached and copy the cache (`HF_HUB_CACHE`)"
            );
            FetchError::refused(model, why)
        };
        let known = cache.commit_of(&model.revision).filter(|commit| is_commit(commit));
        let commit = if model.is_pinned() {
            Some(model.revision.clone())
        } else {
            known
        };
        let Some(commit) = commit else {
            return Err(refused("the cache does not have this revision"));
        };
        if cache.is_whole(&commit) {
            return Ok(Snapshot::whole(cache, &commit, model, Vec::new()));
        }
        let dir = cache.snapshot(&commit);
        let names = names_in(&dir);
        let has_weights = || {
            let index = read_index(&dir).ok().flatten();
            needed::weights(&names, index.as_deref()).is_ok()
        };
        if !is_described(&names) || !has_weights() {
            return Err(refused("the cache does not have all files of this revision"));
        }
        let warning = format!(
            "`{}`: another program has fetched these files, and offline it is unknown whether small ones are missing, such as \
             `generation_config.json`",
            model.at(&commit)
        );
        Ok(Snapshot::whole(cache, &commit, model, vec![warning]))
    }

    /// Whether all files are there.
    pub fn is_whole(&self) -> bool {
        matches!(self.remote, Remote::Whole)
    }

    /// Brings the small files that describe the model. `say` gets lines about progress.
    ///
    /// # Errors
    /// A file cannot be fetched.
    pub async fn fetch_description(&self, say: &(dyn Fn(&str) + Sync)) -> Result<(), FetchError> {
        if self.is_whole() {
            return Ok(());
        }
        let names = needed::description(&self.names());
        if !is_described(&names) {
            return Err(FetchError::refused(
                &self.address(),
                format!("there is no `{CONFIG}`, so it is no checkpoint in the Hugging Face layout"),
            ));
        }
        self.fetch(&names, say).await
    }

    /// Brings the weights, after the description.
    ///
    /// # Errors
    /// There are no weights in a supported format, or a file cannot be fetched.
    pub async fn fetch_weights(&self, say: &(dyn Fn(&str) + Sync)) -> Result<(), FetchError> {
        if self.is_whole() {
            return Ok(());
        }
        let names = self.names();
        let index_path = self.dir.join(INDEX);
        let index = read_index(&self.dir).map_err(|error| FetchError::cache(&self.address(), &index_path, &error))?;
        let weights = needed::weights(&names, index.as_deref());
        let weights = weights.map_err(|why| FetchError::refused(&self.address(), why))?;
        self.fetch(&weights, say).await?;
        if let Remote::Hub(repository, cache) = &self.remote {
            let mut all = needed::description(&names);
            all.extend(weights);
            let commit = &repository.model().revision;
            cache
                .mark_whole(commit, &all)
                .map_err(|error| FetchError::cache(&self.address(), &self.dir, &error))?;
        }
        Ok(())
    }

    fn names(&self) -> BTreeSet<String> {
        match &self.remote {
            Remote::Whole => BTreeSet::new(),
            Remote::Hub(repository, _) => repository.names.clone(),
            Remote::Store(folder, _) => folder.names(),
        }
    }

    fn address(&self) -> String {
        match &self.remote {
            Remote::Whole => self.dir.display().to_string(),
            Remote::Hub(repository, _) => repository.address(),
            Remote::Store(folder, _) => folder.address(),
        }
    }

    async fn fetch(&self, names: &[String], say: &(dyn Fn(&str) + Sync)) -> Result<(), FetchError> {
        match &self.remote {
            Remote::Whole => Ok(()),
            Remote::Hub(repository, cache) => fetch_from_hub(repository, cache, names, say).await,
            Remote::Store(folder, cache) => {
                let wanted = names.iter().map(|name| WantedFile {
                    name: name.clone(),
                    size: folder.size(name),
                    check: Check::Size,
                    path: self.dir.join(name),
                    partial: cache.partial(name),
                    lock: cache.lock(name),
                });
                bring(
                    Source::Store(folder),
                    &folder.address(),
                    &wanted.collect::<Vec<_>>(),
                    say,
                )
                .await
            }
        }
    }
}

async fn fetch_from_hub(
    repository: &Repository,
    cache: &RepositoryCache,
    names: &[String],
    say: &(dyn Fn(&str) + Sync),
) -> Result<(), FetchError> {
    let facts = futures::stream::iter(names)
        .map(|name| repository.facts(name))
        .buffered(FACTS_AT_ONCE)
        .try_collect::<Vec<_>>()
        .await?;
    let wanted = names.iter().zip(&facts).map(|(name, facts)| {
        let path = cache.blob(&facts.hash);
        WantedFile {
            name: name.clone(),
            size: facts.size,
            check: facts.check.clone(),
            partial: path.with_extension("incomplete"),
            lock: cache.lock(&facts.hash),
            path,
        }
    });
    bring(
        Source::Hub(repository),
        &repository.address(),
        &wanted.collect::<Vec<_>>(),
        say,
    )
    .await?;
    let commit = &repository.model().revision;
    for (name, facts) in names.iter().zip(&facts) {
        let linked = cache.link(commit, name, &facts.hash);
        linked.map_err(|error| FetchError::cache(&repository.address(), &cache.snapshot(commit), &error))?;
    }
    Ok(())
}

/// Brings the files that are missing, a few at once.
async fn bring(
    source: Source<'_>,
    address: &str,
    wanted: &[WantedFile],
    say: &(dyn Fn(&str) + Sync),
) -> Result<(), FetchError> {
    let missing: Vec<&WantedFile> = wanted.iter().filter(|file| !file.path.is_file()).collect();
    if missing.is_empty() {
        return Ok(());
    }
    let there = |file: &&WantedFile| {
        std::fs::metadata(&file.partial)
            .map_or(0, |meta| meta.len())
            .min(file.size)
    };
    let sizes = missing.iter().map(|file| file.size - there(file));
    let total = sizes.fold(0, u64::saturating_add);
    check_space(address, &missing[0].path, total)?;
    say(&format!(
        "fetches `{address}`: {}, {}",
        counted(missing.len() as u64, "file"),
        show_size(total)
    ));
    let progress = Progress::new(say, total);
    futures::stream::iter(missing)
        .map(|file| download(source, file, &progress))
        .buffer_unordered(FILES_AT_ONCE)
        .try_collect::<()>()
        .await
}

fn check_space(address: &str, path: &Path, needed: u64) -> Result<(), FetchError> {
    match cache::free_bytes(path) {
        Some(free) if free < needed => Err(FetchError::failed(
            &address,
            format!(
                "needs {}, and the disk of `{}` has {} free: make room, or name a cache on another disk (`HF_HUB_CACHE`, \
                 `GRISTMILL_CACHE`)",
                show_size(needed),
                path.parent().unwrap_or(path).display(),
                show_size(free)
            ),
        )),
        _ => Ok(()),
    }
}

/// Whether a folder holds all files that are needed of `names`. A file gets its name there when it
/// is whole.
fn has_all(dir: &Path, names: &BTreeSet<String>) -> bool {
    let index = read_index(dir).ok().flatten();
    let Ok(weights) = needed::weights(names, index.as_deref()) else {
        return false;
    };
    let mut all = needed::description(names).into_iter().chain(weights);
    all.all(|name| dir.join(name).is_file())
}

/// Whether the files are a checkpoint's or an adapter's.
fn is_described<'a>(names: impl IntoIterator<Item = &'a String>) -> bool {
    names.into_iter().any(|name| name == CONFIG || name == ADAPTER_CONFIG)
}

/// The index of the weights in a folder, if it is there.
fn read_index(dir: &Path) -> std::io::Result<Option<Vec<u8>>> {
    let path = dir.join(INDEX);
    if path.try_exists()? {
        crate::regular::read(&path, INDEX_BYTES_MAX).map(Some)
    } else {
        Ok(None)
    }
}

/// The files directly in a folder.
fn names_in(dir: &Path) -> BTreeSet<String> {
    let entries = std::fs::read_dir(dir).into_iter().flatten().flatten();
    let files = entries.filter(|entry| entry.path().is_file());
    files.filter_map(|entry| entry.file_name().into_string().ok()).collect()
}
