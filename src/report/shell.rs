//! Quotes words of commands that are printed to be copied into a shell.

/// Quotes `word` for a shell. A word with a zero byte, which no argument can hold, is returned
/// unquoted.
pub fn shell_word(word: &str) -> String {
    shlex::try_quote(word).map_or_else(|_| word.to_string(), Into::into)
}
