//! Estimates the cost of compiling a regular expression, without parsing it.
//!
//! The derivative of a sequence of parts that may be empty (`a?a?a?…`) contains every suffix of the
//! sequence, and is built before any limit applies: 32,000 such parts took 19 s and 4 GB. Counted
//! repetitions (`{1,60000}`) and the branches of an alternation cost next to nothing. So the
//! estimate counts the operators that can make a part empty, and the character classes, each of
//! which is a tree over UTF-8.

use crate::engine::constraint::ConstraintError;

/// Maximum length of a regular expression, in bytes.
pub(super) const BYTES_MAX: usize = 64 << 10;
/// Maximum number of operators, and of character classes.
pub(super) const OPERATORS_MAX: usize = 1_000;
pub(super) const CLASSES_MAX: usize = 1_000;

/// Counts of a regular expression's parts.
#[derive(Debug, Default, Clone, Copy, PartialEq, Eq)]
struct RegexCounts {
    bytes: usize,
    /// Number of `?`, `*`, `+`, `{` and `(`, including those inside of brackets.
    operators: usize,
    /// Number of `[`, and of escapes such as `\w` and `\p{L}`.
    classes: usize,
}

impl RegexCounts {
    fn of(pattern: &str) -> RegexCounts {
        let mut counts = RegexCounts {
            bytes: pattern.len(),
            ..RegexCounts::default()
        };
        let mut bytes = pattern.bytes();
        while let Some(byte) = bytes.next() {
            match byte {
                b'\\' => {
                    counts.classes += usize::from(bytes.next().is_some_and(|escaped| b"dDwWsSpP".contains(&escaped)))
                }
                b'?' | b'*' | b'+' | b'{' | b'(' => counts.operators += 1,
                b'[' => counts.classes += 1,
                _ => {}
            }
        }
        counts
    }
}

/// Estimated cost of compiling an expression, in the units of [`schema`](super::schema)'s work.
///
/// # Errors
/// The expression exceeds a bound.
pub(super) fn compile_cost(field: &'static str, pattern: &str) -> Result<u64, ConstraintError> {
    let counts = RegexCounts::of(pattern);
    for (size, limit, unit) in [
        (counts.bytes, BYTES_MAX, "bytes of one regular expression"),
        (
            counts.operators,
            OPERATORS_MAX,
            "operators (`?`, `*`, `+`, `{`, `(`) of one regular expression",
        ),
        (
            counts.classes,
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
    let [bytes, operators, classes] = [counts.bytes, counts.operators, counts.classes].map(|count| count as u64);
    Ok(bytes + 4 * operators * operators + 16 * operators * classes + 1_000 * classes)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn escaped_characters_are_not_counted() {
        let counts = RegexCounts::of(r"^[a-z]+\.(?:\d\d|\w\+)\\{2}$");
        assert_eq!((counts.operators, counts.classes), (4, 4));
        assert_eq!(RegexCounts::of(r"\").classes, 0);
    }

    #[test]
    fn errors_name_the_size_and_the_limit() {
        let error = |pattern: String| compile_cost("regex", &pattern).unwrap_err().to_string();
        assert_eq!(
            error("a?".repeat(1001)),
            "`regex` is too large: 1001 operators (`?`, `*`, `+`, `{`, `(`) of one regular expression, at most 1000 are allowed"
        );
        assert!(error(r"\w".repeat(1001)).contains("1001 classes of characters"));
        assert!(error("a".repeat(BYTES_MAX + 1)).contains("65537 bytes of one regular expression, at most 65536"));
        assert!(
            compile_cost("regex", &"a?".repeat(1000)).is_ok() && compile_cost("regex", &"a".repeat(BYTES_MAX)).is_ok()
        );
        let labels: Vec<String> = (0..5000).map(|i| format!(r"New\ York\ {i}")).collect();
        assert!(
            compile_cost("regex", &labels.join("|")[..BYTES_MAX]).is_ok(),
            "labels cost next to nothing"
        );
    }
}
