//! Signs records and messages, which tell workers what to do: HMAC-SHA-256 with the operator's
//! keys. Without a key, nothing is signed and no signature is required.
//!
//! A signature is the last field of a record or message, inserted into the finished JSON. It covers
//! every byte before that field, so checking it needs no re-serialization. A reader without a key
//! ignores the field as unknown. The signature also covers the object's address, although the bytes
//! do not contain it: a copy at another address fails the check.

use std::ffi::OsString;
use std::fmt;
use std::path::Path;
use std::sync::{Arc, OnceLock};

use base64::Engine;
use base64::prelude::BASE64_STANDARD;
use bytes::Bytes;
use data_encoding::HEXLOWER;
use hmac::{Hmac, KeyInit, Mac};
use schemars::Schema;
use serde_json::json;
use sha2::{Digest, Sha256};

/// Environment variable with the keys, one per line.
const KEY_VARIABLE: &str = "GRISTMILL_SIGNING_KEY";
/// Environment variable with the path of a file of keys.
const KEY_FILE_VARIABLE: &str = "GRISTMILL_SIGNING_KEY_FILE";
/// Minimum length of a key: the output length of HMAC-SHA-256. Shorter keys can be guessed.
const KEY_BYTES_MIN: usize = 32;
/// Maximum number of keys: a rotation needs few, and each key costs one try.
const KEYS_MAX: usize = 16;
/// Maximum size of all keys together.
pub(crate) const KEYS_BYTES_MAX: u64 = 16 << 10;
/// What a secret of Standard Webhooks begins with; base64 follows.
pub(crate) const SECRET_PREFIX: &str = "whsec_";
/// Minimum length of such a secret in bytes, as Standard Webhooks has it.
const SECRET_BYTES_MIN: usize = 24;

/// Environment variables with the keys that sign `on_finish` posts. The recipient has these keys
/// too, and must not be able to sign records with them.
const ON_FINISH_KEY_VARIABLE: &str = "GRISTMILL_ON_FINISH_KEY";
const ON_FINISH_KEY_FILE_VARIABLE: &str = "GRISTMILL_ON_FINISH_KEY_FILE";

const FIELD_START: &str = ",\"signature\":\"";
const FIELD_END: &str = "\"}";
/// Number of hex digits of a signature.
const SIGNATURE_DIGITS: usize = 64;

/// The kind of signed data: a signature of a message is invalid for a record.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Purpose {
    /// A record in the ledger.
    Record,
    /// A message of any queue. Its address is empty, since its meaning does not depend on the
    /// queue.
    Message,
}

/// Why the signature of some bytes is not accepted. Its text follows the name of the record or
/// message.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum SignatureError {
    Missing,
    Wrong,
}

impl fmt::Display for SignatureError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            SignatureError::Missing => "is not signed, and a signing key is set here",
            SignatureError::Wrong => {
                "has a signature that matches no signing key set here: it was changed, copied from another place, or signed with another key"
            }
        })
    }
}

/// Keys in the order of use: the first one signs, all of them verify. Cheap to clone.
#[derive(Clone, Default)]
pub(crate) struct Signing {
    keys: Arc<[Hmac<Sha256>]>,
}

impl fmt::Debug for Signing {
    /// Shows only the number of keys.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Signing({} keys)", self.keys.len())
    }
}

impl Signing {
    /// Reads the keys from this process's environment, once; later calls return the same.
    ///
    /// # Errors
    /// The keys cannot be read or used. The error is one line without the keys.
    pub(crate) fn of_process() -> Result<Signing, String> {
        static RESULT: OnceLock<Result<Signing, String>> = OnceLock::new();
        let found = RESULT.get_or_init(|| {
            Signing::from_key_variables(std::env::var_os(KEY_VARIABLE), std::env::var_os(KEY_FILE_VARIABLE))
        });
        found.clone()
    }

    /// Reads the keys that sign `on_finish` posts, as [`Signing::of_process`] reads its keys.
    ///
    /// # Errors
    /// As for [`Signing::of_process`].
    pub(crate) fn for_webhooks() -> Result<Signing, String> {
        let [keys, file] = [ON_FINISH_KEY_VARIABLE, ON_FINISH_KEY_FILE_VARIABLE].map(std::env::var_os);
        Signing::from_variables([ON_FINISH_KEY_VARIABLE, ON_FINISH_KEY_FILE_VARIABLE], keys, file)
    }

    fn from_key_variables(keys: Option<OsString>, file: Option<OsString>) -> Result<Signing, String> {
        Signing::from_variables([KEY_VARIABLE, KEY_FILE_VARIABLE], keys, file)
    }

    /// Reads the keys from the values of two variables with these names. A variable that is set but
    /// empty is an error: a secret that failed to arrive must not turn signing off.
    fn from_variables(
        [key, key_file]: [&str; 2],
        keys: Option<OsString>,
        file: Option<OsString>,
    ) -> Result<Signing, String> {
        match (keys, file) {
            (None, None) => Ok(Signing::default()),
            (Some(_), Some(_)) => Err(format!("`{key}` and `{key_file}` are both set: unset one of them")),
            (Some(keys), None) => match keys.into_string() {
                Ok(text) => Signing::parse(&text).map_err(|why| format!("`{key}`: {why}")),
                Err(_) => Err(format!("`{key}`: it is not UTF-8 text")),
            },
            (None, Some(path)) if path.is_empty() => {
                Err(format!("`{key_file}` is set and empty: name a file, or unset it"))
            }
            (None, Some(path)) => {
                let path = Path::new(&path);
                let source = || format!("`{}`, which `{key_file}` names", path.display());
                let text = crate::regular::read_text(path, KEYS_BYTES_MAX)
                    .map_err(|error| format!("cannot read {}: {error}", source()))?;
                Signing::parse(&text).map_err(|why| format!("{}: {why}", source()))
            }
        }
    }

    /// Parses keys, one per line. Trailing line ends are ignored.
    ///
    /// # Errors
    /// A line is not a valid key. The error names the line, not the key.
    pub(crate) fn parse(text: &str) -> Result<Signing, String> {
        let lines = lines_of(text, "key")?;
        let key = |(index, line): (usize, &&str)| {
            let (number, length) = (index + 1, line.len());
            if length < KEY_BYTES_MIN {
                return Err(format!(
                    "the key in line {number} has {length} bytes, and needs {KEY_BYTES_MIN} at least: `openssl rand -hex 32` makes one"
                ));
            }
            if line.trim() != *line {
                return Err(format!(
                    "the key in line {number} begins or ends with white space: remove it"
                ));
            }
            // HMAC accepts keys of any length.
            Hmac::<Sha256>::new_from_slice(line.as_bytes())
                .map_err(|error| format!("the key in line {number}: {error}"))
        };
        let keys = lines.iter().enumerate().map(key).collect::<Result<_, _>>()?;
        Ok(Signing { keys })
    }

    /// Parses secrets in the form of Standard Webhooks (`whsec_` and base64), one per line.
    /// Trailing line ends are ignored.
    ///
    /// # Errors
    /// A line is no such secret. The error names the line, not the secret.
    pub(crate) fn parse_secrets(text: &str) -> Result<Signing, String> {
        let lines = lines_of(text, "secret")?;
        let secret = |(index, line): (usize, &&str)| {
            let number = index + 1;
            let encoded = line.strip_prefix(SECRET_PREFIX);
            let Some(secret) = encoded.and_then(|encoded| BASE64_STANDARD.decode(encoded).ok()) else {
                return Err(format!(
                    "the secret in line {number} is not `{SECRET_PREFIX}` and base64: \
                     `echo {SECRET_PREFIX}$(openssl rand -base64 32)` makes one"
                ));
            };
            if secret.len() < SECRET_BYTES_MIN {
                return Err(format!(
                    "the secret in line {number} has {} bytes, and needs {SECRET_BYTES_MIN} at least: \
                     `echo {SECRET_PREFIX}$(openssl rand -base64 32)` makes one",
                    secret.len()
                ));
            }
            Hmac::<Sha256>::new_from_slice(&secret).map_err(|error| format!("the secret in line {number}: {error}"))
        };
        let keys = lines.iter().enumerate().map(secret).collect::<Result<_, _>>()?;
        Ok(Signing { keys })
    }

    pub(crate) fn is_on(&self) -> bool {
        !self.keys.is_empty()
    }

    /// The line about signing to print at the start; `None` if no key is set.
    pub(crate) fn startup_line(&self) -> Option<String> {
        match self.keys.len() {
            0 => None,
            1 => Some("signing is on: unsigned records and messages are refused".into()),
            keys => Some(format!(
                "signing is on, with {keys} keys: unsigned records and messages are refused"
            )),
        }
    }

    /// Adds a signature for `address` as the last field of `json`, a non-empty object in compact
    /// JSON that may end in a line end. Returns `json` unchanged if no key is set.
    pub(crate) fn sign(&self, purpose: Purpose, address: &str, json: Bytes) -> Bytes {
        let Some(key) = self.keys.first() else { return json };
        let (body, end) = match json.strip_suffix(b"}\n") {
            Some(body) => (body, "\n"),
            None => (json.strip_suffix(b"}").unwrap_or(&json), ""),
        };
        let tag = mac(key, purpose, address, &Sha256::digest(body))
            .finalize()
            .into_bytes();
        let signature = HEXLOWER.encode(&tag);
        [
            body,
            FIELD_START.as_bytes(),
            signature.as_bytes(),
            FIELD_END.as_bytes(),
            end.as_bytes(),
        ]
        .concat()
        .into()
    }

    /// HMAC-SHA-256 of `bytes` with each key.
    pub(crate) fn tags(&self, bytes: &[u8]) -> Vec<[u8; SIGNATURE_DIGITS / 2]> {
        let tag = |key: &Hmac<Sha256>| key.clone().chain_update(bytes).finalize().into_bytes().into();
        self.keys.iter().map(tag).collect()
    }

    /// Checks that one of the keys signed `bytes` for this purpose and address. Without a key,
    /// everything passes.
    ///
    /// # Errors
    /// The signature is missing or wrong.
    pub(crate) fn check(&self, purpose: Purpose, address: &str, bytes: &[u8]) -> Result<(), SignatureError> {
        if !self.is_on() {
            return Ok(());
        }
        let (body, tag) = split_signature(bytes).ok_or(SignatureError::Missing)?;
        let digest = Sha256::digest(body);
        // `verify_slice` takes constant time, whichever byte differs.
        let signed = |key| mac(key, purpose, address, &digest).verify_slice(&tag).is_ok();
        if self.keys.iter().any(signed) {
            Ok(())
        } else {
            Err(SignatureError::Wrong)
        }
    }
}

/// The lines of a text, each of which is a key or a secret: `what`. Trailing line ends are ignored.
fn lines_of<'t>(text: &'t str, what: &str) -> Result<Vec<&'t str>, String> {
    let lines: Vec<&str> = text.trim_end_matches(['\r', '\n']).lines().collect();
    if lines.is_empty() {
        return Err(format!("it holds no {what}"));
    }
    if lines.len() > KEYS_MAX {
        return Err(format!(
            "it has {} lines, and at most {KEYS_MAX} {what}s are used",
            lines.len()
        ));
    }
    Ok(lines)
}

/// Authenticates purpose, address, and the hash of the bytes. The lengths of purpose and address
/// precede them.
fn mac(key: &Hmac<Sha256>, purpose: Purpose, address: &str, digest: &[u8]) -> Hmac<Sha256> {
    let mut mac = key.clone();
    let kind = match purpose {
        Purpose::Record => "gristmill record 1",
        Purpose::Message => "gristmill message 1",
    };
    for text in [kind, address] {
        mac.update(&(text.len() as u64).to_be_bytes());
        mac.update(text.as_bytes());
    }
    mac.update(digest);
    mac
}

/// Splits bytes that end in a signature into the signed bytes and the signature.
fn split_signature(bytes: &[u8]) -> Option<(&[u8], [u8; SIGNATURE_DIGITS / 2])> {
    let bytes = bytes.strip_suffix(b"\n").unwrap_or(bytes);
    let rest = bytes.strip_suffix(FIELD_END.as_bytes())?;
    let (rest, digits) = rest.split_at_checked(rest.len().checked_sub(SIGNATURE_DIGITS)?)?;
    let body = rest.strip_suffix(FIELD_START.as_bytes())?;
    let mut tag = [0; SIGNATURE_DIGITS / 2];
    for (byte, pair) in tag.iter_mut().zip(digits.chunks_exact(2)) {
        let pair = std::str::from_utf8(pair).ok().filter(|pair| !pair.contains('+'))?;
        *byte = u8::from_str_radix(pair, 16).ok()?;
    }
    Some((body, tag))
}

/// Whether `bytes` end in a signature, valid or not.
pub(crate) fn is_signed(bytes: &[u8]) -> bool {
    split_signature(bytes).is_some()
}

/// Adds the field `signature` to the JSON Schema of a record or message.
pub(crate) fn add_signature_field(schema: &mut Schema) {
    let properties = schema.ensure_object().entry("properties").or_insert_with(|| json!({}));
    if let Some(properties) = properties.as_object_mut() {
        properties.insert(
            "signature".into(),
            json!({
                "description": "Where a signing key was set: HMAC-SHA-256 of the place and of all bytes before this field, which is the last one.",
                "type": "string",
                "pattern": "^[0-9a-f]{64}$",
            }),
        );
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const ONE: &str = "0123456789abcdef0123456789abcdef";
    const TWO: &str = "another key, of thirty-two bytes";
    const RECORD: &[u8] = b"{\"v\":1,\"name\":\"n\"}\n";

    #[test]
    fn secrets_of_webhooks_are_base64_of_24_bytes_at_least() {
        let secret = |bytes: usize| format!("{SECRET_PREFIX}{}", BASE64_STANDARD.encode(vec![7; bytes]));
        let count = |text: &str| Signing::parse_secrets(text).map(|signing| signing.keys.len());
        assert_eq!(count(&secret(24)), Ok(1));
        assert_eq!(count(&format!("{}\r\n{}\n", secret(24), secret(32))), Ok(2));
        let unprefixed = BASE64_STANDARD.encode([7; 32]);
        for (text, why) in [
            ("", "no secret"),
            (secret(23).as_str(), "line 1 has 23 bytes"),
            (unprefixed.as_str(), "line 1 is not `whsec_`"),
            ("whsec_???", "line 1 is not `whsec_`"),
            (&format!("{}\n{}", secret(24), secret(3)), "line 2 has 3 bytes"),
            (&format!("{}\n", secret(24)).repeat(17), "17 lines"),
        ] {
            let error = Signing::parse_secrets(text).unwrap_err();
            assert!(error.contains(why), "{error}");
            assert!(!error.contains("BwcH"), "the error shows a secret: {error}");
        }
    }

    fn with(text: &str) -> Signing {
        Signing::parse(text).unwrap()
    }

    /// Source: RFC 4231, test cases 1, 2 and 6.
    #[test]
    fn tags_are_hmac_sha_256() {
        let cases: [(&[u8], &[u8], &str); 3] = [
            (
                &[0x0b; 20],
                b"Hi There",
                "b0344c61d8db38535ca8afceaf0bf12b881dc200c9833da726e9376c2e32cff7",
            ),
            (
                b"Jefe",
                b"what do ya want for nothing?",
                "5bdcc146bf60754e6a042426089575c75a003f089d2739839dec58b964ec3843",
            ),
            (
                &[0xaa; 131],
                b"Test Using Larger Than Block-Size Key - Hash Key First",
                "60e431591ee0b67f0d8a26aacbf5b77f8e0bc6213728c5140546040f0ee37f54",
            ),
        ];
        for (key, text, tag) in cases {
            let mut mac = Hmac::<Sha256>::new_from_slice(key).unwrap();
            mac.update(text);
            assert_eq!(HEXLOWER.encode(&mac.finalize().into_bytes()), tag);
        }
    }

    /// The expected values were made with Python's `hmac` and `hashlib`. The signed bytes must
    /// never change without a new `gristmill record N`.
    #[test]
    fn signed_bytes_do_not_change_between_versions() {
        let signed = with(ONE).sign(
            Purpose::Record,
            "s3://b/out/_gristmill/job.json",
            Bytes::from_static(RECORD),
        );
        let text = std::str::from_utf8(&signed).unwrap();
        assert_eq!(
            text,
            "{\"v\":1,\"name\":\"n\",\"signature\":\"f1fc976ae5d6e8cde86c010b152ef39e933267de0b89478022ee6df42d0a5ec1\"}\n"
        );
        let signed = with(ONE).sign(Purpose::Message, "", Bytes::from_static(b"{\"v\":1}"));
        let text = std::str::from_utf8(&signed).unwrap();
        assert_eq!(
            text,
            "{\"v\":1,\"signature\":\"ed8bab6eddb3b520ad4380dc6f01d266ff504b29314d102542486961769304c1\"}"
        );
    }

    #[test]
    fn a_signature_is_valid_for_its_address_and_bytes_only() {
        let (signing, address) = (with(ONE), "s3://b/out/_gristmill/job.json");
        let signed = signing.sign(Purpose::Record, address, Bytes::from_static(RECORD));
        assert_eq!(signing.check(Purpose::Record, address, &signed), Ok(()));
        let read: serde_json::Value = serde_json::from_slice(&signed).unwrap();
        assert_eq!(read["name"], "n");
        let wrong = Err(SignatureError::Wrong);
        assert_eq!(
            signing.check(Purpose::Message, address, &signed),
            wrong,
            "another purpose"
        );
        assert_eq!(
            signing.check(Purpose::Record, "s3://b/other/_gristmill/job.json", &signed),
            wrong
        );
        assert_eq!(with(TWO).check(Purpose::Record, address, &signed), wrong, "another key");
        assert_eq!(
            signing.check(Purpose::Record, address, RECORD),
            Err(SignatureError::Missing)
        );
        // Changing any byte invalidates the signature.
        for at in 0..signed.len() {
            let mut changed = signed.to_vec();
            changed[at] ^= 1;
            assert!(signing.check(Purpose::Record, address, &changed).is_err(), "byte {at}");
        }
        for cut in 0..signed.len() - 1 {
            assert!(
                signing.check(Purpose::Record, address, &signed[..cut]).is_err(),
                "{cut} bytes"
            );
        }
        let extended = [&signed[..signed.len() - 2], b",\"name\":\"other\"}\n"].concat();
        assert!(signing.check(Purpose::Record, address, &extended).is_err());
    }

    #[test]
    fn the_length_of_the_address_is_signed() {
        let key = &with(ONE).keys[0];
        let tag = |address: &str, digest: &[u8]| mac(key, Purpose::Record, address, digest).finalize().into_bytes();
        assert_ne!(tag("a", b"b"), tag("ab", b""));
    }

    #[test]
    fn the_first_key_signs_and_all_of_them_verify() {
        let both = with(&format!("{TWO}\n{ONE}\n"));
        let old = with(ONE).sign(Purpose::Record, "p", Bytes::from_static(RECORD));
        let new = both.sign(Purpose::Record, "p", Bytes::from_static(RECORD));
        assert_eq!(both.check(Purpose::Record, "p", &old), Ok(()));
        assert_eq!(with(TWO).check(Purpose::Record, "p", &new), Ok(()));
        assert_eq!(with(ONE).check(Purpose::Record, "p", &new), Err(SignatureError::Wrong));
    }

    #[test]
    fn without_a_key_nothing_changes() {
        let off = Signing::from_key_variables(None, None).unwrap();
        assert_eq!(
            (
                off.sign(Purpose::Record, "p", Bytes::from_static(RECORD)),
                off.startup_line()
            ),
            (Bytes::from_static(RECORD), None)
        );
        assert_eq!(off.check(Purpose::Record, "p", RECORD), Ok(()));
        let signed = with(ONE).sign(Purpose::Record, "p", Bytes::from_static(RECORD));
        assert_eq!(off.check(Purpose::Record, "p", &signed), Ok(()));
    }

    #[test]
    fn a_key_that_cannot_be_used_is_refused_without_showing_it() {
        let folder = tempfile::tempdir().unwrap();
        let file = |name: &str, text: &[u8]| {
            let path = folder.path().join(name);
            std::fs::write(&path, text).unwrap();
            Some(path.into_os_string())
        };
        let pipe = folder.path().join("pipe");
        assert!(
            std::process::Command::new("mkfifo")
                .arg(&pipe)
                .status()
                .unwrap()
                .success()
        );
        let key = |text: &str| Some(OsString::from(text));
        let many = format!("{ONE}\n").repeat(KEYS_MAX + 1);
        for (keys, path, expected) in [
            (key(ONE), file("a", ONE.as_bytes()), "both set"),
            (key(&ONE[1..]), None, "line 1 has 31 bytes"),
            (key(""), None, "no key"),
            (key("\n\n"), None, "no key"),
            (key(&format!("{ONE}\n\n{TWO}")), None, "line 2 has 0 bytes"),
            (key(&format!(" {ONE}")), None, "white space"),
            (key(&many), None, "17 lines"),
            (None, key(""), "is set and empty"),
            (None, file("empty", b""), "no key"),
            (None, file("short", &ONE.as_bytes()[1..]), "31 bytes"),
            (
                None,
                file("large", &[b'k'; 1 + KEYS_BYTES_MAX as usize]),
                "at most 16384 bytes",
            ),
            (None, file("bytes", &[0xff; 64]), "not UTF-8"),
            (None, Some(pipe.into_os_string()), "a pipe"),
            (None, Some(folder.path().into()), "a folder"),
            (None, key("/nowhere/key"), "/nowhere/key"),
        ] {
            let why = Signing::from_key_variables(keys, path).unwrap_err();
            assert!(
                why.contains(expected) && why.contains(KEY_VARIABLE),
                "{expected}: {why}"
            );
            assert!(!why.contains(&ONE[1..]) && !why.contains('\n'), "{why}");
        }
        let good = Signing::from_key_variables(None, file("good", format!("{ONE}\r\n{TWO}\n").as_bytes())).unwrap();
        assert_eq!((format!("{good:?}"), good.keys.len()), ("Signing(2 keys)".into(), 2));
        let signed = with(ONE).sign(Purpose::Record, "p", Bytes::from_static(RECORD));
        assert_eq!(
            good.check(Purpose::Record, "p", &signed),
            Ok(()),
            "line ends are not part of a key"
        );
    }
}
