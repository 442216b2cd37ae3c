//! Which addresses a worker may open for a queued job, and `verify` for a job's inputs.
//!
//! Anyone who can write to a queue can name any output in a message, and anyone who can write to
//! that output can name any inputs and model in its `job.json`. They must not gain the use of the
//! worker's credentials and files. So the worker checks every address of a message or a record here
//! before it opens the address:
//!
//! | | without options | with `--accept` |
//! |---|---|---|
//! | output | any bucket; a local folder whose record the worker's own user (or root) owns; what `--job` names | below one of the prefixes; what `--job` names |
//! | inputs | the output's own bucket; local files and buckets where the output is such a local folder | below one of the prefixes |
//! | model, where no `--model` is given | any local folder | below one of the prefixes |
//! | model that is fetched from the hub or a bucket, likewise | none | below one of the prefixes |
//!
//! `--accept-inputs` and `--accept-models` add prefixes for inputs and models only. Web servers are
//! read only where they are listed, and the end of a job is posted only to addresses that
//! `--accept-on-finish` lists. Parsed addresses are compared, not texts; in local paths, symbolic
//! links are resolved first.
//!
//! See docs/decisions/019-a-queues-word-is-a-strangers.md.

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use object_store::ObjectStoreScheme;
use object_store::path::Path as Key;
use percent_encoding::percent_decode_str;
use url::{Position, Url};

use crate::dataset::store::clients::{Stores, bucket_of, has_valid_bucket, redacted};
use crate::dataset::store::location::Location;
use crate::worker::owner;

/// Maximum length of a shown address, in characters.
const SHOWN_MAX: usize = 200;

/// Which outputs, inputs and models the operator of a worker accepts.
#[derive(Debug, Clone, Default)]
pub struct Access {
    /// For `run`, whose jobs a person names.
    accepts_everything: bool,
    accepted: Vec<Prefix>,
    inputs: Vec<Prefix>,
    models: Vec<Prefix>,
    /// Addresses to which the end of a job may be posted.
    on_finish: Vec<Prefix>,
    /// The outputs of `--job`.
    job_outputs: Vec<Prefix>,
}

/// The access options of `gristmill worker`.
#[derive(Debug, Clone, Copy, Default)]
pub struct AccessOptions<'a> {
    pub accept: &'a [String],
    pub accept_inputs: &'a [String],
    pub accept_models: &'a [String],
    pub accept_on_finish: &'a [String],
    pub jobs: &'a [String],
}

/// A prefix of addresses that ends at a `/` of their paths. A single address is one, too.
#[derive(Debug, Clone, PartialEq, Eq)]
struct Prefix {
    scheme: String,
    /// User, host and port; `None`: any (`s3://`).
    authority: Option<String>,
    parts: Vec<String>,
}

/// Where an address leads.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum StoreKind {
    Local,
    Bucket,
    Web,
}

impl Access {
    /// Accepts everything: for jobs that a person gave to this process.
    pub fn everything() -> Access {
        Access {
            accepts_everything: true,
            ..Access::default()
        }
    }

    /// The access that these options give; relative paths start at `working_dir`.
    ///
    /// # Errors
    /// An option's value cannot be a prefix. The error names the option.
    pub fn new(options: &AccessOptions<'_>, working_dir: &Path) -> Result<Access, String> {
        let prefixes = |option: &str, texts: &[String]| -> Result<Vec<Prefix>, String> {
            let parse = |text: &String| Prefix::parse(text, working_dir).map_err(|why| format!("`{option}`: {why}"));
            texts.iter().map(parse).collect()
        };
        let named = |text: &String| {
            let url = Location::url_of(text, working_dir).map_err(|error| format!("`--job`: {error}"))?;
            Prefix::of(&url).map_err(|why| format!("`--job`: {why}"))
        };
        Ok(Access {
            accepts_everything: false,
            accepted: prefixes("--accept", options.accept)?,
            inputs: prefixes("--accept-inputs", options.accept_inputs)?,
            models: prefixes("--accept-models", options.accept_models)?,
            on_finish: {
                let on_finish = prefixes("--accept-on-finish", options.accept_on_finish)?;
                if on_finish
                    .iter()
                    .all(|prefix| matches!(prefix.scheme.as_str(), "http" | "https"))
                {
                    on_finish
                } else {
                    return Err("`--accept-on-finish`: give web addresses, such as `https://hooks.example/`".into());
                }
            },
            job_outputs: options.jobs.iter().map(named).collect::<Result<_, String>>()?,
        })
    }

    /// Whether `--accept`, or the option with the prefixes `extra`, lists this address.
    fn lists(&self, extra: &[Prefix], address: &Prefix) -> bool {
        self.accepted
            .iter()
            .chain(extra)
            .any(|prefix| prefix.contains_address(address))
    }

    /// Why the job's record in `output` must not be read; call this before any other check.
    pub fn output_refusal(&self, output: &Location) -> Option<String> {
        if self.accepts_everything {
            return None;
        }
        let address = match Prefix::of(&output.url) {
            Ok(address) => address,
            Err(why) => return Some(format!("its output {why}")),
        };
        if self.lists(&self.job_outputs, &address) {
            return None;
        }
        let why = match store_kind(&output.url) {
            StoreKind::Bucket if self.accepted.is_empty() => return None,
            StoreKind::Local if self.accepted.is_empty() => match owner::check_owner(&address.path()) {
                Ok(()) => return None,
                Err(why) => why,
            },
            StoreKind::Local | StoreKind::Bucket => "is below no prefix of `--accept`".into(),
            StoreKind::Web => "is neither in a bucket nor on this machine, so it must be listed".into(),
        };
        Some(format!(
            "its output `{}` {why}; to work on it, start the worker with `--accept {}`",
            shown_url(&output.url),
            prefix_to_suggest(&output.url, store_kind(&output.url))
        ))
    }

    /// Why this worker must not read the `inputs` of the job in `output`, which it accepts.
    pub fn inputs_refusal<'a>(&self, output: &Location, inputs: impl IntoIterator<Item = &'a str>) -> Option<String> {
        if self.accepts_everything {
            return None;
        }
        inputs
            .into_iter()
            .find_map(|input| match Location::url_of(input, Path::new("/")) {
                Ok(url) => self.input_refusal(output, &url),
                Err(error) => Some(format!("its input: {error}")),
            })
    }

    /// Prefixes that `--accept-inputs` must list for this worker to read the `inputs` of the job in
    /// `output`.
    pub fn prefixes_to_accept<'a>(
        &self,
        output: &Location,
        inputs: impl IntoIterator<Item = &'a str>,
    ) -> BTreeSet<String> {
        let urls = inputs
            .into_iter()
            .filter_map(|input| Location::url_of(input, Path::new("/")).ok());
        urls.filter(|url| self.input_refusal(output, url).is_some())
            .map(|url| prefix_to_suggest(&url, store_kind(&url)))
            .collect()
    }

    fn input_refusal(&self, output: &Location, url: &Url) -> Option<String> {
        let address = match Prefix::of(url) {
            Ok(address) => address,
            Err(why) => return Some(format!("its input {why}")),
        };
        if self.lists(&self.inputs, &address) {
            return None;
        }
        let (input_kind, output_kind) = (store_kind(url), store_kind(&output.url));
        let why = match (input_kind, output_kind) {
            (StoreKind::Web, _) => "is neither in a bucket nor on this machine, so it must be listed",
            _ if !self.accepted.is_empty() => "is below no prefix of `--accept` or `--accept-inputs`",
            (StoreKind::Local | StoreKind::Bucket, StoreKind::Local) => return None,
            (StoreKind::Bucket, StoreKind::Bucket) if same_bucket(url, output) => return None,
            (StoreKind::Bucket, _) => "is in another bucket than its output",
            (StoreKind::Local, _) => "is a file of this machine, its output is not",
        };
        Some(format!(
            "its input `{}` {why}; to have it read, give `--accept-inputs {}`",
            shown_url(url),
            prefix_to_suggest(url, input_kind)
        ))
    }

    /// Why a worker must not load the model in `dir`, which a record names.
    pub fn model_refusal(&self, dir: &Path) -> Option<String> {
        let is_accepted = self.accepts_everything || (self.accepted.is_empty() && self.models.is_empty());
        if is_accepted {
            return None;
        }
        // The URL is normalized (no `..`), as for opening.
        let url = Location::url_of(&dir.to_string_lossy(), Path::new("/")).map_err(|error| error.to_string());
        let address = match url.and_then(|url| Prefix::of(&url)) {
            Ok(address) => address,
            Err(why) => return Some(format!("its model {why}")),
        };
        if self.lists(&self.models, &address) {
            return None;
        }
        Some(format!(
            "its model `{dir}` is below no prefix of `--accept-models`; to load it, start the worker with `--model {dir}` or \
             `--accept-models {dir}`",
            dir = dir.display()
        ))
    }

    /// Why a worker must not fetch the model at `address`, in a bucket or on the hub, which a record
    /// names. It must be listed: a download takes the worker's token, network and disk.
    pub fn fetched_model_refusal(&self, address: &str) -> Option<String> {
        if self.accepts_everything {
            return None;
        }
        let url = Location::url_of(address, Path::new("/")).map_err(|error| error.to_string());
        let url = match url {
            Ok(url) => url,
            Err(why) => return Some(format!("its model {why}")),
        };
        match Prefix::of(&url) {
            Err(why) => Some(format!("its model {why}")),
            Ok(prefix) if self.lists(&self.models, &prefix) => None,
            Ok(_) => Some(format!(
                "its model `{address}` is fetched only where it is listed; to fetch it, start the worker with `--model {address}` \
                 or `--accept-models {address}`",
                address = shown_url(&url)
            )),
        }
    }

    /// Why the end of a job must not be posted to `url`, which a record names. It must be listed.
    pub fn on_finish_refusal(&self, url: &Url) -> Option<String> {
        let listed = |address: Prefix| self.on_finish.iter().any(|prefix| prefix.contains_address(&address));
        let is_accepted = self.accepts_everything || Prefix::of(url).is_ok_and(listed);
        (!is_accepted).then(|| {
            format!(
                "`on_finish.url` `{}` is not listed, so nothing is posted to it; to allow it, start the worker with `--accept-on-finish {}`",
                shown_url(url),
                prefix_to_suggest(url, StoreKind::Web)
            )
        })
    }

    /// From now on, the process follows redirects of web servers only to accepted addresses.
    pub fn confine_redirects(&self) {
        let access = self.clone();
        Stores::of_process().restrict_redirects(Arc::new(move |url| access.may_follow(url)));
    }

    /// Whether a redirect of an input's server to `url` may be followed.
    pub fn may_follow(&self, url: &Url) -> bool {
        let listed = |address: Prefix| {
            self.accepted
                .iter()
                .chain(&self.inputs)
                .any(|prefix| prefix.contains_address(&address))
        };
        self.accepts_everything || Prefix::of(url).is_ok_and(listed)
    }
}

impl Prefix {
    /// Parses the value of an option: an address, a path, or only a scheme of buckets (`s3://`).
    fn parse(text: &str, working_dir: &Path) -> Result<Prefix, String> {
        if text.contains(['*', '?']) {
            return Err(format!("`{text}` has a wildcard: give the part before it"));
        }
        if let Some(scheme) = text.strip_suffix("://") {
            let scheme = canonical_scheme(&scheme.to_ascii_lowercase());
            return match scheme.as_str() {
                "s3" | "gs" | "az" | "abfs" | "abfss" | "hf" => Ok(Prefix {
                    scheme,
                    authority: None,
                    parts: Vec::new(),
                }),
                _ => Err(format!("`{text}` names no host or bucket")),
            };
        }
        let url = Location::url_of(text, working_dir).map_err(|error| error.to_string())?;
        if !is_known(url.scheme()) {
            return Err(format!("`{text}`: nothing is read from `{}://`", url.scheme()));
        }
        Prefix::of(&url)
    }

    /// The address `url`, as a prefix.
    ///
    /// # Errors
    /// The store could take this URL for another address. The error is one line with the reason.
    fn of(url: &Url) -> Result<Prefix, String> {
        let bad = |why: &str| Err(format!("`{}` {why}", shown_url(url)));
        if url.scheme() == "file" {
            let Ok(path) = url.to_file_path() else {
                return bad("is no local path");
            };
            let found = resolve_links(&path);
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
        let is_web = matches!(url.scheme(), "http" | "https");
        if authority.is_empty() || !(is_web || has_valid_bucket(url)) || authority.contains("..") {
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
            scheme: canonical_scheme(url.scheme()),
            authority: Some(authority.to_string()),
            parts,
        })
    }

    fn contains_address(&self, address: &Prefix) -> bool {
        self.scheme == address.scheme
            && (self.authority.is_none() || self.authority == address.authority)
            && address.parts.starts_with(&self.parts)
    }

    /// The prefix as a local path.
    fn path(&self) -> PathBuf {
        Path::new("/").join(self.parts.iter().collect::<PathBuf>())
    }
}

fn is_known(scheme: &str) -> bool {
    let stores = ["s3", "gs", "az", "abfs", "abfss"];
    ["file", "http", "https", "hf"].contains(&scheme) || stores.contains(&canonical_scheme(scheme).as_str())
}

/// Maps all schemes of a store to one of them.
fn canonical_scheme(scheme: &str) -> String {
    match scheme {
        "s3a" => "s3",
        "azure" | "adl" => "az",
        other => other,
    }
    .to_string()
}

fn store_kind(url: &Url) -> StoreKind {
    match ObjectStoreScheme::parse(url) {
        Ok((
            ObjectStoreScheme::AmazonS3 | ObjectStoreScheme::GoogleCloudStorage | ObjectStoreScheme::MicrosoftAzure,
            _,
        )) => StoreKind::Bucket,
        Ok((ObjectStoreScheme::Local, _)) => StoreKind::Local,
        // An unknown store must be listed like a web server.
        _ => StoreKind::Web,
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

/// The prefix that messages suggest for `url`: its bucket, its server, or its folder.
fn prefix_to_suggest(url: &Url, kind: StoreKind) -> String {
    let text = match kind {
        StoreKind::Local => {
            let path = url.to_file_path().unwrap_or_default();
            path.parent().unwrap_or(&path).display().to_string()
        }
        StoreKind::Bucket => {
            let key = ObjectStoreScheme::parse(url).map_or_else(|_| Key::default(), |(_, key)| key);
            bucket_of(url, &key)
        }
        StoreKind::Web => url[..Position::BeforePath].to_string(),
    };
    let mut text = cut_to_shown_max(&text);
    if !text.ends_with('/') {
        text.push('/');
    }
    text
}

/// Resolves the symbolic links in the existing part of a path.
fn resolve_links(path: &Path) -> PathBuf {
    for above in path.ancestors() {
        if let Ok(found) = above.canonicalize() {
            let rest = path.strip_prefix(above).unwrap_or(Path::new(""));
            return found.join(rest);
        }
    }
    path.to_path_buf()
}

fn shown_url(url: &Url) -> String {
    cut_to_shown_max(&redacted(url))
}

fn cut_to_shown_max(text: &str) -> String {
    match text.char_indices().nth(SHOWN_MAX) {
        Some((end, _)) => format!("{}…", &text[..end]),
        None => text.to_string(),
    }
}

#[cfg(test)]
mod tests;
