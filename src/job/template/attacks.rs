//! Templates that crashed the process or would crash it without limits. Each must end in an error of
//! one line, with little memory and time.

use minijinja::value::{Serde, Value};
use serde_json::json;

use super::Template;

fn chat(source: &str) -> Result<String, String> {
    let now = chrono::DateTime::UNIX_EPOCH.naive_utc();
    let template = Template::for_chat("t", source, now)?;
    let context = json!({
        "messages": [{"role": "user", "content": "hello"}, {"role": "assistant", "content": "y".repeat(1000)}],
        "text": "x".repeat(100_000),
    });
    template.render(Value::from(Serde(&context)))
}

#[track_caller]
fn assert_refused(source: &str, why: &str) {
    let shown = &source[..source.len().min(200)];
    match chat(source) {
        Ok(text) => panic!("{shown}: rendered {} bytes", text.len()),
        Err(error) => assert!(error.contains(why) && !error.contains('\n'), "{shown}: {error}"),
    }
}

const TOO_MUCH: &str = "more than 128 MB";
const TOO_MANY_ITEMS: &str = "more than 1000000 items";

#[test]
fn texts_that_grow_are_refused() {
    for source in [
        "{% set ns = namespace(s='x') %}{% for i in range(60) %}{% set ns.s = ns.s ~ ns.s %}{% endfor %}",
        "{% set ns = namespace(s='x') %}{% for i in range(60) %}{% set ns.s = ns.s + ns.s %}{% endfor %}",
        "{% set s = text * 10000 %}",
        "{% set s = 10000 * text %}",
        "{% for i in range(3000) %}{% set s = text ~ i %}{% endfor %}",
        "{% set s = text|replace('x', text) %}",
        "{% set s = text.replace('', text) %}",
        "{% set s = (text|list)|join(text) %}",
        "{% set s = text.join(text) %}",
        "{% set s = [text] * 900000 %}",
        "{% set s = '\\n' * 90000 %}{% set t = s|indent(text) %}",
        "{% set s = ('%s' * 100000)|format(text) %}",
        "{% set s = ('{0}' * 100000).format(text) %}",
        "{% set s = (text|list)|sum(start='') %}",
        "{% set s = ([(text, 2, 3)] * 90000)|sum(start=()) %}",
        "{% set s = ([[text, 2, 3]] * 90000)|sum(start=[]) %}",
        "{% set s %}{% for i in range(90000) %}{{ i }}is written out at some length, again and again, for it to grow \
         large in the end, so large that it would not fit; and what is said here says nothing at all, for many words, until \
         it is said more than a thousand times, and then again and again, so that what comes of it grows. It goes on and on, \
         as if nobody had ever thought of an end to it, and that is what it is meant to do: take what there is, and ask for \
         more. It would take all there is to take if it were not asked how much it has had, and so it is asked, each time, \
         how much it has had by now, and when it has had enough it is told so. Then it ends, with one line that says why. \
         Nine hundred thousand times it would have gone on, and each time it would have taken as much again; so it ends \
         here, at last, since the end of all that is written out is known before it is written, and there is no more room. \
         And still there are some words left that nobody reads, since they are here only to be long, as long as they have to \
         be for ninety thousand of them to be more than may be made, which is one hundred and twenty-eight million bytes: \
         fifteen hundred bytes each, more or less, which is what this comes to, with some more words at its end to be sure \
         of that. So that is all there is to say, and it has been said.{% endfor %}{% endset %}",
    ] {
        let limits = [TOO_MUCH, TOO_MANY_ITEMS, "more than 64 MB"];
        let error = chat(source).map(|text| text.len()).unwrap_err();
        assert!(
            limits.iter().any(|limit| error.contains(limit)),
            "{}: {error}",
            &source[..source.len().min(60)]
        );
    }
    assert_refused("{{ messages|tojson(indent=text) }}", "no number of spaces");
    assert_refused("{{ messages|tojson(separators=[text, text]) }}", "too long");
    assert_refused("{{ strftime_now('%c' * 10000) }}", "more than 1 KB");
}

#[test]
fn lists_that_grow_are_refused() {
    for source in [
        "{% set ns = namespace(s=[1]) %}{% for i in range(60) %}{% set ns.s = ns.s + ns.s %}{% endfor %}",
        "{% set ns = namespace(s=[1]) %}{% for i in range(60) %}{% set ns.s = [ns.s, ns.s] %}{% endfor %}{{ ns.s }}",
        "{% set ns = namespace(s={}) %}{% for i in range(60) %}{% set ns.s = {'a': ns.s, 'b': ns.s} %}{% endfor %}",
        "{% set ns = namespace(s=[1]) %}{% for i in range(60) %}{% set ns.s = ns.s|zip(ns.s)|list %}{% endfor %}",
        "{% set s = (1, messages) * 90000000 %}",
        "{% set s = [1]|batch(90000000, 0) %}",
        "{% set s = [1]|slice(90000000, 0) %}",
        "{% set s = (text * 100)|list %}",
        "{% set s = (text * 100)|split('x') %}",
        "{% set s = (text * 100).split('x') %}",
        "{% set s = [text * 100]|map('list')|list %}",
        "{% macro m() %}{% endmacro %}{{ m(*(text * 100)) }}",
    ] {
        assert_refused(source, TOO_MANY_ITEMS);
    }
}

#[test]
fn values_that_hold_themselves_or_too_many_levels_are_refused() {
    assert_refused("{% set ns = namespace() %}{% set ns.a = ns %}", "a namespace");
    assert_refused("{% set ns = namespace() %}{% set ns.a = [ns] %}", "a namespace");
    assert_refused(
        "{% set ns = namespace() %}{% set ns.a = {'b': ns} %}{{ ns }}",
        "a namespace",
    );
    assert_refused(
        "{% set ns = namespace() %}{% for m in [ns] %}{% set ns.a = loop %}{% endfor %}",
        "a namespace",
    );
    let deep = "{% set ns = namespace(s=[]) %}{% for i in range(90000) %}{% set ns.s = [ns.s] %}{% endfor %}";
    assert_refused(deep, "levels deep");
    let grouped =
        "{% set ns = namespace(s=messages) %}{% for i in range(9000) %}{% set ns.s = ns.s|groupby(0) %}{% endfor %}";
    assert!(chat(grouped).is_err());
    // Lazy values nested in each other.
    let layers = "{% set ns = namespace(s=messages) %}{% for i in range(9000) %}{% set ns.s = ns.s[0:] %}{% endfor %}\
                  {{ ns.s|length }} {{ ns.s is sequence }} {{ ns.s == messages }}";
    assert_eq!(chat(layers).unwrap(), "2 False True");
    let mappings = "{% set ns = namespace(s={'a': 1}) %}{% for i in range(50000) %}{% set ns.s = ns.s|chain({'b': 2}) %}\
                    {% endfor %}{{ ns.s }}";
    assert_eq!(chat(mappings).unwrap(), "{'a': 1, 'b': 2}");
}

#[test]
fn sources_that_nest_are_refused() {
    let many = |part: &str, times: usize| part.repeat(times);
    let cases = [
        format!("{{{{ {}true }}}}", many("not ", 100_000)),
        format!("{{{{ {}1 }}}}", many("-", 100_000)),
        format!("{{{{ {}1{} }}}}", many("(", 100_000), many(")", 100_000)),
        format!("{{{{ {}1{} }}}}", many("[", 100_000), many("]", 100_000)),
        format!("{{{{ a{} }}}}", many(".a", 100_000)),
        format!("{{{{ a{} }}}}", many("[0]", 100_000)),
        format!("{{{{ a{} }}}}", many("|trim", 100_000)),
        format!("{{{{ a{} }}}}", many("~a", 100_000)),
        format!("{{{{ 1{} }}}}", many(" if a else 1", 100_000)),
        format!("{}x{}", many("{% if a %}", 50_000), many("{% endif %}", 50_000)),
        format!("{{% if a %}}{}{{% endif %}}", many("{% elif a %}x", 50_000)),
        format!("{{{{ 'x' * 99999999 ~ 'x' {} }}}}", many("~ 'x' * 99999999", 99)),
        "{% set a = ('x' * 10000) * 10000 %}".into(),
        "{% set a = ([1] * 10000) * 10000 %}".into(),
        many("{{ a }}", 1 << 20),
    ];
    for source in cases {
        let error = Template::for_columns("t", &source).map(|_| ()).unwrap_err();
        assert!(!error.contains('\n') && error.len() < 200, "{error}");
    }
}

#[test]
fn sources_just_within_the_limits_are_parsed() {
    let many = |part: &str, times: usize| part.repeat(times);
    let cases = [
        format!("{{{{ {}true }}}}", many("not ", 1_900)),
        format!("{{{{ text{} }}}}", many(".a", 900)),
        format!("{{{{ text{} }}}}", many("[0]", 600)),
        format!("{{{{ text{} }}}}", many("|trim", 900)),
        format!("{{{{ text{} }}}}", many("~text", 900)),
        format!("{{{{ 1{} }}}}", many(" if text else 1", 600)),
        format!("{{% if not text %}}{}{{% endif %}}", many("{% elif not text %}x", 900)),
    ];
    for source in cases {
        // Rendering may fail because of the values, but not because of the limits of a source.
        let parsed = chat(&source);
        assert!(
            parsed.is_ok() || parsed.as_ref().is_err_and(|e| !e.contains("a tag")),
            "{parsed:?}"
        );
    }
}

#[test]
fn endless_templates_are_refused() {
    let macros = "{% macro m() %}{{ m() }}{{ m() }}{% endmacro %}{{ m() }}";
    assert!(chat(macros).is_err());
    let branching = "{% macro m(n) %}{% if n %}{{ m(n - 1) }}{{ m(n - 1) }}{% endif %}{% endmacro %}{{ m(60) }}";
    assert_refused(branching, "does not come to an end");
}

#[test]
fn ordinary_templates_render_unchanged() {
    let cases = [
        (
            "{{ 3 * 4 }} {{ 'ab' * 2 }} {{ [1] * 2 }} {{ 2 * 1.5 }} {{ messages|length * 2 }}",
            "12 abab [1, 1] 3.0 4",
        ),
        (
            "{% for m in messages[:1] %}{{ m.role ~ ': ' ~ m.content }}{% endfor %}",
            "user: hello",
        ),
        (
            "{% set l = messages[1:] + [{'role': 'x'}] %}{{ l|length }} {{ l[1] is defined }}",
            "2 True",
        ),
        (
            "{% set ns = namespace(n=0, found=[]) %}{% for m in messages if m.role == 'user' %}{% set ns.n = ns.n + 1 %}\
          {% set ns.found = ns.found + [m.role] %}{% endfor %}{{ ns.n }} {{ ns.found }}",
            "1 ['user']",
        ),
        (
            "{% macro m(a, b='c') %}{{ a }}-{{ b }}{{ caller() if caller }}{% endmacro %}{{ m(*['x']) }} {{ m('x', *['y']) }} \
          {% call m('z') %}inner text of some length, so that it counts{% endcall %}",
            "x-c x-y z-cinner text of some length, so that it counts",
        ),
        (
            "{% for k, v in {'a': 1, 'b': 2}.items() %}{{ k }}={{ v }}{{ ',' if not loop.last }}{% endfor %}",
            "a=1,b=2",
        ),
        (
            "{% for x in [[1, [2]], [3]] recursive %}{{ loop(x) if x is not number else x }}{% endfor %}",
            "123",
        ),
        (
            "{% set s %}a{{ 1 }}b{% endset %}{{ s|upper }}{% filter lower %}ABC{% endfilter %}",
            "A1Babc",
        ),
        (
            "{% set a, b = [1, 2] %}{{ a }}{{ b }}{{ 'a,b'.split(',')|join('-') }}{{ 'x'|replace('x', 'y') }}",
            "12a-by",
        ),
        (
            "{{ dict(a=1)|tojson }}{{ {'a': 1}|chain({'b': 2})|tojson }}{{ 'a\nb'|indent(2) }}",
            "{\"a\": 1}{\"a\": 1, \"b\": 2}a\n  b",
        ),
        (
            "{{ [1, 2.5, true]|sum }} {{ messages|sum(attribute='role', start='') }} {{ [[1], [2]]|sum(start=[]) }} \
             {{ [(1,), (2,)]|sum(none, ()) }} {{ nothing|sum }} {{ []|sum(start='x') }}",
            "4.5 userassistant [1, 2] (1, 2) 0 x",
        ),
        (
            "{{ ['b', 'a']|sort|first }}{{ [1, 2, 3]|batch(2)|list|length }}{{ '%s-%s'|format(1, 2) }}",
            "a21-2",
        ),
        (
            "{% if messages[0:0] %}some{% else %}none{% endif %}{{ messages[::-1][0] is defined }}",
            "noneTrue",
        ),
        (
            "{% block a %}in a block, with some text that is long{% endblock %}{{ self.a() }}",
            "in a block, with some text that is longin a block, with some text that is long",
        ),
        (
            "[{{ ''[::-1] }}{{ [][::-1]|list }}{{ messages[9:][::-1]|list }}{{ 'abc'[::-1] }}{% set n = -2 %}{{ 'abc'[::n] }}]",
            "[[][]cbaca]",
        ),
    ];
    for (source, expected) in cases {
        assert_eq!(chat(source).unwrap(), expected, "{source}");
    }
}
