//! The names in a template: its variables, its calls, and the filters, tests and methods that it
//! applies.
//!
//! They are read from minijinja's syntax tree, also in branches that no row reaches. minijinja may
//! change the tree (its module `machinery`) with any release, so only this file and `template/` use
//! it.
//!
//! See docs/decisions/046-names-in-templates-are-read-off-the-tree.md.

use std::collections::{BTreeMap, BTreeSet};

use minijinja::machinery::ast::{BinOpKind, Call, CallArg, CallType, CompareOpKind, Expr, Filter, Macro, Stmt};
use minijinja::machinery::{Span, parse};
use minijinja::syntax::SyntaxConfig;
use minijinja::{Environment, ErrorKind, Value};

use super::suggest;
use super::template::is_large_constant;

/// The names that a template uses. Each number is the line where the name is used first.
#[derive(Debug, Default)]
pub(super) struct Names {
    /// Variables that the template reads without having set them; calls do not count.
    pub reads: BTreeSet<String>,
    /// Constant fields of the variable given to [`Names::of`] (`row.a`, `row["b c"]`), except fields
    /// whose existence the template tests (`is defined`, `in row`, `default`). Empty if the template
    /// sets the variable itself.
    pub fields: BTreeSet<String>,
    /// Fields whose existence the template tests.
    pub tested_fields: BTreeSet<String>,
    /// Functions that the template calls and does not define.
    pub calls: BTreeMap<String, u16>,
    methods: BTreeMap<String, u16>,
    filters: BTreeMap<String, u16>,
    tests: BTreeMap<String, u16>,
    /// First line that imports or includes another template; there is none.
    other_template_line: Option<u16>,
    /// First line with a constant expression whose value is large.
    pub large_constant_line: Option<u16>,
}

impl Names {
    /// The names in `source`, or none if it cannot be parsed. Fields of `variable` are collected,
    /// too.
    pub(super) fn of(source: &str, name: &str, syntax: &SyntaxConfig, variable: &str) -> Names {
        let Ok(tree) = parse(source, name, syntax.clone()) else {
            return Names::default();
        };
        let mut walker = Walker {
            variable,
            scopes: vec![BTreeSet::from(["self", "super"])],
            ..Walker::default()
        };
        walker.statement(&tree);
        let (bound_variables, own_attributes) = (walker.bound_variables, walker.own_attributes);
        let mut names = walker.names;
        // A macro may be called before the line that defines it.
        names.calls.retain(|name, _| !bound_variables.contains(name.as_str()));
        names.methods.retain(|name, _| !own_attributes.contains(name));
        (names.fields, names.tested_fields) = if bound_variables.contains(variable) {
            Default::default()
        } else {
            (&names.fields - &walker.tested_fields, walker.tested_fields)
        };
        names
    }

    /// One message for each filter, test, method and function that `env` does not have, with a
    /// similar known name.
    pub(super) fn unknown_name_messages(&self, env: &Environment) -> Vec<String> {
        let functions: Vec<&str> = env.globals().map(|(name, _)| name).collect();
        let mut found = Vec::new();
        let mut report = |kind: &str, names: &BTreeMap<String, u16>, known: &str, has: &dyn Fn(&str) -> bool| {
            for (name, line) in names.iter().filter(|(name, _)| !has(name)) {
                let hint = suggest(name, known.split_whitespace());
                found.push((*line, format!("line {line}: unknown {kind} `{name}`{hint}")));
            }
        };
        report("filter", &self.filters, FILTERS, &|name| is_known(env, "filter", name));
        report("test", &self.tests, TESTS, &|name| is_known(env, "test", name));
        report("method", &self.methods, METHODS, &|name| has_method(env, name));
        report("function", &self.calls, &functions.join(" "), &|name| {
            functions.contains(&name)
        });
        if let Some(line) = self.other_template_line {
            found.push((
                line,
                format!("line {line}: it wants another template, and there is none"),
            ));
        }
        found.sort();
        found.into_iter().map(|(_, message)| message).collect()
    }
}

/// Whether the environment has a filter or test of this name; `kind` is `filter` or `test`. The
/// environment does not list them, so a template expression tests for the name.
fn is_known(env: &Environment, kind: &str, name: &str) -> bool {
    let test = env.compile_expression(if kind == "filter" {
        "name is filter"
    } else {
        "name is test"
    });
    test.and_then(|test| test.eval(Value::from_pairs([("name", name)])))
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

/// Known names for suggestions; minijinja does not list them.
const FILTERS: &str = "abs attr batch bool capitalize chain count d default dictsort e escape first float format groupby indent int items \
    join last length lines list lower map max min pprint reject rejectattr replace reverse round safe select \
    selectattr slice sort split string sum title tojson trim unique upper zip";
const TESTS: &str = "boolean defined divisibleby endingwith eq equalto escaped even false filter float ge greaterthan gt in int integer \
    iterable le lessthan lower lt mapping ne none number odd safe sameas sequence startingwith string test true \
    undefined upper";
const METHODS: &str = "capitalize casefold center count endswith find format get index isalnum isalpha isascii isdigit islower isnumeric isspace \
    isupper items join keys ljust lower lstrip partition removeprefix removesuffix replace rfind rjust rpartition \
    rsplit rstrip split splitlines startswith strip swapcase title upper values zfill";

/// Walks the tree in execution order and collects names.
#[derive(Default)]
struct Walker<'a> {
    variable: &'a str,
    /// Variables that are set in the scopes around the current node, innermost scope last.
    scopes: Vec<BTreeSet<&'a str>>,
    /// Variables that the template sets anywhere.
    bound_variables: BTreeSet<&'a str>,
    /// Attributes that the template itself creates (`namespace(f=…)`, `{"f": …}`). They may hold
    /// macros, so calls of them are not unknown methods.
    own_attributes: BTreeSet<String>,
    tested_fields: BTreeSet<String>,
    names: Names,
}

impl<'a> Walker<'a> {
    fn bind(&mut self, target: &Expr<'a>) {
        match target {
            Expr::Var(var) => self.bind_name(var.id),
            Expr::List(list) => list.items.iter().for_each(|item| self.bind(item)),
            Expr::Tuple(tuple) => tuple.items.iter().for_each(|item| self.bind(item)),
            Expr::GetAttr(attr) => {
                self.own_attributes.insert(attr.name.to_string());
                self.expression(&attr.expr);
            }
            other => self.expression(other),
        }
    }

    fn bind_name(&mut self, name: &'a str) {
        self.bound_variables.insert(name);
        if let Some(scope) = self.scopes.last_mut() {
            scope.insert(name);
        }
    }

    fn read_variable(&mut self, name: &str) {
        if !self.scopes.iter().any(|scope| scope.contains(name)) {
            self.names.reads.insert(name.to_string());
        }
    }

    /// Calls `visit` in a nested scope, and returns the variables that are set there.
    fn scope(&mut self, visit: impl FnOnce(&mut Self)) -> BTreeSet<&'a str> {
        self.scopes.push(BTreeSet::new());
        visit(self);
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
            Stmt::ForLoop(each_loop) => {
                self.expression(&each_loop.iter);
                self.scope(|walker| {
                    walker.bind(&each_loop.target);
                    walker.bind_name("loop");
                    each_loop
                        .filter_expr
                        .iter()
                        .for_each(|filter| walker.expression(filter));
                    walker.body(&each_loop.body);
                });
                self.scope(|walker| walker.body(&each_loop.else_body));
            }
            Stmt::IfCond(cond) => {
                self.expression(&cond.expr);
                let bound_if_true = self.scope(|walker| walker.body(&cond.true_body));
                let bound_if_false = self.scope(|walker| walker.body(&cond.false_body));
                // A variable that only one branch sets may be undefined afterwards.
                bound_if_true
                    .intersection(&bound_if_false)
                    .for_each(|name| self.bind_name(name));
            }
            Stmt::WithBlock(with) => {
                self.scope(|walker| {
                    for (target, value) in &with.assignments {
                        walker.expression(value);
                        walker.bind(target);
                    }
                    walker.body(&with.body);
                });
            }
            Stmt::Set(set) => {
                self.expression(&set.expr);
                self.bind(&set.target);
            }
            Stmt::SetBlock(set) => {
                self.scope(|walker| walker.body(&set.body));
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
                self.scope(|walker| walker.body(&block.body));
            }
            Stmt::Import(import) => {
                self.other_template(import.span());
                self.bind(&import.name);
            }
            Stmt::FromImport(import) => {
                self.other_template(import.span());
                for (name, alias) in &import.names {
                    self.bind(alias.as_ref().unwrap_or(name));
                }
            }
            Stmt::Extends(extends) => self.other_template(extends.span()),
            Stmt::Include(include) if include.ignore_missing => {}
            Stmt::Include(include) => self.other_template(include.span()),
            Stmt::Macro(definition) => {
                self.bind_name(definition.name);
                self.macro_definition(definition);
            }
            Stmt::CallBlock(block) => {
                self.call(&block.call, block.call.span());
                self.macro_definition(&block.macro_decl);
            }
            Stmt::Do(action) => self.call(&action.call, action.call.span()),
        }
    }

    fn other_template(&mut self, span: Span) {
        self.names.other_template_line.get_or_insert(span.start_line);
    }

    fn macro_definition(&mut self, definition: &Macro<'a>) {
        self.scope(|walker| {
            definition.args.iter().for_each(|arg| walker.bind(arg));
            walker.bind_name("caller");
            definition.defaults.iter().for_each(|value| walker.expression(value));
            walker.body(&definition.body);
        });
    }

    fn expression(&mut self, expression: &Expr<'a>) {
        match expression {
            Expr::Var(var) => self.read_variable(var.id),
            Expr::Const(_) => {}
            Expr::Slice(slice) => {
                self.expression(&slice.expr);
                let ends = [&slice.start, &slice.stop, &slice.step];
                ends.into_iter().flatten().for_each(|end| self.expression(end));
            }
            Expr::UnaryOp(op) => self.expression(&op.expr),
            Expr::BinOp(op) => {
                if is_large_constant(expression) {
                    self.names.large_constant_line.get_or_insert(op.span().start_line);
                }
                if matches!(op.op, BinOpKind::In) {
                    self.membership_test(&op.left, &op.right);
                }
                self.expression(&op.left);
                self.expression(&op.right);
            }
            Expr::Compare(compare) => {
                let mut left = &compare.expr;
                self.expression(left);
                for op in &compare.ops {
                    if matches!(op.op, CompareOpKind::In | CompareOpKind::NotIn) {
                        self.membership_test(left, &op.expr);
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
                add_name(&mut self.names.tests, test.name, test.span());
                if matches!(test.name, "defined" | "undefined") {
                    self.tested_fields.extend(self.field(&test.expr));
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
                let keys = map.keys.iter().filter_map(string_literal);
                self.own_attributes.extend(keys);
                map.keys
                    .iter()
                    .chain(&map.values)
                    .for_each(|part| self.expression(part));
            }
        }
    }

    fn filter(&mut self, filter: &Filter<'a>, span: Span) {
        add_name(&mut self.names.filters, filter.name, span);
        if let ("default" | "d", Some(value)) = (filter.name, &filter.expr) {
            self.tested_fields.extend(self.field(value));
        }
        // `map("upper")` and `selectattr("a", "odd")` apply filters and tests by their names.
        let by_name = match filter.name {
            "map" => Some((&mut self.names.filters, 0)),
            "select" | "reject" => Some((&mut self.names.tests, 0)),
            "selectattr" | "rejectattr" => Some((&mut self.names.tests, 1)),
            _ => None,
        };
        if let Some((names, position)) = by_name
            && let Some(CallArg::Pos(arg)) = filter.args.get(position)
            && let Some(name) = string_literal(arg)
        {
            add_name(names, &name, span);
        }
        filter.expr.iter().for_each(|value| self.expression(value));
        self.arguments(&filter.args);
    }

    fn call(&mut self, call: &Call<'a>, span: Span) {
        match call.identify_call() {
            CallType::Function(name) => add_name(&mut self.names.calls, name, span),
            CallType::Method(value, name) => {
                // `loop.cycle()` is a method of the loop object.
                if !matches!(value, Expr::Var(var) if var.id == "loop") {
                    add_name(&mut self.names.methods, name, span);
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
                self.own_attributes.insert(name.to_string());
            }
            match argument {
                CallArg::Pos(value)
                | CallArg::Kwarg(_, value)
                | CallArg::PosSplat(value)
                | CallArg::KwargSplat(value) => self.expression(value),
            }
        }
    }

    /// The field's name, if `expression` is a constant field of the variable.
    fn field(&self, expression: &Expr<'a>) -> Option<String> {
        let is_variable = |value: &Expr| matches!(value, Expr::Var(var) if var.id == self.variable);
        match expression {
            Expr::GetAttr(attr) if is_variable(&attr.expr) => Some(attr.name.to_string()),
            Expr::GetItem(item) if is_variable(&item.expr) => string_literal(&item.subscript_expr),
            _ => None,
        }
    }

    /// Notes a test of a field's existence: `"field" in row`.
    fn membership_test(&mut self, field: &Expr<'a>, container: &Expr<'a>) {
        if matches!(container, Expr::Var(var) if var.id == self.variable) {
            self.tested_fields.extend(string_literal(field));
        }
    }
}

/// The text, if the expression is a text literal.
fn string_literal(expression: &Expr) -> Option<String> {
    match expression {
        Expr::Const(constant) => constant.value.as_str().map(String::from),
        _ => None,
    }
}

fn add_name(names: &mut BTreeMap<String, u16>, name: &str, span: Span) {
    names.entry(name.to_string()).or_insert(span.start_line);
}

#[cfg(test)]
mod tests {
    #[test]
    fn docs_list_all_filters() {
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
    fn constant_fields_are_found() {
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
    fn variables_that_the_template_does_not_set_are_read() {
        for (source, expected) in [
            ("{{ text[:500] }}{{ (a ~ b)[c:] | upper }}", vec!["a", "b", "c", "text"]),
            (
                "{% for x in items[1:] if x is not defined %}{{ x[1:] }}{{ loop.index }}{% endfor %}",
                vec!["items"],
            ),
            ("{% set y = a.b[::2] %}{{ f(y[1:], z=row['c'][:2]) }}", vec!["a", "row"]),
            ("{{ {'a': b}['a'] }}{{ '[:]' ~ c }}", vec!["b", "c"]),
            // The default for the same name reads the variable before it is set.
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
    fn unknown_names_are_reported_with_line_and_suggestion() {
        let mut env = Environment::new();
        env.set_unknown_method_callback(super::super::python::call_method);
        let unknown = |source: &str| names(source).unknown_name_messages(&env);
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
    fn suggested_names_are_known() {
        let mut env = Environment::new();
        env.set_unknown_method_callback(super::super::python::call_method);
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
