//! The queue in a job file: its address and properties, without secrets.

use serde::{Deserialize, Serialize};
use serde_json::Value;

use super::check::{FieldError, bad, check_length, checked_text};
use super::file::QueueFile;
use super::suggest;
use crate::queue::QueueUrl;
use crate::queue::properties::{JOB_FILE_ALLOWED, Owner, accepts, is_secret, owner};

/// Maximum number of client properties.
const PROPERTIES_MAX: usize = 256;
/// Maximum length of a property's name; librdkafka's longest has 49 bytes.
const PROPERTY_BYTES_MAX: usize = 64;

/// Where a job's shards are enqueued.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct JobQueue {
    /// As in the job file, without a password.
    pub url: String,
    /// Checked librdkafka properties, with values as librdkafka takes them, in the file's order.
    pub kafka: Vec<(String, String)>,
}

/// The environment variable that sets a librdkafka property: for `sasl.password`,
/// `GRISTMILL_KAFKA_SASL_PASSWORD`.
pub fn environment_name(property: &str) -> String {
    format!("GRISTMILL_KAFKA_{}", property.to_ascii_uppercase().replace('.', "_"))
}

/// Whether this address contains a password: `scheme://user:password@…`, or in its query.
pub fn has_password(url: &str) -> bool {
    let rest = url.split_once("://").map_or(url, |(_, rest)| rest);
    let authority = rest.split(['/', '?', '#']).next().unwrap_or_default();
    let user = authority.rsplit_once('@').map(|(user, _)| user);
    let query = rest.split_once('?').map_or("", |(_, query)| query);
    let keys = query.split('&').filter_map(|pair| pair.split_once('='));
    user.is_some_and(|user| user.contains(':')) || keys.into_iter().any(|(key, _)| is_secret(key))
}

fn check_name(name: &str) -> Result<(), FieldError> {
    let is_name_char = |c: char| c.is_ascii_alphanumeric() || matches!(c, '.' | '_' | '-');
    if !name.is_empty() && name.len() <= PROPERTY_BYTES_MAX && name.chars().all(is_name_char) {
        return Ok(());
    }
    bad(
        "queue.kafka",
        format!(
            "has a name that is none of librdkafka's: those have 1 to {PROPERTY_BYTES_MAX} letters, digits, `.` and `_`"
        ),
    )
}

/// Checks that a job file may set this property. A job file may be untrusted, so it may only tune
/// the client: it cannot make the client read files, load libraries or use passwords.
fn check_owner(field: &str, name: &str) -> Result<(), FieldError> {
    let (why, hint) = match owner(name) {
        Owner::JobFile => return Ok(()),
        Owner::Nobody(why) => return bad(field, format!("cannot be set: {why}")),
        Owner::Operator(why) => (why, String::new()),
        Owner::Unlisted => (
            "is not one of the properties that a job file may set",
            suggest(name, JOB_FILE_ALLOWED.iter().copied()),
        ),
    };
    // A variable cannot set a property with `_` or `-` in its name, and a variable that ends in
    // `_FILE` names a file with the value.
    let variable = if name.contains(['_', '-']) || name.ends_with(".file") {
        String::new()
    } else {
        format!("`{}` in the environment or ", environment_name(name))
    };
    bad(
        field,
        format!("{why}: whoever runs gristmill may set it, by {variable}`--kafka {name}=…`{hint}"),
    )
}

impl JobQueue {
    pub(super) fn check(raw: QueueFile) -> Result<JobQueue, FieldError> {
        let url = checked_text("queue.url", raw.url)?;
        if has_password(&url) {
            return bad(
                "queue.url",
                "holds a password, which does not belong in a job file: put it in `GRISTMILL_QUEUE_PASSWORD` in the \
                 environment, or in a file that `GRISTMILL_QUEUE_PASSWORD_FILE` names",
            );
        }
        if let Err(error) = url.parse::<QueueUrl>() {
            return bad("queue.url", format!("cannot be used: {error}"));
        }
        let raw = raw.kafka.unwrap_or_default();
        if !raw.is_empty() && !url.starts_with("kafka://") {
            return bad("queue.kafka", "is for a queue whose `url` begins with `kafka://`");
        }
        if raw.len() > PROPERTIES_MAX {
            return bad(
                "queue.kafka",
                format!("has {} properties, more than {PROPERTIES_MAX}", raw.len()),
            );
        }
        let mut kafka = Vec::with_capacity(raw.len());
        for (name, value) in raw {
            check_name(&name)?;
            let field = format!("queue.kafka.{name}");
            if is_secret(&name) {
                let (variable, why) = (
                    environment_name(&name),
                    "is a secret, which does not belong in a job file",
                );
                return bad(
                    field,
                    format!(
                        "{why}: put it in `{variable}` in the environment, or in a file that `{variable}_FILE` names"
                    ),
                );
            }
            check_owner(&field, &name)?;
            let value = match value {
                Value::String(text) => text,
                Value::Number(number) => number.to_string(),
                Value::Bool(flag) => flag.to_string(),
                _ => return bad(field, "must be a text, a number, `true` or `false`"),
            };
            check_length(&field, &value)?;
            if !accepts(&name, &value) {
                return bad(field, format!("is `{value}`, which librdkafka does not accept"));
            }
            kafka.push((name, value));
        }
        Ok(JobQueue { url, kafka })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn passwords_in_any_part_of_a_url_are_found() {
        for url in [
            "amqp://u:p@h/v/q",
            "amqps://u:@h:5671/v/q",
            "kafka://u:p@h:9092,i:9092/t",
            "amqp://h/v/q?password=x",
            "amqp://a@b:c@h/q",
        ] {
            assert!(has_password(url), "{url}");
        }
        for url in [
            "kafka://h:9092,i:9092/t?group=g",
            "amqp://u@h:5672/v/q",
            "amqp://h/v/q:a@b",
            "local",
        ] {
            assert!(!has_password(url), "{url}");
        }
    }
}
