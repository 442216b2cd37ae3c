//! Tests of the bounds on shapes: shapes beyond a bound, shapes at a bound, and ordinary shapes.

use std::time::{Duration, Instant};

use super::*;
use crate::engine::constraint::compiler::{STACK_BYTES, ShapeState};

/// Schemas that are refused, each with words of the error.
fn refused_schemas() -> Vec<(Value, &'static str)> {
    let properties = |count: usize| -> Value { (0..count).map(|i| (format!("p{i}"), json!({}))).collect() };
    let names = |count: usize| -> Vec<String> { (0..count).map(|i| format!("p{i}")).collect() };
    let chain = |count: usize, link: fn(Value) -> Value| {
        let of = |i: usize| {
            if i + 1 == count {
                json!({"type": "null"})
            } else {
                link(json!({"$ref": format!("#/$defs/d{}", i + 1)}))
            }
        };
        let all: Value = (0..count).map(|i| (format!("d{i}"), of(i))).collect();
        json!({"$ref": "#/$defs/d0", "$defs": all})
    };
    let twice: fn(Value) -> Value = |next| json!({"type": "object", "properties": {"a": {"allOf": [{"type": "object"}, next]}, "b": {"allOf": [{"type": "object"}, next]}}});
    let options = json!(
        (0..4)
            .map(|i| json!({"properties": {format!("k{i}"): {"type": "string"}}}))
            .collect::<Vec<_>>()
    );
    let patterns: Value = (0..65).map(|i| (format!("^p{i}_"), json!({}))).collect();
    let two_in_one = json!({"allOf": [{"properties": properties(1500)}, {"required": (0..501).map(|i| format!("q{i}")).collect::<Vec<_>>()}]});
    vec![
        (
            json!({"type": "object", "properties": properties(7000)}),
            "7000 properties of one object, at most 2000",
        ),
        (
            json!({"type": "object", "required": names(7000)}),
            "7000 required properties of one object, at most 2000",
        ),
        (two_in_one, "2001 properties of one object, at most 2000"),
        (
            json!({"enum": names(10_001)}),
            "10001 entries of one `enum`, `anyOf` or the like, at most 10000",
        ),
        (
            json!({"type": "object", "properties": properties(101), "minProperties": 1}),
            "101 properties of an object with `minProperties`",
        ),
        (
            json!({"type": "object", "patternProperties": patterns}),
            "65 `patternProperties` of one object, at most 64",
        ),
        (
            json!({"type": "string", "pattern": "a?".repeat(1001)}),
            "1001 operators",
        ),
        (
            json!({"type": "object", "patternProperties": {r"\w".repeat(1001): {}}}),
            "1001 classes of characters",
        ),
        (
            json!({"type": "object", "x-guidance": {"key_separator": "a*".repeat(1001)}}),
            "1001 operators",
        ),
        (
            chain(2000, |next| json!({"type": "array", "items": next})),
            "levels of nested `$ref` definitions, at most 3000",
        ),
        (
            chain(
                310,
                |next| json!({"allOf": [{"type": "array", "items": next}, {"type": "array", "items": {"type": "array"}}]}),
            ),
            "levels after `$ref`s are expanded, at most 300",
        ),
        (chain(30, twice), "multiply to more than 64 MiB"),
        (
            json!({"allOf": vec![json!({"anyOf": options}); 12]}),
            "multiply to more than 64 MiB",
        ),
        (
            json!({"const": "x".repeat(500_000), "anyOf": vec![json!({"type": "string"}); 9_000]}),
            "multiply to more than 64 MiB",
        ),
        (
            json!({"oneOf": vec![json!({"type": "object", "required": ["k"]}); 3000]}),
            "multiply to more than 64 MiB",
        ),
        (json!({"type": "object", "$ref": "#"}), "multiply to more than 64 MiB"),
        (
            (0..101).fold(json!({}), |inner, _| json!({"items": inner})),
            "levels, at most 100",
        ),
        (json!({"description": "x".repeat(1 << 20)}), "bytes, at most 1048576"),
    ]
}

#[test]
fn shapes_beyond_a_bound_are_refused_before_compilation() {
    for (at, (value, words)) in refused_schemas().into_iter().enumerate() {
        let began = Instant::now();
        let error = schema(value).expect_err(&format!("case {at}")).to_string();
        assert!(error.contains(words) && !error.contains('\n'), "case {at}: {error}");
        assert!(
            began.elapsed() < Duration::from_secs(10),
            "case {at} took {:?}",
            began.elapsed()
        );
    }
    for (pattern, words) in [
        (
            "a?".repeat(32 << 10),
            "32768 operators (`?`, `*`, `+`, `{`, `(`) of one regular expression, at most 1000",
        ),
        (r"\w?".repeat(1001), "1001 operators"),
        ("[ab]".repeat(1001), "1001 classes of characters"),
        (
            "a".repeat(pattern::BYTES_MAX + 1),
            "65537 bytes of one regular expression, at most 65536",
        ),
    ] {
        let error = regex(&pattern).unwrap_err().to_string();
        assert!(error.contains(words), "{error}");
    }
}

/// Schemas at the bounds. Each uses its thread's stack or time in a different way.
fn largest_schemas() -> Vec<Value> {
    let properties = |count: usize| -> Value {
        (0..count)
            .map(|i| (format!("p{i}"), json!({"type": "string"})))
            .collect()
    };
    let chain = |count: usize, link: fn(Value) -> Value| {
        let of = |i: usize| {
            if i + 1 == count {
                json!({"type": "null"})
            } else {
                link(json!({"$ref": format!("#/$defs/d{}", i + 1)}))
            }
        };
        let all: Value = (0..count).map(|i| (format!("d{i}"), of(i))).collect();
        json!({"$ref": "#/$defs/d0", "$defs": all})
    };
    vec![
        json!({"type": "object", "properties": properties(schema::PROPERTIES_MAX), "additionalProperties": false}),
        json!({"type": "object", "properties": {"a": {"properties": properties(schema::PROPERTIES_MAX)}, "b": {"properties": properties(schema::PROPERTIES_MAX)}}}),
        json!({"type": "object", "properties": properties(schema::COUNTED_PROPERTIES_MAX), "minProperties": 1, "additionalProperties": false}),
        chain(990, |next| json!({"type": "array", "items": next})),
        chain(740, |next| json!({"anyOf": [next, {"type": "null"}]})),
        chain(
            490,
            |next| json!({"type": "object", "properties": {"a": {"anyOf": [next, {"type": "null"}]}}}),
        ),
        chain(1490, |mut next| {
            next["type"] = json!("null");
            next
        }),
        chain(
            140,
            |next| json!({"allOf": [{"type": "array", "items": next}, {"type": "array", "items": {"type": "array"}}]}),
        ),
        chain(
            8,
            |next| json!({"type": "object", "properties": {"a": {"allOf": [{"type": ["object", "null"]}, next]}, "b": {"allOf": [{"type": ["object", "null"]}, next]}}}),
        ),
        (0..48).fold(
            json!({"type": "string"}),
            |inner, i| json!({"type": "object", "properties": {format!("p{i}"): inner}}),
        ),
        json!({"const": (0..97).fold(json!(1), |inner, _| json!([inner]))}),
        json!({"enum": (0..schema::ALTERNATIVES_MAX).map(|i| format!("label {i}")).collect::<Vec<_>>()}),
        json!({"anyOf": (0..schema::ALTERNATIVES_MAX).map(|i| json!({"const": {"k": i}})).collect::<Vec<_>>()}),
        json!({"type": "object", "patternProperties": (0..40).map(|i| (format!("^p{i}_"), json!({"type": "string"}))).collect::<Value>()}),
        json!({"type": "string", "pattern": "a?".repeat(1000)}),
        json!({"type": "string", "pattern": format!("^{}$", r"\w?".repeat(1000))}),
    ]
}

/// With half of a thread's stack, nothing within the bounds overflows it (an overflow would abort
/// the test process), and each case stays well below the time limit.
#[test]
fn shapes_within_the_bounds_need_less_than_the_stack_and_time_limits() {
    let bounded = std::thread::Builder::new().stack_size(STACK_BYTES / 2).spawn(|| {
        let tokenizer = tokenizer();
        let eos = ends(&tokenizer);
        let factory = build::parser_factory(&tokenizer, &eos).unwrap();
        let memory = memory::ShapeMemory::default();
        let regexes = [
            "a?".repeat(1000),
            r"\w?".repeat(1000),
            "(ab|cd|ef|gh|)".repeat(1000),
            "(.?x?){1000}".into(),
        ];
        let schemas = largest_schemas().into_iter().map(OutputConstraint::JsonSchema);
        for (at, shape) in schemas.chain(regexes.map(OutputConstraint::Regex)).enumerate() {
            let began = Instant::now();
            let compiled = build::compile(&shape, &tokenizer, &eos, &memory, || Ok(&factory));
            assert!(
                !matches!(
                    compiled,
                    Err(ConstraintError::TooLarge { .. } | ConstraintError::TooMuchWork { .. })
                ),
                "case {at} is not within the bounds: {compiled:?}"
            );
            assert!(
                began.elapsed() < Duration::from_secs(15),
                "case {at} took {:?}",
                began.elapsed()
            );
            println!("case {at}: {:?}", began.elapsed());
        }
    });
    bounded.unwrap().join().unwrap();
}

#[test]
fn ordinary_schemas_compile() {
    let labels: Vec<String> = (0..1000).map(|i| format!("label number {i}")).collect();
    let properties: Value = (0..100)
        .map(|i| {
            (
                format!("field_{i}"),
                json!({"type": "string", "description": "A field"}),
            )
        })
        .collect();
    let required: Vec<String> = (0..100).map(|i| format!("field_{i}")).collect();
    let nested = (0..10).fold(json!({"type": "string"}), |inner, i| {
        json!({"type": "object", "properties": {format!("level{i}"): inner}, "required": [format!("level{i}")], "additionalProperties": false})
    });
    let base =
        json!({"type": "object", "properties": {"id": {"type": "string", "format": "uuid"}}, "required": ["id"]});
    let cases = [
        (json!({"type": "string", "enum": labels}), r#""label number 999""#),
        (
            json!({"type": "object", "properties": {"label": {"enum": labels}}, "required": ["label"], "additionalProperties": false}),
            r#"{"label":"label number 7"}"#,
        ),
        (
            json!({"type": "object", "properties": properties, "additionalProperties": false}),
            r#"{"field_3":"x","field_99":"y"}"#,
        ),
        (
            json!({"type": "object", "properties": properties, "required": required, "additionalProperties": false}),
            "",
        ),
        (
            nested,
            r#"{"level9":{"level8":{"level7":{"level6":{"level5":{"level4":{"level3":{"level2":{"level1":{"level0":"x"}}}}}}}}}}"#,
        ),
        (
            json!({"type": "string", "pattern": r"^\d{4}-\d{2}-\d{2}$"}),
            r#""2024-12-31""#,
        ),
        (
            json!({"type": "string", "pattern": r"^[a-zA-Z0-9._%+-]+@[a-zA-Z0-9.-]+\.[a-zA-Z]{2,}$"}),
            r#""a.b@example.org""#,
        ),
        (
            json!({"type": "string", "pattern": "^[0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12}$"}),
            r#""01234567-89ab-cdef-0123-456789abcdef""#,
        ),
        (
            json!({"type": "string", "format": "date-time"}),
            r#""2024-12-31T10:00:00Z""#,
        ),
        (json!({"type": "string", "minLength": 1, "maxLength": 2000}), r#""x""#),
        (json!({"type": "integer", "minimum": -5, "maximum": 105}), "-3"),
        (json!({"type": "number", "exclusiveMinimum": 0, "maximum": 1}), "0.25"),
        (
            json!({"type": "array", "items": {"type": "number"}, "minItems": 2, "maxItems": 1000}),
            "[1,2.5]",
        ),
        // As pydantic writes schemas: optional members, one definition used in several places, a
        // tree.
        (
            json!({"$defs": {"Node": {"properties": {"name": {"title": "Name", "type": "string"}, "children": {"default": [], "items": {"$ref": "#/$defs/Node"}, "type": "array"}}, "required": ["name"], "title": "Node", "type": "object"}}, "$ref": "#/$defs/Node"}),
            r#"{"name":"a","children":[{"name":"b"}]}"#,
        ),
        (
            json!({"$defs": {"Color": {"enum": ["red", "blue"], "title": "Color", "type": "string"}}, "type": "object", "title": "T", "properties": {"a": {"anyOf": [{"$ref": "#/$defs/Color"}, {"type": "null"}], "default": null}, "b": {"allOf": [{"$ref": "#/$defs/Color"}], "default": "red"}}, "required": ["a"]}),
            r#"{"a":null,"b":"blue"}"#,
        ),
        (
            json!({"$defs": {"Cat": {"type": "object", "properties": {"kind": {"const": "cat"}, "lives": {"type": "integer"}}, "required": ["kind", "lives"]}, "Dog": {"type": "object", "properties": {"kind": {"const": "dog"}}, "required": ["kind"]}}, "oneOf": [{"$ref": "#/$defs/Cat"}, {"$ref": "#/$defs/Dog"}], "x-guidance": {"coerce_one_of": true}}),
            r#"{"kind":"cat","lives":9}"#,
        ),
        (
            json!({"$defs": {"Base": base, "Node": {"allOf": [{"$ref": "#/$defs/Base"}, {"type": "object", "properties": {"next": {"type": "array", "items": {"$ref": "#/$defs/Node"}}}}]}}, "$ref": "#/$defs/Node"}),
            r#"{"id":"01234567-89ab-cdef-0123-456789abcdef","next":[]}"#,
        ),
        (
            json!({"allOf": (0..4).map(|i| json!({"type": "object", "properties": {format!("kind{i}"): {"enum": ["a", "b", "c", "d", "e"]}, format!("s{i}"): {"type": "string"}}})).collect::<Vec<_>>()}),
            r#"{"kind0":"a","s3":"x"}"#,
        ),
        (
            json!({"type": "object", "additionalProperties": {"type": "integer"}}),
            r#"{"a":1,"b":2}"#,
        ),
        (
            json!({"type": "object", "patternProperties": {"^S_": {"type": "string"}, "^I_": {"type": "integer"}}, "additionalProperties": false}),
            r#"{"S_a":"x","I_b":3}"#,
        ),
        (json!({"type": ["string", "null"]}), "null"),
        (
            json!({"type": "array", "prefixItems": [{"type": "string"}, {"type": "integer"}], "items": false, "minItems": 2}),
            r#"["a",1]"#,
        ),
        // A `title` or `description` beside a `$ref` does not cause its target to be inlined.
        (
            json!({"$ref": "#/$defs/N", "$defs": {"N": {"type": "object", "properties": {"n": {"$ref": "#/$defs/N", "description": "the next", "title": "N"}}}}}),
            r#"{"n":{"n":{}}}"#,
        ),
        (json!({}), r#"{"any":[true,null]}"#),
    ];
    for (at, (value, text)) in cases.into_iter().enumerate() {
        let grammar = schema(value).unwrap_or_else(|error| panic!("case {at}: {error}"));
        assert!(text.is_empty() || grammar.accepts(text), "case {at}: {text}");
    }
    let named: Vec<String> = (0..1000).map(|i| format!(r"New\ York\ {i}\.")).collect();
    assert!(regex(&named.join("|")).unwrap().accepts("New York 999."));
    assert!(regex(r"^(?:[A-Z][a-z]{0,30} ){1,20}[A-Z]\.$").is_ok());
}

#[test]
fn a_shape_that_takes_too_long_is_given_up_and_occupies_its_thread() {
    let (t, slow) = (tokenizer(), |tail: &str| {
        OutputConstraint::Regex(format!("{}{tail}", r"\w?".repeat(1000)))
    });
    let eos = ends(&t);
    let mut compiler = Compiler::with_limits(1, Duration::from_millis(1));
    // Building the vocabulary's trie does not count against the shape's time.
    let quick = OutputConstraint::Regex("b+".into());
    assert!(
        Compiler::with_limits(1, Duration::from_secs(60))
            .compile(&quick, &t, &eos)
            .is_ok()
    );
    let given_up = compiler.compile(&slow("a"), &t, &eos).unwrap_err();
    assert_eq!(
        given_up,
        ConstraintError::TooSlow {
            field: "regex",
            seconds: 0
        }
    );
    // The refusal is cached, and no other shape is compiled while the thread runs.
    assert!(matches!(
        compiler.find(&slow("a"), &t, &eos),
        ShapeState::Ready(Err(ConstraintError::TooSlow { .. }))
    ));
    let busy = compiler.compile(&slow("b"), &t, &eos).unwrap_err();
    assert_eq!(
        busy,
        ConstraintError::ThreadsBusy {
            field: "regex",
            threads: 1
        }
    );
    let began = Instant::now();
    let quick = OutputConstraint::Choice {
        choices: vec!["a".into()],
        probabilities: false,
    };
    while let Err(error) = compiler.compile(&quick, &t, &eos) {
        assert!(matches!(error, ConstraintError::ThreadsBusy { .. }), "{error}");
        assert!(began.elapsed() < Duration::from_secs(60), "the thread never ends");
        std::thread::sleep(Duration::from_millis(20));
    }
}

/// Shapes in use delay those that come after them, but only until they are dropped.
#[test]
fn memory_of_live_shapes_is_bounded() {
    let t = tokenizer();
    let (mut compiler, eos) = (Compiler::new(), ends(&t));
    compiler.live_bytes_max = 15_000;
    let shape = |i: usize| OutputConstraint::Regex(format!("{}{i}", "a?".repeat(50)));
    // Shapes that are only cached make room.
    for i in 0..4 {
        assert!(compiler.compile(&shape(i), &t, &eos).is_ok());
    }
    assert!(compiler.cached_results() <= 2);
    let used: Vec<_> = (4..6).map(|i| compiler.compile(&shape(i), &t, &eos)).collect();
    assert!(matches!(compiler.find(&shape(6), &t, &eos), ShapeState::Compiling(_)));
    assert!(
        compiler.collect(Duration::from_millis(300)).is_empty(),
        "two shapes are in use, and their bytes exceed the limit"
    );
    drop(used);
    assert!(compiler.compile(&shape(6), &t, &eos).is_ok());
}

#[test]
fn a_panic_is_the_error_of_its_shape() {
    let error = compiler::catch_panic("regex", || panic!("it broke\nhere")).unwrap_err();
    assert_eq!(error.to_string(), "`regex` cannot be compiled: panic: it broke here");
    // A panic of llguidance itself, which cuts a text in the middle of a character.
    let cut = json!({"type": "string", "minLength": {"x": format!("{}{}", "a".repeat(93), "é".repeat(50))}});
    let error = schema(cut).unwrap_err().to_string();
    assert!(error.contains("cannot be compiled") && !error.contains('\n'), "{error}");
}

/// A mask that would take too long fails its sequence, and a sequence of another grammar goes on.
#[test]
fn a_mask_that_takes_too_long_fails_only_its_sequence() {
    let hard = regex(&"(x{0,99}y?z{0,999}){0,50}".repeat(190)).unwrap();
    let mut state = GrammarState::new(hard);
    let began = Instant::now();
    let failed = (0..50).find_map(|_| state.consume(120).err().or_else(|| allowed(&mut state).err()));
    assert!(
        failed.as_ref().is_some_and(|why| why.contains("too many")),
        "{failed:?}"
    );
    assert!(began.elapsed() < Duration::from_secs(5), "{:?}", began.elapsed());
    let mut other = GrammarState::new(regex("a[bc]d").unwrap());
    assert_eq!((other.consume(97), allowed(&mut other)), (Ok(false), Ok(vec![98, 99])));
}

/// Feeds a pseudorandom sequence of the letters `a` and `b` to a state. Returns the error that ends
/// it.
fn walk_at_random(state: &mut GrammarState, seed: u64, steps: usize) -> Result<(), String> {
    let mut dice = seed;
    for _ in 0..steps {
        let ids = allowed(state)?;
        assert!(ids.contains(&97) && ids.contains(&98), "{ids:?}");
        dice = dice
            .wrapping_mul(6_364_136_223_846_793_005)
            .wrapping_add(1_442_695_040_888_963_407);
        state.consume(97 + (dice >> 63) as u32)?;
    }
    Ok(())
}

/// The growth of lexers is bounded over all lanes of all grammars: a sequence whose lexer has grown
/// too large fails, and the others go on.
#[test]
fn growth_of_lexers_is_bounded_over_all_grammars() {
    const LIMIT_BYTES: u64 = 4 << 20;
    let t = tokenizer();
    let (mut compiler, eos) = (Compiler::new(), ends(&t));
    compiler.memory.lexer_memory = lexer_memory::LexerMemory::with_limit(LIMIT_BYTES);
    let lexer_memory = compiler.memory.lexer_memory.clone();
    let mut state_of = |text: &str| match compiler.compile(&OutputConstraint::Regex(text.into()), &t, &eos) {
        Ok(Constraint::Grammar(grammar)) => GrammarState::new(grammar),
        other => panic!("no grammar: {other:?}"),
    };
    // Each text of 60 letters reaches a state of its own.
    let mut hostile: Vec<GrammarState> = (0..40)
        .map(|i| state_of(&format!("(a|b)*a(a|b){{60}}{}", i % 4)))
        .collect();
    let mut small = state_of("(a|b)*[cd]");
    let (mut failed, mut peak) = (0, 0);
    for round in 0..40u64 {
        let mut seed = round * 1000;
        hostile.retain_mut(|state| {
            seed += 1;
            let walked = walk_at_random(state, seed, 25);
            peak = peak.max(lexer_memory.bytes());
            let Err(why) = walked else { return true };
            assert!(
                why.contains("take more than 4 MiB") && why.contains("a simpler schema or expression"),
                "{why}"
            );
            failed += 1;
            assert!(lexer_memory.bytes() > LIMIT_BYTES);
            walk_at_random(&mut small, round, 5).unwrap();
            false
        });
    }
    assert!(failed > 0 && peak < 3 * LIMIT_BYTES, "{failed} failed, {peak} bytes");
    assert!(allowed(&mut small).unwrap().contains(&99));
    drop((hostile, small, compiler));
    assert_eq!(lexer_memory.bytes(), 0);
}

/// A lane keeps its lexer's states for its next sequence, unless memory is tight.
#[test]
fn an_unused_lexer_is_dropped_where_memory_is_short() {
    const LIMIT_BYTES: u64 = 1 << 20;
    let t = tokenizer();
    let (mut compiler, eos) = (Compiler::new(), ends(&t));
    compiler.memory.lexer_memory = lexer_memory::LexerMemory::with_limit(LIMIT_BYTES);
    let lexer_memory = compiler.memory.lexer_memory.clone();
    let Ok(Constraint::Grammar(grammar)) =
        compiler.compile(&OutputConstraint::Regex("(a|b)*a(a|b){60}".into()), &t, &eos)
    else {
        panic!("no grammar");
    };
    let mut state = GrammarState::new(grammar.clone());
    walk_at_random(&mut state, 1, 50).unwrap();
    drop(state);
    let kept = lexer_memory.bytes();
    assert!(kept > 0 && kept < LIMIT_BYTES / 2, "{kept} bytes");
    let mut state = GrammarState::new(grammar.clone());
    let mut seed = 2;
    while lexer_memory.bytes() <= LIMIT_BYTES / 2 + kept {
        walk_at_random(&mut state, seed, 10).unwrap();
        seed += 1;
    }
    drop(state);
    assert_eq!(lexer_memory.bytes(), kept, "that of the other lane stays");
}
