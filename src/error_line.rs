//! Formats an error and its causes on one line.

/// The causes of an error on one line. A cause that the line already contains is left out.
pub(crate) fn one_line(error: &anyhow::Error) -> String {
    let mut line = String::new();
    for cause in error.chain() {
        let text = cause.to_string();
        let text = text.split_whitespace().collect::<Vec<_>>().join(" ");
        if line.is_empty() {
            line = text;
        } else if !line.contains(&text) {
            line = format!("{line}: {text}");
        }
    }
    line
}

/// Maximum length of a parser's message in characters, because the message may quote all its input.
const CHARS_MAX: usize = 400;

/// A parser's message on one line, shortened and without control characters. The message may quote
/// foreign bytes.
pub(crate) fn short_line(text: &str) -> String {
    let words = text.split_whitespace().flat_map(|word| [" ", word]).skip(1);
    let mut chars = words.flat_map(str::chars).filter(|c| !c.is_control());
    let mut line: String = chars.by_ref().take(CHARS_MAX).collect();
    if chars.next().is_some() {
        line.push('…');
    }
    line
}

/// The error of a YAML file on one line, without the lines of the file that it is about: they may
/// hold secrets.
pub(crate) fn yaml_line(error: &serde_saphyr::Error) -> String {
    short_line(&error.without_snippet().to_string())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parser_messages_are_cut_and_lose_control_characters() {
        assert_eq!(short_line("no\n \t`a\u{1b}[2J`"), "no `a[2J`");
        let long = short_line(&"x".repeat(1 << 20));
        assert_eq!((long.chars().count(), long.ends_with("x…")), (CHARS_MAX + 1, true));
        assert_eq!(short_line(&"x".repeat(CHARS_MAX)), "x".repeat(CHARS_MAX));
    }

    #[test]
    fn an_error_chain_is_one_line_without_repeats() {
        let error = anyhow::anyhow!("disk\nfull")
            .context("cannot write `x`: disk full")
            .context("shard 3");
        assert_eq!(one_line(&error), "shard 3: cannot write `x`: disk full");
    }
}
