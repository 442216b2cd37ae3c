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
use crate::dataset::store::pinned::{Pin, PinnedFile, display_name};

/// Maximum number of files of a job.
pub const FILES_MAX: usize = 100_000;

/// Extensions of data files in a folder.
const DATA_EXTENSIONS: [&str; 12] = [
    "parquet", "pq", "arrow", "feather", "ipc", "arrows", "jsonl", "ndjson", "json", "csv", "tsv", "tab",
];

/// Extensions of data files in unsupported formats: an error is better than a silently smaller
/// dataset.
const PACKED_EXTENSIONS: [&str; 5] = ["xz", "zip", "7z", "lz4", "br"];

/// The files that addresses match.
#[derive(Debug, Default)]
pub struct Found {
    pub files: Vec<FoundFile>,
    /// Names of files in an address's folder whose names are not those of inputs.
    pub passed_over: Vec<String>,
    /// Notes about outputs of jobs among the matches, a line each.
    pub of_outputs: Vec<String>,
}

#[derive(Debug)]
pub struct FoundFile {
    pub file: PinnedFile,
    /// Number of leading parts of the key that the job file did not write: the folders around the
    /// job file are no part of an input's name.
    pub outside: usize,
}

/// Finds the files of all `uris`, pinned to their current state; a relative path starts at
/// `base_dir`. `own` is the output of the requesting job, in which no input may lie.
pub async fn discover(uris: &[String], base_dir: &FsPath, own: Option<&Location>) -> Result<Found, DatasetError> {
    let mut found = Found::default();
    let (mut seen, mut left_out, mut taken) = (HashSet::new(), BTreeSet::new(), BTreeSet::new());
    for uri in uris {
        let outside = base_parts(uri, base_dir)?;
        let matched = discover_one(uri, base_dir, own).await?;
        found.passed_over.extend(matched.passed_over);
        left_out.extend(matched.left_out);
        taken.extend(matched.taken);
        for file in matched.files {
            if own.is_some_and(|own| lies_in(own, &file.location)) {
                return Err(DatasetError::Refused(format!(
                    "`{}` is an input and lies in `output.uri`, which is the job's own; give the output a folder without inputs",
                    file.name
                )));
            }
            if seen.insert(file.location.url.to_string()) {
                let parts = file.location.path.as_ref().split('/');
                let outside = parts.zip(&outside).take_while(|(part, base)| part == base).count();
                found.files.push(FoundFile { file, outside });
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
    found.of_outputs = outputs::left_out(&left_out)
        .into_iter()
        .chain(outputs::taken(&taken))
        .collect();
    Ok(found)
}

/// The key parts of `base_dir`, if `uri` is relative to it.
fn base_parts(uri: &str, base_dir: &FsPath) -> Result<Vec<String>, DatasetError> {
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
    passed_over: Vec<String>,
    /// Outputs of jobs that the address only comes across; their files are excluded from `files`.
    left_out: Vec<String>,
    /// Outputs matched by the address's wildcards; their files are in `files`.
    taken: Vec<String>,
}

impl Matched {
    fn of(files: Vec<PinnedFile>) -> Matched {
        Matched {
            files,
            ..Matched::default()
        }
    }
}

async fn discover_one(uri: &str, base_dir: &FsPath, own: Option<&Location>) -> Result<Matched, DatasetError> {
    let location = Location::parse(uri, base_dir)?;
    // A file whose literal name holds `[` or `*` takes precedence over a glob.
    let literal_file = location.local_path().is_some_and(|path| path.is_file());
    if !literal_file && let Some((base, pattern)) = split_glob(uri) {
        return glob(uri, &Location::parse(base, base_dir)?, pattern, own).await;
    }
    if location.local_path().is_some_and(|path| path.is_dir()) || uri.ends_with('/') {
        return folder(uri, &location).await;
    }
    regular(&location)?;
    match location.store.head(&location.path).await {
        Ok(meta) => Ok(Matched::of(vec![pin(&location, meta)])),
        // A missing local path is an error; a remote one may be a prefix.
        Err(object_store::Error::NotFound { .. }) if location.local_path().is_some() => Err(DatasetError::NoMatch {
            uri: uri.into(),
            why: "there is no such file or folder".into(),
        }),
        Err(object_store::Error::NotFound { .. }) => folder(uri, &location).await,
        Err(source) => Err(DatasetError::store(&display_name(location.url.as_str()), source)),
    }
}

/// Refuses a local pipe or device, since opening it may block forever.
fn regular(location: &Location) -> Result<(), DatasetError> {
    let Some(meta) = location.local_path().and_then(|path| path.metadata().ok()) else {
        return Ok(());
    };
    let checked = crate::regular::check(meta.file_type());
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

async fn glob(uri: &str, base: &Location, pattern: &str, own: Option<&Location>) -> Result<Matched, DatasetError> {
    let no_match = |why: String| DatasetError::NoMatch { uri: uri.into(), why };
    let matcher = matcher(pattern).map_err(|e| no_match(format!("the pattern is not valid: {e}")))?;
    // A pattern without `/` or `**` lists a single folder instead of the tree below it.
    let deep = pattern.contains('/') || pattern.contains("**");
    let Listed { files, of_outputs } = list(base, deep, &|key| !is_hidden(key) && matcher.is_match(key)).await?;
    let (left_out, answers): (Vec<_>, Vec<_>) = of_outputs.into_iter().partition(|(_, file)| {
        !files.is_empty() || pattern.contains("**") || own.is_some_and(|own| lies_in(own, &file.location))
    });
    let (taken, answers): (Vec<String>, Vec<PinnedFile>) = answers.into_iter().unzip();
    let left_out: Vec<String> = left_out.into_iter().map(|(output, _)| output).collect();
    let files = if files.is_empty() { answers } else { files };
    let name = display_name(base.url.as_str());
    match (files.is_empty(), left_out.is_empty()) {
        (true, true) => Err(no_match(format!("no file below `{name}` fits `{pattern}`"))),
        (true, false) => Err(no_match(only_outputs(&left_out[0]))),
        _ => Ok(Matched {
            files,
            left_out,
            taken,
            ..Matched::default()
        }),
    }
}

/// The error where all matches lie in outputs of jobs.
fn only_outputs(one: &str) -> String {
    format!(
        "all that fits lies in outputs of jobs, such as `{}`; to read answers, name such an output itself",
        display_name(one)
    )
}

fn matcher(pattern: &str) -> Result<GlobMatcher, globset::Error> {
    Ok(GlobBuilder::new(pattern)
        .literal_separator(true)
        .build()?
        .compile_matcher())
}

async fn folder(uri: &str, base: &Location) -> Result<Matched, DatasetError> {
    let Listed { files: all, of_outputs } = list(base, true, &|key| !is_hidden(key)).await?;
    let left_out: Vec<String> = of_outputs.into_iter().map(|(output, _)| output).collect();
    let is = |file: &PinnedFile, extensions: &[&str]| {
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
    let refused = |file: &PinnedFile, why: &str| {
        let why = format!("`{}` is compressed as a whole{why}", file.name);
        Err(DatasetError::NoMatch { uri: uri.into(), why })
    };
    if let Some(packed) = all.iter().find(|file| is(file, &PACKED_EXTENSIONS)) {
        return refused(packed, ", and no gzip, zstd or bzip2; decompress it first");
    }
    let (data, others): (Vec<_>, Vec<_>) = all.into_iter().partition(|file| is(file, &DATA_EXTENSIONS));
    let (texts, others): (Vec<_>, Vec<_>) = others.into_iter().partition(|file| is(file, &["txt"]));
    let is_packed = |file: &&PinnedFile| {
        let name = file.location.path.filename().unwrap_or_default().to_ascii_lowercase();
        name.rsplit_once('.')
            .is_some_and(|(_, last)| compression::EXTENSIONS.contains(&last))
    };
    if let Some(packed) = others.iter().find(is_packed) {
        return refused(
            packed,
            ", and its name does not say what it holds; rename it (`x.jsonl.gz`) or give its own address",
        );
    }
    let (files, more) = if data.is_empty() { (texts, data) } else { (data, texts) };
    if files.is_empty() {
        let missing = "the folder is missing or holds no *.parquet, *.arrow, *.jsonl, *.json, *.csv, *.tsv or *.txt";
        let why = left_out.first().map_or(missing.into(), |one| only_outputs(one));
        return Err(DatasetError::NoMatch { uri: uri.into(), why });
    }
    let passed_over = others.iter().chain(&more).map(|file| file.name.clone()).collect();
    Ok(Matched {
        files,
        passed_over,
        left_out,
        ..Matched::default()
    })
}

/// The listed contents of a folder.
#[derive(Default)]
struct Listed {
    files: Vec<PinnedFile>,
    /// Files within outputs of jobs below the folder, each with the URL of its output.
    of_outputs: Vec<(String, PinnedFile)>,
}

/// The objects below `base` whose relative key is wanted, sorted by key; without `deep`, only its
/// direct children.
async fn list(base: &Location, deep: bool, wanted: &(dyn Fn(&str) -> bool + Sync)) -> Result<Listed, DatasetError> {
    let store_error = |source| DatasetError::store(&display_name(base.url.as_str()), source);
    if base.local_path().is_some_and(|path| !path.exists()) {
        return Ok(Listed::default());
    }
    let prefix = (!base.path.as_ref().is_empty()).then_some(&base.path);
    let mut listing = if deep {
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
        outputs.note(relative);
        if !relative.is_empty() && wanted(relative) {
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
        let output = relative_key(&base.path, &meta.location).and_then(|key| outputs.around(key));
        match output.map(|output| base.join(output).url.to_string()) {
            Some(output) => listed.of_outputs.push((output, pin(base, meta))),
            None => listed.files.push(pin(base, meta)),
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

/// The object `meta` as a pinned file; its key begins with the key of `base`.
fn pin(base: &Location, meta: ObjectMeta) -> PinnedFile {
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
    let Pin { etag, version } = Pin::of(&meta);
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
            error.contains("y.gz` is compressed as a whole, and its name does not say"),
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
        let all = folder("s3://bucket/2026-11/", &base).await.unwrap().files;
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
        let flat = glob("", &base, "*.parquet", None).await.unwrap();
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
