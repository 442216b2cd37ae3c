//! Commands that are printed to be typed again.

/// `word` as a shell reads it back. Zero bytes, which no argument can hold, are not quoted.
pub fn shell_word(word: &str) -> String {
    shlex::try_quote(word).map_or_else(|_| word.to_string(), Into::into)
}
