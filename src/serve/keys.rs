//! API keys: which tenant a request belongs to, and what a tenant may have. The file holds hashes
//! only.

use std::collections::{BTreeSet, HashMap};
use std::path::Path;

use data_encoding::HEXLOWER_PERMISSIVE;
use serde::Deserialize;
use sha2::{Digest, Sha256};
use subtle::ConstantTimeEq;

use crate::error_line::yaml_line;
use crate::regular;

/// Maximum size of a file of keys.
const FILE_BYTES_MAX: u64 = 4 << 20;
/// Maximum characters of a tenant's name.
const NAME_CHARS_MAX: usize = 64;
/// The tenant of a service without keys.
const NO_KEYS_TENANT: &str = "default";

/// A tenant's name, which is part of the keys of its objects.
#[derive(Debug, Clone, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Tenant(String);

impl Tenant {
    /// # Errors
    /// The name could not be part of an object's key.
    pub(super) fn new(name: &str) -> Result<Tenant, String> {
        let is_allowed = |b: u8| b.is_ascii_lowercase() || b.is_ascii_digit() || b == b'-' || b == b'_';
        if name.is_empty() || name.len() > NAME_CHARS_MAX || !name.bytes().all(is_allowed) {
            return Err(format!(
                "tenant `{name}`: a name has 1 to {NAME_CHARS_MAX} characters of `a` to `z`, `0` to `9`, `-` and `_`"
            ));
        }
        Ok(Tenant(name.to_string()))
    }

    pub fn as_str(&self) -> &str {
        &self.0
    }
}

/// The keys that the service accepts.
#[derive(Debug, Clone)]
pub enum Keys {
    /// Everybody who reaches the port is one tenant.
    Open,
    Listed(Vec<Key>),
}

/// A key and the tenant that it belongs to.
#[derive(Debug, Clone)]
pub struct Key {
    sha256: [u8; 32],
    tenant: Tenant,
    /// As the key's entry states them.
    limits: Limits,
}

/// What a tenant may have at a time. `None`: any number.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(super) struct Limits {
    pub open_batches: Option<u64>,
    /// Requests of unfinished batches.
    pub queued_requests: Option<u64>,
    /// Estimated tokens of unfinished batches.
    pub queued_tokens: Option<u64>,
}

impl Limits {
    /// Whether a batch's input is held against limits.
    pub(super) fn has_queue(&self) -> bool {
        self.queued_requests.is_some() || self.queued_tokens.is_some()
    }
}

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct KeysFile {
    keys: Vec<KeyFile>,
}

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct KeyFile {
    tenant: String,
    /// SHA-256 of the key, in hex.
    sha256: String,
    max_open_batches: Option<i64>,
    max_queued_requests: Option<i64>,
    max_queued_tokens: Option<i64>,
}

impl KeyFile {
    fn limits(&self) -> Result<Limits, String> {
        let read = |name: &str, limit: Option<i64>| match limit.map(u64::try_from) {
            None => Ok(None),
            Some(Ok(limit)) if limit > 0 => Ok(Some(limit)),
            Some(_) => Err(format!(
                "`{name}` is below 1, so that no batch could run: give 1 at least, or leave it out for no limit"
            )),
        };
        Ok(Limits {
            open_batches: read("max_open_batches", self.max_open_batches)?,
            queued_requests: read("max_queued_requests", self.max_queued_requests)?,
            queued_tokens: read("max_queued_tokens", self.max_queued_tokens)?,
        })
    }
}

impl Keys {
    /// Reads a file of keys (YAML).
    ///
    /// # Errors
    /// The file cannot be read, or holds something else than keys.
    pub fn load(path: &Path) -> Result<Keys, String> {
        let at = |why: String| format!("`--keys`: `{}`: {why}", path.display());
        let text = regular::read_text(path, FILE_BYTES_MAX).map_err(|error| at(error.to_string()))?;
        Keys::parse(&text).map_err(at)
    }

    fn parse(text: &str) -> Result<Keys, String> {
        let file: KeysFile = serde_saphyr::from_str(text).map_err(|error| yaml_line(&error))?;
        if file.keys.is_empty() {
            return Err("it lists no key".into());
        }
        let keys = file.keys.into_iter().enumerate().map(|(n, key)| {
            let at = |why: String| format!("`keys[{n}]`: {why}");
            let hash = HEXLOWER_PERMISSIVE.decode(key.sha256.as_bytes()).ok();
            let sha256 = hash.and_then(|hash| hash.try_into().ok()).ok_or_else(|| {
                at("`sha256` is no SHA-256 in hex: `printf %s \"$KEY\" | sha256sum` prints it".into())
            })?;
            Ok(Key {
                sha256,
                tenant: Tenant::new(&key.tenant).map_err(at)?,
                limits: key.limits().map_err(at)?,
            })
        });
        let keys: Vec<Key> = keys.collect::<Result<_, String>>()?;
        check_limits(&keys)?;
        Ok(Keys::Listed(keys))
    }

    /// What a tenant may have at a time.
    pub(super) fn limits(&self, tenant: &Tenant) -> Limits {
        let keys = match self {
            Keys::Open => return Limits::default(),
            Keys::Listed(keys) => keys,
        };
        let mut stated = keys.iter().filter(|key| key.tenant == *tenant).map(|key| key.limits);
        stated.find(|limits| *limits != Limits::default()).unwrap_or_default()
    }

    /// All tenants, each once.
    pub(super) fn tenants(&self) -> BTreeSet<Tenant> {
        match self {
            Keys::Open => BTreeSet::from([Tenant(NO_KEYS_TENANT.into())]),
            Keys::Listed(keys) => keys.iter().map(|key| key.tenant.clone()).collect(),
        }
    }

    /// The tenant of a request with this `Authorization` header; `None`: the key is unknown.
    pub(crate) fn tenant(&self, authorization: Option<&[u8]>) -> Option<Tenant> {
        let keys = match self {
            Keys::Open => return Some(Tenant(NO_KEYS_TENANT.into())),
            Keys::Listed(keys) => keys,
        };
        let (scheme, key) = authorization?.split_at_checked("Bearer ".len())?;
        if !scheme.eq_ignore_ascii_case(b"Bearer ") {
            return None;
        }
        let hash = Sha256::digest(key.trim_ascii());
        // All keys are compared, each in constant time, so that the time tells nothing about them.
        let mut found = None;
        for key in keys {
            if bool::from(key.sha256.as_slice().ct_eq(hash.as_slice())) {
                found = Some(&key.tenant);
            }
        }
        found.cloned()
    }
}

/// Checks that the keys of a tenant do not contradict each other: those that state limits state the
/// same ones.
fn check_limits(keys: &[Key]) -> Result<(), String> {
    let mut stated: HashMap<&Tenant, Limits> = HashMap::new();
    for (n, key) in keys.iter().enumerate() {
        if key.limits == Limits::default() {
            continue;
        }
        let first = *stated.entry(&key.tenant).or_insert(key.limits);
        if first != key.limits {
            return Err(format!(
                "`keys[{n}]`: tenant `{}` has another key with other limits: state the same ones in both, or in one alone",
                key.tenant.as_str()
            ));
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn listed(key: &str, tenant: &str) -> String {
        let hash = data_encoding::HEXLOWER.encode(&Sha256::digest(key.as_bytes()));
        format!("- {{tenant: {tenant}, sha256: {hash}}}\n")
    }

    #[test]
    fn a_key_belongs_to_its_tenant() {
        let text = format!("keys:\n{}{}", listed("sk-one", "a"), listed("sk-two", "b"));
        let keys = Keys::parse(&text).unwrap();
        let tenant = |header: &str| keys.tenant(Some(header.as_bytes())).map(|tenant| tenant.0);
        assert_eq!(tenant("Bearer sk-one").as_deref(), Some("a"));
        assert_eq!(tenant("bearer sk-two").as_deref(), Some("b"));
        for header in ["", "Bearer", "Bearer ", "Bearer sk-three", "Basic sk-one", "sk-one"] {
            assert_eq!(tenant(header), None, "{header}");
        }
        assert_eq!(keys.tenant(None), None);
        assert_eq!(Keys::Open.tenant(None).unwrap().as_str(), "default");
    }

    #[test]
    fn unusable_files_of_keys_are_refused() {
        let upper = listed("k", "Team");
        for (text, why) in [
            ("keys: []", "no key"),
            ("keys:\n- {tenant: a, sha256: 12}", "sha256sum"),
            ("keys:\n- {tenant: a, key: sk-one}", "key"),
            (&format!("keys:\n{upper}"), "tenant `Team`"),
        ] {
            let error = Keys::parse(text).unwrap_err();
            assert!(error.contains(why), "{error}");
            assert!(!error.contains("sk-one") && !error.contains('\n'), "{error}");
        }
    }

    /// A key of tenant `a` with these fields.
    fn limited(key: &str, fields: &str) -> String {
        listed(key, "a").replace('}', &format!(", {fields}}}"))
    }

    #[test]
    fn the_keys_of_a_tenant_share_its_limits() {
        let first = limited("1", "max_open_batches: 3, max_queued_tokens: 1000");
        let plain = listed("2", "a");
        let other = listed("3", "b");
        let expected = Limits {
            open_batches: Some(3),
            queued_requests: None,
            queued_tokens: Some(1000),
        };
        let [a, b] = ["a", "b"].map(|name| Tenant::new(name).unwrap());
        for text in [
            format!("keys:\n{first}{plain}{other}"),
            format!("keys:\n{other}{plain}{first}{first}"),
        ] {
            let keys = Keys::parse(&text).unwrap();
            assert_eq!(keys.limits(&a), expected, "{text}");
            assert_eq!(keys.limits(&b), Limits::default(), "{text}");
        }
        assert_eq!(Keys::Open.limits(&a), Limits::default());
        let other = limited("2", "max_open_batches: 3");
        for (text, why) in [
            (
                format!("keys:\n{first}{other}"),
                "`keys[1]`: tenant `a` has another key",
            ),
            (
                format!("keys:\n{}", limited("1", "max_queued_requests: 0")),
                "`keys[0]`: `max_queued_requests` is below 1",
            ),
            (
                format!("keys:\n{}", limited("1", "max_queued_tokens: -1")),
                "`keys[0]`: `max_queued_tokens` is below 1",
            ),
        ] {
            let error = Keys::parse(&text).unwrap_err();
            assert!(error.contains(why), "{error}");
        }
    }
}
