//! The file of webhooks: where events of a tenant go, and the secrets that sign them. Neither
//! secrets nor the paths of addresses reach a message, since a path may be a secret, too.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use data_encoding::HEXLOWER;
use serde::Deserialize;
use sha2::{Digest, Sha256};
use url::{Host, Url};

use super::Webhooks;
use super::post::TRY_TIMEOUT;
use crate::dataset::store::error::cause;
use crate::dataset::store::hosts::is_link_local_url;
use crate::dataset::store::web::post_client;
use crate::error_line::yaml_line;
use crate::regular;
use crate::serve::keys::{Keys, Tenant};
use crate::serve::record::EndStatus;
use crate::signing::{KEYS_BYTES_MAX, SECRET_PREFIX, Signing};

/// Maximum size of a file of webhooks.
const FILE_BYTES_MAX: u64 = 4 << 20;
/// Bytes of the hash of an address that name its webhook in records.
const ID_BYTES: usize = 8;
/// What the names of all events begin with.
const EVENT_PREFIX: &str = "batch.";

/// Where events of a tenant go.
#[derive(Debug)]
pub(super) struct Webhook {
    /// Names it in records. It follows from the address, so that it is the same in all processes.
    pub id: String,
    pub tenant: Tenant,
    pub url: Url,
    /// The server of the address, for messages.
    pub server: String,
    pub secrets: Signing,
    /// The ends of batches that it wants to know.
    pub statuses: Vec<EndStatus>,
    pub client: reqwest::Client,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct WebhooksFile {
    webhooks: Vec<WebhookFile>,
}

/// One entry of the file.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct WebhookFile {
    tenant: String,
    url: String,
    /// Name of an environment variable.
    secret_env: Option<String>,
    /// Relative to the file of webhooks.
    secret_file: Option<PathBuf>,
    events: Option<Vec<String>>,
    #[serde(default)]
    allow_http: bool,
}

/// Reads the value of an environment variable.
type Variables<'a> = &'a dyn Fn(&str) -> Option<String>;

impl Webhooks {
    /// Reads a file of webhooks (YAML), and their secrets.
    ///
    /// # Errors
    /// A file cannot be read, a webhook cannot be used, or its tenant has no key.
    pub fn load(path: &Path, keys: &Keys) -> Result<Webhooks, String> {
        let at = |why: String| format!("`--webhooks`: `{}`: {why}", path.display());
        let text = regular::read_text(path, FILE_BYTES_MAX).map_err(|error| at(error.to_string()))?;
        let folder = path.parent().unwrap_or(Path::new(""));
        let variables = |name: &str| std::env::var(name).ok();
        Webhooks::parse(&text, folder, keys, &variables).map_err(at)
    }

    fn parse(text: &str, folder: &Path, keys: &Keys, variables: Variables<'_>) -> Result<Webhooks, String> {
        let file: WebhooksFile = serde_saphyr::from_str(text).map_err(|error| yaml_line(&error))?;
        if file.webhooks.is_empty() {
            return Err("it lists no webhook".into());
        }
        let tenants = keys.tenants();
        let mut list: Vec<Arc<Webhook>> = Vec::new();
        for (n, entry) in file.webhooks.into_iter().enumerate() {
            let at = |why: String| format!("`webhooks[{n}]`: {why}");
            let webhook = entry.check(folder, variables).map_err(at)?;
            let name = webhook.tenant.as_str();
            if !tenants.contains(&webhook.tenant) {
                let hint = match keys {
                    Keys::Open => "without `--keys`, the only tenant is `default`",
                    Keys::Listed(_) => "`--keys` lists no key of it",
                };
                return Err(at(format!("there is no tenant `{name}`: {hint}")));
            }
            let is_same = |other: &Arc<Webhook>| other.tenant == webhook.tenant && other.id == webhook.id;
            if list.iter().any(is_same) {
                return Err(at(format!("tenant `{name}` has this `url` twice")));
            }
            list.push(Arc::new(webhook));
        }
        Ok(Webhooks {
            list,
            ..Webhooks::default()
        })
    }
}

impl WebhookFile {
    fn check(self, folder: &Path, variables: Variables<'_>) -> Result<Webhook, String> {
        let url = checked_url(&self.url, self.allow_http)?;
        let secrets = self.secrets(folder, variables)?;
        let client = post_client(&url, TRY_TIMEOUT).map_err(|error| cause(&error))?;
        let hash = Sha256::digest(url.as_str().as_bytes());
        Ok(Webhook {
            id: HEXLOWER.encode(&hash[..ID_BYTES]),
            tenant: Tenant::new(&self.tenant)?,
            server: url.origin().ascii_serialization(),
            url,
            secrets,
            statuses: statuses(self.events)?,
            client,
        })
    }

    fn secrets(&self, folder: &Path, variables: Variables<'_>) -> Result<Signing, String> {
        match (&self.secret_env, &self.secret_file) {
            (Some(name), None) => {
                // Whatever else stands here may be the secret itself.
                if !is_variable_name(name) || name.starts_with(SECRET_PREFIX) {
                    return Err("`secret_env` is the name of an environment variable that holds the secret".into());
                }
                let text = variables(name).ok_or_else(|| {
                    format!("the environment variable `{name}`, which `secret_env` names, is not set or no UTF-8 text")
                })?;
                Signing::parse_secrets(&text).map_err(|why| format!("the environment variable `{name}`: {why}"))
            }
            (None, Some(path)) => {
                if path.to_str().is_some_and(|path| path.starts_with(SECRET_PREFIX)) {
                    return Err("`secret_file` is the path of a file that holds the secret".into());
                }
                let path = folder.join(path);
                let at = |why: String| format!("`{}`, which `secret_file` names: {why}", path.display());
                let text = regular::read_text(&path, KEYS_BYTES_MAX).map_err(|error| at(error.to_string()))?;
                Signing::parse_secrets(&text).map_err(at)
            }
            _ => Err("give its secret: either `secret_env` or `secret_file`".into()),
        }
    }
}

fn is_variable_name(name: &str) -> bool {
    let is_allowed = |b: u8| b.is_ascii_alphanumeric() || b == b'_';
    !name.is_empty() && name.bytes().all(is_allowed)
}

fn checked_url(text: &str, allow_http: bool) -> Result<Url, String> {
    let url = Url::parse(text).map_err(|error| format!("`url` is no address: {error}"))?;
    let is_local = match url.host() {
        Some(Host::Ipv4(ip)) => ip.is_loopback(),
        Some(Host::Ipv6(ip)) => ip.is_loopback(),
        Some(Host::Domain(name)) => name == "localhost" || name.ends_with(".localhost"),
        None => false,
    };
    match url.scheme() {
        "https" => {}
        "http" if is_local || allow_http => {}
        "http" => {
            return Err(
                "`url` begins with `http:`, so that everybody on the way can read it: use `https:`, or set \
                        `allow_http: true`"
                    .into(),
            );
        }
        _ => return Err("`url` begins with neither `https:` nor `http:`".into()),
    }
    if !url.username().is_empty() || url.password().is_some() {
        return Err("`url` holds a user or a password: the signature tells who posts".into());
    }
    if is_link_local_url(&url) {
        return Err("`url` is a link-local address or a metadata service; nothing is posted there".into());
    }
    Ok(url)
}

/// The ends of batches whose events are wanted; all of them if `events` is left out.
fn statuses(events: Option<Vec<String>>) -> Result<Vec<EndStatus>, String> {
    let Some(events) = events else {
        return Ok(EndStatus::ALL.to_vec());
    };
    if events.is_empty() {
        return Err("`events` is empty: name events, or leave it out for all".into());
    }
    let status = |event: &String| {
        let name = event.strip_prefix(EVENT_PREFIX);
        let found = EndStatus::ALL.into_iter().find(|status| name == Some(status.name()));
        found.ok_or_else(|| {
            let known = EndStatus::ALL.map(event_name).join("`, `");
            format!("`events` names an unknown event; there are `{known}`")
        })
    };
    events.iter().map(status).collect()
}

/// The event of a batch's end, as OpenAI names it.
pub(super) fn event_name(status: EndStatus) -> String {
    format!("{EVENT_PREFIX}{}", status.name())
}

#[cfg(test)]
mod tests {
    use super::*;

    const SECRET: &str = "whsec_AAECAwQFBgcICQoLDA0ODxAREhMUFRYXGBkaGxwdHh8=";

    impl Webhook {
        /// A webhook of the tenant `default` for all events.
        pub(in crate::serve::webhooks) fn for_test(url: &str, secret: &str) -> Webhook {
            let entry = WebhookFile {
                tenant: "default".into(),
                url: url.into(),
                secret_env: Some("SECRET".into()),
                secret_file: None,
                events: None,
                allow_http: true,
            };
            entry.check(Path::new("/"), &|_| Some(secret.to_string())).unwrap()
        }
    }

    impl Webhooks {
        /// A webhook of the tenant `default` for all events.
        pub(in crate::serve) fn for_test(url: &str) -> Webhooks {
            Webhooks {
                list: vec![Arc::new(Webhook::for_test(url, SECRET))],
                ..Webhooks::default()
            }
        }
    }

    fn parse_in(folder: &Path, entries: &str) -> Result<Webhooks, String> {
        let variables = |name: &str| match name {
            "GOOD" => Some(SECRET.to_string()),
            "SHORT" => Some("whsec_AAEC".to_string()),
            _ => None,
        };
        Webhooks::parse(&format!("webhooks:\n{entries}"), folder, &Keys::Open, &variables)
    }

    fn parse(fields: &str) -> Result<Webhooks, String> {
        parse_in(Path::new("/nowhere"), &format!("- {{tenant: default, {fields}}}"))
    }

    #[test]
    fn webhooks_have_an_address_a_secret_and_events() {
        let folder = tempfile::tempdir().unwrap();
        std::fs::write(folder.path().join("secret"), format!("{SECRET}\n")).unwrap();
        let webhooks = parse_in(
            folder.path(),
            "- {tenant: default, url: 'https://a.example/in?k=1', secret_env: GOOD}\n\
             - {tenant: default, url: 'http://[::1]:9/x', secret_file: secret, events: [batch.failed]}\n\
             - {tenant: default, url: 'http://a.example/', secret_env: GOOD, allow_http: true}\n\
             - {tenant: default, url: 'http://localhost/', secret_env: GOOD}\n",
        )
        .unwrap();
        let [first, second, ..] = webhooks.list.as_slice() else {
            panic!("{webhooks:?}");
        };
        assert_eq!(first.statuses, EndStatus::ALL);
        assert_eq!(second.statuses, [EndStatus::Failed]);
        assert_eq!(first.server, "https://a.example");
        assert_eq!((first.id.len(), first.id == second.id), (16, false));
        assert!(!format!("{webhooks:?}").contains("AAEC"));
    }

    #[test]
    fn unusable_webhooks_are_refused_without_their_secrets() {
        let url = "url: 'https://a.example/hidden'";
        let good = format!("{url}, secret_env: GOOD");
        for (fields, why) in [
            (format!("{good}, secret: {SECRET}"), "secret"),
            (url.to_string(), "either `secret_env` or `secret_file`"),
            (
                format!("{good}, secret_file: x"),
                "either `secret_env` or `secret_file`",
            ),
            (format!("{url}, secret_env: '{SECRET}'"), "`secret_env` is the name"),
            (format!("{url}, secret_env: whsec_AAEC"), "`secret_env` is the name"),
            (format!("{url}, secret_file: '{SECRET}'"), "`secret_file` is the path"),
            (format!("{url}, secret_env: NOT_SET"), "`NOT_SET`"),
            (format!("{url}, secret_env: SHORT"), "has 3 bytes"),
            (format!("{url}, secret_file: none"), "/nowhere/none"),
            (format!("{good}, events: []"), "`events` is empty"),
            (format!("{good}, events: [batch.done]"), "`batch.cancelled`"),
            (good.replace("https", "http"), "`allow_http: true`"),
            (good.replace("https", "ftp"), "neither"),
            (good.replace("https://", ""), "no address"),
            (good.replace("a.example", "me:pw@a.example"), "a user or a password"),
            (good.replace("a.example", "169.254.169.254"), "metadata service"),
        ] {
            let error = parse(&fields).unwrap_err();
            assert!(error.contains(why), "{fields}: {error}");
            for hidden in ["AAEC", "hidden", "pw", "\n"] {
                assert!(!error.contains(hidden), "{fields}: {error}");
            }
        }
        let twice = format!("- {{tenant: default, {good}}}\n").repeat(2);
        let other = format!("- {{tenant: other, {good}}}\n");
        for (entries, why) in [
            (twice.as_str(), "twice"),
            (&other, "no tenant `other`"),
            ("  []", "no webhook"),
        ] {
            let error = parse_in(Path::new("/"), entries).unwrap_err();
            assert!(error.contains(why), "{error}");
        }
    }
}
