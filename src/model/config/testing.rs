//! Configurations for tests: keys that a test has in common, and what it changes of them.

use std::path::Path;

use serde_json::Value;

use super::Config;

/// `keys` with the changes.
pub(super) fn with(mut keys: Value, changes: &Value) -> Value {
    let map = keys.as_object_mut().unwrap();
    map.extend(changes.as_object().unwrap().clone());
    keys
}

/// The configuration of `keys` with the changes, or why it is refused.
pub(super) fn parse(keys: Value, changes: &Value) -> Result<Config, String> {
    let text = with(keys, changes).to_string();
    Config::parse(Path::new("config.json"), &text).map_err(|e| e.to_string())
}
