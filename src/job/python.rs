//! Behaviour that chat templates expect from Python and transformers: filters, tests, methods, and
//! the printed form of values.
//!
//! Chat templates are written for Python's Jinja. minijinja differs from it in a few points, which
//! this module corrects.

use std::fmt::Write;
use std::sync::Arc;

use minijinja::value::{Kwargs, Rest, ValueKind, ValueOrKwargs, from_args};
use minijinja::{Error, ErrorKind, State, Value};

use super::guard;
use super::template::{budget, sized};

/// Maximum nesting of values written as JSON.
const JSON_DEPTH_MAX: usize = 64;
/// Maximum length of an indent and of a separator in JSON, in bytes.
const JSON_SEPARATOR_BYTES_MAX: usize = 64;

/// Layout of JSON text.
struct JsonLayout {
    /// One item per line, with this indent per level; `None`: everything on one line.
    indent: Option<String>,
    item_separator: String,
    key_separator: String,
    /// Whether characters beyond ASCII are escaped.
    ascii_only: bool,
    sort_keys: bool,
}

/// `tojson` as in transformers: Python's `json.dumps` with `<`, `>` and non-ASCII text unescaped.
pub(super) fn tojson(value: &Value, args: Rest<Value>, kwargs: Kwargs) -> Result<Value, Error> {
    let names = ["ensure_ascii", "indent", "separators", "sort_keys"];
    let option = |i: usize| -> Result<Option<Value>, Error> {
        let named: Option<Value> = kwargs.get(names[i])?;
        Ok(named.or_else(|| args.get(i).cloned()).filter(|value| !value.is_none()))
    };
    let ascii_only = option(0)?.is_some_and(|v| v.is_true());
    let indent = match option(1)? {
        Some(value) => Some(match (value.as_usize(), value.as_str()) {
            (Some(n), _) if n <= JSON_SEPARATOR_BYTES_MAX => " ".repeat(n),
            (_, Some(text)) if text.len() <= JSON_SEPARATOR_BYTES_MAX => text.to_string(),
            _ => {
                return Err(Error::new(
                    ErrorKind::InvalidOperation,
                    "tojson: `indent` is no number of spaces",
                ));
            }
        }),
        None => None,
    };
    let (item_separator, key_separator) = match option(2)? {
        Some(pair) => {
            let part = |i| pair.get_item_by_index(i).map(|value| value.to_string());
            let (item, key) = (part(0)?, part(1)?);
            if item.len().max(key.len()) > JSON_SEPARATOR_BYTES_MAX {
                return Err(Error::new(
                    ErrorKind::InvalidOperation,
                    "tojson: `separators` are too long",
                ));
            }
            (item, key)
        }
        None if indent.is_some() => (",".to_string(), ": ".to_string()),
        None => (", ".to_string(), ": ".to_string()),
    };
    let sort_keys = option(3)?.is_some_and(|v| v.is_true());
    kwargs.assert_all_used()?;
    let mut out = String::new();
    write_json(
        value,
        &JsonLayout {
            indent,
            item_separator,
            key_separator,
            ascii_only,
            sort_keys,
        },
        0,
        &mut out,
    )?;
    Ok(Value::from(out))
}

/// `value` as JSON without white space.
pub(super) fn compact_json(value: &Value) -> Result<String, Error> {
    let layout = JsonLayout {
        indent: None,
        item_separator: ",".into(),
        key_separator: ":".into(),
        ascii_only: false,
        sort_keys: false,
    };
    let mut out = String::new();
    write_json(value, &layout, 0, &mut out)?;
    Ok(out)
}

fn write_json(value: &Value, layout: &JsonLayout, depth: usize, out: &mut String) -> Result<(), Error> {
    if depth > JSON_DEPTH_MAX {
        return Err(Error::new(ErrorKind::InvalidOperation, "tojson: nested too deeply"));
    }
    budget::check_fits(out.len())?;
    let break_line = |out: &mut String, depth: usize| {
        if let Some(indent) = &layout.indent {
            out.push('\n');
            out.extend(std::iter::repeat_n(indent.as_str(), depth));
        }
    };
    match value.kind() {
        ValueKind::None => out.push_str("null"),
        ValueKind::Bool => out.push_str(if value.is_true() { "true" } else { "false" }),
        ValueKind::Number => out.push_str(&number_repr(value)),
        ValueKind::String => write_json_text(value.as_str().unwrap_or_default(), layout.ascii_only, out),
        ValueKind::Seq | ValueKind::Iterable => {
            let mut empty = true;
            out.push('[');
            for item in value.try_iter()?.checked() {
                if !empty {
                    out.push_str(&layout.item_separator);
                }
                empty = false;
                break_line(out, depth + 1);
                write_json(&item?, layout, depth + 1, out)?;
            }
            if !empty {
                break_line(out, depth);
            }
            out.push(']');
        }
        ValueKind::Map => {
            let mut keys = value.try_iter()?.checked().collect::<Result<Vec<_>, _>>()?;
            if layout.sort_keys {
                keys.sort_by_key(|key| key.to_string());
            }
            out.push('{');
            for (i, key) in keys.iter().enumerate() {
                if i > 0 {
                    out.push_str(&layout.item_separator);
                }
                break_line(out, depth + 1);
                write_json_text(&key.to_string(), layout.ascii_only, out);
                out.push_str(&layout.key_separator);
                write_json(&value.get_item(key)?, layout, depth + 1, out)?;
            }
            if !keys.is_empty() {
                break_line(out, depth);
            }
            out.push('}');
        }
        kind => {
            return Err(Error::new(
                ErrorKind::InvalidOperation,
                format!("tojson: cannot write {kind} as JSON"),
            ));
        }
    }
    Ok(())
}

fn write_json_text(text: &str, ascii_only: bool, out: &mut String) {
    out.push('"');
    for c in text.chars() {
        match c {
            '"' => out.push_str("\\\""),
            '\\' => out.push_str("\\\\"),
            '\n' => out.push_str("\\n"),
            '\r' => out.push_str("\\r"),
            '\t' => out.push_str("\\t"),
            '\u{8}' => out.push_str("\\b"),
            '\u{C}' => out.push_str("\\f"),
            c if (c as u32) < 0x20 => push_escape(c as u32, out),
            // The guard's marks are not escaped: the guard must find them in the rendered prompt.
            c if ascii_only && (c as u32) > 0x7E && !guard::is_mark(c) => {
                let mut units = [0; 2];
                for unit in c.encode_utf16(&mut units) {
                    push_escape((*unit).into(), out);
                }
            }
            c => out.push(c),
        }
    }
    out.push('"');
}

fn push_escape(code: u32, out: &mut String) {
    // Writing to a string cannot fail.
    let _ = write!(out, "\\u{code:04x}");
}

/// A number as Python prints it.
fn number_repr(value: &Value) -> String {
    if value.is_integer() {
        return value.to_string();
    }
    match f64::try_from(value.clone()) {
        Ok(float) => float_repr(float),
        Err(_) => value.to_string(),
    }
}

/// A float as Python's `repr` writes it: the shortest digits that parse to the same number, with an
/// exponent from 1e16 on and below 1e-4.
pub(super) fn float_repr(value: f64) -> String {
    if value.is_nan() {
        return "NaN".into();
    }
    if value.is_infinite() {
        return if value > 0.0 {
            "Infinity".into()
        } else {
            "-Infinity".into()
        };
    }
    let magnitude = value.abs();
    if magnitude != 0.0 && !(1e-4..1e16).contains(&magnitude) {
        let text = format!("{value:e}");
        let (digits, exponent) = text.split_once('e').unwrap_or((&text, "0"));
        let (sign, exponent) = match exponent.strip_prefix('-') {
            Some(rest) => ('-', rest),
            None => ('+', exponent),
        };
        return format!("{digits}e{sign}{exponent:0>2}");
    }
    let text = value.to_string();
    if text.contains('.') { text } else { format!("{text}.0") }
}

/// Maximum width of a `format` field, in characters.
const FORMAT_WIDTH_MAX: u64 = 4096;

/// The `format` filter with limited field widths: `"%9999999999d"` would use up all memory.
pub(super) fn format(state: &mut State, text: &Value, args: Rest<ValueOrKwargs>) -> Result<Value, Error> {
    let values: Vec<Value> = args.iter().map(|arg| Value::clone(arg)).collect();
    for spec in text.as_str().unwrap_or_default().split('%').skip(1) {
        // Digits in a named argument's name are not a width.
        let named = spec.strip_prefix('(').and_then(|name| name.split_once(')'));
        let spec = named.map_or(spec, |(_, spec)| spec);
        let end = spec.find(|c: char| c.is_alphabetic() || c == '%').unwrap_or(spec.len());
        check_widths(&spec[..end], &values)?;
    }
    sized::check_format(text.as_str().unwrap_or_default().matches('%').count(), &values)?;
    minijinja::filters::format(state, text, args)
}

/// Refuses a format field `spec` if its width, or an argument that may give the width, is too large.
fn check_widths(spec: &str, args: &[Value]) -> Result<(), Error> {
    let is_too_wide = |width: u64| width > FORMAT_WIDTH_MAX;
    let mut numbers = spec
        .split(|c: char| !c.is_ascii_digit())
        .filter(|digits| !digits.is_empty());
    let has_wide_number = numbers.any(|digits| digits.parse().map_or(true, is_too_wide));
    let is_wide = |value: &Value| value.as_i64().is_some_and(|n| is_too_wide(n.unsigned_abs()));
    let holds_wide = |value: &Value| match value.kind() {
        // Named arguments.
        ValueKind::Map => value
            .try_iter()
            .is_ok_and(|mut keys| keys.any(|key| value.get_item(&key).is_ok_and(|item| is_wide(&item)))),
        _ => is_wide(value),
    };
    let has_wide_argument = spec.contains(['*', '{']) && args.iter().any(holds_wide);
    if has_wide_number || has_wide_argument {
        return Err(Error::new(
            ErrorKind::InvalidOperation,
            format!("format: a field is wider than {FORMAT_WIDTH_MAX} characters"),
        ));
    }
    Ok(())
}

/// Jinja's `indent` filter; unlike in minijinja, a trailing line break is kept.
pub(super) fn indent(text: &str, width: Option<Value>, args: Rest<Value>, kwargs: Kwargs) -> Result<String, Error> {
    let width = match width {
        Some(width) => Some(width),
        None => kwargs.get::<Option<Value>>("width")?,
    };
    let indent = match &width {
        None => " ".repeat(4),
        Some(width) => match (width.as_usize(), width.as_str()) {
            (Some(n), _) if n <= 1024 => " ".repeat(n),
            (_, Some(text)) => text.to_string(),
            _ => {
                return Err(Error::new(
                    ErrorKind::InvalidOperation,
                    "indent: `width` is no number of spaces",
                ));
            }
        },
    };
    let flag = |i: usize, name: &str| -> Result<bool, Error> {
        let named: Option<bool> = kwargs.get(name)?;
        Ok(named.unwrap_or_else(|| args.get(i).is_some_and(|value| value.is_true())))
    };
    let (first, blank) = (flag(0, "first")?, flag(1, "blank")?);
    kwargs.assert_all_used()?;
    sized::check_indent(text, indent.len())?;
    let mut out = String::with_capacity(text.len() + text.len() / 8);
    for (i, line) in format!("{text}\n").lines().enumerate() {
        if i > 0 {
            out.push('\n');
        }
        if (i == 0 && first) || (i > 0 && (blank || !line.is_empty())) {
            out.push_str(&indent);
        }
        out.push_str(line);
    }
    Ok(out)
}

/// Jinja's `iterable` test: texts and mappings are iterable, as in Python.
pub(super) fn is_iterable(value: &Value) -> bool {
    use ValueKind::{Iterable, Map, Seq, String, Undefined};
    matches!(value.kind(), String | Seq | Map | Iterable | Undefined)
}

/// Jinja's `sequence` test: texts and mappings are sequences, since they have a length and items.
pub(super) fn is_sequence(value: &Value) -> bool {
    use ValueKind::{Map, Seq, String, Undefined};
    matches!(value.kind(), String | Seq | Map | Undefined)
}

/// Calls a Python method of a text, list or mapping: one of minijinja-contrib's, or one of those
/// that it does not have.
pub(super) fn call_method(state: &mut State, value: &Value, name: &str, args: &[Value]) -> Result<Value, Error> {
    check_method(value, name, args)?;
    if let Some(text) = value.as_str()
        && let Some(result) = text_method(text, name, args)?
    {
        return Ok(result);
    }
    if value.kind() == ValueKind::Seq && name == "index" {
        let (wanted,): (Value,) = from_args(args)?;
        for (i, item) in value.try_iter()?.checked().enumerate() {
            if item? == wanted {
                return Ok(Value::from(i));
            }
        }
        return Err(Error::new(ErrorKind::InvalidOperation, "list.index: not in list"));
    }
    minijinja_contrib::pycompat::unknown_method_callback(state, value, name, args)
}

/// Checks the size of a text method's result before it is computed.
fn check_method(value: &Value, name: &str, args: &[Value]) -> Result<(), Error> {
    let Some(text) = value.as_str() else { return Ok(()) };
    match (name, args.first()) {
        ("join", Some(list)) => sized::check_join(text, list),
        ("replace" | "split" | "rsplit" | "splitlines", _) => {
            let all: Vec<Value> = [value].into_iter().chain(args).cloned().collect();
            sized::check_result(name, &all)
        }
        ("format", _) => sized::check_format(text.matches('{').count(), args),
        _ => Ok(()),
    }
}

#[expect(clippy::too_many_lines, reason = "one arm per method")]
fn text_method(text: &str, name: &str, args: &[Value]) -> Result<Option<Value>, Error> {
    let triple = |a: &str, b: &str, c: &str| Value::from((a.to_string(), b.to_string(), c.to_string()));
    Ok(Some(match name {
        "removeprefix" => {
            let (prefix,): (Arc<str>,) = from_args(args)?;
            Value::from(text.strip_prefix(&*prefix).unwrap_or(text))
        }
        "removesuffix" => {
            let (suffix,): (Arc<str>,) = from_args(args)?;
            Value::from(text.strip_suffix(&*suffix).unwrap_or(text))
        }
        "partition" => {
            let (separator,): (Arc<str>,) = from_args(args)?;
            match text.split_once(&*separator) {
                Some((before, after)) => triple(before, &separator, after),
                None => triple(text, "", ""),
            }
        }
        "rpartition" => {
            let (separator,): (Arc<str>,) = from_args(args)?;
            match text.rsplit_once(&*separator) {
                Some((before, after)) => triple(before, &separator, after),
                None => triple("", "", text),
            }
        }
        "rsplit" => {
            let (separator, splits): (Arc<str>, Option<i64>) = from_args(args)?;
            let mut parts: Vec<&str> = match splits.and_then(|n| usize::try_from(n).ok()) {
                Some(n) => text.rsplitn(n.saturating_add(1), &*separator).collect(),
                None => text.rsplit(&*separator).collect(),
            };
            parts.reverse();
            parts.into_iter().map(Value::from).collect()
        }
        "index" => {
            let (part,): (Arc<str>,) = from_args(args)?;
            match text.find(&*part) {
                Some(start) => Value::from(text[..start].chars().count()),
                None => return Err(Error::new(ErrorKind::InvalidOperation, "str.index: not found")),
            }
        }
        // This only checks the widths; minijinja-contrib formats.
        "format" => {
            for spec in text.split(':').skip(1) {
                let end = spec.find('}').unwrap_or(spec.len());
                check_widths(&spec[..end], args)?;
            }
            return Ok(None);
        }
        // Unlike Jinja's filter `title`, the method capitalizes after every non-letter.
        "title" => {
            let mut in_word = false;
            let mut out = String::with_capacity(text.len());
            for c in text.chars() {
                if in_word {
                    out.extend(c.to_lowercase())
                } else {
                    out.extend(c.to_uppercase())
                }
                in_word = c.is_alphabetic();
            }
            Value::from(out)
        }
        "casefold" => Value::from(text.to_lowercase()),
        "swapcase" => text
            .chars()
            .flat_map(|c| {
                if c.is_lowercase() {
                    c.to_uppercase().collect::<Vec<_>>()
                } else {
                    c.to_lowercase().collect()
                }
            })
            .collect::<String>()
            .into(),
        "zfill" | "ljust" | "rjust" | "center" => {
            let (width,): (usize,) = from_args(args)?;
            let padding = width.min(1 << 16).saturating_sub(text.chars().count());
            Value::from(match name {
                "zfill" => format!("{}{text}", "0".repeat(padding)),
                "ljust" => format!("{text}{}", " ".repeat(padding)),
                // As in Python, an odd number of spaces has its extra one in front if the width is
                // odd, too.
                "center" => {
                    let before = padding / 2 + (padding & width & 1);
                    format!("{}{text}{}", " ".repeat(before), " ".repeat(padding - before))
                }
                _ => format!("{}{text}", " ".repeat(padding)),
            })
        }
        _ => return Ok(None),
    }))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn floats_print_as_in_python() {
        let cases = [
            (0.0, "0.0"),
            (1.0, "1.0"),
            (-2.5, "-2.5"),
            (1e16, "1e+16"),
            (1e15, "1000000000000000.0"),
            (1.5e-5, "1.5e-05"),
            (0.0001, "0.0001"),
            (1e100, "1e+100"),
            (0.1, "0.1"),
        ];
        for (value, text) in cases {
            assert_eq!(float_repr(value), text);
        }
    }
}
