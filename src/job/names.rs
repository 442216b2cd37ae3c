//! The names in a template: its variables, its calls, and the filters, tests and methods that it
//! applies.
//!
//! They are read from minijinja's syntax tree, including branches that no row reaches. The tree is
//! in minijinja's `machinery` module, which may change with any release; only this file and
//! `template/` use it.
//!
//! See docs/decisions/046-names-in-templates-are-read-off-the-tree.md.

use std::collections::{BTreeMap, BTreeSet};

use minijinja::machinery::ast::{BinOpKind, Call, CallArg, CallType, CompareOpKind, Expr, Filter, Macro, Stmt};
use minijinja::machinery::{Span, parse};
use minijinja::syntax::SyntaxConfig;
use minijinja::{Environment, ErrorKind, Value};

use super::suggest;
use super::template::is_large_constant;

/// The names that a template uses; calls and filters are stored with the first line of their use.
#[derive(Debug, Default)]
pub(super) struct Names {
    /// Variables that are read (besides calls) and that the template does not set before.
    pub reads: BTreeSet<String>,
    /// Constant fields of the given variable (`row.a`, `row["b c"]`), except fields whose existence
    /// the template tests (`is defined`, `in row`, `default`). Empty if the template sets the
    /// variable itself.
    pub fields: BTreeSet<String>,
    /// Fields whose existence the template tests.
    pub asked: BTreeSet<String>,
    /// Functions called that the template does not define.
    pub calls: BTreeMap<String, u16>,
    methods: BTreeMap<String, u16>,
    filters: BTreeMap<String, u16>,
    tests: BTreeMap<String, u16>,
    /// First line with an import or include of another template, which does not exist.
    others: Option<u16>,
    /// First line with a constant expression that evaluates to a large value.
    pub large_constant: Option<u16>,
}

impl Names {
    /// The names in `source`, or none if it cannot be parsed; `of` is the variable whose fields are
    /// collected.
    pub(super) fn of(source: &str, name: &str, syntax: &SyntaxConfig, of: &str) -> Names {
        let Ok(tree) = parse(source, name, syntax.clone()) else {
            return Names::default();
        };
        let mut walk = Walk {
            of,
            scopes: vec![BTreeSet::from(["self", "super"])],
            ..Walk::default()
        };
        walk.statement(&tree);
        let (bound, own) = (walk.bound, walk.own);
        let mut names = walk.names;
        // A macro may be called before its definition.
        names.calls.retain(|name, _| !bound.contains(name.as_str()));
        names.methods.retain(|name, _| !own.contains(name));
        (names.fields, names.asked) = if bound.contains(of) {
            Default::default()
        } else {
            (&names.fields - &walk.asked, walk.asked)
        };
        names
    }

    /// Calls and filters that `env` lacks, a line each with the most similar known name.
    pub(super) fn unknown(&self, env: &Environment) -> Vec<String> {
        let functions: Vec<&str> = env.globals().map(|(name, _)| name).collect();
        let mut found = Vec::new();
        let mut look = |kind: &str, names: &BTreeMap<String, u16>, known: &str, has: &dyn Fn(&str) -> bool| {
            for (name, line) in names.iter().filter(|(name, _)| !has(name)) {
                let hint = suggest(name, known.split_whitespace());
                found.push((*line, format!("line {line}: unknown {kind} `{name}`{hint}")));
            }
        };
        look("filter", &self.filters, FILTERS, &|name| is_known(env, "filter", name));
        look("test", &self.tests, TESTS, &|name| is_known(env, "test", name));
        look("method", &self.methods, METHODS, &|name| has_method(env, name));
        look("function", &self.calls, &functions.join(" "), &|name| {
            functions.contains(&name)
        });
        if let Some(line) = self.others {
            found.push((
                line,
                format!("line {line}: it wants another template, and there is none"),
            ));
        }
        found.sort();
        found.into_iter().map(|(_, message)| message).collect()
    }
}

/// Whether the environment has a `kind` (`filter`, `test`) of this name, determined by an
/// expression that tests for it.
fn is_known(env: &Environment, kind: &str, name: &str) -> bool {
    let asked = env.compile_expression(if kind == "filter" {
        "name is filter"
    } else {
        "name is test"
    });
    asked
        .and_then(|asked| asked.eval(Value::from_pairs([("name", name)])))
        .is_ok_and(|answer| answer.is_true())
}

/// Whether any type of value in templates has a method of this name.
fn has_method(env: &Environment, name: &str) -> bool {
    let values = [
        Value::from(""),
        Value::from(Vec::<Value>::new()),
        Value::from_pairs([("", "")]),
    ];
    values.iter().any(|value| {
        // A known method called without arguments fails with another error kind.
        !matches!(value.call_method(&mut env.empty_state(), name, &[]), Err(e) if e.kind() == ErrorKind::UnknownMethod)
    })
}

/// Names for suggestions, since minijinja does not list its own.
const FILTERS: &str = "abs attr batch bool capitalize chain count d default dictsort e escape first float format groupby indent int items \
    join last length lines list lower map max min pprint reject rejectattr replace reverse round safe select \
    selectattr slice sort split string sum title tojson trim unique upper zip";
const TESTS: &str = "boolean defined divisibleby endingwith eq equalto escaped even false filter float ge greaterthan gt in int integer \
    iterable le lessthan lower lt mapping ne none number odd safe sameas sequence startingwith string test true \
    undefined upper";
const METHODS: &str = "capitalize casefold center count endswith find format get index isalnum isalpha isascii isdigit islower isnumeric isspace \
    isupper items join keys ljust lower lstrip partition removeprefix removesuffix replace rfind rjust rpartition \
    rsplit rstrip split splitlines startswith strip swapcase title upper values zfill";

/// Walks the tree in execution order.
#[derive(Default)]
struct Walk<'a> {
    of: &'a str,
    /// Variables set here by scope, innermost last.
    scopes: Vec<BTreeSet<&'a str>>,
    /// Variables that the template sets anywhere.
    bound: BTreeSet<&'a str>,
    /// Attributes that the template itself creates (`namespace(f=…)`, `{"f": …}`), which may hold
    /// callables.
    own: BTreeSet<String>,
    asked: BTreeSet<String>,
    names: Names,
}

impl<'a> Walk<'a> {
    fn bind(&mut self, target: &Expr<'a>) {
        match target {
            Expr::Var(var) => self.bind_name(var.id),
            Expr::List(list) => list.items.iter().for_each(|item| self.bind(item)),
            Expr::Tuple(tuple) => tuple.items.iter().for_each(|item| self.bind(item)),
            Expr::GetAttr(attr) => {
                self.own.insert(attr.name.to_string());
                self.expression(&attr.expr);
            }
            other => self.expression(other),
        }
    }

    fn bind_name(&mut self, name: &'a str) {
        self.bound.insert(name);
        if let Some(scope) = self.scopes.last_mut() {
            scope.insert(name);
        }
    }

    fn read(&mut self, name: &str) {
        if !self.scopes.iter().any(|scope| scope.contains(name)) {
            self.names.reads.insert(name.to_string());
        }
    }

    /// Walks in a nested scope, and returns the variables set there.
    fn scope(&mut self, walk: impl FnOnce(&mut Self)) -> BTreeSet<&'a str> {
        self.scopes.push(BTreeSet::new());
        walk(self);
        self.scopes.pop().unwrap_or_default()
    }

    fn body(&mut self, body: &[Stmt<'a>]) {
        body.iter().for_each(|statement| self.statement(statement));
    }

    #[expect(clippy::too_many_lines, reason = "one arm per kind of statement")]
    fn statement(&mut self, statement: &Stmt<'a>) {
        match statement {
            Stmt::Template(template) => self.body(&template.children),
            Stmt::EmitExpr(emit) => self.expression(&emit.expr),
            Stmt::EmitRaw(_) | Stmt::Continue(_) | Stmt::Break(_) => {}
            Stmt::ForLoop(each) => {
                self.expression(&each.iter);
                self.scope(|walk| {
                    walk.bind(&each.target);
                    walk.bind_name("loop");
                    each.filter_expr.iter().for_each(|filter| walk.expression(filter));
                    walk.body(&each.body);
                });
                self.scope(|walk| walk.body(&each.else_body));
            }
            Stmt::IfCond(cond) => {
                self.expression(&cond.expr);
                let yes = self.scope(|walk| walk.body(&cond.true_body));
                let no = self.scope(|walk| walk.body(&cond.false_body));
                // A variable set in only one branch may still be undefined.
                yes.intersection(&no).for_each(|name| self.bind_name(name));
            }
            Stmt::WithBlock(with) => {
                self.scope(|walk| {
                    for (target, value) in &with.assignments {
                        walk.expression(value);
                        walk.bind(target);
                    }
                    walk.body(&with.body);
                });
            }
            Stmt::Set(set) => {
                self.expression(&set.expr);
                self.bind(&set.target);
            }
            Stmt::SetBlock(set) => {
                self.scope(|walk| walk.body(&set.body));
                set.filter.iter().for_each(|filter| self.expression(filter));
                self.bind(&set.target);
            }
            Stmt::AutoEscape(escape) => {
                self.expression(&escape.enabled);
                self.body(&escape.body);
            }
            Stmt::FilterBlock(block) => {
                self.body(&block.body);
                self.expression(&block.filter);
            }
            Stmt::Block(block) => {
                self.scope(|walk| walk.body(&block.body));
            }
            Stmt::Import(import) => {
                self.other(import.span());
                self.bind(&import.name);
            }
            Stmt::FromImport(import) => {
                self.other(import.span());
                for (name, alias) in &import.names {
                    self.bind(alias.as_ref().unwrap_or(name));
                }
            }
            Stmt::Extends(extends) => self.other(extends.span()),
            Stmt::Include(include) if include.ignore_missing => {}
            Stmt::Include(include) => self.other(include.span()),
            Stmt::Macro(defined) => {
                self.bind_name(defined.name);
                self.defined(defined);
            }
            Stmt::CallBlock(block) => {
                self.call(&block.call, block.call.span());
                self.defined(&block.macro_decl);
            }
            Stmt::Do(action) => self.call(&action.call, action.call.span()),
        }
    }

    fn other(&mut self, span: Span) {
        self.names.others.get_or_insert(span.start_line);
    }

    fn defined(&mut self, defined: &Macro<'a>) {
        self.scope(|walk| {
            defined.args.iter().for_each(|arg| walk.bind(arg));
            walk.bind_name("caller");
            defined.defaults.iter().for_each(|value| walk.expression(value));
            walk.body(&defined.body);
        });
    }

    fn expression(&mut self, expression: &Expr<'a>) {
        match expression {
            Expr::Var(var) => self.read(var.id),
            Expr::Const(_) => {}
            Expr::Slice(slice) => {
                self.expression(&slice.expr);
                let ends = [&slice.start, &slice.stop, &slice.step];
                ends.into_iter().flatten().for_each(|end| self.expression(end));
            }
            Expr::UnaryOp(op) => self.expression(&op.expr),
            Expr::BinOp(op) => {
                if is_large_constant(expression) {
                    self.names.large_constant.get_or_insert(op.span().start_line);
                }
                if matches!(op.op, BinOpKind::In) {
                    self.ask_in(&op.left, &op.right);
                }
                self.expression(&op.left);
                self.expression(&op.right);
            }
            Expr::Compare(compare) => {
                let mut left = &compare.expr;
                self.expression(left);
                for op in &compare.ops {
                    if matches!(op.op, CompareOpKind::In | CompareOpKind::NotIn) {
                        self.ask_in(left, &op.expr);
                    }
                    self.expression(&op.expr);
                    left = &op.expr;
                }
            }
            Expr::IfExpr(choice) => {
                self.expression(&choice.test_expr);
                self.expression(&choice.true_expr);
                choice.false_expr.iter().for_each(|other| self.expression(other));
            }
            Expr::Filter(filter) => self.filter(filter, filter.span()),
            Expr::Test(test) => {
                note(&mut self.names.tests, test.name, test.span());
                if matches!(test.name, "defined" | "undefined") {
                    self.asked.extend(self.field(&test.expr));
                }
                self.expression(&test.expr);
                self.arguments(&test.args);
            }
            Expr::GetAttr(attr) => {
                self.names.fields.extend(self.field(expression));
                self.expression(&attr.expr);
            }
            Expr::GetItem(item) => {
                self.names.fields.extend(self.field(expression));
                self.expression(&item.expr);
                self.expression(&item.subscript_expr);
            }
            Expr::Call(call) => self.call(call, call.span()),
            Expr::List(list) => list.items.iter().for_each(|item| self.expression(item)),
            Expr::Tuple(tuple) => tuple.items.iter().for_each(|item| self.expression(item)),
            Expr::Map(map) => {
                let keys = map.keys.iter().filter_map(text);
                self.own.extend(keys);
                map.keys
                    .iter()
                    .chain(&map.values)
                    .for_each(|part| self.expression(part));
            }
        }
    }

    fn filter(&mut self, filter: &Filter<'a>, span: Span) {
        note(&mut self.names.filters, filter.name, span);
        if let ("default" | "d", Some(value)) = (filter.name, &filter.expr) {
            self.asked.extend(self.field(value));
        }
        // `map("upper")` and `selectattr("a", "odd")` apply filters and tests by their names.
        let by_name = match filter.name {
            "map" => Some((&mut self.names.filters, 0)),
            "select" | "reject" => Some((&mut self.names.tests, 0)),
            "selectattr" | "rejectattr" => Some((&mut self.names.tests, 1)),
            _ => None,
        };
        if let Some((names, at)) = by_name
            && let Some(CallArg::Pos(arg)) = filter.args.get(at)
            && let Some(name) = text(arg)
        {
            note(names, &name, span);
        }
        filter.expr.iter().for_each(|value| self.expression(value));
        self.arguments(&filter.args);
    }

    fn call(&mut self, call: &Call<'a>, span: Span) {
        match call.identify_call() {
            CallType::Function(name) => note(&mut self.names.calls, name, span),
            CallType::Method(value, name) => {
                // `loop.cycle()` is a method of the loop object.
                if !matches!(value, Expr::Var(var) if var.id == "loop") {
                    note(&mut self.names.methods, name, span);
                }
                self.expression(value);
            }
            CallType::Block(_) => {}
            CallType::Object(value) => self.expression(value),
        }
        self.arguments(&call.args);
    }

    fn arguments(&mut self, arguments: &[CallArg<'a>]) {
        for argument in arguments {
            if let CallArg::Kwarg(name, _) = argument {
                self.own.insert(name.to_string());
            }
            match argument {
                CallArg::Pos(value)
                | CallArg::Kwarg(_, value)
                | CallArg::PosSplat(value)
                | CallArg::KwargSplat(value) => self.expression(value),
            }
        }
    }

    /// The constant field of the given variable, if `expression` is one.
    fn field(&self, expression: &Expr<'a>) -> Option<String> {
        let is_of = |value: &Expr| matches!(value, Expr::Var(var) if var.id == self.of);
        match expression {
            Expr::GetAttr(attr) if is_of(&attr.expr) => Some(attr.name.to_string()),
            Expr::GetItem(item) if is_of(&item.expr) => text(&item.subscript_expr),
            _ => None,
        }
    }

    /// `"field" in row` tests a field's existence.
    fn ask_in(&mut self, field: &Expr<'a>, whole: &Expr<'a>) {
        if matches!(whole, Expr::Var(var) if var.id == self.of) {
            self.asked.extend(text(field));
        }
    }
}

/// A text literal.
fn text(expression: &Expr) -> Option<String> {
    match expression {
        Expr::Const(constant) => constant.value.as_str().map(String::from),
        _ => None,
    }
}

fn note(names: &mut BTreeMap<String, u16>, name: &str, span: Span) {
    names.entry(name.to_string()).or_insert(span.start_line);
}

#[cfg(test)]
mod tests {
    #[test]
    fn the_documents_list_the_filters() {
        let docs = std::fs::read_to_string(concat!(env!("CARGO_MANIFEST_DIR"), "/docs/job-file.md")).unwrap();
        let missing: Vec<&str> = super::FILTERS
            .split_whitespace()
            .filter(|name| !docs.contains(&format!("`{name}`")))
            .collect();
        assert!(missing.is_empty(), "{missing:?}");
    }

    use super::*;

    fn names(source: &str) -> Names {
        Names::of(source, "t", &SyntaxConfig::default(), "row")
    }

    fn list(names: BTreeSet<String>) -> Vec<String> {
        names.into_iter().collect()
    }

    #[test]
    fn fields_are_found_where_they_can_be_told() {
        for (source, expected) in [
            ("{{ row[\"two wrods\"] }}", vec!["two wrods"]),
            (
                "{{- row [ 'a' ] ~ row.b.c -}}{% if row['d'] == 1 %}{% endif %}",
                vec!["a", "b", "d"],
            ),
            (
                "{{ row[a] }}{{ row.items() }}{{ row | tojson }}{{ x.row.y }}{{ 'row.z' }}",
                vec![],
            ),
            ("{# row.a #}{% raw %}{{ row.b }}{% endraw %}{ row.c }", vec![]),
            (
                "{% if row.a is defined %}{{ row.a }}{% endif %}{{ row.b | default('') }}",
                vec![],
            ),
            (
                "{% if 'a' in row and 'b' not in row %}{{ row.a }}{{ row['b'] }}{% endif %}",
                vec![],
            ),
            ("{% for row in rows %}{{ row.a }}{% endfor %}", vec![]),
            ("{% set row = b %}{{ row.a }}", vec![]),
            ("{% for x in row.a %}{{ row['it\\'s'] }}{% endfor %}", vec!["a", "it's"]),
            ("{% with x = row.a %}{{ x }}{% endwith %}", vec!["a"]),
            ("{{ row.a[:5] }}", vec!["a"]),
        ] {
            assert_eq!(list(names(source).fields), expected, "{source}");
        }
    }

    #[test]
    fn variables_are_read_where_the_template_gives_them_no_value() {
        for (source, expected) in [
            ("{{ text[:500] }}{{ (a ~ b)[c:] | upper }}", vec!["a", "b", "c", "text"]),
            (
                "{% for x in items[1:] if x is not defined %}{{ x[1:] }}{{ loop.index }}{% endfor %}",
                vec!["items"],
            ),
            ("{% set y = a.b[::2] %}{{ f(y[1:], z=row['c'][:2]) }}", vec!["a", "row"]),
            ("{{ {'a': b}['a'] }}{{ '[:]' ~ c }}", vec!["b", "c"]),
            // A default for the same name still tests its existence first.
            ("{% set k = k | default(true) %}{{ k }}", vec!["k"]),
            ("{% if k is not defined %}{% set k = 1 %}{% endif %}{{ k }}", vec!["k"]),
            (
                "{% if a %}{% set y = 1 %}{% else %}{% set y = 2 %}{% endif %}{{ y }}",
                vec!["a"],
            ),
            ("{% if a %}{% set y = 1 %}{% endif %}{{ y }}", vec!["a", "y"]),
            ("{% for x in a %}{% set y = x %}{% endfor %}{{ y }}", vec!["a", "y"]),
            (
                "{% macro m(p, q=d) %}{{ p ~ q ~ free }}{{ caller() }}{% endmacro %}{{ m(a) }}{{ p }}",
                vec!["a", "d", "free", "p"],
            ),
            (
                "{% set ns = namespace(i=k) %}{% set ns.i = j %}{{ ns.i }}",
                vec!["j", "k"],
            ),
            ("{% set b | upper %}{{ a }}{% endset %}{{ b }}", vec!["a"]),
            (
                "{% filter upper %}{{ a }}{% endfilter %}{% with a = a, c = a %}{{ c }}{% endwith %}",
                vec!["a"],
            ),
            ("{{ range(1) }}{{ x.range }}{{ f(range=1) }}{{ x | trim }}", vec!["x"]),
            ("{{ range(1) }}{{ range.a }}", vec!["range"]),
            ("{{ range == 1 }}", vec!["range"]),
            ("plain", vec![]),
        ] {
            assert_eq!(list(names(source).reads), expected, "{source}");
        }
    }

    #[test]
    fn unknown_names_are_told_with_line_and_nearest() {
        let mut env = Environment::new();
        env.set_unknown_method_callback(super::super::python::method);
        let unknown = |source: &str| names(source).unknown(&env);
        for (source, expected) in [
            (
                "\n{{ a | uper }}",
                "line 2: unknown filter `uper`; did you mean `upper`?",
            ),
            (
                "{% if a %}\n\n{{ b | lowr }}{% endif %}",
                "line 3: unknown filter `lowr`; did you mean `lower`?",
            ),
            (
                "{{ a is defind }}",
                "line 1: unknown test `defind`; did you mean `defined`?",
            ),
            (
                "{{ a is not strng }}",
                "line 1: unknown test `strng`; did you mean `string`?",
            ),
            ("{{ a.strp() }}", "line 1: unknown method `strp`; did you mean `strip`?"),
            (
                "{{ rnge(3) }}",
                "line 1: unknown function `rnge`; did you mean `range`?",
            ),
            ("{{ a | map('uper') }}", "line 1: unknown filter `uper`"),
            ("{{ a | selectattr('x', 'od') }}", "line 1: unknown test `od`"),
            ("{% filter uper %}x{% endfilter %}", "unknown filter `uper`"),
            ("{% set x | uper %}x{% endset %}", "unknown filter `uper`"),
            ("{% macro m() %}{{ a | uper }}{% endmacro %}", "unknown filter `uper`"),
            ("{% include 'x' %}", "another template"),
        ] {
            let found = unknown(source);
            assert!(found.len() == 1 && found[0].contains(expected), "{source}: {found:?}");
        }
        for source in [
            "{{ a | upper | d('x') }}{{ a is divisibleby 3 }}{{ a.removeprefix('x').get('y') }}{{ range(3) }}",
            "{% macro a() %}{{ b() }}{% endmacro %}{% macro b() %}x{% endmacro %}{{ a() }}",
            "{% for x in a recursive %}{{ loop(x) }}{{ loop.cycle(1, 2) }}{% endfor %}",
            "{% macro f() %}x{% endmacro %}{% set n = namespace(g=f) %}{{ n.g() }}{{ {'h': f}.h() }}",
            "{{ a | map(attribute='b') | select('odd') | list }}{% include 'x' ignore missing %}",
        ] {
            assert_eq!(unknown(source), Vec::<String>::new(), "{source}");
        }
    }

    #[test]
    fn what_is_suggested_is_known() {
        let mut env = Environment::new();
        env.set_unknown_method_callback(super::super::python::method);
        for name in FILTERS.split_whitespace() {
            assert!(is_known(&env, "filter", name), "{name}");
        }
        for name in TESTS.split_whitespace() {
            assert!(is_known(&env, "test", name), "{name}");
        }
        for name in METHODS.split_whitespace() {
            assert!(has_method(&env, name), "{name}");
        }
        assert!(!is_known(&env, "filter", "x") && !is_known(&env, "test", "x") && !has_method(&env, "x"));
    }
}
