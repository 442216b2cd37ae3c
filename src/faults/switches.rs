//! Switches that break the guarantee on purpose: the negative controls of the fault suite.

use std::sync::OnceLock;

/// The variable that turns switches on.
pub const VARIABLE: &str = "GRISTMILL_FAULT_SWITCHES";

/// All switches, with the effect of each.
pub const SWITCHES: &[(&str, &str)] = &[
    (
        "ack-before-commit",
        "a message is acknowledged before its shard is worked on",
    ),
    ("put-unconditional", "a create overwrites what stands at its key"),
    (
        "exists-is-success",
        "\"already exists\" counts as our own success, without reading the key back",
    ),
    ("part-after-commit", "the commit is written before the part it names"),
    (
        "next-version",
        "no fault: records are written in the version after this one, and read, as a newer gristmill would",
    ),
];

/// Whether the switch `name` is on in this process.
pub fn is_switched_on(name: &str) -> bool {
    static ON: OnceLock<Vec<&'static str>> = OnceLock::new();
    let on = ON.get_or_init(|| {
        let text = std::env::var(VARIABLE).unwrap_or_default();
        parse(&text).unwrap_or_else(|why| super::refuse(VARIABLE, &why))
    });
    debug_assert!(SWITCHES.iter().any(|(known, _)| *known == name), "no switch `{name}`");
    on.contains(&name)
}

/// The bytes of a record of version `version`. If the switch `next-version` is on, their version is
/// `next`.
pub fn as_next_version(bytes: Vec<u8>, version: u32, next: u32) -> Vec<u8> {
    let prefix = format!("{{\"v\":{version},");
    match bytes.strip_prefix(prefix.as_bytes()) {
        Some(rest) if is_switched_on("next-version") => {
            let mut next = format!("{{\"v\":{next},").into_bytes();
            next.extend_from_slice(rest);
            next
        }
        _ => bytes,
    }
}

fn parse(text: &str) -> Result<Vec<&'static str>, String> {
    let names = text.split(',').map(str::trim).filter(|name| !name.is_empty());
    names
        .map(|name| {
            let found = SWITCHES.iter().find(|(known, _)| *known == name);
            found
                .map(|(known, _)| *known)
                .ok_or_else(|| format!("there is no switch `{name}`"))
        })
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn unknown_switches_are_refused() {
        assert_eq!(parse("").unwrap(), Vec::<&str>::new());
        assert_eq!(
            parse("put-unconditional, exists-is-success,").unwrap(),
            ["put-unconditional", "exists-is-success"]
        );
        assert_eq!(parse("put").unwrap_err(), "there is no switch `put`");
    }
}
