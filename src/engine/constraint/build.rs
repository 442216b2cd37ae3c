//! Compiles one shape on the calling thread, within the limits given to llguidance.
//!
//! See docs/decisions/052-json-may-have-one-space.md.

use std::sync::Arc;

use llguidance::api::{ParserLimits, TopLevelGrammar};
use llguidance::{Matcher, ParserFactory};
use serde_json::{Map, Value};
use toktrie::TokEnv;

use crate::engine::choice::ChoiceTrie;
use crate::engine::constraint::grammar::Grammar;
use crate::engine::constraint::memory::ShapeMemory;
use crate::engine::constraint::refusal::located_refusal;
use crate::engine::constraint::text::one_line;
use crate::engine::constraint::{Constraint, ConstraintError, MemoryCharge, formats, pattern, schema};
use crate::engine::params::OutputConstraint;
use crate::engine::vocabulary::Vocabulary;
use crate::tokenizer::Tokenizer;

/// llguidance's message if no token may follow.
const NOTHING_FOLLOWS: &str = "NoExtensionBias";
/// Part of llguidance's panic message for a grammar with too many symbols.
const TOO_MANY_SYMBOLS: &str = "grammar.symbols.len()";

/// Limits on the compilation of a grammar and on each mask. All of them are set, so that an update
/// of llguidance cannot change them.
const LIMITS: ParserLimits = ParserLimits {
    // Grammar items at one position: about 500 optional properties, or 2,000 objects in an `anyOf`.
    max_items_in_row: 2_000,
    initial_lexer_fuel: 1_000_000,
    // Both limits are per mask: some tens of milliseconds.
    step_lexer_fuel: 200_000,
    step_max_items: 50_000,
    // 1 to 2 KB per state, in each lane.
    max_lexer_states: 100_000,
    max_grammar_size: 500_000,
    precompute_large_lexemes: true,
    verbose_errors: false,
};

/// Maximum bytes of a trie of choices per byte of the choices' texts.
const TRIE_BYTES_PER_TEXT_BYTE: u64 = 100;

/// The job's field that a shape comes from.
pub(super) fn job_field(shape: &OutputConstraint) -> &'static str {
    match shape {
        OutputConstraint::Free => "generate",
        OutputConstraint::Choice { .. } => "choice",
        OutputConstraint::JsonSchema(_) => "json_schema",
        OutputConstraint::Regex(_) => "regex",
    }
}

/// llguidance's compiler for this vocabulary.
pub(super) fn parser_factory(tokenizer: &Arc<Tokenizer>, eos: &[u32]) -> Result<ParserFactory, ConstraintError> {
    let env: TokEnv = Arc::new(Vocabulary::new(tokenizer, eos));
    let mut factory = ParserFactory::new_simple(&env).map_err(|e| ConstraintError::Vocabulary {
        why: one_line(&format!("{e:#}")),
    })?;
    factory.quiet();
    *factory.limits_mut() = LIMITS;
    Ok(factory)
}

/// Compiles a shape. `factory` is called only for shapes that need a grammar.
pub(super) fn compile<'a>(
    shape: &OutputConstraint,
    tokenizer: &Arc<Tokenizer>,
    eos: &[u32],
    memory: &ShapeMemory,
    factory: impl FnOnce() -> Result<&'a ParserFactory, ConstraintError>,
) -> Result<Constraint, ConstraintError> {
    let (grammar, weight) = match shape {
        OutputConstraint::Free => return Ok(Constraint::Free),
        OutputConstraint::Choice { choices, probabilities } => {
            let bytes: usize = choices.iter().map(String::len).sum();
            let mut choices = ChoiceTrie::new(choices, tokenizer, eos)?;
            choices.charge = MemoryCharge::new(TRIE_BYTES_PER_TEXT_BYTE * bytes as u64, &memory.live_bytes);
            return Ok(Constraint::Choice {
                choices: Arc::new(choices),
                probabilities: *probabilities,
            });
        }
        OutputConstraint::JsonSchema(value) => {
            let weight = schema::check_work(value)?;
            (TopLevelGrammar::from_json_schema(prepare_schema(value)?), weight)
        }
        OutputConstraint::Regex(regex) => {
            let weight = pattern::compile_cost("regex", regex)?;
            (TopLevelGrammar::from_regex(without_anchors(regex)), weight)
        }
    };
    let compiled = compile_grammar(grammar, job_field(shape), factory()?, weight, memory);
    compiled.map_err(|error| match (error, shape) {
        (ConstraintError::Invalid { field, why }, OutputConstraint::JsonSchema(schema)) => ConstraintError::Invalid {
            field,
            why: located_refusal(&why, schema).unwrap_or(why),
        },
        (error, _) => error,
    })
}

fn compile_grammar(
    grammar: TopLevelGrammar,
    field: &'static str,
    factory: &ParserFactory,
    weight: u64,
    memory: &ShapeMemory,
) -> Result<Constraint, ConstraintError> {
    let parser = factory.create_parser(grammar).map_err(|e| ConstraintError::Invalid {
        field,
        why: refusal_reason(&format!("{e:#}")),
    })?;
    let mut matcher = Matcher::new(Ok(parser.clone()));
    let forced = matcher.consume_ff_tokens();
    // Computing the first mask also fills the lexer's caches, which the parser and the matcher
    // share and which clones start with.
    let mask = matcher
        .compute_mask_or_eos()
        .map_err(|e| match one_line(&e.to_string()) {
            line if line == NOTHING_FOLLOWS => ConstraintError::Unsatisfiable { field },
            why => ConstraintError::Invalid { field, why },
        })?;
    if mask.is_zero() {
        return Err(ConstraintError::Unsatisfiable { field });
    }
    let charge = MemoryCharge::new(weight, &memory.live_bytes);
    let grammar = Grammar::new(parser, &matcher, forced, mask, memory.lexer_memory.clone(), charge);
    Ok(Constraint::Grammar(Arc::new(grammar)))
}

/// Beginning of llguidance's message if no answer fits a schema.
const UNSATISFIABLE: &str = "Unsatisfiable schema: ";

/// The reason why a grammar cannot be compiled, in one line.
fn refusal_reason(message: &str) -> String {
    match one_line(message) {
        line if line.contains(TOO_MANY_SYMBOLS) => "its grammar has more than 65,000 symbols".into(),
        line => match line.split_once("regex parse error: ") {
            Some((_, error)) => regex_reason(error).unwrap_or(line),
            None => line
                .replacen(UNSATISFIABLE, "no answer fits it: ", 1)
                .replace(UNSATISFIABLE, ""),
        },
    }
}

/// The reason in an error of the crate regex-syntax: `(a error: unclosed group 1 | start: …`.
fn regex_reason(error: &str) -> Option<String> {
    let (_, why) = error.split_once("error: ")?;
    let why = why.split(" 1 | start: ").next()?;
    Some(format!("in a regular expression, {why}"))
}

/// The schema as llguidance gets it: with bounded digits of times, and with defaults of
/// llguidance's options for white space.
fn prepare_schema(schema: &Value) -> Result<Value, ConstraintError> {
    let invalid = |why: &str| ConstraintError::Invalid {
        field: "json_schema",
        why: why.into(),
    };
    let mut members = match schema {
        Value::Object(members) => members.clone(),
        Value::Bool(true) => Map::new(),
        Value::Bool(false) => return Err(invalid("no JSON fits `false`")),
        _ => return Err(invalid("a JSON Schema is an object")),
    };
    let options = members.entry("x-guidance").or_insert_with(|| Value::Object(Map::new()));
    let Value::Object(options) = options else {
        return Err(invalid("`x-guidance` is not an object"));
    };
    // Allow one space or none after a separator, as the model prefers. It has learned one of the
    // two forms, and forcing the other makes its answers worse. More white space only costs tokens,
    // and some models would continue it without end.
    for (name, value) in [
        ("whitespace_flexible", Value::Bool(false)),
        ("key_separator", Value::from(": ?")),
        ("item_separator", Value::from(", ?")),
    ] {
        options.entry(name).or_insert(value);
    }
    let mut schema = Value::Object(members);
    formats::bound_digits(&mut schema);
    Ok(schema)
}

/// Removes `^` at the start and `$` at the end: the whole text is matched anyway, and llguidance
/// does not support them.
pub(super) fn without_anchors(regex: &str) -> &str {
    let regex = regex.strip_prefix('^').unwrap_or(regex);
    match regex.strip_suffix('$') {
        // After an odd number of backslashes, `$` is a literal dollar sign.
        Some(rest) if rest.bytes().rev().take_while(|b| *b == b'\\').count() % 2 == 0 => rest,
        _ => regex,
    }
}
