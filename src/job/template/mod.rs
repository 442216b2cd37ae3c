//! Templates based on minijinja: the environments of column templates and of chat templates, and
//! their limits.
//!
//! A column template refers to columns (`{{ subject }}`; `{{ row["two words"] }}` for names that
//! are no identifiers). Values are rendered as follows: null as nothing, booleans as `true` and
//! `false`, numbers in their shortest exact form, texts unchanged (decimals, ISO 8601 timestamps
//! and binary data arrive as texts), lists and structs as compact JSON. A missing column is an
//! error; it is not rendered as nothing.
//!
//! A template may be untrusted: it comes from a checkpoint or from a queued job. The depth of its
//! syntax tree is limited before the tree is built (`program`). minijinja limits the number of
//! executed instructions. A budget of bytes, items and time (`budget`) limits intermediate values
//! and output; meters between the template's instructions charge the budget (`meter`).
//!
//! See docs/decisions/045-template-instructions-are-metered.md.

use std::collections::BTreeSet;
use std::panic::{AssertUnwindSafe, catch_unwind};

use chrono::NaiveDateTime;
use minijinja::syntax::SyntaxConfig;
use minijinja::value::{Serde, ValueKind};
use minijinja::{AutoEscape, Environment, Error, ErrorKind, Output, UndefinedBehavior, Value};

use super::names::Names;
use super::{one_line, python};
use budget::{OUTPUT_BYTES_MAX, Rendering};
use program::Program;
pub(super) use program::is_large_constant;

/// Maximum number of executed instructions per rendering; a long conversation with tools takes some
/// thousands.
const FUEL_MAX: u64 = 5_000_000;
/// Maximum length of a template's error message, in bytes: `raise_exception` accepts any text.
const ERROR_BYTES_MAX: usize = 16 << 10;
/// Maximum length of a format for `strftime_now`, in bytes.
const TIME_FORMAT_BYTES_MAX: usize = 1024;
/// The variable that holds all columns.
const ROW: &str = "row";

/// The first text between `{{` and `}}` that looks like a column's name with spaces.
fn spaced_name(source: &str) -> Option<&str> {
    const OPERATORS: [&str; 7] = ["and", "else", "if", "in", "is", "not", "or"];
    let mut rest = source;
    while let Some((_, inside)) = rest.split_once("{{") {
        let (name, after) = inside.split_once("}}")?;
        let name = name.trim();
        let is_name_char = |c: char| c.is_alphanumeric() || c == '_' || c == ' ';
        let has_operator = name.split(' ').any(|word| OPERATORS.contains(&word));
        if name.contains(' ') && name.chars().all(is_name_char) && !has_operator {
            return Some(name);
        }
        rest = after;
    }
    None
}

/// A compiled template.
pub(super) struct Template {
    env: Environment<'static>,
    names: Names,
    program: Program,
}

impl Template {
    /// Compiles a template over a row's columns; `name` is the job's field with the template.
    pub(super) fn for_columns(name: &str, source: &str) -> Result<Template, String> {
        let mut env = base_environment();
        env.set_undefined_behavior(UndefinedBehavior::Strict);
        // A final newline of a column template is kept.
        set_syntax(&mut env, |syntax| syntax.keep_trailing_newline(true))?;
        env.set_formatter(|out, _, value| {
            match value.kind() {
                ValueKind::None => {}
                ValueKind::Undefined => return Err(Error::from(ErrorKind::UndefinedError)),
                ValueKind::String => return emit_text(out, value.as_str().unwrap_or_default()),
                _ => return emit_text(out, &python::compact_json(value)?),
            }
            Ok(())
        });
        let template = Template::compile(env, name, source.to_string()).map_err(|why| match spaced_name(source) {
            Some(words) => format!("{why}; a column with such a name is written `{{{{ row[\"{words}\"] }}}}`"),
            None => why,
        })?;
        template.check_limits()?;
        Ok(template)
    }

    /// Compiles a chat template in an environment like transformers'. `now` is the time that
    /// `strftime_now` returns.
    pub(super) fn for_chat(name: &str, source: &str, now: NaiveDateTime) -> Result<Template, String> {
        let mut env = base_environment();
        env.set_undefined_behavior(UndefinedBehavior::Lenient);
        set_syntax(&mut env, |syntax| syntax.trim_blocks(true).lstrip_blocks(true))?;
        env.add_function("raise_exception", |message: Value| -> Result<Value, Error> {
            Err(Error::new(ErrorKind::InvalidOperation, value_text(&message)?))
        });
        env.add_function("strftime_now", move |format: &str| strftime(now, format));
        env.set_formatter(|out, _, value| match value.kind() {
            ValueKind::Number if !value.is_integer() => match f64::try_from(value.clone()) {
                Ok(float) if float.is_finite() => emit_text(out, &python::float_repr(float)),
                _ => emit_text(out, &value.to_string()),
            },
            ValueKind::String => emit_text(out, value.as_str().unwrap_or_default()),
            _ => emit_text(out, &value_text(value)?),
        });
        Template::compile(env, name, without_generation_tags(source))
    }

    fn compile(env: Environment<'static>, name: &str, source: String) -> Result<Template, String> {
        let (program, names) = Program::compile(name, source, env.syntax(), ROW)?;
        Ok(Template { env, names, program })
    }

    /// The variables that the template reads without having set them; calls do not count.
    pub(super) fn variables_read(&self) -> &BTreeSet<String> {
        &self.names.reads
    }

    /// Messages about unknown filters, tests, methods and functions, one line each, also in branches
    /// that no row reaches.
    pub(super) fn unknown_name_messages(&self) -> Vec<String> {
        self.names.unknown_name_messages(&self.env)
    }

    /// Whether the template calls the function `name`.
    pub(super) fn calls(&self, name: &str) -> bool {
        self.names.calls.contains_key(name)
    }

    /// Whether `name` is a function that templates can call.
    pub(super) fn has_function(&self, name: &str) -> bool {
        self.env.globals().any(|(function, _)| function == name)
    }

    /// Renders with `context`; the error is one line.
    pub(super) fn render(&self, context: Value) -> Result<String, String> {
        let rendering = Rendering::begin();
        self.run(context, &rendering).map_err(|error| error.message)
    }

    /// Runs the template.
    fn run(&self, context: Value, rendering: &Rendering) -> Result<String, RenderError> {
        let mut text = String::new();
        let run = AssertUnwindSafe(|| self.program.run(&self.env, context, &mut text));
        // A panic of minijinja is an error of this row, and does not end the worker.
        let result = catch_unwind(run).map_err(|_| RenderError {
            message: "it breaks the template engine".to_string(),
            exceeds_limit: false,
        })?;
        result.map_err(|error| RenderError {
            message: describe(&error),
            exceeds_limit: error.kind() == ErrorKind::OutOfFuel || rendering.was_refused(),
        })?;
        // The meters do not count short literal texts, so the whole length is checked here.
        if text.len() > OUTPUT_BYTES_MAX {
            Err(RenderError {
                message: budget::too_long_message(),
                exceeds_limit: true,
            })
        } else {
            Ok(text)
        }
    }

    /// Checks, before any row is read, that the template keeps its limits with a short text in every
    /// column. Other errors are ignored, since the real values may have other types.
    fn check_limits(&self) -> Result<(), String> {
        let columns = self.columns().names;
        let context = Value::from_pairs(columns.into_iter().map(|name| (name, Value::from("x"))));
        match self.run(context, &Rendering::begin()) {
            Err(error) if error.exceeds_limit => Err(error.message),
            _ => Ok(()),
        }
    }

    /// The columns that the template uses, as far as its source shows.
    pub(super) fn columns(&self) -> Columns {
        let mut names = self.names.reads.clone();
        let may_use_any = names.remove(ROW);
        Columns {
            names,
            row_fields: self.names.fields.clone(),
            tested_row_fields: self.names.tested_fields.clone(),
            may_use_any,
        }
    }
}

/// Why a rendering failed.
struct RenderError {
    /// One line.
    message: String,
    /// Whether the template exceeded a limit.
    exceeds_limit: bool,
}

/// The columns that a template uses.
#[derive(Debug, Default, PartialEq, Eq)]
pub(super) struct Columns {
    /// Columns that are variables of the template.
    pub names: BTreeSet<String>,
    /// Constant fields of `row`, except those whose existence the template tests (`is defined`,
    /// `in row`, `default`). They are columns, unless the input has a column named `row`.
    pub row_fields: BTreeSet<String>,
    /// Fields of `row` whose existence the template tests.
    pub tested_row_fields: BTreeSet<String>,
    /// Whether the template reads `row`, and so may use any column.
    pub may_use_any: bool,
}

/// The context of a column template: the row's columns, and `row` with all of them. A column named
/// `row` takes the place of the latter.
pub(super) fn column_context(fields: &serde_json::Map<String, serde_json::Value>) -> Value {
    let columns = Value::from(Serde(fields));
    if fields.contains_key(ROW) {
        return columns;
    }
    let names = fields
        .keys()
        .map(|name| (name.clone(), columns.get_attr(name).unwrap_or_default()));
    Value::from_pairs(names.chain([(ROW.to_string(), columns.clone())]))
}

/// The environment with what column templates and chat templates have in common.
fn base_environment() -> Environment<'static> {
    let mut env = Environment::new();
    // The meters add instructions, so the fuel is doubled.
    env.set_fuel(Some(2 * FUEL_MAX));
    env.set_auto_escape_callback(|_| AutoEscape::None);
    // Jinja has no such function, so templates may use the name as a variable.
    env.remove_global("debug");
    meter::install(&mut env);
    sized::install(&mut env);
    env.set_unknown_method_callback(python::call_method);
    env.add_filter("tojson", python::tojson);
    env.add_filter("indent", python::indent);
    env.add_filter("format", python::format);
    env.add_test("iterable", python::is_iterable);
    env.add_test("sequence", python::is_sequence);
    env
}

fn set_syntax(
    env: &mut Environment<'static>,
    change: impl FnOnce(&mut minijinja::syntax::SyntaxConfigBuilder) -> &mut minijinja::syntax::SyntaxConfigBuilder,
) -> Result<(), String> {
    let mut syntax = SyntaxConfig::builder();
    change(&mut syntax);
    env.set_syntax(syntax.build().map_err(|e| describe(&e))?);
    Ok(())
}

/// Charges and writes the text of an expression.
fn emit_text(out: &mut Output, text: &str) -> Result<(), Error> {
    budget::charge_emitted(text.len())?;
    Ok(out.write_str(text)?)
}

/// Converts a value to text after a check of its size.
fn value_text(value: &Value) -> Result<String, Error> {
    if budget::is_container(value) {
        budget::weigh(value)?;
    }
    Ok(value.to_string())
}

fn strftime(now: NaiveDateTime, format: &str) -> Result<String, Error> {
    use std::fmt::Write;
    if format.len() > TIME_FORMAT_BYTES_MAX {
        return Err(budget::refuse("strftime_now: a format of more than 1 KB"));
    }
    let mut out = String::new();
    write!(out, "{}", now.format(format)).map_err(|_| {
        Error::new(
            ErrorKind::InvalidOperation,
            format!("strftime_now: bad format `{format}`"),
        )
    })?;
    Ok(out)
}

/// Describes a minijinja error in one line: the line in the template, and the innermost cause.
fn describe(error: &Error) -> String {
    let mut innermost = error;
    let mut source = std::error::Error::source(error);
    while let Some(cause) = source {
        match cause.downcast_ref::<Error>() {
            Some(cause) => innermost = cause,
            None => break,
        }
        source = std::error::Error::source(cause);
    }
    let line = innermost
        .line()
        .or(error.line())
        .map(|line| format!("line {line}: "))
        .unwrap_or_default();
    let message = match innermost.kind() {
        ErrorKind::OutOfFuel => format!("it does not come to an end ({FUEL_MAX} steps)"),
        kind => match innermost.detail() {
            Some(detail) => detail.to_string(),
            None => kind.to_string(),
        },
    };
    let mut message = one_line(&format!("{line}{message}"));
    message.truncate(message.floor_char_boundary(ERROR_BYTES_MAX));
    message
}

/// Replaces `{% generation %}` … `{% endgeneration %}` by `{% with %}` … `{% endwith %}`, which has
/// the same scope of variables and no other effect. transformers adds these tags to Jinja to mark
/// the assistant's content.
fn without_generation_tags(source: &str) -> String {
    let mut out = String::with_capacity(source.len());
    let mut rest = source;
    while let Some(at) = rest.find('{') {
        let (before, tag) = rest.split_at(at);
        out.push_str(before);
        let end = match tag.as_bytes().get(1) {
            Some(b'#') => tag.find("#}").map(|end| end + 2),
            Some(b'{') => tag_end(tag, "}}"),
            Some(b'%') => tag_end(tag, "%}"),
            _ => Some(1),
        };
        // The parser reports an unclosed tag.
        let (tag, after) = tag.split_at(end.unwrap_or(tag.len()));
        rest = after;
        let word = tag.strip_prefix("{%").map(|inner| {
            inner
                .trim_end_matches("%}")
                .trim_start_matches(['-', '+'])
                .trim_end_matches(['-', '+'])
                .trim()
        });
        match word {
            Some("generation") => out.push_str(&tag.replace("generation", "with")),
            Some("endgeneration") => out.push_str(&tag.replace("endgeneration", "endwith")),
            Some("raw") => {
                // The content of a raw block is not parsed as a template.
                out.push_str(tag);
                let end = rest.find("endraw").unwrap_or(rest.len());
                out.push_str(&rest[..end]);
                rest = &rest[end..];
            }
            _ => out.push_str(tag),
        }
    }
    out.push_str(rest);
    out
}

/// The end of a tag that ends with `close` outside of quoted text.
fn tag_end(tag: &str, close: &str) -> Option<usize> {
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

pub(super) mod budget;
mod meter;
mod program;
pub(super) mod sized;

#[cfg(test)]
mod attacks;

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn render(source: &str, row: serde_json::Value) -> Result<String, String> {
        let serde_json::Value::Object(fields) = row else {
            panic!("no object")
        };
        Template::for_columns("t", source)?.render(column_context(&fields))
    }

    #[test]
    fn values_of_columns_have_a_defined_form() {
        let row = json!({
            "null": null, "flag": true, "int": 7, "big": 9007199254740993u64, "float": 1.0, "small": 0.1,
            "decimal": "12.340", "time": "2026-11-21T01:02:03Z", "list": [1, "é<", null],
            "map": {"b": 1, "a": {"c": false}}, "text": "a \"b\" <c>",
        });
        let cases = [
            ("[{{ null }}]", "[]"),
            ("{{ flag }}", "true"),
            ("{{ int }} {{ big }}", "7 9007199254740993"),
            ("{{ float }} {{ small }}", "1.0 0.1"),
            ("{{ decimal }} {{ time }}", "12.340 2026-11-21T01:02:03Z"),
            ("{{ list }}", "[1,\"é<\",null]"),
            ("{{ map }} {{ map.a.c }}", "{\"b\":1,\"a\":{\"c\":false}} false"),
            ("{{ text }}", "a \"b\" <c>"),
            ("{{ row['text'] }}\n", "a \"b\" <c>\n"),
            ("{% if null is none %}none{% endif %}", "none"),
            ("{{ null or 'nothing' }}", "nothing"),
        ];
        for (source, expected) in cases {
            assert_eq!(render(source, row.clone()).unwrap(), expected, "{source}");
        }
    }

    #[test]
    fn columns_are_found() {
        let columns = |source: &str| Template::for_columns("t", source).unwrap().columns();
        let names = |names: &[&str]| names.iter().map(|name| name.to_string()).collect::<BTreeSet<_>>();
        let source = "{{ b }}{% for x in a %}{{ x }}{{ loop.index }}{% endfor %}{% set y = c.d %}{{ y }}{{ range(3) }}";
        let found = columns(source);
        assert_eq!((found.names, found.may_use_any), (names(&["a", "b", "c"]), false));
        assert_eq!(columns("plain"), Columns::default());
        let found = columns("{{ row['a b'] }}{{ row.c }}{{ d }}{{ row[d] }}");
        assert_eq!(
            (found.names, found.row_fields, found.may_use_any),
            (names(&["d"]), names(&["a b", "c"]), true)
        );
        assert_eq!(columns("{{ text[:5] }}").names, names(&["text"]));
        assert!(columns("{{ row.a[:5] }}").may_use_any);
        // A function's name in a call is no column, but as a variable it is one.
        assert_eq!(columns("{{ range(3) }}{{ namespace(a=1).a }}").names, names(&[]));
        assert_eq!(
            columns("{{ range }}{{ dict.a }}{{ debug | upper }}").names,
            names(&["range", "dict", "debug"])
        );
    }

    #[test]
    fn columns_of_global_names_render() {
        let row = json!({"range": "a", "namespace": 2});
        assert_eq!(render("{{ range }} {{ namespace }}", row).unwrap(), "a 2");
    }

    #[test]
    fn formatted_fields_are_not_too_wide() {
        for source in [
            "{{ '%9999999999d' | format(a) }}",
            "{{ '%99999999999999999999999d' | format(a) }}",
            "{{ '%*d' | format(b, a) }}",
            "{{ '%.999999999f' | format(1.5) }}",
            "{{ '%(x)999999d' | format(x=a) }}",
            "{{ '{:9999999999}'.format(a) }}",
            "{{ '{:{w}}'.format(a, w=b) }}",
        ] {
            let error = render(source, json!({"a": 1, "b": 9_999_999})).unwrap_err();
            assert!(error.contains("wider than 4096"), "{source}: {error}");
        }
        let fine = "{{ '%5d 100%% %s 99999' | format(a, b) }}|{{ '{:>3}'.format(a) }}|{{ '%-10s.' | format(b) }}";
        let rendered = render(fine, json!({"a": 1, "b": 9_999_999})).unwrap();
        assert_eq!(rendered, "    1 100% 9999999 99999|  1|9999999   .");
    }

    #[test]
    fn missing_columns_and_bad_syntax_are_errors() {
        assert!(render("{{ missing }}", json!({})).is_err());
        assert!(render("{{ a.b.c }}", json!({"a": {}})).is_err());
        let error = Template::for_columns("t", "\n{% if %}").err().unwrap();
        assert!(error.starts_with("line 2: ") && !error.contains('\n'), "{error}");
    }

    #[test]
    fn endless_templates_stop() {
        let loops = "{% for a in range(90000) %}{% for b in range(90000) %}{% endfor %}{% endfor %}";
        assert!(
            render(loops, json!({}))
                .unwrap_err()
                .contains("does not come to an end")
        );
        let macros = "{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}";
        assert!(render(macros, json!({})).is_err());
        let large = "{% for a in range(90000) %}{{ text }}{% endfor %}";
        let error = render(large, json!({"text": "x".repeat(10_000)})).unwrap_err();
        assert!(error.contains("more than 64 MB"), "{error}");
    }

    #[test]
    fn generation_tags_become_blocks() {
        assert_eq!(
            without_generation_tags(
                "{%- generation -%}x{{ '{% generation %}' }}{# {% generation %} #}{% endgeneration %}"
            ),
            "{%- with -%}x{{ '{% generation %}' }}{# {% generation %} #}{% endwith %}"
        );
        assert_eq!(without_generation_tags("a { b {% x"), "a { b {% x");
        let raw = "{% raw %}{% generation %}{% endraw %}";
        assert_eq!(without_generation_tags(raw), raw);
    }
}
