//! The layout of a CSV table: its delimiter, columns and column types, as a job requests them and
//! as they are planned.
//!
//! A column's type is either given by the job or inferred from every cell of the column in all
//! inputs. A cell counts as a number only if that number is written exactly like the cell. So a
//! prompt shows each cell of an inferred column as it is in the file, including `007` and `1e5`.
//!
//! See docs/decisions/036-csv-columns-are-numbers-only-without-loss.md.

use std::collections::{BTreeMap, HashSet};

use arrow::datatypes::{DataType, Field};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use serde_json::{Number, Value};

use crate::dataset::kinds::{KEYS_MAX, Kinds};

/// Longest name of a column, in bytes.
const NAME_BYTES_MAX: usize = 16 << 10;

/// Maximum number of significant digits with which every formatter writes a float64 back unchanged.
const DIGITS_MAX: usize = 15;

/// Integers up to this are exact as 64-bit floats.
const EXACT_IN_F64: u64 = 1 << 53;

/// The CSV settings of a job.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct CsvOptions {
    /// `None`: a tab where the file's name ends in `.tsv` or `.tab`, else a comma.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub delimiter: Option<char>,
    /// The columns' names, where the files have no header.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub columns: Option<Vec<String>>,
    /// Types given by the job, by column.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub types: BTreeMap<String, CsvType>,
}

impl CsvOptions {
    /// Whether all settings are the defaults.
    pub fn is_default(&self) -> bool {
        *self == CsvOptions::default()
    }
}

/// The type of a column.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum CsvType {
    /// Text as it stands in the file.
    #[default]
    String,
    Int64,
    Float64,
    Bool,
}

/// A column of the table.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct CsvColumn {
    pub name: String,
    #[serde(rename = "type")]
    pub kind: CsvType,
}

/// The table that all of a job's CSV files are parts of: plain data for the record.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct CsvTable {
    pub delimiter: char,
    /// In the files' order.
    pub columns: Vec<CsvColumn>,
}

impl CsvTable {
    /// The delimiter as a byte.
    pub fn delimiter_byte(&self) -> u8 {
        // `check_delimiter` admits ASCII only.
        self.delimiter as u8
    }

    /// Checks constraints that the types do not express. The error is one line.
    pub fn check(&self) -> Result<(), String> {
        check_delimiter(self.delimiter)?;
        check_names(self.columns.iter().map(|column| column.name.as_str()))
    }

    /// The table with a type for each column: the type in `job_types`, else the one that the cells'
    /// `kinds` allow.
    pub fn typed(self, job_types: &BTreeMap<String, CsvType>, kinds: &BTreeMap<String, Kinds>) -> CsvTable {
        let typed = |column: CsvColumn| {
            let cell_kinds = kinds.get(&column.name).copied().unwrap_or_default();
            let kind = job_types.get(&column.name).copied();
            CsvColumn {
                kind: kind.unwrap_or_else(|| CsvType::of(cell_kinds)),
                ..column
            }
        };
        CsvTable {
            columns: self.columns.into_iter().map(typed).collect(),
            ..self
        }
    }
}

/// Checks that the delimiter is an ASCII character without another meaning in CSV.
pub fn check_delimiter(delimiter: char) -> Result<(), String> {
    match delimiter {
        '"' | '\r' | '\n' | '\0' => Err(format!("{delimiter:?} cannot separate cells")),
        _ if !delimiter.is_ascii() => Err(format!("{delimiter:?} is no ASCII character")),
        _ => Ok(()),
    }
}

/// Checks the column names: at least one, all distinct and non-empty.
pub fn check_names<'a>(names: impl ExactSizeIterator<Item = &'a str>) -> Result<(), String> {
    if names.len() == 0 || names.len() > KEYS_MAX {
        return Err(format!("{} columns; a table has 1 to {KEYS_MAX}", names.len()));
    }
    let mut seen = HashSet::new();
    for name in names {
        if name.is_empty() {
            return Err("a column without a name".into());
        }
        if name.len() > NAME_BYTES_MAX {
            return Err(format!(
                "a column's name of {} bytes, more than {NAME_BYTES_MAX}",
                name.len()
            ));
        }
        if !seen.insert(name) {
            return Err(format!("two columns `{}`", name.escape_debug()));
        }
    }
    Ok(())
}

impl CsvType {
    /// The type whose values have exactly the texts that these kinds were inferred from.
    fn of(kinds: Kinds) -> CsvType {
        match kinds.field("").data_type() {
            DataType::Int64 => CsvType::Int64,
            DataType::Float64 => CsvType::Float64,
            _ => CsvType::String,
        }
    }

    /// The type's name in job files and messages.
    pub fn as_str(self) -> &'static str {
        match self {
            CsvType::String => "string",
            CsvType::Int64 => "int64",
            CsvType::Float64 => "float64",
            CsvType::Bool => "bool",
        }
    }

    /// The field of the carried column.
    pub fn field(self, name: &str) -> Field {
        let data_type = match self {
            CsvType::String => DataType::Utf8,
            CsvType::Int64 => DataType::Int64,
            CsvType::Float64 => DataType::Float64,
            CsvType::Bool => DataType::Boolean,
        };
        Field::new(name, data_type, true)
    }

    /// The value of a cell; `None` if the cell is no value of this type. An empty cell is null,
    /// except a quoted cell of type string.
    pub fn value(self, text: &str, is_quoted: bool) -> Option<Value> {
        if text.is_empty() && !(is_quoted && self == CsvType::String) {
            return Some(Value::Null);
        }
        match self {
            CsvType::String => Some(text.into()),
            CsvType::Int64 => text.parse::<i64>().ok().map(Value::from),
            // An integer stays an integer, so that prompts show the cell's own text.
            CsvType::Float64 => match canonical_integer(text) {
                Some(number) if number.unsigned_abs() <= EXACT_IN_F64 => Some(number.into()),
                _ => text.parse::<f64>().ok().and_then(Number::from_f64).map(Value::Number),
            },
            CsvType::Bool if text.eq_ignore_ascii_case("true") => Some(true.into()),
            CsvType::Bool if text.eq_ignore_ascii_case("false") => Some(false.into()),
            CsvType::Bool => None,
        }
    }
}

/// The kind of a cell: a number only if the number is written exactly like the cell. A quoted cell
/// is text.
pub fn cell_kind(text: &[u8], is_quoted: bool) -> Kinds {
    if is_quoted {
        return Kinds::TEXT;
    }
    match text {
        b"" => Kinds::NULL,
        // The first byte shows that most texts are no numbers, without parsing them.
        [b'-' | b'0'..=b'9', ..] => std::str::from_utf8(text).map_or(Kinds::TEXT, number_kind),
        _ => Kinds::TEXT,
    }
}

fn number_kind(text: &str) -> Kinds {
    match canonical_integer(text) {
        Some(number) if number.unsigned_abs() <= EXACT_IN_F64 => Kinds::INT,
        Some(_) => Kinds::LONG_INT,
        None if is_canonical_decimal(text) => Kinds::FLOAT,
        None => Kinds::TEXT,
    }
}

/// The integer whose decimal form is exactly this text.
fn canonical_integer(text: &str) -> Option<i64> {
    let digits = text.strip_prefix('-').unwrap_or(text);
    let is_canonical = match digits.as_bytes() {
        [b'0'] => digits.len() == text.len(),
        [b'1'..=b'9', rest @ ..] => rest.iter().all(u8::is_ascii_digit),
        _ => false,
    };
    is_canonical.then(|| text.parse().ok()).flatten()
}

/// Whether a float64 with this value is written as exactly this text.
fn is_canonical_decimal(text: &str) -> bool {
    let is_plain = text
        .bytes()
        .all(|byte| byte.is_ascii_digit() || matches!(byte, b'-' | b'.'));
    let digits = text
        .trim_start_matches(['-', '0', '.'])
        .bytes()
        .filter(u8::is_ascii_digit);
    // Small decimals are written with an exponent.
    if !is_plain || digits.count() > DIGITS_MAX || text.trim_start_matches('-').starts_with("0.0000") {
        return false;
    }
    let number = text.parse().ok().and_then(Number::from_f64);
    number.is_some_and(|number| number.to_string() == text)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn inferred_type(cells: &[&str]) -> CsvType {
        let kinds = cells.iter().map(|cell| cell_kind(cell.as_bytes(), false));
        CsvType::of(kinds.fold(Kinds::default(), Kinds::union))
    }

    #[test]
    fn only_canonical_numbers_make_a_numeric_column() {
        assert_eq!(inferred_type(&["1", "-20", "", "9223372036854775807"]), CsvType::Int64);
        assert_eq!(inferred_type(&["1", "2.5", "-0.001", "3.0"]), CsvType::Float64);
        // Templates write booleans differently.
        assert_eq!(inferred_type(&["true", "", "false"]), CsvType::String);
        for text in [
            "007",
            "1e5",
            "1E5",
            "+1",
            "-0",
            " 1",
            "1 ",
            "1.50",
            "1.",
            ".5",
            "-",
            "0x10",
            "1_000",
            "1,000",
            "NaN",
            "inf",
            "True",
            "9223372036854775808",
            "0.00001",
            "1234567.1234567890",
            "0.1234567890123456",
            "1.7976931348623157e308",
            "-.5",
            "--1",
            "1.2.3",
            "٣",
        ] {
            assert_eq!(inferred_type(&["1", text]), CsvType::String, "{text}");
            assert_eq!(inferred_type(&[text]), CsvType::String, "{text}");
        }
        // A float would round the integer.
        assert_eq!(inferred_type(&["9007199254740993", "0.5"]), CsvType::String);
        assert_eq!(inferred_type(&["true", "1"]), CsvType::String);
        assert_eq!(inferred_type(&["", ""]), CsvType::String);
        assert_eq!(CsvType::of(cell_kind(b"1", true)), CsvType::String);
    }

    #[test]
    fn values_of_given_types() {
        let value = |kind: CsvType, text: &str| kind.value(text, false);
        assert_eq!(value(CsvType::Int64, "007"), Some(7.into()));
        assert_eq!(value(CsvType::Float64, "1e5"), Some(1e5.into()));
        assert_eq!(value(CsvType::Bool, "TRUE"), Some(true.into()));
        for (kind, text) in [
            (CsvType::Int64, "1.0"),
            (CsvType::Int64, " 1"),
            (CsvType::Float64, "nan"),
            (CsvType::Float64, "1,5"),
            (CsvType::Bool, "yes"),
        ] {
            assert_eq!(value(kind, text), None, "{text}");
        }
        assert_eq!(CsvType::String.value("", false), Some(Value::Null));
        assert_eq!(CsvType::String.value("", true), Some("".into()));
        assert_eq!(CsvType::Int64.value("", true), Some(Value::Null));
    }

    proptest! {
        #[test]
        fn prompts_show_inferred_numbers_unchanged(text in "-?[0-9]{0,17}(\\.[0-9]{0,17})?|[-0-9.eE+]{1,8}|true|false") {
            let kind = CsvType::of(cell_kind(text.as_bytes(), false));
            if let Some(value) = kind.value(&text, false).filter(|value| !value.is_string() && !value.is_null()) {
                let row = minijinja::Value::from(minijinja::value::Serde(&serde_json::json!({"v": value})));
                let shown = minijinja::Environment::new().render_str("{{ v }}", row).unwrap();
                prop_assert_eq!(&shown, &text);
                prop_assert_eq!(value.to_string(), text);
            }
        }
    }
}
