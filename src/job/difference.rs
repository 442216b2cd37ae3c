//! Differences between two jobs, field by field, for messages.

use std::collections::{BTreeMap, BTreeSet};

use serde_json::{Map, Value};

use super::carry::ALL;

/// Maximum number of differences that a line names.
const NAMED_MAX: usize = 3;
/// Longest value in a line, in characters.
const VALUE_CHARS_MAX: usize = 60;

/// A field with different values in two jobs.
#[derive(Debug, PartialEq)]
pub struct Difference {
    /// The field's path in the job file.
    field: String,
    was: Option<Value>,
    is: Option<Value>,
}

impl Difference {
    /// Whether this difference makes it another job.
    pub fn is_of_another_job(&self) -> bool {
        let harmless = ["name", "model", "precision", "kv_cache", "shards.rows", "output.uri"];
        !harmless.contains(&self.field.as_str())
    }

    /// Whether the field was fixed when the job began, so that its new value is ignored.
    pub fn is_settled_at_the_start(&self) -> bool {
        ["name", "shards.rows"].contains(&self.field.as_str())
    }

    /// The differences in one line; `None` if there are none.
    pub fn list<'a>(found: impl Iterator<Item = &'a Difference>) -> Option<String> {
        let lines: Vec<String> = found.map(Difference::line).collect();
        match lines.len() {
            0 => None,
            count @ 1..=NAMED_MAX => Some(lines[..count].join(", ")),
            count => Some(format!(
                "{}, and {} more",
                lines[..NAMED_MAX].join(", "),
                count - NAMED_MAX
            )),
        }
    }

    fn line(&self) -> String {
        let [was, is] = [&self.was, &self.is].map(|value| value.as_ref().map(Value::to_string));
        // Long values are shown from shortly before the first difference.
        let alike = match (&was, &is) {
            (Some(was), Some(is)) => was.chars().zip(is.chars()).take_while(|(a, b)| a == b).count(),
            _ => 0,
        };
        let [was, is] = [was, is].map(|text| text.map(|text| short(&text, alike)));
        match (was, is) {
            (Some(was), Some(is)) => format!("`{}` was {was} and is {is}", self.field),
            (Some(was), None) => format!("`{}` was {was} and is left out", self.field),
            (None, is) => format!("`{}` was left out and is {}", self.field, is.unwrap_or_default()),
        }
    }
}

/// The differences of `is` from `was`, both made by [`Job::resolved`](super::Job::resolved).
/// Budgets, `on_finish` and the job files' locations are ignored.
pub fn differences(was: &Value, is: &Value) -> Vec<Difference> {
    let mut found = Vec::new();
    let [was, is] = [was, is].map(with_written_fields);
    compare(Some(&was), Some(&is), "", &mut found);
    found.retain(|one| {
        let top = one.field.split(['.', '[']).next().unwrap_or_default();
        !["budget", "on_finish", "base_dir", "file", "hash"].contains(&top)
    });
    found
}

/// A resolved job with the fields that a job file has in place of the resolved ones.
fn with_written_fields(job: &Value) -> Value {
    let mut job = job.clone();
    if let Some(Value::Object(output)) = job.get_mut("output") {
        let carry = written_carry(output);
        output.insert("carry".into(), carry);
    }
    if let Some(Value::Object(generate)) = job.get_mut("generate")
        && let Some(Value::Object(mut shape)) = generate.shift_remove("shape")
    {
        if let Some(Value::Object(mut choice)) = shape.shift_remove("choice") {
            let probabilities = choice.shift_remove("probabilities").filter(|asked| *asked == true);
            shape.insert("choice".into(), choice.shift_remove("choices").unwrap_or_default());
            shape.insert("choice_probabilities".into(), probabilities.unwrap_or_default());
        }
        generate.extend(shape);
    }
    if let Some(Value::Object(input)) = job.get_mut("input")
        && let Some(Value::Object(csv)) = input.shift_remove("csv")
    {
        input.extend(csv);
    }
    if let Some(template) = job.pointer_mut("/prompt/chat_template")
        && let Some(written) = ["named", "source"].iter().find_map(|kind| template.get(kind).cloned())
    {
        *template = written;
    }
    job
}

/// The `output.carry` that a job file would have for the columns of `output`.
fn written_carry(output: &mut Map<String, Value>) -> Value {
    let [columns, renamed, all] = ["carry", "renamed", "carry_all"].map(|name| output.shift_remove(name));
    let columns: Vec<String> = serde_json::from_value(columns.unwrap_or_default()).unwrap_or_default();
    let renamed: BTreeMap<String, String> = serde_json::from_value(renamed.unwrap_or_default()).unwrap_or_default();
    let all = all.filter(|all| *all == true).map(|_| ALL);
    match all {
        None if columns.is_empty() => Value::Null,
        None if renamed.is_empty() => columns.into(),
        Some(all) if columns.is_empty() => all.into(),
        all => {
            let new = |column: &String| renamed.get(column).unwrap_or(column).clone();
            let named = columns.iter().map(|column| (new(column), Value::from(column.as_str())));
            named
                .chain(all.map(|all| (all.to_string(), Value::from(all))))
                .collect()
        }
    }
}

fn compare(was: Option<&Value>, is: Option<&Value>, path: &str, found: &mut Vec<Difference>) {
    // A null field equals a missing field.
    let [was, is] = [was, is].map(|value| value.filter(|value| !value.is_null()));
    match (was, is) {
        (was, is) if was == is => {}
        (Some(Value::Object(was)), Some(Value::Object(is))) => {
            let keys: BTreeSet<&String> = was.keys().chain(is.keys()).collect();
            for key in keys {
                let below = match path {
                    "" => key.clone(),
                    path => format!("{path}.{key}"),
                };
                compare(was.get(key), is.get(key), &below, found);
            }
        }
        (Some(Value::Array(was)), Some(Value::Array(is))) if was.len() == is.len() => {
            for (i, (was, is)) in was.iter().zip(is).enumerate() {
                compare(Some(was), Some(is), &format!("{path}[{i}]"), found);
            }
        }
        (was, is) => found.push(Difference {
            field: as_written(path),
            was: was.cloned(),
            is: is.cloned(),
        }),
    }
}

/// The job file's field for `path` of a resolved job.
fn as_written(path: &str) -> String {
    let path = match path {
        "shard_rows" => "shards.rows",
        "gold" => "report.gold",
        "output.writing" | "output.writing.codec" => "output.compression",
        "output.writing.level" => "output.compression_level",
        "output.writing.group_rows" => "output.row_group_rows",
        path => path,
    };
    path.replace("input.uris", "input.uri")
        .replace("prompt.kind.", "prompt.")
        .replace(".parts", ".content")
}

/// A value for a line; a long value is cut to the part around its `at`-th character.
fn short(text: &str, at: usize) -> String {
    let length = text.chars().count();
    if length <= VALUE_CHARS_MAX {
        return text.to_string();
    }
    let start = at.saturating_sub(VALUE_CHARS_MAX / 3).min(length - VALUE_CHARS_MAX);
    let part: String = text.chars().skip(start).take(VALUE_CHARS_MAX).collect();
    let before = if start > 0 { "…" } else { "" };
    let behind = if start + VALUE_CHARS_MAX < length { "…" } else { "" };
    format!("{before}{part}{behind}")
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn list(was: Value, is: Value) -> Option<String> {
        Difference::list(differences(&was, &is).iter())
    }

    #[test]
    fn fields_are_named_as_the_job_file_has_them() {
        let was = json!({"input": {"uris": ["a.csv"]}, "prompt": {"kind": {"messages": [{"parts": ["x"]}]}}, "shard_rows": 5,
            "generate": {"seed": 1}, "gold": null, "budget": {"usd": 1}, "on_finish": {"url": "http://a/"}, "base_dir": "/a", "file": "a.yaml", "hash": "1"});
        let is = json!({"input": {"uris": ["b.csv"]}, "prompt": {"kind": {"messages": [{"parts": ["y"]}]}}, "shard_rows": 6,
            "generate": {}, "gold": "g", "budget": {"usd": 2}, "base_dir": "/b", "file": "b.yaml", "hash": "2"});
        let found = differences(&was, &is);
        let lines: Vec<String> = found.iter().map(Difference::line).collect();
        assert_eq!(
            lines,
            [
                "`generate.seed` was 1 and is left out",
                "`report.gold` was left out and is \"g\"",
                "`input.uri[0]` was \"a.csv\" and is \"b.csv\"",
                "`prompt.messages[0].content[0]` was \"x\" and is \"y\"",
                "`shards.rows` was 5 and is 6",
            ]
        );
        assert!(found.iter().filter(|one| one.is_of_another_job()).count() == 4);
        assert_eq!(found.iter().filter(|one| one.is_settled_at_the_start()).count(), 1);
    }

    #[test]
    fn what_is_carried_is_told_as_it_is_written() {
        let carry = |columns: Value, renamed: Value, all: bool| json!({"output": {"carry": columns, "renamed": renamed, "carry_all": all}});
        let names = || json!(["a", "b"]);
        for (was, is, line) in [
            (
                carry(json!([]), json!(null), true),
                carry(names(), json!(null), false),
                r#"`output.carry` was "*" and is ["a","b"]"#,
            ),
            (
                carry(names(), json!({"a": "x"}), true),
                carry(json!([]), json!(null), false),
                r#"`output.carry` was {"x":"a","b":"b","*":"*"} and is left out"#,
            ),
            (
                carry(names(), json!({"a": "x"}), false),
                carry(names(), json!({"a": "y"}), false),
                r#"`output.carry.x` was "a" and is left out, `output.carry.y` was left out and is "a""#,
            ),
        ] {
            assert_eq!(list(was, is).as_deref(), Some(line));
        }
        let generate = |shape: Value| json!({"generate": {"shape": shape}});
        for (was, is, line) in [
            (
                json!("free"),
                json!({"regex": "a"}),
                r#"`generate.regex` was left out and is "a""#,
            ),
            (
                json!({"choice": {"choices": ["a", "b"], "probabilities": false}}),
                json!({"choice": {"choices": ["a", "c"], "probabilities": true}}),
                r#"`generate.choice[1]` was "b" and is "c", `generate.choice_probabilities` was left out and is true"#,
            ),
        ] {
            assert_eq!(list(generate(was), generate(is)).as_deref(), Some(line));
        }
        let other = json!({"input": {"csv": {"delimiter": ";"}}, "prompt": {"chat_template": {"named": "x"}}});
        assert_eq!(
            list(
                other,
                json!({"input": {}, "prompt": {"chat_template": {"source": "{{ a }}"}}})
            )
            .as_deref(),
            Some(r#"`input.delimiter` was ";" and is left out, `prompt.chat_template` was "x" and is "{{ a }}""#)
        );
        // The record is of a gristmill without the newer fields.
        assert_eq!(
            list(
                json!({"output": {"carry": ["a"]}}),
                carry(json!(["a"]), json!({}), false)
            ),
            None
        );
    }

    #[test]
    fn a_line_is_short() {
        let many = |from: i32| json!({"generate": (from..from + 9).map(|i| (format!("f{}", i - from), json!(i))).collect::<serde_json::Map<_, _>>()});
        let line = list(many(0), many(100)).unwrap();
        assert!(line.ends_with("`generate.f2` was 2 and is 102, and 6 more"), "{line}");
        let line = list(json!({"name": "x".repeat(1000)}), json!({"name": vec!["y"; 500]})).unwrap();
        assert!(line.chars().count() < 200, "{line}");
        let line = list(
            json!({"name": format!("{}a", "x".repeat(99))}),
            json!({"name": format!("{}b", "x".repeat(99))}),
        )
        .unwrap();
        assert!(line.contains("xa\" and is ") && line.ends_with("xb\""), "{line}");
        assert_eq!(list(many(1), many(1)), None);
        assert_eq!(list(json!({"a": null}), json!({})), None);
    }
}
