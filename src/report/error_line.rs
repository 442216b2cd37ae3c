//! An error and its causes on one line.

/// The causes of an error on one line, each said once even where a cause repeats its source.
pub fn one_line(error: &anyhow::Error) -> String {
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_error_chain_is_one_line_without_repeats() {
        let error = anyhow::anyhow!("disk\nfull")
            .context("cannot write `x`: disk full")
            .context("shard 3");
        assert_eq!(one_line(&error), "shard 3: cannot write `x`: disk full");
    }
}
