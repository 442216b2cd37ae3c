//! The words of a template: what can be told from its text without a parser's tree.

use std::collections::BTreeSet;

/// A word inside a template's tags.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Word<'a> {
    /// A name, a keyword or a number.
    Name(&'a str),
    /// What stands between quotes, as written.
    Text(&'a str),
    Sign(char),
}

use Word::{Name, Sign, Text};

/// Is the variable `name` read anywhere other than to call it?
pub(super) fn is_read(source: &str, name: &str) -> bool {
    tags(source).into_iter().map(words).any(|words| {
        (0..words.len()).any(|i| {
            let before = i.checked_sub(1).map(|i| words[i]);
            // A field, a filter, a test, a named argument.
            let other = matches!(before, Some(Sign('.' | '|') | Name("is")))
                || (words.get(i + 1) == Some(&Sign('=')) && words.get(i + 2) != Some(&Sign('=')));
            words[i] == Name(name) && !other && words.get(i + 1) != Some(&Sign('('))
        })
    })
}

/// The constant fields of the variable `of` (`of["a b"]`, `of.a`) that a template reads without asking whether they
/// exist; none where the template itself gives `of` a value.
pub(super) fn fields_of(source: &str, of: &str) -> BTreeSet<String> {
    let mut fields = BTreeSet::new();
    let mut asked = BTreeSet::new();
    for words in tags(source).into_iter().map(words) {
        if binds(&words, of) {
            return BTreeSet::new();
        }
        for i in 0..words.len() {
            let rest = &words[i..];
            match rest {
                [Text(field), Name("in"), Name(name), ..] | [Text(field), Name("not"), Name("in"), Name(name), ..]
                    if *name == of =>
                {
                    asked.insert(field.to_string());
                }
                _ => {}
            }
            let is_field = i.checked_sub(1).is_some_and(|i| words[i] == Sign('.'));
            let (field, after) = match rest {
                [Name(name), Sign('['), Text(field), Sign(']'), after @ ..] if *name == of && !field.contains('\\') => {
                    (field, after)
                }
                [Name(name), Sign('.'), Name(field), after @ ..] if *name == of => (field, after),
                _ => continue,
            };
            match after {
                _ if is_field => {}
                // A method of the mapping.
                [Sign('('), ..] => {}
                [Name("is"), Name("defined" | "undefined"), ..]
                | [Name("is"), Name("not"), Name("defined" | "undefined"), ..]
                | [Sign('|'), Name("default" | "d"), ..] => {
                    asked.insert(field.to_string());
                }
                _ => {
                    fields.insert(field.to_string());
                }
            }
        }
    }
    &fields - &asked
}

/// Words that are no variables.
const KEYWORDS: [&str; 33] = [
    "if",
    "elif",
    "else",
    "for",
    "in",
    "not",
    "and",
    "or",
    "is",
    "set",
    "with",
    "macro",
    "call",
    "filter",
    "block",
    "do",
    "true",
    "false",
    "none",
    "True",
    "False",
    "None",
    "recursive",
    "loop",
    "self",
    "super",
    "caller",
    "include",
    "import",
    "from",
    "as",
    "extends",
    "autoescape",
];

/// The variables in tags that cut slices (`a[1:]`), which minijinja's own list of variables lacks.
pub(super) fn of_slices(source: &str) -> BTreeSet<String> {
    let all: Vec<Vec<Word>> = tags(source).into_iter().map(words).collect();
    let mut found = BTreeSet::new();
    for words in &all {
        let mut brackets = Vec::new();
        let sliced = words.iter().any(|word| {
            match word {
                Sign(open @ ('[' | '{' | '(')) => brackets.push(*open),
                Sign(']' | '}' | ')') => drop(brackets.pop()),
                Sign(':') => return brackets.last() == Some(&'['),
                _ => {}
            }
            false
        });
        if !sliced {
            continue;
        }
        for (i, word) in words.iter().enumerate() {
            let Name(name) = word else { continue };
            let before = i.checked_sub(1).map(|i| words[i]);
            let other = matches!(before, Some(Sign('.' | '|') | Name("is" | "filter")))
                || matches!(&words[..i], [.., Name("is"), Name("not")])
                || (words.get(i + 1) == Some(&Sign('=')) && words.get(i + 2) != Some(&Sign('=')))
                || words.get(i + 1) == Some(&Sign('('));
            let plain = !name.starts_with(|c: char| c.is_ascii_digit()) && !KEYWORDS.contains(name);
            if plain && !other && !all.iter().any(|words| binds(words, name)) {
                found.insert(name.to_string());
            }
        }
    }
    found
}

/// Does a tag give `name` a value?
fn binds(words: &[Word], name: &str) -> bool {
    let end = match words.first() {
        Some(Name("for")) => words.iter().position(|word| *word == Name("in")),
        Some(Name("set")) => words.iter().position(|word| *word == Sign('=')),
        Some(Name("macro" | "call" | "import" | "from")) => None,
        Some(Name("with")) => return words.windows(2).any(|pair| pair == [Name(name), Sign('=')]),
        _ => return false,
    };
    words[..end.unwrap_or(words.len())].contains(&Name(name))
}

/// The insides of a template's tags, comments and raw text left out.
fn tags(source: &str) -> Vec<&str> {
    let mut found = Vec::new();
    let mut rest = source;
    while let Some(at) = rest.find('{') {
        let tag = &rest[at..];
        let end = match tag.as_bytes().get(1) {
            Some(b'#') => tag.find("#}").map(|end| end + 2),
            Some(b'{') => close_of(tag, "}}"),
            Some(b'%') => close_of(tag, "%}"),
            _ => {
                rest = &tag[1..];
                continue;
            }
        };
        // Templates that do not parse come to nobody's eyes.
        let end = end.unwrap_or(tag.len());
        rest = &tag[end..];
        let inner = tag[2..end].trim_end_matches(['}', '%']).trim_matches(['-', '+']).trim();
        if inner == "raw" {
            rest = &rest[rest.find("endraw").unwrap_or(rest.len())..];
        } else if !tag.starts_with("{#") {
            found.push(inner);
        }
    }
    found
}

fn words(tag: &str) -> Vec<Word<'_>> {
    let part_of_name = |c: char| c.is_alphanumeric() || c == '_';
    let mut found = Vec::new();
    let mut rest = tag;
    while let Some(c) = rest.chars().next() {
        let (word, length) = match c {
            '"' | '\'' => {
                let mut escaped = false;
                let end = rest[1..].find(|next: char| {
                    let ends = next == c && !escaped;
                    escaped = next == '\\' && !escaped;
                    ends
                });
                let end = end.map_or(rest.len(), |end| end + 1);
                (Text(&rest[1..end]), (end + 1).min(rest.len()))
            }
            c if part_of_name(c) => {
                let end = rest.find(|c| !part_of_name(c)).unwrap_or(rest.len());
                (Name(&rest[..end]), end)
            }
            c => (Sign(c), c.len_utf8()),
        };
        if !c.is_whitespace() {
            found.push(word);
        }
        rest = &rest[length..];
    }
    found
}

/// Where a tag ends, quoted text in it skipped.
pub(super) fn close_of(tag: &str, close: &str) -> Option<usize> {
    let mut quote = None;
    let mut escaped = false;
    for (i, c) in tag.char_indices().skip(2) {
        match quote {
            Some(_) if escaped => escaped = false,
            Some(_) if c == '\\' => escaped = true,
            Some(open) if c == open => quote = None,
            Some(_) => {}
            None if c == '"' || c == '\'' => quote = Some(c),
            None if tag[i..].starts_with(close) => return Some(i + close.len()),
            None => {}
        }
    }
    None
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn fields_are_found_where_they_can_be_told() {
        let fields = |source: &str| fields_of(source, "row").into_iter().collect::<Vec<_>>();
        for (source, expected) in [
            ("{{ row[\"two wrods\"] }}", vec!["two wrods"]),
            (
                "{{- row [ 'a' ] ~ row.b.c -}}{% if row['d'] == 1 %}{% endif %}",
                vec!["a", "b", "d"],
            ),
            (
                "{{ row[a] }}{{ row.items() }}{{ row | tojson }}{{ x.row.y }}{{ 'row.z' }}",
                vec![],
            ),
            ("{# row.a #}{% raw %}{{ row.b }}{% endraw %}{ row.c }", vec![]),
            (
                "{% if row.a is defined %}{{ row.a }}{% endif %}{{ row.b | default('') }}",
                vec![],
            ),
            (
                "{% if 'a' in row and 'b' not in row %}{{ row.a }}{{ row['b'] }}{% endif %}",
                vec![],
            ),
            ("{% for row in rows %}{{ row.a }}{% endfor %}", vec![]),
            ("{% set row = b %}{{ row.a }}", vec![]),
            ("{% for x in row.a %}{{ row['it\\'s'] }}{% endfor %}", vec!["a"]),
            ("{% with x = row.a %}{{ x }}{% endwith %}{{ row.", vec!["a"]),
        ] {
            assert_eq!(fields(source), expected, "{source}");
        }
    }

    #[test]
    fn slices_have_their_variables() {
        let of = |source: &str| of_slices(source).into_iter().collect::<Vec<_>>();
        for (source, expected) in [
            ("{{ text[:500] }}{{ b }}", vec!["text"]),
            ("{{ (a ~ b)[c:] | upper }}", vec!["a", "b", "c"]),
            (
                "{% for x in items[1:] if x is not defined %}{{ x[1:] }}{% endfor %}",
                vec!["items"],
            ),
            ("{% set y = a.b[::2] %}{{ f(y[1:], z=row['c'][:2]) }}", vec!["a", "row"]),
            ("{{ {'a': b}['a'] }}{{ '[:]' ~ c }}", vec![]),
        ] {
            assert_eq!(of(source), expected, "{source}");
        }
    }

    #[test]
    fn calls_are_no_reads() {
        for (source, expected) in [
            ("{{ range }}", true),
            ("{{ range(1) }}", false),
            ("{{ range(1) }}{{ range.a }}", true),
            ("{{ x.range }}{{ f(range=1) }}{{ x | range }}{{ x is range }}", false),
            ("{{ range == 1 }}", true),
        ] {
            assert_eq!(is_read(source, "range"), expected, "{source}");
        }
    }
}
