//! Advice about common mistakes in YAML, from the line at which the parser stopped.

/// Advice about a line that the YAML parser refused; `None` if it has no known mistake.
pub(super) fn advice(line: &str) -> Option<String> {
    let field = first_field(line).unwrap_or("text");
    let unquoted = outside_quotes(line);
    if unquoted.contains("{{") || unquoted.contains("{%") {
        return Some(format!(
            "YAML reads `{{` as the start of a mapping: put the template in quotes, as in `{field}: \"{{{{ column }}}}\"`, or on \
             lines of its own behind `{field}: |`"
        ));
    }
    if unquoted.contains("${") {
        return Some(format!(
            "put a value that contains `${{…}}` in quotes: `{field}: \"${{name}}\"`"
        ));
    }
    let indent = &line[..line.len() - line.trim_start().len()];
    if indent.contains('\t') {
        return Some("YAML does not allow tabs for indentation: use spaces".into());
    }
    let value = line.split_once(':').map_or("", |(_, value)| value);
    if outside_quotes(value).contains(": ") && !value.trim_start().starts_with(['{', '[']) {
        return Some(format!("put a text that contains `: ` in quotes: `{field}: \"…\"`"));
    }
    None
}

/// The name of the first field in a line. In `prompt: {text: …}`, it is the inner field.
fn first_field(line: &str) -> Option<&str> {
    let name = line.trim_start_matches([' ', '\t', '-', '{']).split_once(':')?.0;
    let is_name = !name.is_empty() && name.chars().all(|c| c.is_ascii_alphanumeric() || c == '_');
    let inner = line.split_once('{').and_then(|(_, inner)| inner.split_once(':'));
    match inner {
        Some((inner, _)) if !inner.is_empty() && inner.chars().all(|c| c.is_ascii_lowercase() || c == '_') => {
            Some(inner)
        }
        _ => is_name.then_some(name),
    }
}

/// The line without its quoted parts and its comment.
fn outside_quotes(line: &str) -> String {
    let mut quote = None;
    let mut unquoted = String::new();
    for c in line.chars() {
        match quote {
            Some(open) if c == open => quote = None,
            Some(_) => {}
            None if c == '"' || c == '\'' => quote = Some(c),
            None if c == '#' && unquoted.ends_with(char::is_whitespace) => break,
            None => unquoted.push(c),
        }
    }
    unquoted
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn common_mistakes_get_advice() {
        for (line, words) in [
            ("  text: {{ subject }}", "`text: \"{{ column }}\"`"),
            ("prompt: {text: {{ subject }}}", "`text: \"{{ column }}\"`"),
            ("    content: {% if x %}y{% endif %}", "behind `content: |`"),
            ("output: {uri: out/${date}}", "`uri: \"${name}\"`"),
            ("\ttext: x", "use spaces"),
            ("  text: a: b", "`text: \"…\"`"),
        ] {
            let advice = advice(line).unwrap_or_else(|| panic!("{line}"));
            assert!(advice.contains(words), "{line}: {advice}");
        }
    }

    #[test]
    fn other_lines_get_no_advice() {
        for line in [
            "text: \"{{ subject }}\"",
            "text: '${date}: {{ x }}'",
            "name: x # not: this {{ one }}",
            "input: {uri: a, format: csv}",
            "name x",
            "",
        ] {
            assert_eq!(advice(line), None, "{line}");
        }
    }
}
