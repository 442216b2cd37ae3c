//! Actions at the end of a job: a command that `run` starts, and an address that receives the
//! result.
//!
//! Only the address is in the job's record, for workers; the operator of a worker decides whether
//! the worker posts there. The command is not recorded: whoever can write to the output can change
//! the record, so it would be unsafe to execute a command from there.

use serde::{Deserialize, Serialize};
use url::Url;

use super::check::{FieldError, bad, check_text};
use super::file::OnFinishFile;
use crate::dataset::store::hosts::is_link_local_url;

/// Maximum number of words in a command.
const WORDS_MAX: usize = 256;
/// Longest address, in bytes.
const URL_BYTES_MAX: usize = 2048;

/// A job's checked `on_finish` block.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct OnFinish {
    /// A program and its arguments; empty if there is no command, and after reading from a record.
    #[serde(skip)]
    pub command: Vec<String>,
    /// A checked web address.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub url: Option<String>,
}

impl OnFinish {
    pub(super) fn check(raw: OnFinishFile) -> Result<OnFinish, FieldError> {
        let command = match raw.command {
            None => Vec::new(),
            Some(command) => {
                check_command(&command)?;
                command
            }
        };
        let on_finish = OnFinish { command, url: raw.url };
        on_finish.validate()?;
        Ok(on_finish)
    }

    /// Whether the record of this block is empty.
    pub fn is_record_empty(&self) -> bool {
        self.url.is_none()
    }

    /// The address, if any. (A checked address always parses.)
    pub fn address(&self) -> Option<Url> {
        Url::parse(self.url.as_deref()?).ok()
    }

    /// Checks the address, which comes from a job file or from a record.
    pub(super) fn validate(&self) -> Result<(), FieldError> {
        match &self.url {
            Some(url) => check_url(url).or_else(|why| bad("on_finish.url", why)),
            None => Ok(()),
        }
    }
}

fn check_command(command: &[String]) -> Result<(), FieldError> {
    let field = "on_finish.command";
    let Some(program) = command.first() else {
        return bad(
            field,
            "is an empty list: give a program and its arguments, each a text of its own",
        );
    };
    check_text(field, program)?;
    if command.len() > WORDS_MAX {
        return bad(field, format!("has {} words, more than {WORDS_MAX}", command.len()));
    }
    if command.iter().any(|word| word.contains('\0')) {
        bad(field, "holds a zero byte, which no argument can have")
    } else {
        command
            .iter()
            .try_for_each(|word| super::check::check_length(field, word))
    }
}

fn check_url(text: &str) -> Result<(), String> {
    if text.len() > URL_BYTES_MAX {
        return Err(format!("has {} bytes, more than {URL_BYTES_MAX}", text.len()));
    }
    let url = Url::parse(text).ok();
    let is_web = |url: &Url| matches!(url.scheme(), "http" | "https") && url.host().is_some();
    let Some(url) = url.filter(is_web) else {
        // The text is not shown if it may hold a user, a password or a query.
        return Err(if text.contains(['@', '?', '#']) {
            "is no web address: write it as `https://host/path`".into()
        } else {
            format!("is `{text}`, which is no web address: write it as `https://host/path`")
        });
    };
    // The address is stored in the job's record, which everyone with access to the output can read.
    let may_hold_secret = !url.username().is_empty() || url.password().is_some() || url.query().is_some();
    if may_hold_secret || url.fragment().is_some() {
        return Err(
            "has a user, a password, a query or a `#` in it: what is posted is signed, with `GRISTMILL_ON_FINISH_KEY`"
                .into(),
        );
    }
    if is_link_local_url(&url) {
        Err("names a link-local address or metadata service, to which nothing is posted".into())
    } else {
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn checked(command: Option<&[&str]>, url: Option<&str>) -> Result<OnFinish, String> {
        let command = command.map(|words| words.iter().map(|word| word.to_string()).collect());
        let url = url.map(str::to_string);
        OnFinish::check(OnFinishFile { command, url }).map_err(|error| error.to_string())
    }

    #[test]
    fn invalid_commands_and_addresses_are_refused() {
        for (command, url, message) in [
            (Some(&[][..]), None, "`on_finish.command` is an empty list"),
            (Some(&[" "]), None, "is empty"),
            (Some(&["a", "b\0"]), None, "zero byte"),
            (None, Some("notify.example/x"), "write it as `https://host/path`"),
            (
                None,
                Some("ftp://me:hush@h/x"),
                "is no web address: write it as `https://host/path`",
            ),
            (None, Some("file:///etc/passwd"), "is no web address"),
            (None, Some("s3://bucket/x"), "is no web address"),
            (None, Some("https://u@h/x"), "GRISTMILL_ON_FINISH_KEY"),
            (None, Some("https://h/x?token=1"), "GRISTMILL_ON_FINISH_KEY"),
            (None, Some("http://169.254.169.254/x"), "metadata service"),
            (None, Some("http://0xa9fea9fe/x"), "metadata service"),
            (None, Some("http://metadata.google.internal/x"), "metadata service"),
        ] {
            let why = checked(command, url).unwrap_err();
            assert!(why.contains(message) && !why.contains("hush"), "{message}: {why}");
        }
        let many = vec!["x"; WORDS_MAX + 1];
        assert!(checked(Some(&many), None).unwrap_err().contains("257 words"));
    }

    #[test]
    fn a_record_holds_no_command() {
        let both = checked(Some(&["notify", "--all"]), Some("https://hooks.example/x")).unwrap();
        let record = serde_json::to_value(&both).unwrap();
        assert_eq!(record, serde_json::json!({"url": "https://hooks.example/x"}));
        // A command that someone put into the record is ignored too.
        let foreign = serde_json::json!({"command": ["rm", "-rf", "/"], "url": "https://hooks.example/x"});
        let read: OnFinish = serde_json::from_value(foreign).unwrap();
        assert!(read.command.is_empty() && read.url == both.url);
    }
}
