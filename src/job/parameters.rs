//! Parameters of a job file: `${name}`, set with `--set name=value`, and `${env:NAME}` from the
//! environment.
//!
//! They are filled into the texts of the parsed file, not into its source, so a value cannot add a
//! field. `$${name}` stands for the literal text `${name}`. Any other `$` is left alone, as in
//! `${{ price }}`.

use std::collections::BTreeMap;

use serde_json::Value;

use super::suggest;

/// Maximum total bytes of the values that are filled into one job file.
const FILLED_BYTES_MAX: usize = 4 << 20;

/// The parameter values given to one command.
#[derive(Debug, Clone, Default)]
pub struct Parameters {
    values: BTreeMap<String, String>,
    /// Replaces the environment in tests.
    environment: Option<BTreeMap<String, String>>,
}

/// The fields of a job file that have parameters.
#[derive(Debug, Default, PartialEq)]
pub(super) struct Filled {
    /// Paths of texts that parameters have changed.
    pub fields: Vec<String>,
    /// Paths of texts that consisted of one parameter alone: their fields may need a number.
    pub single_parameter_fields: Vec<String>,
}

impl Parameters {
    /// # Errors
    /// A name is given twice or is not valid in `${…}`, or a value is empty.
    pub fn new(given: &[(String, String)]) -> Result<Parameters, String> {
        let mut parameters = Parameters::default();
        for (name, value) in given {
            if !is_name(name) {
                return Err(format!(
                    "`--set {name}=…`: a parameter's name is made of letters, digits and `_`, and begins with no digit; it stands as `${{NAME}}` in the job file, \
                     whose other fields are changed there"
                ));
            }
            if value.is_empty() {
                return Err(format!(
                    "`--set {name}=` has no value: is a variable of the shell not set?"
                ));
            }
            if parameters.values.insert(name.clone(), value.clone()).is_some() {
                return Err(format!("`--set {name}=…` is given twice"));
            }
        }
        Ok(parameters)
    }

    /// Creates a filler for one job file.
    pub(super) fn filler(&self) -> ParameterFiller<'_> {
        ParameterFiller {
            parameters: self,
            used_names: Vec::new(),
            filled_bytes: 0,
            filled: Filled::default(),
        }
    }

    fn value_of(&self, name: &str) -> Result<String, String> {
        let Some(variable) = name.strip_prefix("env:") else {
            return self.values.get(name).cloned().ok_or_else(|| {
                format!(
                    "`${{{name}}}` has no value: give it with `--set {name}=…` (`$${{{name}}}` stands for the text itself){}",
                    suggest(name, self.values.keys().map(String::as_str))
                )
            });
        };
        if may_be_secret(variable) {
            return Err(format!(
                "`${{{name}}}`: by its name `{variable}` may be a secret, and parameters stand in the job's record for all to read"
            ));
        }
        let found = match &self.environment {
            Some(environment) => Ok(environment.get(variable).cloned()),
            None => match std::env::var(variable) {
                Ok(value) => Ok(Some(value)),
                Err(std::env::VarError::NotPresent) => Ok(None),
                Err(std::env::VarError::NotUnicode(_)) => Err(()),
            },
        };
        match found {
            Ok(Some(value)) if value.is_empty() => {
                Err(format!("`${{{name}}}`: the environment's `{variable}` is empty"))
            }
            Ok(Some(value)) => Ok(value),
            Ok(None) => Err(format!(
                "`${{{name}}}`: the environment has no `{variable}` (`$${{{name}}}` stands for the text itself)"
            )),
            Err(()) => Err(format!("`${{{name}}}`: the environment's `{variable}` is not UTF-8")),
        }
    }
}

/// Fills parameters into the texts of one job file; see [`Parameters::filler`].
pub(super) struct ParameterFiller<'a> {
    parameters: &'a Parameters,
    /// Names that occurred in the texts so far.
    used_names: Vec<String>,
    filled_bytes: usize,
    filled: Filled,
}

impl ParameterFiller<'_> {
    /// Fills every text in `value`, which is at `path` in the job file.
    pub(super) fn fill_value(&mut self, value: &mut Value, path: &str) -> Result<(), String> {
        match value {
            Value::String(text) if text.contains("${") => {
                let with_path = |why| match path {
                    "" => why,
                    path => format!("`{path}`: {why}"),
                };
                let (filled, is_single_parameter) = self.fill_text(text).map_err(with_path)?;
                if filled != *text {
                    self.filled.fields.push(path.to_string());
                    if is_single_parameter {
                        self.filled.single_parameter_fields.push(path.to_string());
                    }
                }
                *text = filled;
                Ok(())
            }
            Value::Array(items) => items
                .iter_mut()
                .enumerate()
                .try_for_each(|(i, item)| self.fill_value(item, &format!("{path}[{i}]"))),
            Value::Object(fields) => fields.iter_mut().try_for_each(|(key, field)| match path {
                "" => self.fill_value(field, key),
                path => self.fill_value(field, &format!("{path}.{key}")),
            }),
            _ => Ok(()),
        }
    }

    /// Ends the filling and returns the fields that have parameters.
    ///
    /// # Errors
    /// The command gives a value for a name that is not in the file.
    pub(super) fn finish(self) -> Result<Filled, String> {
        match self
            .parameters
            .values
            .keys()
            .find(|name| !self.used_names.contains(name))
        {
            None => Ok(self.filled),
            Some(name) => {
                let hint = suggest(name, self.used_names.iter().map(String::as_str));
                Err(format!(
                    "no text of the file has `${{{name}}}`, which `--set {name}=…` is for{hint}"
                ))
            }
        }
    }

    /// Returns the text with its parameters filled in, and whether it consisted of one parameter
    /// alone.
    pub(super) fn fill_text(&mut self, text: &str) -> Result<(String, bool), String> {
        let mut out = String::new();
        let mut rest = text;
        let mut is_single_parameter = false;
        while let Some(start) = rest.find("${") {
            let Some(name) = leading_name(&rest[start..]) else {
                out.push_str(&rest[..start + 2]);
                rest = &rest[start + 2..];
                continue;
            };
            let end = start + "${}".len() + name.len();
            match rest[..start].strip_suffix('$') {
                Some(before) => {
                    out.push_str(before);
                    out.push_str(&rest[start..end]);
                }
                None => {
                    let value = self.parameters.value_of(name)?;
                    self.filled_bytes += value.len();
                    if self.filled_bytes > FILLED_BYTES_MAX {
                        return Err(format!("parameters fill in more than {FILLED_BYTES_MAX} bytes"));
                    }
                    out.push_str(&rest[..start]);
                    out.push_str(&value);
                    is_single_parameter = start == 0 && end == text.len();
                    if !self.used_names.iter().any(|used| used == name) {
                        self.used_names.push(name.to_string());
                    }
                }
            }
            rest = &rest[end..];
        }
        out.push_str(rest);
        Ok((out, is_single_parameter))
    }
}

/// The name in `${name}` or `${env:NAME}` at the beginning of `text`.
fn leading_name(text: &str) -> Option<&str> {
    let (inner, _) = text.strip_prefix("${")?.split_once('}')?;
    is_name(inner.strip_prefix("env:").unwrap_or(inner)).then_some(inner)
}

/// Whether a variable's name suggests that its value is a secret.
fn may_be_secret(variable: &str) -> bool {
    let words = [
        "PASSWORD",
        "PASSWD",
        "SECRET",
        "TOKEN",
        "KEY",
        "KEYS",
        "CREDENTIAL",
        "CREDENTIALS",
    ];
    variable
        .to_ascii_uppercase()
        .split('_')
        .any(|word| words.contains(&word))
}

fn is_name(word: &str) -> bool {
    word.starts_with(|c: char| c.is_ascii_alphabetic() || c == '_')
        && word.chars().all(|c| c.is_ascii_alphanumeric() || c == '_')
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn parameters(given: &[(&str, &str)]) -> Parameters {
        let given: Vec<_> = given.iter().map(|(n, v)| (n.to_string(), v.to_string())).collect();
        Parameters {
            environment: Some(
                [("TEAM", "red"), ("NOTHING", "")]
                    .map(|(n, v)| (n.to_string(), v.to_string()))
                    .into(),
            ),
            ..Parameters::new(&given).unwrap()
        }
    }

    fn fill(content: &mut Value, given: &[(&str, &str)]) -> Result<Filled, String> {
        let parameters = parameters(given);
        let mut filler = parameters.filler();
        filler.fill_value(content, "")?;
        filler.finish()
    }

    fn filled(text: &str, given: &[(&str, &str)]) -> Result<String, String> {
        let mut content = json!({"output": {"uri": text}});
        fill(&mut content, given)?;
        Ok(content["output"]["uri"].as_str().unwrap().to_string())
    }

    #[test]
    fn values_are_filled_into_texts() {
        let date = [("date", "2026-11-24")];
        for (text, expected) in [
            ("s3://labels/${date}/", "s3://labels/2026-11-24/"),
            ("${date}${date}", "2026-11-242026-11-24"),
            ("${env:TEAM}-${date}", "red-2026-11-24"),
            ("$${date} ${date}", "${date} 2026-11-24"),
            ("$${env:TEAM} ${date}", "${env:TEAM} 2026-11-24"),
            (
                "${date} costs ${{ price }} or ${a b} or $x ${",
                "2026-11-24 costs ${{ price }} or ${a b} or $x ${",
            ),
            ("{{ date }} ${date}", "{{ date }} 2026-11-24"),
            ("€${date}€", "€2026-11-24€"),
        ] {
            assert_eq!(filled(text, &date).as_deref(), Ok(expected), "{text}");
        }
    }

    #[test]
    fn a_value_is_not_filled_again() {
        let given = [("a", "${b} $${b} ${env:TEAM}"), ("b", "x")];
        assert_eq!(filled("${a}|${b}", &given).unwrap(), "${b} $${b} ${env:TEAM}|x");
    }

    #[test]
    fn missing_and_unused_values_are_named() {
        for (text, given, expected) in [
            ("x", &[("date", "1")][..], "no text of the file has `${date}`"),
            (
                "${dat}",
                &[("date", "1")],
                "`output.uri`: `${dat}` has no value: give it with `--set dat=…`",
            ),
            ("${dat}", &[("date", "1")], "did you mean `date`?"),
            ("${env:NOTHING}", &[], "the environment's `NOTHING` is empty"),
            ("${env:NOBODY_SET}", &[], "the environment has no `NOBODY_SET`"),
        ] {
            let error = filled(text, given).unwrap_err();
            assert!(error.contains(expected), "{error}");
        }
        // A name in the value of another parameter does not count as used.
        let error = filled("${a}", &[("a", "${b}"), ("b", "1")]).unwrap_err();
        assert!(error.contains("`--set b=…`"), "{error}");
    }

    #[test]
    fn secrets_of_the_environment_are_no_parameters() {
        for secret in [
            "GRISTMILL_SIGNING_KEY",
            "GRISTMILL_QUEUE_PASSWORD",
            "AWS_SECRET_ACCESS_KEY",
            "AWS_SESSION_TOKEN",
            "GRISTMILL_KAFKA_SASL_PASSWORD",
            "hf_token",
        ] {
            let error = filled(&format!("${{env:{secret}}}"), &[]).unwrap_err();
            assert!(error.contains("may be a secret"), "{error}");
        }
        assert_eq!(filled("${env:TEAM}", &[]).unwrap(), "red");
        assert!(!may_be_secret("MONKEY") && !may_be_secret("DATE"));
    }

    #[test]
    fn names_are_identifiers_and_unique() {
        let new = |names: &[&str]| {
            Parameters::new(
                &names
                    .iter()
                    .map(|n| (n.to_string(), "v".to_string()))
                    .collect::<Vec<_>>(),
            )
        };
        for wrong in ["", "1a", "a-b", "env:X", "a b", "ä"] {
            assert!(new(&[wrong]).unwrap_err().contains("letters"), "{wrong}");
        }
        assert!(new(&["a", "a"]).unwrap_err().contains("twice"));
        assert!(new(&["a", "_b1"]).is_ok());
        let empty = Parameters::new(&[("date".into(), String::new())]).unwrap_err();
        assert!(empty.contains("`--set date=` has no value"), "{empty}");
    }

    #[test]
    fn fields_of_a_single_parameter_are_listed() {
        let mut content = json!({"a": "${n}", "b": ["x${n}", "$${n}", "${n}${n}"], "c": {"d": "${n}"}, "${n}": 1});
        let found = fill(&mut content, &[("n", "5")]).unwrap();
        assert_eq!(found.single_parameter_fields, ["a", "c.d"]);
        assert_eq!(found.fields, ["a", "b[0]", "b[1]", "b[2]", "c.d"]);
        assert_eq!(
            content,
            json!({"a": "5", "b": ["x5", "${n}", "55"], "c": {"d": "5"}, "${n}": 1})
        );
    }

    #[test]
    fn filled_bytes_are_limited() {
        let mut content = json!(vec!["${a}"; 5000]);
        let error = fill(&mut content, &[("a", &"x".repeat(1000))]).unwrap_err();
        assert!(error.contains("more than"), "{error}");
    }
}
