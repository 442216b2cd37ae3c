//! Resolves addresses to the input files they name, in a stable order.
//!
//! An address is a file, a folder (its data files at any depth) or a glob
//! (`s3://b/2026-11/*.parquet`; `**` crosses folders). Addresses keep the job file's order; the
//! matches of one address are sorted by key. A file that is matched twice counts once. Names that
//! begin with `_` or `.` are ignored, unless an address names that very file. A folder such as
//! `_x=1` is still a partition column, as in Spark.

use std::collections::{BTreeSet, HashSet};
use std::path::Path as FsPath;

use futures::{StreamExt, TryStreamExt, stream};
use globset::{GlobBuilder, GlobMatcher};
use object_store::path::Path;
use object_store::{ObjectMeta, ObjectStoreExt};
use url::Url;

use super::outputs::{self, Outputs, lies_in};
use crate::dataset::error::DatasetError;
use crate::dataset::lines::compression;
use crate::dataset::store::location::Location;
use crate::dataset::store::pinned_file::{FileVersion, PinnedFile, display_name};

/// Maximum number of files of a job.
pub const FILES_MAX: usize = 100_000;

/// Extensions of data files in a folder.
const DATA_EXTENSIONS: [&str; 12] = [
    "parquet", "pq", "arrow", "feather", "ipc", "arrows", "jsonl", "ndjson", "json", "csv", "tsv", "tab",
];

/// Extensions of unsupported compressions. Such a file is an error, since ignoring it would leave
/// rows out silently.
const UNSUPPORTED_EXTENSIONS: [&str; 5] = ["xz", "zip", "7z", "lz4", "br"];

/// The files that addresses match.
#[derive(Debug, Default)]
pub struct Found {
    pub files: Vec<FoundFile>,
    /// Files in the addresses' folders that are ignored because of their names.
    pub ignored_files: Vec<String>,
    /// Notes about outputs of jobs among the matches, a line each.
    pub output_notes: Vec<String>,
}

#[derive(Debug)]
pub struct FoundFile {
    pub file: PinnedFile,
    /// Number of leading parts of the key that come from the job file's own folder. They are not
    /// searched for partition columns.
    pub base_parts: usize,
}

/// Finds the files of all `uris`, in their current version; a relative path starts at `base_dir`.
/// `own_output` is the output of the requesting job: an input in it is refused.
pub async fn discover(
    uris: &[String],
    base_dir: &FsPath,
    own_output: Option<&Location>,
) -> Result<Found, DatasetError> {
    let mut found = Found::default();
    let (mut seen, mut excluded_outputs, mut included_outputs) = (HashSet::new(), BTreeSet::new(), BTreeSet::new());
    for uri in uris {
        let base = base_key_parts(uri, base_dir)?;
        let matched = discover_one(uri, base_dir, own_output).await?;
        found.ignored_files.extend(matched.ignored_files);
        excluded_outputs.extend(matched.excluded_outputs);
        included_outputs.extend(matched.included_outputs);
        for file in matched.files {
            if own_output.is_some_and(|own_output| lies_in(own_output, &file.location)) {
                return Err(DatasetError::Refused(format!(
                    "the input `{}` is in the job's own output (`output.uri`); give the output a folder without inputs",
                    file.name
                )));
            }
            if seen.insert(file.location.url.to_string()) {
                let parts = file.location.path.as_ref().split('/');
                let base_parts = parts.zip(&base).take_while(|(part, base)| part == base).count();
                found.files.push(FoundFile { file, base_parts });
            }
        }
        if found.files.len() > FILES_MAX {
            return Err(DatasetError::Refused(format!(
                "`{uri}` matches more than {FILES_MAX} input files"
            )));
        }
    }
    if uris.is_empty() {
        return Err(DatasetError::Refused("the job names no input".into()));
    }
    found.output_notes = outputs::excluded_note(&excluded_outputs)
        .into_iter()
        .chain(outputs::included_note(&included_outputs))
        .collect();
    Ok(found)
}

/// The key parts of `base_dir`, if `uri` is relative to it.
fn base_key_parts(uri: &str, base_dir: &FsPath) -> Result<Vec<String>, DatasetError> {
    if uri.contains("://") || FsPath::new(uri).is_absolute() {
        return Ok(Vec::new());
    }
    let base = Location::parse(".", base_dir)?;
    Ok(base.path.as_ref().split('/').map(String::from).collect())
}

/// The matches of one address.
#[derive(Default)]
struct Matched {
    files: Vec<PinnedFile>,
    ignored_files: Vec<String>,
    /// Outputs of jobs below the address that it does not name; `files` has none of their files.
    excluded_outputs: Vec<String>,
    /// Outputs of jobs that the address's wildcards match; `files` has their files.
    included_outputs: Vec<String>,
}

impl Matched {
    fn of(files: Vec<PinnedFile>) -> Matched {
        Matched {
            files,
            ..Matched::default()
        }
    }
}

async fn discover_one(uri: &str, base_dir: &FsPath, own_output: Option<&Location>) -> Result<Matched, DatasetError> {
    let location = Location::parse(uri, base_dir)?;
    // A local file whose name contains `[` or `*` takes precedence over the glob.
    let is_literal_file = location.local_path().is_some_and(|path| path.is_file());
    if !is_literal_file && let Some((base, pattern)) = split_glob(uri) {
        return match_glob(uri, &Location::parse(base, base_dir)?, pattern, own_output).await;
    }
    if location.local_path().is_some_and(|path| path.is_dir()) || uri.ends_with('/') {
        return match_folder(uri, &location).await;
    }
    check_is_regular(&location)?;
    match location.store.head(&location.path).await {
        Ok(meta) => Ok(Matched::of(vec![pinned_file(&location, meta)])),
        // A missing local path is an error; a missing key in a store may be a prefix of others.
        Err(object_store::Error::NotFound { .. }) if location.local_path().is_some() => Err(DatasetError::NoMatch {
            uri: uri.into(),
            why: "there is no such file or folder".into(),
        }),
        Err(object_store::Error::NotFound { .. }) => match_folder(uri, &location).await,
        Err(source) => Err(DatasetError::store(&display_name(location.url.as_str()), source)),
    }
}

/// Refuses a local pipe or device, since opening it may block forever.
fn check_is_regular(location: &Location) -> Result<(), DatasetError> {
    let Some(meta) = location.local_path().and_then(|path| path.metadata().ok()) else {
        return Ok(());
    };
    let checked = crate::regular::check_is_regular(meta.file_type());
    checked.map_err(|why| DatasetError::unreadable(&display_name(location.url.as_str()), why))
}

/// Splits an address before its first part with a wildcard: the folder to list, and the pattern
/// below it.
fn split_glob(uri: &str) -> Option<(&str, &str)> {
    if uri.starts_with("http://") || uri.starts_with("https://") {
        return None; // `?` begins a query there, and web servers cannot list.
    }
    let wildcard = uri.find(['*', '?', '[', '{'])?;
    let cut = uri[..wildcard].rfind('/').map_or(0, |slash| slash + 1);
    let base = if cut == 0 { "." } else { &uri[..cut] };
    Some((base, &uri[cut..]))
}

async fn match_glob(
    uri: &str,
    base: &Location,
    pattern: &str,
    own_output: Option<&Location>,
) -> Result<Matched, DatasetError> {
    let no_match = |why: String| DatasetError::NoMatch { uri: uri.into(), why };
    let matcher = compile_glob(pattern).map_err(|e| no_match(format!("the pattern is not valid: {e}")))?;
    // A pattern without `/` or `**` lists a single folder instead of the tree below it.
    let is_recursive = pattern.contains('/') || pattern.contains("**");
    let Listed { files, in_outputs } =
        list(base, is_recursive, &|key| !is_hidden(key) && matcher.is_match(key)).await?;
    let (excluded_outputs, answers): (Vec<_>, Vec<_>) = in_outputs.into_iter().partition(|(_, file)| {
        !files.is_empty()
            || pattern.contains("**")
            || own_output.is_some_and(|own_output| lies_in(own_output, &file.location))
    });
    let (included_outputs, answers): (Vec<String>, Vec<PinnedFile>) = answers.into_iter().unzip();
    let excluded_outputs: Vec<String> = excluded_outputs.into_iter().map(|(output, _)| output).collect();
    let files = if files.is_empty() { answers } else { files };
    let name = display_name(base.url.as_str());
    match (files.is_empty(), excluded_outputs.is_empty()) {
        (true, true) => Err(no_match(format!("no file below `{name}` fits `{pattern}`"))),
        (true, false) => Err(no_match(only_outputs_match(&excluded_outputs[0]))),
        _ => Ok(Matched {
            files,
            excluded_outputs,
            included_outputs,
            ..Matched::default()
        }),
    }
}

/// The error if all matches are in outputs of jobs, such as `output`.
fn only_outputs_match(output: &str) -> String {
    format!(
        "all files that match are in outputs of jobs, such as `{}`; to read answers, give the address of such an output",
        display_name(output)
    )
}

fn compile_glob(pattern: &str) -> Result<GlobMatcher, globset::Error> {
    Ok(GlobBuilder::new(pattern)
        .literal_separator(true)
        .build()?
        .compile_matcher())
}

async fn match_folder(uri: &str, base: &Location) -> Result<Matched, DatasetError> {
    let Listed { files: all, in_outputs } = list(base, true, &|key| !is_hidden(key)).await?;
    let excluded_outputs: Vec<String> = in_outputs.into_iter().map(|(output, _)| output).collect();
    let has_extension = |file: &PinnedFile, extensions: &[&str]| {
        let name = file.location.path.filename().unwrap_or_default().to_ascii_lowercase();
        let mut parts = name.rsplit('.');
        let last = parts.next().unwrap_or_default().to_string();
        // A compression extension is stripped; the extension before it tells the format.
        let kind = if compression::EXTENSIONS.contains(&last.as_str()) {
            parts.next().unwrap_or_default().to_string()
        } else {
            last
        };
        name.contains('.') && extensions.contains(&kind.as_str())
    };
    let refuse = |file: &PinnedFile, why: &str| {
        let why = format!("`{}` is compressed as a whole{why}", file.name);
        Err(DatasetError::NoMatch { uri: uri.into(), why })
    };
    if let Some(packed) = all.iter().find(|file| has_extension(file, &UNSUPPORTED_EXTENSIONS)) {
        return refuse(packed, ", and no gzip, zstd or bzip2; decompress it first");
    }
    let (data, others): (Vec<_>, Vec<_>) = all.into_iter().partition(|file| has_extension(file, &DATA_EXTENSIONS));
    let (texts, others): (Vec<_>, Vec<_>) = others.into_iter().partition(|file| has_extension(file, &["txt"]));
    let is_compressed = |file: &&PinnedFile| {
        let name = file.location.path.filename().unwrap_or_default().to_ascii_lowercase();
        name.rsplit_once('.')
            .is_some_and(|(_, last)| compression::EXTENSIONS.contains(&last))
    };
    if let Some(packed) = others.iter().find(is_compressed) {
        return refuse(
            packed,
            ", and its name does not show its format; rename it (`x.jsonl.gz`) or give its own address",
        );
    }
    let (files, unused) = if data.is_empty() { (texts, data) } else { (data, texts) };
    if files.is_empty() {
        let missing = "the folder is missing or holds no *.parquet, *.arrow, *.jsonl, *.json, *.csv, *.tsv or *.txt";
        let why = excluded_outputs
            .first()
            .map_or(missing.into(), |one| only_outputs_match(one));
        return Err(DatasetError::NoMatch { uri: uri.into(), why });
    }
    let ignored_files = others.iter().chain(&unused).map(|file| file.name.clone()).collect();
    Ok(Matched {
        files,
        ignored_files,
        excluded_outputs,
        ..Matched::default()
    })
}

/// The listed contents of a folder.
#[derive(Default)]
struct Listed {
    files: Vec<PinnedFile>,
    /// Files within outputs of jobs below the folder, each with the URL of its output.
    in_outputs: Vec<(String, PinnedFile)>,
}

/// The objects below `base` whose relative key is wanted, sorted by key. If not `is_recursive`,
/// only direct children.
async fn list(
    base: &Location,
    is_recursive: bool,
    is_wanted: &(dyn Fn(&str) -> bool + Sync),
) -> Result<Listed, DatasetError> {
    let store_error = |source| DatasetError::store(&display_name(base.url.as_str()), source);
    if base.local_path().is_some_and(|path| !path.exists()) {
        return Ok(Listed::default());
    }
    let prefix = (!base.path.as_ref().is_empty()).then_some(&base.path);
    let mut listing = if is_recursive {
        base.store.list(prefix)
    } else {
        let found = base.store.list_with_delimiter(prefix).await.map_err(store_error)?;
        stream::iter(found.objects.into_iter().map(Ok)).boxed()
    };
    let (mut metas, mut outputs) = (Vec::new(), Outputs::default());
    while let Some(meta) = listing.try_next().await.map_err(store_error)? {
        let Some(relative) = relative_key(&base.path, &meta.location) else {
            continue;
        };
        outputs.add_if_record(relative);
        if !relative.is_empty() && is_wanted(relative) {
            metas.push(meta);
        }
        if metas.len() > FILES_MAX {
            return Err(DatasetError::Refused(format!(
                "`{}` holds more than {FILES_MAX} input files",
                base.url
            )));
        }
    }
    metas.sort_by(|a, b| a.location.as_ref().cmp(b.location.as_ref()));
    let mut listed = Listed::default();
    for meta in metas {
        let output = relative_key(&base.path, &meta.location).and_then(|key| outputs.output_of(key));
        match output.map(|output| base.join(output).url.to_string()) {
            Some(output) => listed.in_outputs.push((output, pinned_file(base, meta))),
            None => listed.files.push(pinned_file(base, meta)),
        }
    }
    Ok(listed)
}

fn relative_key<'a>(prefix: &Path, key: &'a Path) -> Option<&'a str> {
    let rest = key.as_ref().strip_prefix(prefix.as_ref())?;
    Some(rest.strip_prefix('/').unwrap_or(rest))
}

fn is_hidden(key: &str) -> bool {
    key.split('/')
        .any(|part| part.starts_with('.') || (part.starts_with('_') && !part.contains('=')))
}

/// The current version of the object that a listing of `base` returned as `meta`.
fn pinned_file(base: &Location, meta: ObjectMeta) -> PinnedFile {
    let url = if base.local_path().is_some() {
        Url::from_file_path(format!("/{}", meta.location)).unwrap_or_else(|()| base.url.clone())
    } else {
        let mut url = base.url.clone();
        if let (Some(relative), Ok(mut segments)) = (relative_key(&base.path, &meta.location), url.path_segments_mut())
        {
            segments.pop_if_empty();
            if !relative.is_empty() {
                segments.extend(relative.split('/'));
            }
        }
        url
    };
    let name = display_name(url.as_str());
    let FileVersion { etag, version } = FileVersion::of(&meta);
    let location = Location {
        store: base.store.clone(),
        path: meta.location,
        url,
    };
    PinnedFile {
        location,
        size: meta.size,
        etag,
        version,
        name,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs;
    use std::sync::Arc;

    async fn names(dir: &FsPath, uris: &[&str]) -> Result<Vec<String>, String> {
        let uris: Vec<String> = uris.iter().map(|u| u.to_string()).collect();
        let files = discover(&uris, dir, None).await.map_err(|e| e.to_string())?;
        let root = dir.canonicalize().unwrap();
        Ok(files
            .files
            .iter()
            .map(|f| {
                f.file
                    .name
                    .trim_start_matches(root.to_str().unwrap())
                    .trim_start_matches('/')
                    .into()
            })
            .collect())
    }

    #[tokio::test]
    async fn files_folders_and_globs() {
        let dir = tempfile::tempdir().unwrap();
        let dir = dir.path().canonicalize().unwrap();
        fs::create_dir_all(dir.join("in/day=2/_tmp")).unwrap();
        for name in [
            "in/b.parquet",
            "in/a.parquet",
            "in/_SUCCESS",
            "in/.x.parquet",
            "in/notes.txt",
            "in/a b[1]é%.jsonl",
        ] {
            fs::write(dir.join(name), b"x").unwrap();
        }
        fs::write(dir.join("in/day=2/c.parquet"), b"x").unwrap();
        fs::write(dir.join("in/day=2/_tmp/d.parquet"), b"x").unwrap();
        let odd = "in/a b[1]é%.jsonl";
        let all = names(&dir, &["in"]).await.unwrap();
        assert_eq!(all, [odd, "in/a.parquet", "in/b.parquet", "in/day=2/c.parquet"]);
        assert_eq!(names(&dir, &["in/"]).await.unwrap(), all);
        assert_eq!(
            names(&dir, &["in/*.parquet"]).await.unwrap(),
            ["in/a.parquet", "in/b.parquet"]
        );
        assert_eq!(names(&dir, &["in/**/*.parquet"]).await.unwrap().len(), 3);
        assert_eq!(
            names(&dir, &["in/{b,c}.parquet", "in/a.parquet", "./in/../in/b.parquet"])
                .await
                .unwrap(),
            ["in/b.parquet", "in/a.parquet"]
        );
        assert_eq!(names(&dir, &["in/.x.parquet"]).await.unwrap(), ["in/.x.parquet"]);
        assert_eq!(names(&dir, &[odd]).await.unwrap(), [odd]);
        let file_url = Url::from_file_path(dir.join(odd)).unwrap();
        assert_eq!(names(&dir, &[file_url.as_str()]).await.unwrap(), [odd]);
        // Every file found can be opened again by its URL alone.
        for FoundFile { file, .. } in discover(&["in".to_string()], &dir, None).await.unwrap().files {
            let again = Location::parse(file.location.url.as_str(), FsPath::new("/")).unwrap();
            assert_eq!(again.path, file.location.path);
            assert_eq!(&again.read().await.unwrap()[..], b"x");
        }
    }

    #[tokio::test]
    async fn no_match_names_the_address() {
        let dir = tempfile::tempdir().unwrap();
        fs::create_dir_all(dir.path().join("empty")).unwrap();
        for uri in ["gone.parquet", "gone/", "gone/*.parquet", "empty", "empty/*.jsonl"] {
            let error = names(dir.path(), &[uri]).await.unwrap_err();
            assert!(error.starts_with(&format!("no input matches `{uri}`: ")), "{error}");
        }
        assert!(
            names(dir.path(), &["[/x"])
                .await
                .unwrap_err()
                .contains("pattern is not valid")
        );
        assert!(names(dir.path(), &[]).await.unwrap_err().contains("names no input"));
        fs::write(dir.path().join("empty/x.jsonl.gz"), b"x").unwrap();
        assert_eq!(names(dir.path(), &["empty"]).await.unwrap(), ["empty/x.jsonl.gz"]);
        fs::write(dir.path().join("empty/y.gz"), b"x").unwrap();
        let error = names(dir.path(), &["empty"]).await.unwrap_err();
        assert!(
            error.contains("y.gz` is compressed as a whole, and its name does not show its format"),
            "{error}"
        );
        fs::write(dir.path().join("empty/y.jsonl.xz"), b"x").unwrap();
        let error = names(dir.path(), &["empty"]).await.unwrap_err();
        assert!(error.contains("decompress it first"), "{error}");
    }

    #[tokio::test]
    async fn keys_of_a_remote_store_become_urls() {
        let store = Arc::new(object_store::memory::InMemory::new());
        for key in [
            "2026-11/a b.parquet",
            "2026-11/x/c#é.parquet",
            "2026-110/d.parquet",
            "2026-11/_e.parquet",
        ] {
            store.put(&Path::parse(key).unwrap(), "x".into()).await.unwrap();
        }
        let url = Url::parse("s3://bucket/2026-11/").unwrap();
        let base = Location {
            store,
            path: Path::from("2026-11"),
            url,
        };
        let urls = |files: Vec<PinnedFile>| files.iter().map(|f| f.location.url.to_string()).collect::<Vec<_>>();
        let all = match_folder("s3://bucket/2026-11/", &base).await.unwrap().files;
        for file in &all {
            assert_eq!(
                Path::from_url_path(file.location.url.path()).unwrap(),
                file.location.path
            );
        }
        assert_eq!(
            urls(all),
            [
                "s3://bucket/2026-11/a%20b.parquet",
                "s3://bucket/2026-11/x/c%23%C3%A9.parquet"
            ]
        );
        let flat = match_glob("", &base, "*.parquet", None).await.unwrap();
        assert_eq!(urls(flat.files), ["s3://bucket/2026-11/a%20b.parquet"]);
    }

    #[test]
    fn globs_are_cut_before_their_first_wildcard() {
        assert_eq!(
            split_glob("s3://b/2026-11/*.parquet"),
            Some(("s3://b/2026-11/", "*.parquet"))
        );
        assert_eq!(split_glob("*.jsonl"), Some((".", "*.jsonl")));
        assert_eq!(split_glob("/d/x-?/y.jsonl"), Some(("/d/", "x-?/y.jsonl")));
        assert_eq!(split_glob("https://h/x.jsonl?sig=*"), None);
        assert_eq!(split_glob("a/b.parquet"), None);
    }
}
