//! What a regular expression may ask of its compiler, found without parsing it.
//!
//! The derivative of a sequence of parts that may be empty (`a?a?a?…`) holds every rest of it, and is made before anybody counts what
//! that costs: 32,000 of them took 19 s and 4 GB. Repetitions by number (`{1,60000}`) cost nothing, and neither do the branches of
//! an alternation; so what is counted is what can make a part empty, and classes of characters, each of which is a tree over UTF-8.

use crate::engine::constraint::ConstraintError;

/// Longest regular expression, in bytes.
pub(super) const BYTES_MAX: usize = 64 << 10;
/// Most operators, and most classes of characters.
pub(super) const OPERATORS_MAX: usize = 1_000;
pub(super) const CLASSES_MAX: usize = 1_000;

/// What a regular expression consists of.
#[derive(Debug, Default, Clone, Copy, PartialEq, Eq)]
struct Parts {
    bytes: usize,
    /// `?`, `*`, `+`, `{` and `(`, those inside of brackets among them.
    operators: usize,
    /// `[`, and escapes such as `\w` and `\p{L}`.
    classes: usize,
}

impl Parts {
    fn of(pattern: &str) -> Parts {
        let mut parts = Parts {
            bytes: pattern.len(),
            ..Parts::default()
        };
        let mut bytes = pattern.bytes();
        while let Some(byte) = bytes.next() {
            match byte {
                b'\\' => {
                    parts.classes += usize::from(bytes.next().is_some_and(|escaped| b"dDwWsSpP".contains(&escaped)))
                }
                b'?' | b'*' | b'+' | b'{' | b'(' => parts.operators += 1,
                b'[' => parts.classes += 1,
                _ => {}
            }
        }
        parts
    }
}

/// What it costs to compile an expression, in the units of [`schema`](super::schema)'s work.
///
/// # Errors
/// It is longer, or has more parts, than any that is compiled.
pub(super) fn cost(field: &'static str, pattern: &str) -> Result<u64, ConstraintError> {
    let parts = Parts::of(pattern);
    for (size, limit, unit) in [
        (parts.bytes, BYTES_MAX, "bytes of one regular expression"),
        (
            parts.operators,
            OPERATORS_MAX,
            "operators (`?`, `*`, `+`, `{`, `(`) of one regular expression",
        ),
        (
            parts.classes,
            CLASSES_MAX,
            "classes of characters (`[`, `\\w`, …) of one regular expression",
        ),
    ] {
        if size > limit {
            return Err(ConstraintError::TooLarge {
                field,
                size,
                unit,
                limit,
            });
        }
    }
    let [bytes, operators, classes] = [parts.bytes, parts.operators, parts.classes].map(|count| count as u64);
    Ok(bytes + 4 * operators * operators + 16 * operators * classes + 1_000 * classes)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parts_are_counted_without_what_is_escaped() {
        let parts = Parts::of(r"^[a-z]+\.(?:\d\d|\w\+)\\{2}$");
        assert_eq!((parts.operators, parts.classes), (4, 4));
        assert_eq!(Parts::of(r"\").classes, 0);
    }

    #[test]
    fn each_bound_is_said_with_what_was_found() {
        let said = |pattern: String| cost("regex", &pattern).unwrap_err().to_string();
        assert_eq!(
            said("a?".repeat(1001)),
            "`regex` is too large: 1001 operators (`?`, `*`, `+`, `{`, `(`) of one regular expression, at most 1000 are read"
        );
        assert!(said(r"\w".repeat(1001)).contains("1001 classes of characters"));
        assert!(said("a".repeat(BYTES_MAX + 1)).contains("65537 bytes of one regular expression, at most 65536"));
        assert!(cost("regex", &"a?".repeat(1000)).is_ok() && cost("regex", &"a".repeat(BYTES_MAX)).is_ok());
        let labels: Vec<String> = (0..5000).map(|i| format!(r"New\ York\ {i}")).collect();
        assert!(
            cost("regex", &labels.join("|")[..BYTES_MAX]).is_ok(),
            "labels cost next to nothing"
        );
    }
}
