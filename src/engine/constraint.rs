//! What a completion may look like, compiled once per distinct shape and shared by all sequences that ask for it.
//!
//! JSON Schemas and regular expressions go through llguidance: a grammar over bytes walks the trie of the vocabulary's bytes
//! and yields the mask of tokens that may come next. JSON is written without white space between its parts. A shape that
//! cannot compile, or that no token can begin, is refused here, before a job starts.
//!
//! Where a grammar leaves one way to go on, the bytes up to the next choice are spelled with the tokenizer's own tokens
//! ([`GrammarState::forced`]) and the model is not asked. The last of them are left out where a longer token could also take
//! in what comes next: that is the model's choice.
//!
//! Each sequence walks a matcher of its own. Matchers of one *lane* share what they find out about the grammar (the states of its
//! lexer, which are expensive) and take turns; lanes run in parallel. What a sequence may say does not depend on its
//! neighbours: where a matcher that shares fails, which the neighbours' states may have brought it to, one that shares with
//! none decides.

use std::collections::HashMap;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, LazyLock, Mutex, MutexGuard, PoisonError};

use llguidance::api::TopLevelGrammar;
use llguidance::{Matcher, ParserFactory};
use serde_json::{Map, Value};
use sha2::{Digest, Sha256};
use toktrie::{SimpleVob, TokEnv};

use crate::engine::choice::Choices;
use crate::engine::params::Shape;
use crate::engine::vocabulary::Vocabulary;
use crate::model::tokenizer::Tokenizer;

/// Largest JSON Schema, as compact JSON, and largest regular expression, in bytes.
const SCHEMA_BYTES_MAX: usize = 1 << 20;
const REGEX_BYTES_MAX: usize = 64 << 10;
/// Deepest nesting of a JSON Schema.
const SCHEMA_DEPTH_MAX: usize = 100;
/// Compiled shapes a compiler remembers, and bytes of their texts; rows of a batch file may each bring their own.
const CACHED_MAX: usize = 256;
const CACHED_BYTES_MAX: usize = 8 << 20;
/// Sequences that share their lexer's states one after the other before a lane begins anew: what is kept stays bounded.
const LANE_SEQUENCES: usize = 256;
/// Longest part of a foreign message or text that an error repeats, in characters.
const QUOTED_CHARS_MAX: usize = 300;

/// A shape that no completion can be held to: the job (or the row that brought it) is refused.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum ConstraintError {
    #[error("`{field}` is too large: {size} {unit}, at most {limit} are read")]
    TooLarge {
        field: &'static str,
        size: usize,
        unit: &'static str,
        limit: usize,
    },
    #[error("`{field}` cannot be compiled: {why}")]
    Invalid { field: &'static str, why: String },
    #[error("`{field}` allows no text that this model's vocabulary can spell")]
    Unsatisfiable { field: &'static str },
    #[error("`choice` lists {count} choices of {bytes} bytes together; 1 to 10,000 choices of at most 1 MiB are taken")]
    ChoiceCount { count: usize, bytes: usize },
    #[error("the model's vocabulary cannot spell the choice `{text}`")]
    Unspeakable { text: String },
    #[error("the choice `{text}` begins another one, and the model has no end-of-sequence token to tell them apart")]
    NoEnd { text: String },
    #[error(
        "the choice `{text}` needs token {token}, which the checkpoint's `suppress_tokens`, `begin_suppress_tokens` or \
         `bad_words_ids` forbid; `generate.defaults: neutral` leaves them out"
    )]
    Forbidden { text: String, token: u32 },
    #[error("the vocabulary cannot be used for constrained output: {why}")]
    Vocabulary { why: String },
}

/// A compiled [`Shape`]; clones share it.
#[derive(Debug, Clone)]
pub enum Constraint {
    Free,
    Choice { choices: Arc<Choices>, probabilities: bool },
    Grammar(Arc<Grammar>),
}

impl Constraint {
    /// Compiles one shape for a vocabulary. Whoever compiles several shapes keeps a [`Compiler`].
    pub fn compile(shape: &Shape, tokenizer: &Arc<Tokenizer>, eos: &[u32]) -> Result<Constraint, ConstraintError> {
        Compiler::new(eos).compile(shape, tokenizer)
    }

    /// Tokens of the longest text it allows, where that is known.
    pub fn longest(&self) -> Option<usize> {
        match self {
            Constraint::Choice { choices, .. } => Some(choices.longest()),
            Constraint::Free | Constraint::Grammar(_) => None,
        }
    }
}

/// Compiles shapes for one vocabulary and remembers them.
pub struct Compiler {
    eos: Vec<u32>,
    /// Made when the first grammar is compiled: the trie of a large vocabulary takes a while.
    factory: Option<ParserFactory>,
    /// The shape asked for last: rows of a job share theirs.
    last: Option<(Shape, Result<Constraint, ConstraintError>)>,
    /// By the hash of the shape's text.
    compiled: HashMap<[u8; 32], Result<Constraint, ConstraintError>>,
    /// Bytes of the texts of all `compiled`.
    compiled_bytes: usize,
}

impl Compiler {
    /// `eos`: the model's end-of-sequence ids.
    pub fn new(eos: &[u32]) -> Compiler {
        Compiler {
            eos: eos.to_vec(),
            factory: None,
            last: None,
            compiled: HashMap::new(),
            compiled_bytes: 0,
        }
    }

    /// Compiles a shape, or finds it compiled. All calls must bring the same tokenizer.
    pub fn compile(&mut self, shape: &Shape, tokenizer: &Arc<Tokenizer>) -> Result<Constraint, ConstraintError> {
        if let Some((last, result)) = &self.last
            && same_shape(last, shape)
        {
            return result.clone();
        }
        let result = self.compile_other(shape, tokenizer);
        self.last = Some((shape.clone(), result.clone()));
        result
    }

    /// Compiles a shape that is not the last one, or finds it compiled.
    fn compile_other(&mut self, shape: &Shape, tokenizer: &Arc<Tokenizer>) -> Result<Constraint, ConstraintError> {
        let name = match shape {
            Shape::Free => return Ok(Constraint::Free),
            Shape::Choice { choices, probabilities } => format!("choice {probabilities} {choices:?}"),
            Shape::JsonSchema(schema) => format!("json {}", checked_schema(schema)?),
            Shape::Regex(regex) => format!("regex {}", checked_regex(regex)?),
        };
        let key = Sha256::digest(name.as_bytes()).into();
        if let Some(known) = self.compiled.get(&key) {
            return known.clone();
        }
        let result = self.compile_new(shape, tokenizer);
        self.compiled_bytes += name.len();
        if self.compiled.len() >= CACHED_MAX || self.compiled_bytes > CACHED_BYTES_MAX {
            self.compiled.clear();
            self.compiled_bytes = name.len();
        }
        self.compiled.insert(key, result.clone());
        result
    }

    fn compile_new(&mut self, shape: &Shape, tokenizer: &Arc<Tokenizer>) -> Result<Constraint, ConstraintError> {
        let (field, grammar) = match shape {
            Shape::Free => return Ok(Constraint::Free),
            Shape::Choice { choices, probabilities } => {
                let choices = Arc::new(Choices::new(choices, tokenizer, &self.eos)?);
                return Ok(Constraint::Choice {
                    choices,
                    probabilities: *probabilities,
                });
            }
            Shape::JsonSchema(schema) => ("json_schema", TopLevelGrammar::from_json_schema(compact(schema)?)),
            Shape::Regex(regex) => ("regex", TopLevelGrammar::from_regex(without_anchors(regex))),
        };
        let factory = match &mut self.factory {
            Some(factory) => factory,
            none => none.insert(factory(tokenizer, &self.eos)?),
        };
        let parser = factory.create_parser(grammar).map_err(|e| ConstraintError::Invalid {
            field,
            why: one_line(&format!("{e:#}")),
        })?;
        let mut matcher = Matcher::new(Ok(parser));
        let forced = matcher.consume_ff_tokens();
        // The first mask also fills the caches that clones start with.
        let mask = matcher
            .compute_mask_or_eos()
            .map_err(|e| match one_line(&e.to_string()) {
                line if line == NOTHING_FOLLOWS => ConstraintError::Unsatisfiable { field },
                why => ConstraintError::Invalid { field, why },
            })?;
        if mask.is_zero() {
            return Err(ConstraintError::Unsatisfiable { field });
        }
        let env = factory.tok_env().clone();
        Ok(Constraint::Grammar(Arc::new(Grammar {
            ended: matcher.is_stopped(),
            lanes: (0..*LANES).map(|_| Mutex::default()).collect(),
            next_lane: AtomicUsize::new(0),
            prototype: Mutex::new(matcher),
            forced,
            first_mask: mask,
            env,
        })))
    }
}

/// What llguidance says where no token may follow.
const NOTHING_FOLLOWS: &str = "NoExtensionBias";

/// A compiled grammar.
pub struct Grammar {
    /// Tokens that every text begins with.
    forced: Vec<u32>,
    /// Can nothing follow them?
    ended: bool,
    /// Stands after them and is only cloned.
    prototype: Mutex<Matcher>,
    /// What may follow them.
    first_mask: SimpleVob,
    lanes: Vec<Mutex<Lane>>,
    next_lane: AtomicUsize,
    env: TokEnv,
}

/// Some more than there are threads, so that they balance.
static LANES: LazyLock<usize> = LazyLock::new(|| 4 * std::thread::available_parallelism().map_or(1, usize::from));

/// Matchers that share the states of their lexer.
#[derive(Default)]
struct Lane {
    /// Stands where the prototype does and is only cloned.
    matcher: Option<Matcher>,
    /// How many have been cloned.
    sequences: usize,
}

/// A broken matcher says so itself.
fn locked<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl std::fmt::Debug for Grammar {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Grammar")
            .field("first_tokens", &self.first_mask.num_set())
            .finish()
    }
}

impl Grammar {
    /// Does the whole text fit?
    pub fn accepts(&self, text: &str) -> bool {
        let trie = self.env.tok_trie();
        let Some(rest) = text.as_bytes().strip_prefix(&trie.decode(&self.forced)[..]) else {
            return false;
        };
        let mut matcher = self.matcher();
        let tokens = trie.greedy_tokenize(rest);
        // The vocabulary may lack bytes of the text, which the tokens then leave out.
        if trie.decode(&tokens) != rest {
            return false;
        }
        (tokens.is_empty() || matcher.consume_tokens(&tokens).is_ok()) && accepting(&mut matcher)
    }

    /// A matcher that shares with none.
    fn matcher(&self) -> Matcher {
        locked(&self.prototype).deep_clone()
    }

    /// A matcher that shares with others of this lane.
    fn matcher_of(&self, lane: usize) -> Matcher {
        let mut lane = locked(&self.lanes[lane]);
        if lane.sequences == LANE_SEQUENCES {
            *lane = Lane::default();
        }
        lane.sequences += 1;
        lane.matcher.get_or_insert_with(|| self.matcher()).clone()
    }
}

/// Where one sequence stands in a grammar.
///
/// While it has nothing but the tokens that every text begins with, it is the shared grammar and nothing else, so thousands may
/// wait.
pub struct GrammarState {
    grammar: Arc<Grammar>,
    /// How many of [`Grammar::forced`] it has taken.
    begun: usize,
    lane: usize,
    /// `None` until a token was sampled.
    matcher: Option<Matcher>,
    /// Does it share with others of its lane?
    shares: bool,
    /// What `matcher` has taken.
    taken: Vec<u32>,
    mask: Mask,
}

/// What may come next.
enum Mask {
    /// The grammar's first mask.
    First,
    Unknown,
    Computed(Result<SimpleVob, String>),
}

impl GrammarState {
    /// Stands at the start.
    pub fn new(grammar: Arc<Grammar>) -> GrammarState {
        GrammarState {
            lane: grammar.next_lane.fetch_add(1, Ordering::Relaxed) % grammar.lanes.len(),
            begun: 0,
            matcher: None,
            shares: true,
            taken: Vec::new(),
            grammar,
            mask: Mask::First,
        }
    }

    pub fn grammar(&self) -> &Grammar {
        &self.grammar
    }

    /// Sequences of different lanes do not wait for each other; there are as many as [`GrammarState::lanes`] says.
    pub fn lane(&self) -> usize {
        self.lane
    }

    pub fn lanes() -> usize {
        *LANES
    }

    /// Computes the mask of the next token, where that has not been done. Takes from microseconds to milliseconds.
    pub fn prepare(&mut self) {
        if matches!(self.mask, Mask::Unknown) {
            let mask = self.ask(Matcher::compute_mask_or_eos);
            self.mask = Mask::Computed(mask.map_err(|e| format!("no token can follow in the asked-for shape: {e}")));
        }
    }

    /// Asks its matcher; where that fails and shares with others, one that does not.
    fn ask<T>(&mut self, what: impl Fn(&mut Matcher) -> anyhow::Result<T>) -> Result<T, String> {
        let matcher = self.matcher.get_or_insert_with(|| self.grammar.matcher_of(self.lane));
        match what(matcher) {
            Err(_) if std::mem::take(&mut self.shares) => {
                let alone = self.matcher.insert(self.grammar.matcher());
                alone.consume_tokens(&self.taken).and_then(|()| what(alone))
            }
            result => result,
        }
        .map_err(|e| one_line(&e.to_string()))
    }

    /// Tokens that may come next, a bit an id, once [prepared](Self::prepare); end-of-sequence ids among them where the text is
    /// complete.
    pub fn mask(&self) -> Result<&[u32], String> {
        match &self.mask {
            Mask::First => Ok(self.grammar.first_mask.as_slice()),
            Mask::Computed(mask) => mask.as_ref().map(SimpleVob::as_slice).map_err(String::clone),
            Mask::Unknown => Err("no mask was computed".into()),
        }
    }

    /// Writes down which tokens a text may begin with, a bit an id: the one that is certain, or the grammar's first mask.
    pub fn first_mask(&self, mask: &mut Vec<u32>) {
        match self.grammar.forced.first() {
            Some(first) => {
                mask.resize(*first as usize / 32 + 1, 0);
                mask[*first as usize / 32] |= 1 << (first % 32);
            }
            None => mask.extend_from_slice(self.grammar.first_mask.as_slice()),
        }
    }

    /// Tokens that are certain to come next, whatever the model says; to be taken one by one. Empty where it has a choice.
    pub fn forced(&mut self) -> Vec<u32> {
        match &mut self.matcher {
            Some(matcher) => matcher.compute_ff_tokens(),
            None => self.grammar.forced[self.begun..].to_vec(),
        }
    }

    /// Takes a token that the mask allowed, or the next forced one. `true`: the text is complete and nothing can follow.
    pub fn take(&mut self, token: u32) -> Result<bool, String> {
        if self.begun < self.grammar.forced.len() {
            self.begun += 1;
            return Ok(self.begun == self.grammar.forced.len() && self.grammar.ended);
        }
        self.mask = Mask::Unknown;
        let ended = self.ask(|matcher| {
            matcher.consume_token(token)?;
            Ok(matcher.is_stopped())
        })?;
        self.taken.push(token);
        Ok(ended)
    }

    /// Is the text complete (though more may be allowed to follow)?
    pub fn is_complete(&mut self) -> bool {
        // What is forced is not the end.
        self.begun == self.grammar.forced.len()
            && accepting(self.matcher.get_or_insert_with(|| self.grammar.matcher_of(self.lane)))
    }
}

fn accepting(matcher: &mut Matcher) -> bool {
    match matcher.is_stopped() {
        true => matcher.stop_reason().is_ok(),
        false => matcher.is_accepting().unwrap_or(false),
    }
}

/// What compiles shapes for this vocabulary.
fn factory(tokenizer: &Arc<Tokenizer>, eos: &[u32]) -> Result<ParserFactory, ConstraintError> {
    let env: TokEnv = Arc::new(Vocabulary::new(tokenizer, eos));
    let mut factory = ParserFactory::new_simple(&env).map_err(|e| ConstraintError::Vocabulary {
        why: one_line(&format!("{e:#}")),
    })?;
    factory.quiet();
    factory.limits_mut().verbose_errors = false;
    Ok(factory)
}

/// Are these the same, the order of members in a schema (which is the order of the output) included?
fn same_shape(a: &Shape, b: &Shape) -> bool {
    match (a, b) {
        (Shape::JsonSchema(a), Shape::JsonSchema(b)) => same_json(a, b),
        _ => a == b,
    }
}

/// Equality that minds the order of members, without recursion.
fn same_json(a: &Value, b: &Value) -> bool {
    let mut stack = vec![(a, b)];
    while let Some(pair) = stack.pop() {
        match pair {
            (Value::Array(a), Value::Array(b)) if a.len() == b.len() => stack.extend(a.iter().zip(b)),
            (Value::Object(a), Value::Object(b)) if a.len() == b.len() && a.keys().eq(b.keys()) => {
                stack.extend(a.values().zip(b.values()));
            }
            (Value::Array(_) | Value::Object(_), _) => return false,
            (a, b) if a == b => {}
            _ => return false,
        }
    }
    true
}

/// The schema as text, within limits.
fn checked_schema(schema: &Value) -> Result<String, ConstraintError> {
    let depth = depth_of(schema);
    let too_large = |size, unit, limit| ConstraintError::TooLarge {
        field: "json_schema",
        size,
        unit,
        limit,
    };
    if depth > SCHEMA_DEPTH_MAX {
        return Err(too_large(depth, "levels", SCHEMA_DEPTH_MAX));
    }
    let text = schema.to_string();
    match text.len() > SCHEMA_BYTES_MAX {
        true => Err(too_large(text.len(), "bytes", SCHEMA_BYTES_MAX)),
        false => Ok(text),
    }
}

fn checked_regex(regex: &str) -> Result<&str, ConstraintError> {
    let (size, limit) = (regex.len(), REGEX_BYTES_MAX);
    match size > limit {
        true => Err(ConstraintError::TooLarge {
            field: "regex",
            size,
            unit: "bytes",
            limit,
        }),
        false => Ok(regex),
    }
}

/// Levels of nesting, without recursion.
fn depth_of(value: &Value) -> usize {
    let mut deepest = 0;
    let mut stack = vec![(value, 1)];
    while let Some((value, depth)) = stack.pop() {
        deepest = deepest.max(depth);
        match value {
            Value::Array(items) => stack.extend(items.iter().map(|v| (v, depth + 1))),
            Value::Object(members) => stack.extend(members.values().map(|v| (v, depth + 1))),
            _ => {}
        }
    }
    deepest
}

/// The schema with llguidance's option against white space set, unless the schema sets its own.
fn compact(schema: &Value) -> Result<Value, ConstraintError> {
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
    // One space after a separator or none, as the model likes: it has learned one of both, and forcing the other upon it
    // costs sense. More white space (which some models go on with for ever) only costs tokens.
    for (name, value) in [
        ("whitespace_flexible", Value::Bool(false)),
        ("key_separator", Value::from(": ?")),
        ("item_separator", Value::from(", ?")),
    ] {
        options.entry(name).or_insert(value);
    }
    Ok(Value::Object(members))
}

/// The whole text is matched anyway, so `^` at the start and `$` at the end say nothing new, and llguidance knows neither.
fn without_anchors(regex: &str) -> &str {
    let regex = regex.strip_prefix('^').unwrap_or(regex);
    match regex.strip_suffix('$') {
        // After an odd number of backslashes it is a dollar sign.
        Some(rest) if rest.bytes().rev().take_while(|b| *b == b'\\').count() % 2 == 0 => rest,
        _ => regex,
    }
}

/// A foreign message on one line and not too long, without the state dumps that llguidance puts between angle brackets.
fn one_line(message: &str) -> String {
    let lines = message.lines().map(str::trim).take_while(|line| !line.starts_with('<'));
    let words: Vec<&str> = lines
        .flat_map(str::split_whitespace)
        .filter(|word| !word.trim_matches('^').is_empty())
        .collect();
    let line = words.join(" ");
    match line.char_indices().nth(QUOTED_CHARS_MAX) {
        Some((end, _)) => format!("{}…", &line[..end]),
        None if line.is_empty() => "no reason given".to_string(),
        None => line.trim_end_matches('.').to_string(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use serde_json::json;

    /// The ids that may come next.
    fn allowed(state: &mut GrammarState) -> Result<Vec<u32>, String> {
        state.prepare();
        let mask = state.mask()?;
        let ids = (0..mask.len() as u32 * 32).filter(|id| mask[*id as usize / 32] >> (id % 32) & 1 == 1);
        Ok(ids.collect())
    }

    fn tokenizer() -> Arc<Tokenizer> {
        let words = ["name", "age", "{\"", "\":", "true", "12"];
        Arc::new(Tokenizer::from_words(&words, &["<pad>", "<eos>"]).unwrap())
    }

    fn grammar(shape: &Shape) -> Result<Arc<Grammar>, ConstraintError> {
        let tokenizer = tokenizer();
        match Constraint::compile(shape, &tokenizer, &[tokenizer.eos_id().unwrap()])? {
            Constraint::Grammar(grammar) => Ok(grammar),
            other => panic!("not a grammar: {other:?}"),
        }
    }

    fn regex(text: &str) -> Result<Arc<Grammar>, ConstraintError> {
        grammar(&Shape::Regex(text.into()))
    }

    fn schema(value: Value) -> Result<Arc<Grammar>, ConstraintError> {
        grammar(&Shape::JsonSchema(value))
    }

    #[test]
    fn regexes_match_the_whole_text() {
        for text in ["[a-c]{2,3}x", "^[a-c]{2,3}x$", "^(?:[a-c]{2,3}x)$"] {
            let g = regex(text).unwrap();
            assert!(g.accepts("abx") && g.accepts("abcx"), "{text}");
            assert!(
                !g.accepts("ax") && !g.accepts("abxx") && !g.accepts("ab") && !g.accepts(""),
                "{text}"
            );
        }
        assert_eq!(without_anchors(r"^a\$"), r"a\$");
        assert_eq!(without_anchors(r"a\\$"), r"a\\");
        let unicode = regex("[äöü€]+").unwrap();
        assert!(unicode.accepts("ä€") && !unicode.accepts("a"));
        let any = regex("(?:a/b)?").unwrap();
        assert!(any.accepts("") && any.accepts("a/b"));
    }

    #[test]
    fn schemas_are_compact_json() {
        let s = json!({"type": "object", "properties": {"name": {"type": "string"}, "age": {"type": "integer"}},
                       "required": ["name", "age"], "additionalProperties": false});
        let g = schema(s).unwrap();
        assert!(g.accepts(r#"{"name":"Ä \" x","age":12}"#));
        assert!(
            g.accepts(r#"{"name": "x", "age": 12}"#),
            "one space, as most models write it"
        );
        for spaced in [
            r#"{"name":  "x","age":12}"#,
            r#"{ "name":"x","age":12}"#,
            "{\"name\":\n\"x\",\"age\":12}",
        ] {
            assert!(!g.accepts(spaced), "more white space costs tokens: {spaced}");
        }
        assert!(!g.accepts(r#"{"name":"x"}"#) && !g.accepts(r#"{"name":"x","age":12"#) && !g.accepts(""));
        assert!(schema(json!(true)).unwrap().accepts("[1,{\"a\":null}]"));
    }

    #[test]
    fn a_sequence_is_masked_and_ends_with_its_shape() {
        let t = tokenizer();
        let eos = t.eos_id().unwrap();
        let mut state = GrammarState::new(regex("a[bc]d").unwrap());
        let allowed = |state: &mut GrammarState| allowed(state).unwrap();
        assert_eq!(state.forced(), [97]);
        assert_eq!(state.take(97), Ok(false));
        assert!(state.forced().is_empty() && !state.is_complete());
        assert_eq!(allowed(&mut state), [98, 99]);
        assert_eq!(state.take(99), Ok(false));
        assert!(!state.is_complete());
        assert_eq!((allowed(&mut state), state.forced()), (vec![100], vec![100]));
        assert_eq!(state.take(100), Ok(true), "nothing can follow");
        assert!(state.is_complete());
        let mut open = GrammarState::new(regex("a+").unwrap());
        assert_eq!(open.take(97), Ok(false));
        assert_eq!(allowed(&mut open), [97, eos]);
        assert!(open.is_complete());
    }

    #[test]
    fn what_cannot_work_is_refused_with_one_line() {
        let deep = (0..200).fold(json!({}), |inner, _| json!({"items": inner}));
        let cases = [
            regex("a("),
            regex("[z-a]"),
            regex("(?=a)b"),
            regex(&"a".repeat(REGEX_BYTES_MAX + 1)),
            schema(json!(false)),
            schema(json!("string")),
            schema(json!({"type": "nonsense"})),
            schema(json!({"$ref": "http://example.com/else.json"})),
            schema(json!({"$ref": "#/$defs/missing"})),
            schema(json!({"type": "integer", "minimum": 5, "maximum": 4})),
            schema(json!({"enum": []})),
            schema(json!({"x-guidance": 3})),
            schema(deep),
        ];
        for (i, case) in cases.into_iter().enumerate() {
            let error = case.expect_err(&format!("case {i} compiles")).to_string();
            assert!(
                !error.contains('\n') && error.len() < 600 && !error.ends_with('.'),
                "case {i}: {error}"
            );
        }
    }

    #[test]
    fn a_shape_that_no_token_can_begin_is_refused() {
        // A vocabulary without the letters that the regex wants.
        let json = json!({"version": "1.0", "added_tokens": [],
            "model": {"type": "WordLevel", "vocab": {"x": 0, "y": 1, "[UNK]": 2}, "unk_token": "[UNK]"}});
        let tokenizer = Arc::new(Tokenizer::from_json(&json.to_string(), None).unwrap());
        let result = Constraint::compile(&Shape::Regex("abc".into()), &tokenizer, &[]);
        assert!(
            matches!(result, Err(ConstraintError::Unsatisfiable { field: "regex" })),
            "{result:?}"
        );
        let other = Constraint::compile(&Shape::Regex("( x)+".into()), &tokenizer, &[]);
        assert!(other.is_ok(), "{other:?}");
    }

    #[test]
    fn a_shape_is_compiled_once() {
        let t = tokenizer();
        let mut compiler = Compiler::new(&[t.eos_id().unwrap()]);
        let shape = Shape::Regex("a+".into());
        let (a, b) = (
            compiler.compile(&shape, &t).unwrap(),
            compiler.compile(&shape, &t).unwrap(),
        );
        match (a, b) {
            (Constraint::Grammar(a), Constraint::Grammar(b)) => assert!(Arc::ptr_eq(&a, &b)),
            other => panic!("{other:?}"),
        }
    }

    #[test]
    fn the_order_of_members_makes_another_shape() {
        let t = tokenizer();
        let mut compiler = Compiler::new(&[t.eos_id().unwrap()]);
        let ordered = |text: &str| Shape::JsonSchema(serde_json::from_str(text).unwrap());
        let a = ordered(r#"{"type":"object","properties":{"a":{},"b":{}},"required":["a","b"]}"#);
        let b = ordered(r#"{"type":"object","properties":{"b":{},"a":{}},"required":["a","b"]}"#);
        assert!(same_shape(&a, &a.clone()) && !same_shape(&a, &b));
        assert!(!same_shape(&ordered("[1]"), &ordered("[1,2]")) && !same_shape(&ordered("{}"), &ordered("[]")));
        let mut fits = |shape: &Shape, text: &str| match compiler.compile(shape, &t) {
            Ok(Constraint::Grammar(grammar)) => grammar.accepts(text),
            other => panic!("{other:?}"),
        };
        assert!(fits(&a, r#"{"a":1,"b":2}"#) && !fits(&b, r#"{"a":1,"b":2}"#));
    }

    #[test]
    fn remembered_shapes_are_bounded_by_their_bytes() {
        let t = tokenizer();
        let mut compiler = Compiler::new(&[t.eos_id().unwrap()]);
        let large = |i: usize| Shape::JsonSchema(json!({"title": format!("{i}{}", "x".repeat(900 << 10)), "const": 1}));
        for i in 0..12 {
            assert!(compiler.compile(&large(i), &t).is_ok());
            assert!(compiler.compiled_bytes <= CACHED_BYTES_MAX && compiler.compiled.len() <= 9);
        }
        assert_eq!(compiler.compiled.len(), 3, "emptied once, when the tenth came");
    }

    /// Waiting costs nothing: no matcher before a token is sampled.
    #[test]
    fn a_waiting_sequence_has_no_matcher() {
        let mut state = GrammarState::new(regex("ab?c").unwrap());
        assert_eq!(state.forced(), [97]);
        assert_eq!(state.take(97), Ok(false));
        assert!(state.matcher.is_none() && state.forced().is_empty());
        assert_eq!(allowed(&mut state).unwrap(), [98, 99]);
        assert!(state.matcher.is_none());
        assert_eq!(state.take(98), Ok(false));
        assert!(state.matcher.is_some() && !state.is_complete());
    }

    /// What sequences of a lane share may break, and is thrown away when many have used it.
    #[test]
    fn lanes_begin_anew_and_decide_nothing() {
        let grammar = regex("(?:ab?c){3}d").unwrap();
        let all: Vec<u32> = (0..3 * LANE_SEQUENCES * GrammarState::lanes())
            .map(|_| {
                let mut state = GrammarState::new(grammar.clone());
                for token in [97, 98, 99] {
                    assert_eq!(state.take(token), Ok(false));
                }
                assert_eq!(allowed(&mut state).unwrap(), [97]);
                locked(&grammar.lanes[state.lane()]).sequences as u32
            })
            .collect();
        assert_eq!(all.iter().max(), Some(&(LANE_SEQUENCES as u32)));
        assert_eq!(all.iter().filter(|n| **n == 1).count(), 3 * GrammarState::lanes());
        for lane in &grammar.lanes {
            let broken = Matcher::new(Err(anyhow::anyhow!("it broke")));
            *locked(lane) = Lane {
                matcher: Some(broken),
                sequences: 1,
            };
        }
        let mut state = GrammarState::new(grammar);
        assert_eq!((state.take(97), state.take(99)), (Ok(false), Ok(false)));
        assert_eq!(allowed(&mut state).unwrap(), [97]);
        assert!(state.take(98).is_err(), "alone it fails as well");
    }

    /// Shapes that would blow up if they were spelled out: they compile or are refused, and their first steps are quick.
    #[test]
    fn hostile_shapes_do_no_harm() {
        let many: Vec<String> = (0..5000).map(|i| format!("value {i}")).collect();
        let results = [
            regex("(?:(?:a{1000}){1000}){1000}"),
            regex("(a|b)*a(a|b){60}"),
            schema(json!({"enum": many})),
            schema(json!({"type": "array", "items": {"type": "integer"}, "minItems": 1_000_000_000})),
            schema(json!({"type": "string", "minLength": 1_000_000_000})),
            schema(json!({"$ref": "#"})),
            schema(json!({"anyOf": [{"$ref": "#"}, {"$ref": "#"}]})),
        ];
        let compiled = results.each_ref().map(Result::is_ok);
        assert_eq!(compiled, [false, true, true, true, true, false, false]);
        // A thousand million letters, all certain.
        let endless = results[0].as_ref().unwrap_err().to_string();
        assert!(
            endless.contains("cannot be compiled: lexer error: too many"),
            "{endless}"
        );
        for grammar in results.into_iter().flatten() {
            let mut state = GrammarState::new(grammar);
            for _ in 0..10 {
                let Some(token) = allowed(&mut state).ok().and_then(|ids| ids.first().copied()) else {
                    break;
                };
                if state.take(token).unwrap_or(true) {
                    break;
                }
            }
        }
    }

    #[test]
    fn foreign_messages_become_one_line() {
        assert_eq!(
            one_line("regex parse error:\n    a(\n     ^\nerror: unclosed group."),
            "regex parse error: a( error: unclosed group"
        );
        assert_eq!(one_line("bad token\n<state>\nTokens: 1\n</state>"), "bad token");
        assert_eq!(one_line(" \n"), "no reason given");
        assert_eq!(one_line(&"é".repeat(1000)).chars().count(), QUOTED_CHARS_MAX + 1);
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(64))]
        #[test]
        fn foreign_regexes_never_panic(text in "\\PC{0,24}") {
            if let Ok(g) = regex(&text) {
                g.accepts("a");
            }
        }
    }
}
