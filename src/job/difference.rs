//! Differences between two jobs, field by field, for messages.

use std::collections::{BTreeMap, BTreeSet};

use serde_json::{Map, Value};

use super::carry::ALL_COLUMNS;

/// Maximum number of differences that a message describes.
const LISTED_MAX: usize = 3;
/// Maximum length of a value in a message, in characters.
const VALUE_CHARS_MAX: usize = 60;

/// A field with different values in two jobs.
#[derive(Debug, PartialEq)]
pub struct Difference {
    /// The field's path in the job file.
    field: String,
    old: Option<Value>,
    new: Option<Value>,
}

impl Difference {
    /// Whether jobs that differ in this field are different jobs.
    pub fn makes_another_job(&self) -> bool {
        let harmless = [
            "name",
            "model",
            "adapter",
            "precision",
            "kv_cache",
            "shards.rows",
            "output.uri",
        ];
        !harmless.contains(&self.field.as_str())
    }

    /// Whether the field is fixed once the job has begun, so that its new value is ignored.
    pub fn is_fixed_at_start(&self) -> bool {
        ["name", "shards.rows"].contains(&self.field.as_str())
    }

    /// Describes the differences in one line; `None` if there are none.
    pub fn list<'a>(found: impl Iterator<Item = &'a Difference>) -> Option<String> {
        let lines: Vec<String> = found.map(Difference::describe).collect();
        match lines.len() {
            0 => None,
            count @ 1..=LISTED_MAX => Some(lines[..count].join(", ")),
            count => Some(format!(
                "{}, and {} more",
                lines[..LISTED_MAX].join(", "),
                count - LISTED_MAX
            )),
        }
    }

    fn describe(&self) -> String {
        let [old, new] = [&self.old, &self.new].map(|value| value.as_ref().map(Value::to_string));
        // An excerpt of a long value shows the first character that differs.
        let common_chars = match (&old, &new) {
            (Some(old), Some(new)) => old.chars().zip(new.chars()).take_while(|(a, b)| a == b).count(),
            _ => 0,
        };
        let [old, new] = [old, new].map(|text| text.map(|text| excerpt(&text, common_chars)));
        match (old, new) {
            (Some(old), Some(new)) => format!("`{}` was {old} and is {new}", self.field),
            (Some(old), None) => format!("`{}` was {old} and is left out", self.field),
            (None, new) => format!("`{}` was left out and is {}", self.field, new.unwrap_or_default()),
        }
    }
}

/// The differences between two jobs, both made by [`Job::resolved`](super::Job::resolved). Budgets,
/// `on_finish`, and the locations and hashes of the job files are ignored.
pub fn differences(old: &Value, new: &Value) -> Vec<Difference> {
    let mut found = Vec::new();
    let [old, new] = [old, new].map(in_job_file_form);
    compare(Some(&old), Some(&new), "", &mut found);
    found.retain(|difference| {
        let top = difference.field.split(['.', '[']).next().unwrap_or_default();
        !["budget", "on_finish", "base_dir", "file", "hash"].contains(&top)
    });
    found
}

/// Converts a resolved job to the fields of a job file.
fn in_job_file_form(job: &Value) -> Value {
    let mut job = job.clone();
    if let Some(Value::Object(output)) = job.get_mut("output") {
        let carry = carry_in_job_file(output);
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
        && let Some(source) = ["named", "source"].iter().find_map(|kind| template.get(kind).cloned())
    {
        *template = source;
    }
    job
}

/// The value of `output.carry` in a job file that carries the columns of `output`.
fn carry_in_job_file(output: &mut Map<String, Value>) -> Value {
    let [columns, renamed, all] = ["carry", "renamed", "carry_all"].map(|name| output.shift_remove(name));
    let columns: Vec<String> = serde_json::from_value(columns.unwrap_or_default()).unwrap_or_default();
    let renamed: BTreeMap<String, String> = serde_json::from_value(renamed.unwrap_or_default()).unwrap_or_default();
    let all = all.filter(|all| *all == true).map(|_| ALL_COLUMNS);
    match all {
        None if columns.is_empty() => Value::Null,
        None if renamed.is_empty() => columns.into(),
        Some(all) if columns.is_empty() => all.into(),
        all => {
            let name = |column: &String| renamed.get(column).unwrap_or(column).clone();
            let named = columns
                .iter()
                .map(|column| (name(column), Value::from(column.as_str())));
            named
                .chain(all.map(|all| (all.to_string(), Value::from(all))))
                .collect()
        }
    }
}

fn compare(old: Option<&Value>, new: Option<&Value>, path: &str, found: &mut Vec<Difference>) {
    // Null is the same as a missing field.
    let [old, new] = [old, new].map(|value| value.filter(|value| !value.is_null()));
    match (old, new) {
        (old, new) if old == new => {}
        (Some(Value::Object(old)), Some(Value::Object(new))) => {
            let keys: BTreeSet<&String> = old.keys().chain(new.keys()).collect();
            for key in keys {
                let key_path = match path {
                    "" => key.clone(),
                    path => format!("{path}.{key}"),
                };
                compare(old.get(key), new.get(key), &key_path, found);
            }
        }
        (Some(Value::Array(old)), Some(Value::Array(new))) if old.len() == new.len() => {
            for (i, (old, new)) in old.iter().zip(new).enumerate() {
                compare(Some(old), Some(new), &format!("{path}[{i}]"), found);
            }
        }
        (old, new) => found.push(Difference {
            field: field_in_job_file(path),
            old: old.cloned(),
            new: new.cloned(),
        }),
    }
}

/// The path in a job file of the field that is at `path` in a resolved job.
fn field_in_job_file(path: &str) -> String {
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

/// Shortens a long text to an excerpt around its character number `center`.
fn excerpt(text: &str, center: usize) -> String {
    let length = text.chars().count();
    if length <= VALUE_CHARS_MAX {
        return text.to_string();
    }
    let start = center.saturating_sub(VALUE_CHARS_MAX / 3).min(length - VALUE_CHARS_MAX);
    let part: String = text.chars().skip(start).take(VALUE_CHARS_MAX).collect();
    let before = if start > 0 { "…" } else { "" };
    let after = if start + VALUE_CHARS_MAX < length { "…" } else { "" };
    format!("{before}{part}{after}")
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn list(old: Value, new: Value) -> Option<String> {
        Difference::list(differences(&old, &new).iter())
    }

    #[test]
    fn fields_have_their_names_in_the_job_file() {
        let old = json!({"input": {"uris": ["a.csv"]}, "prompt": {"kind": {"messages": [{"parts": ["x"]}]}}, "shard_rows": 5,
            "generate": {"seed": 1}, "gold": null, "budget": {"usd": 1}, "on_finish": {"url": "http://a/"}, "base_dir": "/a", "file": "a.yaml", "hash": "1"});
        let new = json!({"input": {"uris": ["b.csv"]}, "prompt": {"kind": {"messages": [{"parts": ["y"]}]}}, "shard_rows": 6,
            "generate": {}, "gold": "g", "budget": {"usd": 2}, "base_dir": "/b", "file": "b.yaml", "hash": "2"});
        let found = differences(&old, &new);
        let lines: Vec<String> = found.iter().map(Difference::describe).collect();
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
        assert!(found.iter().filter(|difference| difference.makes_another_job()).count() == 4);
        assert_eq!(
            found.iter().filter(|difference| difference.is_fixed_at_start()).count(),
            1
        );
    }

    #[test]
    fn carry_and_constraints_are_reported_in_job_file_form() {
        let carry = |columns: Value, renamed: Value, all: bool| json!({"output": {"carry": columns, "renamed": renamed, "carry_all": all}});
        let names = || json!(["a", "b"]);
        for (old, new, line) in [
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
            assert_eq!(list(old, new).as_deref(), Some(line));
        }
        let generate = |shape: Value| json!({"generate": {"shape": shape}});
        for (old, new, line) in [
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
            assert_eq!(list(generate(old), generate(new)).as_deref(), Some(line));
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
        // A record of an older gristmill does not have the newer fields.
        assert_eq!(
            list(
                json!({"output": {"carry": ["a"]}}),
                carry(json!(["a"]), json!({}), false)
            ),
            None
        );
    }

    #[test]
    fn lists_of_differences_are_short() {
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
