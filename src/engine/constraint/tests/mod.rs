//! Tests of shapes, compiled for a small vocabulary.

mod bounds;

use super::build::without_anchors;
use super::compiler::CACHED_BYTES_MAX;
use super::grammar::{LANE_SEQUENCES_MAX, lock};
use super::text::{QUOTED_CHARS_MAX, one_line, same_shape};
use super::*;
use llguidance::Matcher;
use proptest::prelude::*;
use serde_json::{Value, json};

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

fn ends(tokenizer: &Tokenizer) -> Arc<[u32]> {
    [tokenizer.eos_id().unwrap()].into()
}

fn grammar(shape: &OutputConstraint) -> Result<Arc<Grammar>, ConstraintError> {
    let tokenizer = tokenizer();
    match Constraint::compile(shape, &tokenizer, &[tokenizer.eos_id().unwrap()])? {
        Constraint::Grammar(grammar) => Ok(grammar),
        other => panic!("not a grammar: {other:?}"),
    }
}

fn regex(text: &str) -> Result<Arc<Grammar>, ConstraintError> {
    grammar(&OutputConstraint::Regex(text.into()))
}

fn schema(value: Value) -> Result<Arc<Grammar>, ConstraintError> {
    grammar(&OutputConstraint::JsonSchema(value))
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
fn numbers_that_would_change_are_refused() {
    for (value, words) in [
        (
            json!({"const": 9_007_199_254_740_993_u64}),
            "9007199254740993 has no exact 64-bit floating-point form",
        ),
        (
            json!({"enum": ["a", {"b": [18_446_744_073_709_551_615_u64]}]}),
            "18446744073709551615",
        ),
        (
            serde_json::from_str(r#"{"const": 12345678901234567890123}"#).unwrap(),
            "has no exact 64-bit floating-point form",
        ),
        (
            json!({"items": {"const": -9_007_199_254_740_993_i64}, "type": "array"}),
            "-9007199254740993",
        ),
        (
            json!({"type": "integer", "minimum": 9.3e18, "maximum": 9.4e18}),
            "that have no 64-bit floating-point form",
        ),
        (
            json!({"type": ["integer", "null"], "exclusiveMaximum": -1e19, "minimum": -1e20}),
            "that have no 64-bit floating-point form",
        ),
        (
            json!({"type": "integer", "minimum": i64::MIN, "maximum": i64::MIN}),
            "that have no 64-bit floating-point form",
        ),
        (
            json!({"allOf": [{"type": "integer"}, {"minimum": -1e20, "maximum": -1e19}]}),
            "that have no 64-bit floating-point form",
        ),
    ] {
        let error = schema(value.clone()).unwrap_err().to_string();
        assert!(error.contains(words), "{value}: {error}");
    }
    // Bounds of integers are exactly those of the schema, or the schema is refused.
    let large = 9_007_199_254_740_993_i64;
    for (name, bound) in [
        ("minimum", large),
        ("maximum", large),
        ("minimum", -large),
        ("maximum", i64::MAX - 1),
        ("exclusiveMinimum", large - 1),
        ("exclusiveMaximum", large + 1),
        ("exclusiveMaximum", i64::MAX),
    ] {
        let error =
            schema(json!({"type": "object", "properties": {"a": {"type": "integer", name: bound}}})).unwrap_err();
        let words = format!("at `/properties/a`, its bound {bound} has no exact 64-bit floating-point form");
        assert!(error.to_string().contains(&words), "{name}: {error}");
    }
    let draft_4 = json!({"type": "integer", "minimum": large - 1, "exclusiveMinimum": true});
    assert!(
        schema(draft_4)
            .unwrap_err()
            .to_string()
            .contains("its bound 9007199254740992")
    );
    for (name, bound, least, most) in [
        ("minimum", large - 1, large - 1, large + 1),
        ("maximum", large - 1, 0, large - 1),
        ("exclusiveMinimum", large - 2, large - 1, large),
        ("exclusiveMaximum", large - 1, 0, large - 2),
    ] {
        let g = schema(json!({"type": "integer", name: bound})).unwrap();
        let accepts = |number: i64| g.accepts(&number.to_string());
        assert!(accepts(least) && accepts(most), "{name} {bound}");
        let out = if name.ends_with("inimum") {
            least.checked_sub(1)
        } else {
            most.checked_add(1)
        };
        assert!(out.is_none_or(|out| !accepts(out)), "{name} {bound}");
    }
    // A property may have a keyword's name, and the target of a `$ref` is a schema wherever it is.
    let named = json!({"type": "object", "properties": {"const": {"type": "number", "minimum": 0.1, "default": 9_007_199_254_740_993_i64},
        "enum": {"type": "number", "examples": [9_007_199_254_740_993_i64]}}});
    assert!(schema(named).is_ok());
    let odd = json!({"$ref": "#/default", "default": {"const": 9_007_199_254_740_993_i64}});
    assert!(
        schema(odd)
            .unwrap_err()
            .to_string()
            .contains("at `/default`, its value 9007199254740993")
    );
    for (value, answer) in [
        (json!({"const": 9_007_199_254_740_992_u64}), "9007199254740992"),
        (json!({"enum": [0.1, 7]}), "0.1"),
        (
            json!({"type": "integer", "maximum": 9_223_372_036_854_775_807_i64, "minimum": 0}),
            "9223372036854775807",
        ),
    ] {
        assert!(schema(value.clone()).unwrap().accepts(answer), "{value}");
    }
}

#[test]
fn fractions_of_seconds_have_nine_digits_at_most() {
    let g = schema(json!({"type": "array", "items": {"type": ["string", "null"], "format": "date-time"}})).unwrap();
    for fine in [
        "2026-11-24T01:02:03Z",
        "2026-11-24T01:02:03.5Z",
        "2026-11-24T01:02:03.123456789+01:00",
    ] {
        assert!(g.accepts(&format!("[null,\"{fine}\"]")), "{fine}");
    }
    for other in ["2026-11-24T01:02:03.1234567890Z", "2026-11-24", "2026-11-24T01:02:03.Z"] {
        assert!(!g.accepts(&format!("[\"{other}\"]")), "{other}");
    }
    // Together with the schema's own `pattern` and `allOf`.
    let g = schema(json!({"type": "string", "format": "time", "pattern": "Z$", "allOf": [{"pattern": "^0"}]})).unwrap();
    assert!(g.accepts("\"01:02:03.000000001Z\""));
    for other in ["01:02:03.0000000001Z", "01:02:03.1+00:00", "11:02:03Z"] {
        assert!(!g.accepts(&format!("\"{other}\"")), "{other}");
    }
    // A property named `format`, and data, are ignored.
    let g = schema(
        json!({"type": "object", "properties": {"format": {"const": {"format": "time"}}}, "required": ["format"],
        "additionalProperties": false}),
    );
    assert!(g.unwrap().accepts(r#"{"format":{"format":"time"}}"#));
}

#[test]
fn numbers_of_durations_have_nine_digits_at_most() {
    let g = schema(json!({"type": "string", "format": "duration"})).unwrap();
    for fine in ["P1D", "PT123456789S", "P1Y2M3DT4H5M6S", "P999999999W"] {
        assert!(g.accepts(&format!("\"{fine}\"")), "{fine}");
    }
    for other in ["PT1234567890S", "P1DT0000000000H", "P", "1D"] {
        assert!(!g.accepts(&format!("\"{other}\"")), "{other}");
    }
}

#[test]
fn unsupported_keywords_are_named_with_location_and_remedy() {
    for (value, words) in [
        (
            json!({"type": "object", "properties": {"a/b": {"type": "object", "propertyNames": {"pattern": "x"}}}}),
            "it has `propertyNames` at `/properties/a~1b`, which is not supported: leave it out, and check the answers against it afterwards",
        ),
        (
            json!({"anyOf": [{"type": "null"}, {"if": {"type": "null"}, "then": {}}]}),
            "it has `if` and `then` at `/anyOf/1`, which are not supported: leave them out",
        ),
        (
            json!({"type": "array", "uniqueItems": true}),
            "it has `uniqueItems` at its root, which is not supported",
        ),
        // A property named `not` is no keyword.
        (
            json!({"$ref": "#/$defs/x", "$defs": {"x": {"type": "object", "properties": {"not": {"not": {}}}}}}),
            "it has `not` at `/$defs/x/properties/not`",
        ),
        (
            json!({"type": "array", "items": {"type": "string", "format": "postcode"}}),
            "it has the `format` `postcode` at `/items`, which is unknown: leave it out, or use a `pattern`",
        ),
        (
            json!({"type": "array", "items": {"type": ["null", "float"]}}),
            "it has the `type` `float` at `/items`; types are `string`,",
        ),
        (
            json!({"type": "array", "items": {"$ref": "#/$defs/no"}}),
            "its `$ref` at `/items` names `#/$defs/no`, which does not exist",
        ),
        (
            json!({"type": "array", "items": {"$ref": "other.json"}}),
            "its `$ref` at `/items` names `other.json`: a `$ref` can only point into the same schema",
        ),
    ] {
        let error = schema(value.clone()).unwrap_err().to_string();
        assert!(error.contains(words), "{value}: {error}");
    }
    let deep = (0..40).fold(
        json!({"not": {}}),
        |inner, _| json!({"type": "object", "properties": {"a property": inner}}),
    );
    let error = schema(deep).unwrap_err().to_string();
    assert!(
        error.contains("…`, which is not supported: leave it out, and check") && error.len() < 400,
        "{error}"
    );
}

#[test]
fn a_sequence_is_masked_and_ends_with_its_shape() {
    let t = tokenizer();
    let eos = t.eos_id().unwrap();
    let mut state = GrammarState::new(regex("a[bc]d").unwrap());
    let allowed = |state: &mut GrammarState| allowed(state).unwrap();
    assert_eq!(state.forced_tokens(), [97]);
    assert_eq!(state.consume(97), Ok(false));
    assert!(state.forced_tokens().is_empty() && !state.is_complete());
    assert_eq!(allowed(&mut state), [98, 99]);
    assert_eq!(state.consume(99), Ok(false));
    assert!(!state.is_complete());
    assert_eq!((allowed(&mut state), state.forced_tokens()), (vec![100], vec![100]));
    assert_eq!(state.consume(100), Ok(true), "nothing can follow");
    assert!(state.is_complete());
    let mut open = GrammarState::new(regex("a+").unwrap());
    assert_eq!(open.consume(97), Ok(false));
    assert_eq!(allowed(&mut open), [97, eos]);
    assert!(open.is_complete());
}

#[test]
fn invalid_shapes_are_refused_with_one_line() {
    let deep = (0..200).fold(json!({}), |inner, _| json!({"items": inner}));
    let cases = [
        regex("a("),
        regex("[z-a]"),
        regex("(?=a)b"),
        regex(&"a".repeat(pattern::BYTES_MAX + 1)),
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
    // A vocabulary that lacks the letters of the regex.
    let json = json!({"version": "1.0", "added_tokens": [],
        "model": {"type": "WordLevel", "vocab": {"x": 0, "y": 1, "[UNK]": 2}, "unk_token": "[UNK]"}});
    let tokenizer = Arc::new(Tokenizer::from_json(&json.to_string(), None).unwrap());
    let result = Constraint::compile(&OutputConstraint::Regex("abc".into()), &tokenizer, &[]);
    assert!(
        matches!(result, Err(ConstraintError::Unsatisfiable { field: "regex" })),
        "{result:?}"
    );
    let other = Constraint::compile(&OutputConstraint::Regex("( x)+".into()), &tokenizer, &[]);
    assert!(other.is_ok(), "{other:?}");
}

#[test]
fn a_shape_is_compiled_once() {
    let t = tokenizer();
    let (mut compiler, eos) = (Compiler::new(), ends(&t));
    let shape = OutputConstraint::Regex("a+".into());
    let (a, b) = (
        compiler.compile(&shape, &t, &eos).unwrap(),
        compiler.compile(&shape, &t, &eos).unwrap(),
    );
    match (a, b) {
        (Constraint::Grammar(a), Constraint::Grammar(b)) => assert!(Arc::ptr_eq(&a, &b)),
        other => panic!("{other:?}"),
    }
}

#[test]
fn shapes_differ_by_the_order_of_members() {
    let t = tokenizer();
    let (mut compiler, eos) = (Compiler::new(), ends(&t));
    let ordered = |text: &str| OutputConstraint::JsonSchema(serde_json::from_str(text).unwrap());
    let a = ordered(r#"{"type":"object","properties":{"a":{},"b":{}},"required":["a","b"]}"#);
    let b = ordered(r#"{"type":"object","properties":{"b":{},"a":{}},"required":["a","b"]}"#);
    assert!(same_shape(&a, &a.clone()) && !same_shape(&a, &b));
    assert!(!same_shape(&ordered("[1]"), &ordered("[1,2]")) && !same_shape(&ordered("{}"), &ordered("[]")));
    let mut fits = |shape: &OutputConstraint, text: &str| match compiler.compile(shape, &t, &eos) {
        Ok(Constraint::Grammar(grammar)) => grammar.accepts(text),
        other => panic!("{other:?}"),
    };
    assert!(fits(&a, r#"{"a":1,"b":2}"#) && !fits(&b, r#"{"a":1,"b":2}"#));
}

#[test]
fn cached_shapes_are_bounded_by_their_bytes() {
    let t = tokenizer();
    let (mut compiler, eos) = (Compiler::new(), ends(&t));
    let large =
        |i: usize| OutputConstraint::JsonSchema(json!({"title": format!("{i}{}", "x".repeat(900 << 10)), "const": 1}));
    for i in 0..12 {
        assert!(compiler.compile(&large(i), &t, &eos).is_ok());
        assert!(compiler.compiled_bytes <= CACHED_BYTES_MAX && compiler.cached_results() <= 9);
    }
    assert_eq!(compiler.cached_results(), 3, "emptied once, when the tenth came");
}

/// A waiting sequence has no matcher before a token is sampled.
#[test]
fn a_waiting_sequence_has_no_matcher() {
    let mut state = GrammarState::new(regex("ab?c").unwrap());
    assert_eq!(state.forced_tokens(), [97]);
    assert_eq!(state.consume(97), Ok(false));
    assert!(state.handle.is_none() && state.forced_tokens().is_empty());
    assert_eq!(allowed(&mut state).unwrap(), [98, 99]);
    assert!(state.handle.is_none());
    assert_eq!(state.consume(98), Ok(false));
    assert!(state.handle.is_some() && !state.is_complete());
}

/// A lane's lexer is discarded after many sequences, and after it breaks.
#[test]
fn lanes_restart_and_do_not_affect_results() {
    let grammar = regex("(?:ab?c){3}d").unwrap();
    let all: Vec<u32> = (0..3 * LANE_SEQUENCES_MAX * GrammarState::lane_count())
        .map(|_| {
            let mut state = GrammarState::new(grammar.clone());
            for token in [97, 98, 99] {
                assert_eq!(state.consume(token), Ok(false));
            }
            assert_eq!(allowed(&mut state).unwrap(), [97]);
            lock(&grammar.lanes[state.lane()]).sequences as u32
        })
        .collect();
    assert_eq!(all.iter().max(), Some(&(LANE_SEQUENCES_MAX as u32)));
    assert_eq!(all.iter().filter(|n| **n == 1).count(), 3 * GrammarState::lane_count());
    for lane in &grammar.lanes {
        let mut lane = lock(lane);
        lane.handle.as_mut().unwrap().matcher = Matcher::new(Err(anyhow::anyhow!("it broke")));
        lane.sequences = 1;
    }
    let mut state = GrammarState::new(grammar);
    assert_eq!((state.consume(97), state.consume(99)), (Ok(false), Ok(false)));
    assert_eq!(allowed(&mut state).unwrap(), [97]);
    assert!(state.consume(98).is_err(), "alone it fails as well");
}

/// Shapes that would be huge if expanded compile or are refused, and their first steps are quick.
#[test]
fn hostile_shapes_are_compiled_or_refused_quickly() {
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
    // 10^9 letters, all of them forced.
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
            if state.consume(token).unwrap_or(true) {
                break;
            }
        }
    }
}

#[test]
fn external_messages_become_one_line() {
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
    fn arbitrary_regexes_never_panic(text in "\\PC{0,24}") {
        if let Ok(g) = regex(&text) {
            g.accepts("a");
        }
    }
}
