//! The protocol of the Hugging Face hub: a repository's commit and files, and each file's hash and
//! bytes.

use std::collections::BTreeSet;
use std::time::Duration;

use futures::{StreamExt, TryStreamExt};
use percent_encoding::{AsciiSet, NON_ALPHANUMERIC, utf8_percent_encode};
use reqwest::header::{AUTHORIZATION, CONTENT_RANGE, HeaderMap, HeaderValue, LOCATION, RANGE};
use reqwest::{Client, Method, Response, StatusCode};
use serde::Deserialize;
use url::{Host, Url};

use super::address::{HubModel, is_commit};
use super::cache;
use super::download::{Check, Part, Trouble};
use super::error::FetchError;
use crate::dataset::store::error::cause;
use crate::dataset::store::web::download_client;

const ENDPOINT: &str = "https://huggingface.co";
/// Maximum size of the description of a repository; one with many thousand files has some MB.
const DESCRIPTION_BYTES_MAX: usize = 64 << 20;
/// Maximum number of redirects within the hub, as of a renamed repository.
const REDIRECTS_MAX: usize = 5;
/// Tries of a request whose answer is small.
const TRIES: u32 = 4;
const FIRST_PAUSE: Duration = Duration::from_millis(500);
/// The hub's message for a token that it does not know, whatever the repository.
const WRONG_TOKEN: &str = "Invalid credentials in Authorization header";
/// Characters that stay as they are in a segment of a path.
const SEGMENT: &AsciiSet = &NON_ALPHANUMERIC.remove(b'-').remove(b'_').remove(b'.');

/// The hub, as the environment describes it.
pub(super) struct Hub {
    endpoint: Url,
    token: Option<HeaderValue>,
    /// Follows redirects: a file's bytes lie on other servers. The token stays on the hub.
    following: Client,
    /// Follows none: the hub's own answer has a file's hash.
    plain: Client,
}

/// A repository at a commit.
pub(super) struct Repository {
    hub: Hub,
    model: HubModel,
    pub names: BTreeSet<String>,
}

/// What the hub says of a file.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct FileFacts {
    /// The hash by which the cache names the content.
    pub hash: String,
    pub check: Check,
    pub size: u64,
}

#[derive(Deserialize)]
struct Description {
    sha: String,
    #[serde(default)]
    siblings: Vec<Sibling>,
}

#[derive(Deserialize)]
struct Sibling {
    rfilename: String,
}

/// Whether the environment forbids requests.
pub(super) fn is_offline() -> bool {
    let is_on = |name: &str| {
        let value = cache::variable(name).unwrap_or_default();
        ["1", "true", "yes", "on"]
            .iter()
            .any(|on| value.eq_ignore_ascii_case(on))
    };
    is_on("HF_HUB_OFFLINE") || is_on("TRANSFORMERS_OFFLINE")
}

/// The token: `HF_TOKEN`, or what `hf auth login` has stored.
fn token() -> Option<String> {
    let named = ["HF_TOKEN", "HUGGING_FACE_HUB_TOKEN"];
    let in_environment = named.iter().find_map(|name| cache::variable(name)?.into_string().ok());
    let stored = || {
        let path = cache::path_of("HF_TOKEN_PATH");
        let path = path.or_else(|| Some(cache::hugging_face_home()?.join("token")))?;
        std::fs::read_to_string(path).ok()
    };
    let token = in_environment.or_else(stored)?.trim().to_string();
    (!token.is_empty()).then_some(token)
}

impl Hub {
    fn from_environment(model: &HubModel) -> Result<Hub, FetchError> {
        let text = cache::variable("HF_ENDPOINT").map_or(ENDPOINT.into(), |value| value.to_string_lossy().into_owned());
        let bad = |why: &str| FetchError::refused(model, format!("`HF_ENDPOINT` {why}"));
        let mut endpoint = Url::parse(&text).map_err(|_| bad("is no address"))?;
        if !matches!(endpoint.scheme(), "http" | "https") || endpoint.cannot_be_a_base() {
            return Err(bad("is no address of a web server"));
        }
        if endpoint.password().is_some() || endpoint.query().is_some() {
            return Err(bad("holds a password or a query: give a token as `HF_TOKEN`"));
        }
        if !endpoint.path().ends_with('/') {
            endpoint.set_path(&format!("{}/", endpoint.path()));
        }
        let token = token();
        if token.is_some() && !is_private_to_us(&endpoint) {
            return Err(bad(
                "is not encrypted, and everybody on the way could read the token: use `https://`, or unset `HF_TOKEN`",
            ));
        }
        let token = token.map(|token| HeaderValue::from_str(&format!("Bearer {token}")));
        let mut token = token
            .transpose()
            .map_err(|_| FetchError::refused(model, "the token for the hub has characters that no token has"))?;
        if let Some(token) = &mut token {
            token.set_sensitive(true);
        }
        let client = |follows| {
            download_client(&endpoint, follows)
                .map_err(|error| FetchError::failed(model, format!("no client for the hub: {}", cause(&error))))
        };
        Ok(Hub {
            following: client(true)?,
            plain: client(false)?,
            endpoint,
            token,
        })
    }

    /// Sends a request, again where the failure may pass. The answer may be an error's.
    async fn send(&self, client: &Client, method: &Method, url: &Url, headers: &HeaderMap) -> Result<Response, String> {
        let (mut pause, mut tried) = (FIRST_PAUSE, 0);
        loop {
            tried += 1;
            let mut request = client.request(method.clone(), url.clone()).headers(headers.clone());
            if let Some(token) = &self.token {
                request = request.header(AUTHORIZATION, token.clone());
            }
            let sent = request.send().await;
            let may_pass = match &sent {
                Ok(response) => {
                    response.status().is_server_error() || response.status() == StatusCode::TOO_MANY_REQUESTS
                }
                Err(error) => !error.is_builder() && !error.is_redirect(),
            };
            if tried == TRIES || !may_pass {
                return sent.map_err(|error| cause(&error));
            }
            tokio::time::sleep(pause).await;
            pause *= 2;
        }
    }

    fn url(&self, path: &str) -> Result<Url, String> {
        self.endpoint.join(path).map_err(|error| error.to_string())
    }
}

/// Whether only the two ends of a connection can read what is sent.
fn is_private_to_us(endpoint: &Url) -> bool {
    let is_local = match endpoint.host() {
        Some(Host::Domain(name)) => name == "localhost",
        Some(Host::Ipv4(ip)) => ip.is_loopback(),
        Some(Host::Ipv6(ip)) => ip.is_loopback(),
        None => false,
    };
    endpoint.scheme() == "https" || is_local
}

impl Repository {
    /// Asks the hub for the commit of the model's revision, and for its files.
    pub(super) async fn open(model: &HubModel) -> Result<Repository, FetchError> {
        let hub = Hub::from_environment(model)?;
        let revision = utf8_percent_encode(&model.revision, SEGMENT);
        let path = format!("api/models/{}/revision/{revision}", model.repository);
        let failed = |why: String| {
            FetchError::failed(
                model,
                format!("the hub cannot be asked: {why}; with `HF_HUB_OFFLINE=1`, the files of the cache are used"),
            )
        };
        let url = hub.url(&path).map_err(failed)?;
        let response = hub
            .send(&hub.following, &Method::GET, &url, &HeaderMap::new())
            .await
            .map_err(failed)?;
        if !response.status().is_success() {
            return Err(refusal(model, &response, hub.token.is_some(), None));
        }
        let mut body = Vec::new();
        let mut chunks = response.bytes_stream();
        while let Some(chunk) = chunks.next().await {
            body.extend_from_slice(&chunk.map_err(|error| failed(cause(&error)))?);
            if body.len() > DESCRIPTION_BYTES_MAX {
                return Err(failed("its description of the repository has no end".into()));
            }
        }
        let description: Description =
            serde_json::from_slice(&body).map_err(|_| failed("its answer describes no repository".into()))?;
        if !is_commit(&description.sha) {
            return Err(failed("its answer names no commit".into()));
        }
        if model.is_pinned() && description.sha != model.revision {
            return Err(failed(format!("it answers with another commit, `{}`", description.sha)));
        }
        Ok(Repository {
            hub,
            model: model.at(&description.sha),
            names: description.siblings.into_iter().map(|file| file.rfilename).collect(),
        })
    }

    /// The repository at its commit.
    pub(super) fn model(&self) -> &HubModel {
        &self.model
    }

    pub(super) fn address(&self) -> String {
        self.model.to_string()
    }

    fn file_url(&self, name: &str) -> Result<Url, String> {
        let name: Vec<String> = name
            .split('/')
            .map(|part| utf8_percent_encode(part, SEGMENT).to_string())
            .collect();
        let path = format!(
            "{}/resolve/{}/{}",
            self.model.repository,
            self.model.revision,
            name.join("/")
        );
        self.hub.url(&path)
    }

    /// Asks for a file's hash and size.
    pub(super) async fn facts(&self, name: &str) -> Result<FileFacts, FetchError> {
        let failed = |why: String| FetchError::failed(&self.model, format!("`{name}`: {why}"));
        let mut headers = HeaderMap::new();
        // A compressed answer would have another length.
        headers.insert("accept-encoding", HeaderValue::from_static("identity"));
        let mut url = self.file_url(name).map_err(failed)?;
        for _ in 0..=REDIRECTS_MAX {
            let sent = self.hub.send(&self.hub.plain, &Method::HEAD, &url, &headers).await;
            let response = sent.map_err(|why| failed(format!("the hub cannot be asked: {why}")))?;
            if !response.status().is_success() && !response.status().is_redirection() {
                return Err(refusal(&self.model, &response, self.hub.token.is_some(), Some(name)));
            }
            // The hub sends on within itself, to a renamed repository or to its cache of small files.
            // An answer that leads elsewhere describes the file.
            let target = response.headers().get(LOCATION).and_then(|value| value.to_str().ok());
            match target.and_then(|target| url.join(target).ok()) {
                Some(target) if target.origin() == url.origin() => url = target,
                _ => return file_facts(&response, &self.model.revision).map_err(failed),
            }
        }
        Err(failed(format!("the hub redirects more than {REDIRECTS_MAX} times")))
    }

    /// Opens a file's bytes from `offset` on.
    pub(super) async fn open_file(&self, name: &str, offset: u64) -> Result<Part, Trouble> {
        let url = self.file_url(name).map_err(Trouble::Passing)?;
        let mut headers = HeaderMap::new();
        headers.insert("accept-encoding", HeaderValue::from_static("identity"));
        if offset > 0
            && let Ok(range) = HeaderValue::from_str(&format!("bytes={offset}-"))
        {
            headers.insert(RANGE, range);
        }
        let sent = self.hub.send(&self.hub.following, &Method::GET, &url, &headers).await;
        let response = sent.map_err(Trouble::Passing)?;
        let start = match response.status() {
            StatusCode::PARTIAL_CONTENT => range_start(response.headers())
                .ok_or_else(|| Trouble::Passing("the server names no range of its bytes".into()))?,
            StatusCode::OK => 0,
            status if status.is_client_error() => {
                let has_token = self.hub.token.is_some();
                return Err(refusal(&self.model, &response, has_token, Some(name)).into());
            }
            status => return Err(Trouble::Passing(format!("the server answered {status}"))),
        };
        let bytes = response.bytes_stream().map_err(|error| cause(&error)).boxed();
        Ok(Part { start, bytes })
    }
}

/// The first position of a `Content-Range`.
fn range_start(headers: &HeaderMap) -> Option<u64> {
    let range = headers.get(CONTENT_RANGE)?.to_str().ok()?;
    range.strip_prefix("bytes ")?.split('-').next()?.parse().ok()
}

/// A file's hash and size, of an answer that sends its bytes or leads to another server.
fn file_facts(response: &Response, commit: &str) -> Result<FileFacts, String> {
    let text = |name: &str| response.headers().get(name).and_then(|value| value.to_str().ok());
    let is_own = response.status().is_success();
    let etag = text("x-linked-etag").or_else(|| text("etag").filter(|_| is_own));
    let hash = etag.unwrap_or_default().trim_start_matches("W/").trim_matches('"');
    let size = text("x-linked-size").or_else(|| text("content-length").filter(|_| is_own));
    facts_of(hash, size, text("x-repo-commit"), commit)
}

fn facts_of(hash: &str, size: Option<&str>, answered: Option<&str>, commit: &str) -> Result<FileFacts, String> {
    if answered.is_some_and(|answered| answered != commit) {
        return Err("the hub answers for another commit".into());
    }
    let is_hex = hash.bytes().all(|c| c.is_ascii_digit() || (b'a'..=b'f').contains(&c));
    let check = match hash.len() {
        64 if is_hex => Check::Sha256(hash.to_string()),
        40 if is_hex => Check::GitBlob(hash.to_string()),
        _ => return Err("the hub names no hash of it, so it cannot be verified".into()),
    };
    let size = size
        .and_then(|size| size.parse().ok())
        .ok_or("the hub names no size of it")?;
    Ok(FileFacts {
        hash: hash.to_string(),
        check,
        size,
    })
}

/// What an error's answer means. The hub says it by a header; other servers by the status alone.
fn refusal(model: &HubModel, response: &Response, has_token: bool, file: Option<&str>) -> FetchError {
    let text = |name: &str| response.headers().get(name).and_then(|value| value.to_str().ok());
    if has_token && text("x-error-message") == Some(WRONG_TOKEN) {
        return FetchError::refused(
            model,
            "the hub does not know the token (`HF_TOKEN`, or that of `hf auth login`): give a valid one, or none for a public model",
        );
    }
    refusal_of(model, response.status(), text("x-error-code"), has_token, file)
}

fn refusal_of(
    model: &HubModel,
    status: StatusCode,
    code: Option<&str>,
    has_token: bool,
    file: Option<&str>,
) -> FetchError {
    let HubModel { repository, revision } = model;
    let refused = |why: String| FetchError::refused(model, why);
    let token_hint = if has_token {
        "the token (`HF_TOKEN`, or that of `hf auth login`) does not give access to it"
    } else {
        "give a token of an account with access to it as `HF_TOKEN`, or by `hf auth login`"
    };
    match (code, status.as_u16()) {
        (Some("GatedRepo"), _) => refused(format!(
            "is gated: its terms must be accepted on its page ({ENDPOINT}/{repository}), and {token_hint}"
        )),
        (Some("RevisionNotFound"), _) => refused(format!("the repository has no revision `{revision}`")),
        (Some("EntryNotFound"), _) => refused(format!("has no file `{}`", file.unwrap_or_default())),
        (Some("DisabledRepo"), _) => refused("the hub has disabled this repository".into()),
        (None, 404) if file.is_some() => refused(format!("has no file `{}`", file.unwrap_or_default())),
        (Some("RepoNotFound"), _) | (None, 401 | 404) => refused(format!(
            "there is no such repository, or it is private: check its name; if it is private, {token_hint}"
        )),
        (_, 401 | 403) => refused(format!("the hub refuses access ({status}): {token_hint}")),
        (_, 429) => FetchError::failed(model, "the hub has had too many requests from here: try it again later"),
        _ => FetchError::failed(model, format!("the hub answered {status}")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn model() -> HubModel {
        HubModel {
            repository: "org/name".into(),
            revision: "v2".into(),
        }
    }

    #[test]
    fn refusals_say_what_to_do() {
        for (status, code, has_token, file, words) in [
            (
                401,
                Some("GatedRepo"),
                false,
                None,
                "huggingface.co/org/name), and give a token",
            ),
            (403, Some("GatedRepo"), true, None, "and the token"),
            (403, None, true, Some("config.json"), "does not give access"),
            (
                401,
                Some("RepoNotFound"),
                false,
                None,
                "no such repository, or it is private",
            ),
            (401, None, false, None, "no such repository"),
            (404, None, false, None, "no such repository"),
            (404, Some("RevisionNotFound"), false, None, "no revision `v2`"),
            (404, Some("EntryNotFound"), false, Some("a"), "no file `a`"),
            (404, None, false, Some("a"), "no file `a`"),
            (429, None, false, None, "try it again later"),
            (503, None, false, None, "503"),
        ] {
            let status = StatusCode::from_u16(status).unwrap();
            let why = refusal_of(&model(), status, code, has_token, file).to_string();
            assert!(
                why.contains(words) && why.starts_with("`hf://org/name@v2`: "),
                "{words}: {why}"
            );
        }
    }

    #[test]
    fn a_hash_is_that_of_git_or_of_git_lfs() {
        let (sha1, sha256) = ("a".repeat(40), "b".repeat(64));
        let of = |hash: &str, size, answered| facts_of(hash, size, answered, "c");
        assert_eq!(
            of(&sha1, Some("3"), Some("c")).unwrap().check,
            Check::GitBlob(sha1.clone())
        );
        assert_eq!(of(&sha256, Some("3"), None).unwrap().check, Check::Sha256(sha256));
        for (hash, size, answered) in [
            ("../../x", Some("3"), None),
            ("abc-1", Some("3"), None),
            (&"A".repeat(40), Some("3"), None),
            (&sha1, None, None),
            (&sha1, Some("-1"), None),
            (&sha1, Some("3"), Some("d")),
        ] {
            assert!(of(hash, size, answered).is_err(), "{hash} {size:?} {answered:?}");
        }
    }

    #[test]
    fn a_token_needs_an_encrypted_or_local_way() {
        for (endpoint, is_private) in [
            ("https://huggingface.co", true),
            ("http://127.0.0.1:8080", true),
            ("http://localhost", true),
            ("http://[::1]", true),
            ("http://mirror.example", false),
            ("http://10.0.0.1", false),
        ] {
            assert_eq!(
                is_private_to_us(&Url::parse(endpoint).unwrap()),
                is_private,
                "{endpoint}"
            );
        }
    }
}
