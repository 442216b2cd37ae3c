//! What a worker may touch for a queued job, and `verify` for a job's inputs.
//!
//! Anyone who can write to a queue can name any output in a message, and anyone who can write to
//! that output can name any inputs and model in its `job.json`. The worker's credentials and files
//! are out of their reach. So the worker asks here before it opens any address that a message or a
//! record names:
//!
//! | | without options | with `--accept` |
//! |---|---|---|
//! | output | any bucket; a local folder whose record the worker's own user (or root) owns; what `--job` names | below one of the prefixes; what `--job` names |
//! | inputs | the output's own bucket; local files and buckets where the output is such a local folder | below one of the prefixes |
//! | model, where no `--model` is given | any local folder | below one of the prefixes |
//!
//! `--accept-inputs` and `--accept-models` add prefixes for inputs and models only. Web servers are
//! read only where they are listed, and the end of a job is posted only to addresses that
//! `--accept-on-finish` lists. Decisions are by the parsed address; in local paths, symbolic links
//! are followed first.
//!
//! See docs/decisions/019-a-queues-word-is-a-strangers.md.

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use object_store::ObjectStoreScheme;
use object_store::path::Path as Key;
use percent_encoding::percent_decode_str;
use url::{Position, Url};

use crate::dataset::store::clients::{Stores, bucket_of, names_bucket, shown};
use crate::dataset::store::location::Location;
use crate::worker::owner;

/// Maximum length of a shown address, in characters.
const SHOWN_MAX: usize = 200;

/// Which outputs, inputs and models the operator of a worker accepts.
#[derive(Debug, Clone, Default)]
pub struct Access {
    /// `run` works on jobs that a person named: everything is accepted.
    everything: bool,
    accepted: Vec<Prefix>,
    inputs: Vec<Prefix>,
    models: Vec<Prefix>,
    /// Addresses to which the end of a job may be posted.
    told: Vec<Prefix>,
    /// The outputs of `--job`.
    outputs: Vec<Prefix>,
}

/// The access options of `gristmill worker`.
#[derive(Debug, Clone, Copy, Default)]
pub struct Asked<'a> {
    pub accept: &'a [String],
    pub accept_inputs: &'a [String],
    pub accept_models: &'a [String],
    pub accept_on_finish: &'a [String],
    pub jobs: &'a [String],
}

/// Addresses with a common prefix, by whole parts of their paths.
#[derive(Debug, Clone, PartialEq, Eq)]
struct Prefix {
    scheme: String,
    /// User, host and port; `None`: any (`s3://`).
    authority: Option<String>,
    parts: Vec<String>,
}

/// How an address is reached.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Kind {
    Local,
    Bucket,
    Web,
}

impl Access {
    /// Accepts everything: for jobs that a person gave to this process.
    pub fn everything() -> Access {
        Access {
            everything: true,
            ..Access::default()
        }
    }

    /// The access that these options accept; relative paths start at `here`.
    ///
    /// # Errors
    /// A text that cannot be a prefix, with its option.
    pub fn new(asked: &Asked<'_>, here: &Path) -> Result<Access, String> {
        let prefixes = |option: &str, texts: &[String]| -> Result<Vec<Prefix>, String> {
            let parse = |text: &String| Prefix::parse(text, here).map_err(|why| format!("`{option}`: {why}"));
            texts.iter().map(parse).collect()
        };
        let named = |text: &String| {
            let url = Location::url_of(text, here).map_err(|error| format!("`--job`: {error}"))?;
            Prefix::of(&url).map_err(|why| format!("`--job`: {why}"))
        };
        Ok(Access {
            everything: false,
            accepted: prefixes("--accept", asked.accept)?,
            inputs: prefixes("--accept-inputs", asked.accept_inputs)?,
            models: prefixes("--accept-models", asked.accept_models)?,
            told: {
                let told = prefixes("--accept-on-finish", asked.accept_on_finish)?;
                if told
                    .iter()
                    .all(|prefix| matches!(prefix.scheme.as_str(), "http" | "https"))
                {
                    told
                } else {
                    return Err("`--accept-on-finish`: give web addresses, such as `https://hooks.example/`".into());
                }
            },
            outputs: asked.jobs.iter().map(named).collect::<Result<_, String>>()?,
        })
    }

    /// Whether `--accept`, or the option of `more`, lists this place.
    fn lists(&self, more: &[Prefix], place: &Prefix) -> bool {
        self.accepted.iter().chain(more).any(|prefix| prefix.holds(place))
    }

    /// Why a job's record must not be read at `output`; call this before any other check.
    pub fn refuses_output(&self, output: &Location) -> Option<String> {
        if self.everything {
            return None;
        }
        let place = match Prefix::of(&output.url) {
            Ok(place) => place,
            Err(why) => return Some(format!("its output {why}")),
        };
        if self.lists(&self.outputs, &place) {
            return None;
        }
        let why = match kind(&output.url) {
            Kind::Bucket if self.accepted.is_empty() => return None,
            Kind::Local if self.accepted.is_empty() => match owner::owns(&place.path()) {
                Ok(()) => return None,
                Err(why) => why,
            },
            Kind::Local | Kind::Bucket => "is below no prefix of `--accept`".into(),
            Kind::Web => "is neither in a bucket nor on this machine, so it must be listed".into(),
        };
        Some(format!(
            "its output `{}` {why}; to work on it, start the worker with `--accept {}`",
            brief(&output.url),
            folder_of(&output.url, kind(&output.url))
        ))
    }

    /// Why this worker must not read the `inputs` of the job at `output`, whose output it accepts.
    pub fn refuses_inputs<'a>(&self, output: &Location, inputs: impl IntoIterator<Item = &'a str>) -> Option<String> {
        if self.everything {
            return None;
        }
        inputs
            .into_iter()
            .find_map(|input| match Location::url_of(input, Path::new("/")) {
                Ok(url) => self.refuses_input(output, &url),
                Err(error) => Some(format!("its input: {error}")),
            })
    }

    /// What `--accept-inputs` must list for this worker to read the `inputs` of the job at `output`.
    pub fn to_accept<'a>(&self, output: &Location, inputs: impl IntoIterator<Item = &'a str>) -> BTreeSet<String> {
        let urls = inputs
            .into_iter()
            .filter_map(|input| Location::url_of(input, Path::new("/")).ok());
        urls.filter(|url| self.refuses_input(output, url).is_some())
            .map(|url| folder_of(&url, kind(&url)))
            .collect()
    }

    fn refuses_input(&self, output: &Location, url: &Url) -> Option<String> {
        let place = match Prefix::of(url) {
            Ok(place) => place,
            Err(why) => return Some(format!("its input {why}")),
        };
        if self.lists(&self.inputs, &place) {
            return None;
        }
        let (from, to) = (kind(url), kind(&output.url));
        let why = match (from, to) {
            (Kind::Web, _) => "is neither in a bucket nor on this machine, so it must be listed",
            _ if !self.accepted.is_empty() => "is below no prefix of `--accept` or `--accept-inputs`",
            (Kind::Local | Kind::Bucket, Kind::Local) => return None,
            (Kind::Bucket, Kind::Bucket) if same_bucket(url, output) => return None,
            (Kind::Bucket, _) => "is in another bucket than its output",
            (Kind::Local, _) => "is a file of this machine, its output is not",
        };
        Some(format!(
            "its input `{}` {why}; to have it read, give `--accept-inputs {}`",
            brief(url),
            folder_of(url, from)
        ))
    }

    /// Why a worker must not load the model in `dir`, which a record names.
    pub fn refuses_model(&self, dir: &Path) -> Option<String> {
        let open = self.everything || (self.accepted.is_empty() && self.models.is_empty());
        if open {
            return None;
        }
        // Normalized without `..`, as it is opened.
        let url = Location::url_of(&dir.to_string_lossy(), Path::new("/")).map_err(|error| error.to_string());
        let place = match url.and_then(|url| Prefix::of(&url)) {
            Ok(place) => place,
            Err(why) => return Some(format!("its model {why}")),
        };
        if self.lists(&self.models, &place) {
            return None;
        }
        Some(format!(
            "its model `{dir}` is below no prefix of `--accept-models`; to load it, start the worker with `--model {dir}` or \
             `--accept-models {dir}`",
            dir = dir.display()
        ))
    }

    /// Why the end of a job must not be posted to `url`, which a record names. Every such address
    /// must be listed.
    pub fn refuses_told(&self, url: &Url) -> Option<String> {
        let listed = |place: Prefix| self.told.iter().any(|prefix| prefix.holds(&place));
        let open = self.everything || Prefix::of(url).is_ok_and(listed);
        (!open).then(|| {
            format!(
                "`on_finish.url` `{}` is not listed, so nothing is posted to it: `--accept-on-finish {}` would",
                brief(url),
                folder_of(url, Kind::Web)
            )
        })
    }

    /// From here on, web servers' redirects are held to this access, too.
    pub fn confine_redirects(&self) {
        let access = self.clone();
        Stores::of_process().confine(Arc::new(move |url| access.may_follow(url)));
    }

    /// Whether an input's server may redirect to `url`.
    pub fn may_follow(&self, url: &Url) -> bool {
        let listed = |place: Prefix| {
            self.accepted
                .iter()
                .chain(&self.inputs)
                .any(|prefix| prefix.holds(&place))
        };
        self.everything || Prefix::of(url).is_ok_and(listed)
    }
}

impl Prefix {
    /// Parses a prefix as an operator writes it: an address, a path, or the scheme of buckets alone
    /// (`s3://`).
    fn parse(text: &str, here: &Path) -> Result<Prefix, String> {
        if text.contains(['*', '?']) {
            return Err(format!("`{text}` has a wildcard: give the part before it"));
        }
        if let Some(scheme) = text.strip_suffix("://") {
            let scheme = known_scheme(&scheme.to_ascii_lowercase());
            return match scheme.as_str() {
                "s3" | "gs" | "az" | "abfs" | "abfss" => Ok(Prefix {
                    scheme,
                    authority: None,
                    parts: Vec::new(),
                }),
                _ => Err(format!("`{text}` names no host or bucket")),
            };
        }
        let url = Location::url_of(text, here).map_err(|error| error.to_string())?;
        if !is_known(url.scheme()) {
            return Err(format!("`{text}`: nothing is read from `{}://`", url.scheme()));
        }
        Prefix::of(&url)
    }

    /// The place that `url` names.
    ///
    /// # Errors
    /// The store could read this URL as another place; holds one line with the reason.
    fn of(url: &Url) -> Result<Prefix, String> {
        let bad = |why: &str| Err(format!("`{}` {why}", brief(url)));
        if url.scheme() == "file" {
            let Ok(path) = url.to_file_path() else {
                return bad("is no local path");
            };
            let found = real(&path);
            let Some(text) = found.to_str() else {
                return bad("is no text");
            };
            return Ok(Prefix {
                scheme: "file".into(),
                authority: Some(String::new()),
                parts: text
                    .split('/')
                    .filter(|part| !part.is_empty())
                    .map(str::to_string)
                    .collect(),
            });
        }
        if url.password().is_some() || url.fragment().is_some() {
            return bad("has a password or a `#` in it");
        }
        let authority = &url[Position::BeforeUsername..Position::BeforePath];
        let web = matches!(url.scheme(), "http" | "https");
        if authority.is_empty() || !(web || names_bucket(url)) || authority.contains("..") {
            return bad("names no bucket");
        }
        let mut parts = Vec::new();
        for part in url.path().split('/').filter(|part| !part.is_empty()) {
            match percent_decode_str(part).decode_utf8() {
                Ok(part) if !part.contains(['/', '\\', '\0']) && part != "." && part != ".." => {
                    parts.push(part.into_owned());
                }
                _ => return bad("has a part that is no name"),
            }
        }
        Ok(Prefix {
            scheme: known_scheme(url.scheme()),
            authority: Some(authority.to_string()),
            parts,
        })
    }

    fn holds(&self, place: &Prefix) -> bool {
        self.scheme == place.scheme
            && (self.authority.is_none() || self.authority == place.authority)
            && place.parts.starts_with(&self.parts)
    }

    /// The prefix as a local path.
    fn path(&self) -> PathBuf {
        Path::new("/").join(self.parts.iter().collect::<PathBuf>())
    }
}

fn is_known(scheme: &str) -> bool {
    let stores = ["s3", "gs", "az", "abfs", "abfss"];
    ["file", "http", "https"].contains(&scheme) || stores.contains(&known_scheme(scheme).as_str())
}

/// Maps alternative schemes of a store to one.
fn known_scheme(scheme: &str) -> String {
    match scheme {
        "s3a" => "s3",
        "azure" | "adl" => "az",
        other => other,
    }
    .to_string()
}

fn kind(url: &Url) -> Kind {
    match ObjectStoreScheme::parse(url) {
        Ok((
            ObjectStoreScheme::AmazonS3 | ObjectStoreScheme::GoogleCloudStorage | ObjectStoreScheme::MicrosoftAzure,
            _,
        )) => Kind::Bucket,
        Ok((ObjectStoreScheme::Local, _)) => Kind::Local,
        // An unknown store must be listed like a web server.
        _ => Kind::Web,
    }
}

fn same_bucket(url: &Url, output: &Location) -> bool {
    let bucket = |url: &Url| {
        let (_, key) = ObjectStoreScheme::parse(url).ok()?;
        Some(bucket_of(url, &key))
    };
    let of_output: Option<String> = bucket(&output.url);
    of_output.is_some() && bucket(url) == of_output
}

/// The prefix to accept for `url`: its bucket, its server, or its folder.
fn folder_of(url: &Url, kind: Kind) -> String {
    let text = match kind {
        Kind::Local => {
            let path = url.to_file_path().unwrap_or_default();
            path.parent().unwrap_or(&path).display().to_string()
        }
        Kind::Bucket => {
            let key = ObjectStoreScheme::parse(url).map_or_else(|_| Key::default(), |(_, key)| key);
            bucket_of(url, &key)
        }
        Kind::Web => url[..Position::BeforePath].to_string(),
    };
    let mut text = cut(&text);
    if !text.ends_with('/') {
        text.push('/');
    }
    text
}

/// Resolves the links in a path as far as the path exists.
fn real(path: &Path) -> PathBuf {
    for above in path.ancestors() {
        if let Ok(found) = above.canonicalize() {
            let rest = path.strip_prefix(above).unwrap_or(Path::new(""));
            return found.join(rest);
        }
    }
    path.to_path_buf()
}

fn brief(url: &Url) -> String {
    cut(&shown(url))
}

fn cut(text: &str) -> String {
    match text.char_indices().nth(SHOWN_MAX) {
        Some((end, _)) => format!("{}…", &text[..end]),
        None => text.to_string(),
    }
}

#[cfg(test)]
mod tests;
