//! A local output folder as an object store that follows no symbolic links below the output.
//!
//! The output itself and the folders above it may be links, because the person who starts the job
//! chose them. Names below the output may have been created by anybody who can write to the folder,
//! while a worker runs with other rights. So each name below the output is opened relative to the
//! opened folder that holds it (`openat` with `O_NOFOLLOW`), which leaves no time between check and
//! use. Listings include links and pipes as objects. Requests that would read them, write over them
//! or pass through them are refused.
//!
//! See docs/decisions/008-no-links-below-a-local-output.md.

use std::fmt;
use std::fs::File;
use std::io::{Error as IoError, ErrorKind, Write};
use std::path::{Path as FsPath, PathBuf};
use std::time::{Duration, SystemTime};

use async_trait::async_trait;
use chrono::{DateTime, Utc};
use futures::stream::BoxStream;
use futures::{StreamExt, TryFutureExt, stream};
use object_store::path::Path;
use object_store::{
    CopyMode, CopyOptions, Error, GetOptions, GetResult, GetResultPayload, ListResult, MultipartUpload, ObjectMeta,
    ObjectStore, PutMode, PutMultipartOptions, PutOptions, PutPayload, PutResult, RenameOptions, RenameTargetMode,
    Result,
};
use rustix::fd::OwnedFd;
use rustix::fs::{AtFlags, Dir, FileType, Mode, OFlags, Stat};

/// Maximum depth of nested folders in a listing.
const DEPTH_MAX: usize = 64;
const FOLDER_FLAGS: OFlags = OFlags::RDONLY.union(OFlags::DIRECTORY).union(OFlags::CLOEXEC);
/// Flags for files. With `NONBLOCK`, opening a pipe returns at once, and the pipe is then refused.
const FILE_FLAGS: OFlags = OFlags::NOFOLLOW.union(OFlags::NONBLOCK).union(OFlags::CLOEXEC);

/// A file type that must not be read or written.
#[derive(Debug, thiserror::Error)]
pub(super) enum IrregularFile {
    #[error("`{}` is a symbolic link", .0.display())]
    Link(PathBuf),
    #[error("`{}` is no regular file", .0.display())]
    Special(PathBuf),
}

/// A put option: only the owner may read the file.
#[derive(Debug, Clone, Copy)]
pub(super) struct OwnerOnly;

/// A local folder as an object store. Cheap to clone.
#[derive(Debug, Clone)]
pub(super) struct Folder {
    root: PathBuf,
    /// Prefix of the output's keys.
    prefix: Path,
}

/// An opened folder below the output, and a name in it.
struct FolderEntry {
    folder: OwnedFd,
    name: String,
    /// Path of the name, for messages.
    path: PathBuf,
}

impl Folder {
    /// The folder at `root`, whose keys begin with `prefix`.
    pub(super) fn new(root: PathBuf, prefix: Path) -> Folder {
        Folder { root, prefix }
    }

    pub(super) fn root(&self) -> &FsPath {
        &self.root
    }

    /// Opens the file at `location` for locking; creates it if it does not exist.
    pub(super) async fn lock_file(&self, location: &Path) -> Result<File> {
        let location = location.clone();
        self.blocking(move |folder| {
            let entry = folder.entry(&location, true)?;
            let file = entry.open(FILE_FLAGS | OFlags::CREATE | OFlags::WRONLY, 0o666)?;
            Ok(file.0)
        })
        .await
    }

    /// Syncs the folder of `location`, so that the name survives a power loss.
    pub(super) async fn sync_folder_of(&self, location: &Path) -> Result<()> {
        let location = location.clone();
        self.blocking(move |folder| folder.entry(&location, false)?.sync())
            .await
    }

    /// Removes the files directly in `location` whose name satisfies `is_removable` and that were
    /// last written more than `age` ago.
    pub(super) async fn remove_old(
        &self,
        location: &Path,
        age: Duration,
        is_removable: fn(&str) -> bool,
    ) -> Result<()> {
        let location = location.clone();
        self.blocking(move |folder| {
            let names = folder.entries(&location)?;
            let now = SystemTime::now();
            for (name, _) in names.into_iter().filter(|(name, _)| is_removable(name)) {
                // `Path::join` would escape a `#`.
                let entry = folder.entry(&Path::parse(format!("{location}/{name}"))?, false)?;
                // Another run may be cleaning too, so a file that is gone is no error.
                let Some(stat) = entry.stat()? else { continue };
                let written = SystemTime::from(modified(&stat));
                let is_old = now.duration_since(written).is_ok_and(|since| since > age);
                if is_old && FileType::from_raw_mode(stat.st_mode).is_file() {
                    match entry.remove() {
                        Err(Error::NotFound { .. }) => {}
                        other => other?,
                    }
                }
            }
            Ok(())
        })
        .await
    }

    async fn blocking<T: Send + 'static>(&self, work: impl FnOnce(&Folder) -> Result<T> + Send + 'static) -> Result<T> {
        let folder = self.clone();
        tokio::task::spawn_blocking(move || work(&folder))
            .await
            .unwrap_or_else(|error| Err(generic(IoError::other(error))))
    }

    /// The components of `location` below the output.
    fn components(&self, location: &Path) -> Result<Vec<String>> {
        match location.prefix_match(&self.prefix) {
            Some(parts) => Ok(parts.map(|part| part.as_ref().to_string()).collect()),
            None => Err(Error::NotSupported {
                source: format!("`{location}` is not below `{}`", self.root.display()).into(),
            }),
        }
    }

    /// Opens the output folder; with `create`, creates it if it does not exist.
    fn open_root(&self, create: bool) -> Result<OwnedFd> {
        match rustix::fs::open(&self.root, FOLDER_FLAGS, Mode::empty()) {
            Err(error) if create && error.kind() == ErrorKind::NotFound => {
                let mut existing = self.root.as_path();
                while !existing.exists() {
                    existing = existing.parent().unwrap_or(FsPath::new("/"));
                }
                std::fs::create_dir_all(&self.root).map_err(|e| io_error(e, &self.root))?;
                let created = self.root.ancestors().take_while(|folder| *folder != existing);
                for folder in created.chain([existing]) {
                    let synced = File::open(folder).and_then(|folder| folder.sync_all());
                    synced.map_err(|e| io_error(e, folder))?;
                }
                rustix::fs::open(&self.root, FOLDER_FLAGS, Mode::empty()).map_err(|e| io_error(e.into(), &self.root))
            }
            other => other.map_err(|e| io_error(e.into(), &self.root)),
        }
    }

    /// Opens the folder at the path `names` below the output.
    fn enter(&self, names: &[String], create: bool) -> Result<(OwnedFd, PathBuf)> {
        let (mut folder, mut path) = (self.open_root(create)?, self.root.clone());
        for name in names {
            path.push(name);
            let entry = FolderEntry {
                folder,
                name: name.clone(),
                path: path.clone(),
            };
            folder = entry.enter(create)?;
        }
        Ok((folder, path))
    }

    /// Opens the folder of `location`; with `create`, creates the folders on the way.
    fn entry(&self, location: &Path, create: bool) -> Result<FolderEntry> {
        let mut names = self.components(location)?;
        let name = names
            .pop()
            .ok_or_else(|| io_error(ErrorKind::IsADirectory.into(), &self.root))?;
        let (folder, path) = self.enter(&names, create)?;
        let path = path.join(&name);
        Ok(FolderEntry { folder, name, path })
    }

    /// The entries directly in the folder at `location`; none if there is no such folder.
    fn entries(&self, location: &Path) -> Result<Vec<(String, Stat)>> {
        let (folder, path) = match self.enter(&self.components(location)?, false) {
            Err(Error::NotFound { .. }) => return Ok(Vec::new()),
            other => other?,
        };
        let to_error = |error: rustix::io::Errno| io_error(error.into(), &path);
        let mut found = Vec::new();
        for entry in Dir::read_from(&folder).map_err(to_error)? {
            let entry = entry.map_err(to_error)?;
            let name = entry.file_name();
            if name == c"." || name == c".." {
                continue;
            }
            let stat = match rustix::fs::statat(&folder, name, AtFlags::SYMLINK_NOFOLLOW) {
                // The entry was removed after the folder was read.
                Err(error) if error.kind() == ErrorKind::NotFound => continue,
                other => other.map_err(to_error)?,
            };
            let name = name.to_str().map_err(|_| {
                let text = format!(
                    "it holds the name `{}`, which is not UTF-8",
                    name.to_string_lossy().escape_debug()
                );
                io_error(IoError::new(ErrorKind::InvalidFilename, text), &path)
            })?;
            found.push((name.to_owned(), stat));
        }
        Ok(found)
    }

    /// The objects and the folders directly in the folder at `location`.
    fn list_folder(&self, location: &Path) -> Result<(Vec<ObjectMeta>, Vec<Path>)> {
        let (mut objects, mut folders) = (Vec::new(), Vec::new());
        for (name, stat) in self.entries(location)? {
            let key = match location.as_ref() {
                "" => Path::parse(name)?,
                above => Path::parse(format!("{above}/{name}"))?,
            };
            if FileType::from_raw_mode(stat.st_mode).is_dir() {
                folders.push(key)
            } else {
                objects.push(meta(&stat, key))
            }
        }
        Ok((objects, folders))
    }

    /// All objects below the folder at `location`.
    fn walk(&self, location: &Path) -> Result<Vec<ObjectMeta>> {
        let mut found = Vec::new();
        let mut open = vec![(location.clone(), 0)];
        while let Some((folder, depth)) = open.pop() {
            if depth > DEPTH_MAX {
                let text = format!("folders are nested deeper than {DEPTH_MAX}");
                return Err(io_error(IoError::new(ErrorKind::InvalidFilename, text), &self.root));
            }
            let (objects, folders) = self.list_folder(&folder)?;
            found.extend(objects);
            open.extend(folders.into_iter().map(|folder| (folder, depth + 1)));
        }
        Ok(found)
    }

    fn write(&self, location: &Path, payload: &PutPayload, mode: u32) -> Result<()> {
        let entry = self.entry(location, true)?;
        let flags = OFlags::CREATE | OFlags::EXCL | OFlags::WRONLY | FILE_FLAGS;
        let (mut file, _) = entry.open(flags, mode)?;
        let written = payload.iter().try_for_each(|piece| file.write_all(piece));
        written.and_then(|()| file.sync_all()).map_err(|error| {
            // If the removal fails, the file is removed later with other old stages.
            let _ = entry.remove();
            io_error(error, &entry.path)
        })
    }

    fn read(&self, location: &Path, options: &GetOptions) -> Result<GetResult> {
        let entry = self.entry(location, false)?;
        let (file, stat) = entry.open(FILE_FLAGS | OFlags::RDONLY, 0)?;
        let meta = meta(&stat, location.clone());
        options.check_preconditions(&meta)?;
        let range = match &options.range {
            Some(range) => range.as_range(meta.size).map_err(|e| generic(IoError::other(e)))?,
            None => 0..meta.size,
        };
        Ok(GetResult {
            payload: GetResultPayload::File(file, entry.path),
            meta,
            range,
            attributes: Default::default(),
            extensions: Default::default(),
        })
    }

    fn link(&self, from: &Path, to: &Path) -> Result<()> {
        let (from, to) = (self.entry(from, false)?, self.entry(to, true)?);
        rustix::fs::linkat(&from.folder, &from.name, &to.folder, &to.name, AtFlags::empty())
            .map_err(|error| io_error(error.into(), &to.path))?;
        to.sync()
    }

    fn rename(&self, from: &Path, to: &Path) -> Result<()> {
        let (from, to) = (self.entry(from, false)?, self.entry(to, true)?);
        // A rename would replace a link, which somebody made on purpose.
        if to
            .stat()?
            .is_some_and(|stat| FileType::from_raw_mode(stat.st_mode).is_symlink())
        {
            return Err(irregular_error(IrregularFile::Link(to.path)));
        }
        rustix::fs::renameat(&from.folder, &from.name, &to.folder, &to.name)
            .map_err(|error| io_error(error.into(), &to.path))?;
        to.sync()
    }
}

impl FolderEntry {
    /// Opens the folder of this name; with `create`, creates it if it does not exist.
    fn enter(self, create: bool) -> Result<OwnedFd> {
        let open = || rustix::fs::openat(&self.folder, &self.name, FOLDER_FLAGS | OFlags::NOFOLLOW, Mode::empty());
        let error = match open() {
            Ok(folder) => return Ok(folder),
            Err(error) => IoError::from(error),
        };
        if error.kind() != ErrorKind::NotFound || !create {
            return Err(self.refusal(error));
        }
        match rustix::fs::mkdirat(&self.folder, &self.name, Mode::from_raw_mode(0o777)) {
            Err(error) if error.kind() != ErrorKind::AlreadyExists => return Err(self.refusal(error.into())),
            _ => self.sync()?,
        }
        open().map_err(|error| self.refusal(error.into()))
    }

    /// Opens the regular file of this name.
    fn open(&self, flags: OFlags, mode: u32) -> Result<(File, Stat)> {
        let opened = rustix::fs::openat(&self.folder, &self.name, flags, Mode::from_raw_mode(mode));
        let file = opened.map_err(|error| self.refusal(error.into()))?;
        let stat = rustix::fs::fstat(&file).map_err(|error| io_error(error.into(), &self.path))?;
        match FileType::from_raw_mode(stat.st_mode) {
            FileType::RegularFile => Ok((File::from(file), stat)),
            FileType::Directory => Err(io_error(
                IoError::new(ErrorKind::NotFound, "it is a folder"),
                &self.path,
            )),
            _ => Err(irregular_error(IrregularFile::Special(self.path.clone()))),
        }
    }

    /// Metadata of the entry with this name. Does not follow a link.
    fn stat(&self) -> Result<Option<Stat>> {
        match rustix::fs::statat(&self.folder, &self.name, AtFlags::SYMLINK_NOFOLLOW) {
            Ok(stat) => Ok(Some(stat)),
            Err(error) if error.kind() == ErrorKind::NotFound => Ok(None),
            Err(error) => Err(io_error(error.into(), &self.path)),
        }
    }

    /// Removes the name. For a link, its target stays.
    fn remove(&self) -> Result<()> {
        rustix::fs::unlinkat(&self.folder, &self.name, AtFlags::empty())
            .map_err(|error| io_error(error.into(), &self.path))
    }

    fn sync(&self) -> Result<()> {
        rustix::fs::fsync(&self.folder).map_err(|error| io_error(error.into(), &self.path))
    }

    /// The error for a name that could not be opened. Operating systems report links, pipes and
    /// sockets in several ways, so the file's type decides.
    fn refusal(&self, error: IoError) -> Error {
        let already_exists = error.kind() == ErrorKind::AlreadyExists;
        match self.stat() {
            Ok(Some(stat)) if !already_exists => match FileType::from_raw_mode(stat.st_mode) {
                FileType::Symlink => irregular_error(IrregularFile::Link(self.path.clone())),
                FileType::RegularFile | FileType::Directory => io_error(error, &self.path),
                _ => irregular_error(IrregularFile::Special(self.path.clone())),
            },
            _ => io_error(error, &self.path),
        }
    }
}

impl fmt::Display for Folder {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "the folder `{}`", self.root.display())
    }
}

#[async_trait]
impl ObjectStore for Folder {
    /// Writes a new file. Only a rename replaces an existing file.
    async fn put_opts(&self, location: &Path, payload: PutPayload, options: PutOptions) -> Result<PutResult> {
        if matches!(options.mode, PutMode::Update(_)) {
            return Err(self.unsupported("a conditional update"));
        }
        let mode = options.extensions.get::<OwnerOnly>().map_or(0o666, |OwnerOnly| 0o600);
        let location = location.clone();
        self.blocking(move |folder| folder.write(&location, &payload, mode))
            .await?;
        Ok(PutResult {
            e_tag: None,
            version: None,
            extensions: Default::default(),
        })
    }

    async fn put_multipart_opts(&self, _: &Path, _: PutMultipartOptions) -> Result<Box<dyn MultipartUpload>> {
        Err(self.unsupported("a put in parts"))
    }

    async fn get_opts(&self, location: &Path, options: GetOptions) -> Result<GetResult> {
        let location = location.clone();
        self.blocking(move |folder| folder.read(&location, &options)).await
    }

    fn delete_stream(&self, locations: BoxStream<'static, Result<Path>>) -> BoxStream<'static, Result<Path>> {
        let folder = self.clone();
        let remove = move |location: Result<Path>| {
            let folder = folder.clone();
            async move {
                let location = location?;
                let removed = location.clone();
                folder
                    .blocking(move |folder| folder.entry(&location, false)?.remove())
                    .await
                    .map(|()| removed)
            }
        };
        locations.then(remove).boxed()
    }

    fn list(&self, prefix: Option<&Path>) -> BoxStream<'static, Result<ObjectMeta>> {
        let (folder, prefix) = (self.clone(), prefix.unwrap_or(&self.prefix).clone());
        async move { folder.blocking(move |folder| folder.walk(&prefix)).await }
            .map_ok(|found| stream::iter(found.into_iter().map(Ok)))
            .try_flatten_stream()
            .boxed()
    }

    async fn list_with_delimiter(&self, prefix: Option<&Path>) -> Result<ListResult> {
        let prefix = prefix.unwrap_or(&self.prefix).clone();
        let (objects, common_prefixes) = self.blocking(move |folder| folder.list_folder(&prefix)).await?;
        Ok(ListResult {
            common_prefixes,
            objects,
            extensions: Default::default(),
        })
    }

    async fn copy_opts(&self, from: &Path, to: &Path, options: CopyOptions) -> Result<()> {
        if options.mode != CopyMode::Create {
            return Err(self.unsupported("a copy over another file"));
        }
        let (from, to) = (from.clone(), to.clone());
        self.blocking(move |folder| folder.link(&from, &to)).await
    }

    async fn rename_opts(&self, from: &Path, to: &Path, options: RenameOptions) -> Result<()> {
        if options.target_mode != RenameTargetMode::Overwrite {
            return Err(self.unsupported("a rename to a free name"));
        }
        let (from, to) = (from.clone(), to.clone());
        self.blocking(move |folder| folder.rename(&from, &to)).await
    }
}

impl Folder {
    fn unsupported(&self, what: &str) -> Error {
        Error::NotImplemented {
            operation: what.into(),
            implementer: self.to_string(),
        }
    }
}

fn modified(stat: &Stat) -> DateTime<Utc> {
    DateTime::from_timestamp(stat.st_mtime, stat.st_mtime_nsec as u32).unwrap_or_default()
}

/// Metadata with an ETag in the format of object_store's own local files.
fn meta(stat: &Stat, location: Path) -> ObjectMeta {
    let modified = modified(stat);
    let micros = modified.timestamp_micros().max(0);
    let size = stat.st_size as u64;
    ObjectMeta {
        location,
        last_modified: modified,
        size,
        e_tag: Some(format!("\"{:x}-{micros:x}-{size:x}\"", stat.st_ino)),
        version: None,
    }
}

fn io_error(source: IoError, path: &FsPath) -> Error {
    let shown_path = path.display().to_string();
    match source.kind() {
        ErrorKind::NotFound => Error::NotFound {
            path: shown_path,
            source: source.into(),
        },
        ErrorKind::AlreadyExists => Error::AlreadyExists {
            path: shown_path,
            source: source.into(),
        },
        _ => generic(source),
    }
}

fn generic(source: IoError) -> Error {
    Error::Generic {
        store: "LocalFileSystem",
        source: source.into(),
    }
}

fn irregular_error(what: IrregularFile) -> Error {
    Error::Generic {
        store: "LocalFileSystem",
        source: what.into(),
    }
}

#[cfg(test)]
mod tests;
