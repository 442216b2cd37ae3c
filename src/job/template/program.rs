//! Compiles a template's source to instructions with meters, on a thread with a large stack.
//!
//! The parser bounds the nesting of brackets and blocks, but not the length of a chain of
//! operators, filters or attributes, and each link of a chain is a level of the tree. So tags are
//! measured before parsing. The depth is then bounded, and the parser runs on a thread whose stack
//! is large enough for it.

use std::collections::BTreeMap;
use std::thread;

use minijinja::machinery::ast::{BinOpKind, Expr};
use minijinja::machinery::{CodeGenerator, Instructions, Token, parse, tokenize};
use minijinja::syntax::SyntaxConfig;
use minijinja::{AutoEscape, Environment, Error, Value};
use self_cell::self_cell;

use super::super::names::Names;
use super::{describe, meter};

/// Maximum length of a source; the longest template of a published model is under 100 KB.
const SOURCE_BYTES_MAX: usize = 1 << 20;
/// Maximum number of operators, names and brackets in one tag. Items of a list literal are not
/// counted.
const TAG_LINKS_MAX: usize = 2_000;
/// Maximum number of `elif` in a template: each is nested in the one before it.
const ELIF_MAX: usize = 1_000;
/// Maximum size of a value that is computed from constants at compile time.
const CONSTANT_MAX: u64 = 1 << 20;
/// Stack size of the parser's thread: several kilobytes for each level that the limits allow.
const STACK_BYTES: usize = 64 << 20;

struct Source {
    name: String,
    text: String,
}

struct Code<'a> {
    main: Instructions<'a>,
    blocks: BTreeMap<&'a str, Instructions<'a>>,
}

self_cell!(
    /// A template's instructions and the source that they borrow from.
    pub(super) struct Program {
        owner: Source,
        #[covariant]
        dependent: Code,
    }
);

impl Program {
    /// Compiles a template, and finds the names in it; `of` is the variable whose fields are
    /// collected. The error is one line.
    pub(super) fn compile(
        name: &str,
        text: String,
        syntax: &SyntaxConfig,
        of: &str,
    ) -> Result<(Program, Names), String> {
        check_source(&text, syntax)?;
        let source = Source {
            name: name.to_string(),
            text,
        };
        thread::scope(|scope| {
            let compiling = thread::Builder::new()
                .name("template".into())
                .stack_size(STACK_BYTES)
                .spawn_scoped(scope, || {
                    let names = Names::of(&source.text, name, syntax, of);
                    if let Some(line) = names.large_constant {
                        return Err(format!("line {line}: a constant of more than 1 MB"));
                    }
                    let program = Program::try_new(source, |source| Code::of(source, syntax))?;
                    Ok((program, names))
                });
            let compiling = compiling.map_err(|e| format!("no thread to parse it on: {e}"))?;
            compiling.join().unwrap_or_else(|_| Err("it breaks the parser".into()))
        })
    }

    /// Runs the template; its output is appended to `text`.
    pub(super) fn run(&self, env: &Environment<'static>, context: Value, text: &mut String) -> Result<(), Error> {
        let code = self.borrow_dependent();
        let mut out = minijinja::machinery::make_string_output(text);
        let done = minijinja::machinery::eval(env, &code.main, context, &code.blocks, &mut out, AutoEscape::None);
        done.map(|_| ())
    }
}

impl<'a> Code<'a> {
    fn of(source: &'a Source, syntax: &SyntaxConfig) -> Result<Code<'a>, String> {
        let tree = parse(&source.text, &source.name, syntax.clone()).map_err(|e| describe(&e))?;
        let mut generator = CodeGenerator::new(&source.name, &source.text);
        generator.compile_stmt(&tree);
        let (main, blocks) = generator.finish();
        let repeats = meter::repeats(&main);
        let blocks = blocks
            .iter()
            .map(|(name, block)| Ok((*name, meter::metered(block, true)?)));
        Ok(Code {
            blocks: blocks.collect::<Result<_, String>>()?,
            main: meter::metered(&main, repeats)?,
        })
    }
}

/// Checks a source against the limits that bound its tree's depth.
fn check_source(text: &str, syntax: &SyntaxConfig) -> Result<(), String> {
    if text.len() > SOURCE_BYTES_MAX {
        return Err(format!("it is longer than {} MB", SOURCE_BYTES_MAX >> 20));
    }
    let (mut links, mut elifs) = (0, 0);
    // The scan stops at an invalid token, which the parser reports.
    for (token, span) in tokenize(text, false, syntax.clone()).map_while(Result::ok) {
        match token {
            Token::BlockStart | Token::VariableStart => links = 0,
            Token::TemplateData(_) | Token::VariableEnd | Token::BlockEnd => {}
            Token::Str(_) | Token::String(_) | Token::Int(_) | Token::Int128(_) | Token::Float(_) => {}
            Token::Comma | Token::Colon | Token::Assign => {}
            Token::Ident("elif") => elifs += 1,
            _ => links += 1,
        }
        if links > TAG_LINKS_MAX {
            let line = span.start_line;
            return Err(format!(
                "line {line}: a tag has more than {TAG_LINKS_MAX} operators, names and brackets"
            ));
        }
        if elifs > ELIF_MAX {
            return Err(format!("it has more than {ELIF_MAX} `elif`"));
        }
    }
    Ok(())
}

/// Whether the expression becomes a large value when the template is compiled, before anything
/// runs.
pub(in crate::job) fn is_large_constant(expression: &Expr) -> bool {
    constant(expression).is_some_and(|size| size.bytes > CONSTANT_MAX)
}

/// Upper bounds of a constant expression's value.
struct Size {
    bytes: u64,
    /// Its value as a number.
    times: u64,
}

fn constant(expression: &Expr) -> Option<Size> {
    let sum = |items: &[Expr]| {
        let sizes = items.iter().map(|item| constant(item).map(|size| size.bytes));
        let bytes = sizes.sum::<Option<u64>>()?;
        Some(Size {
            bytes: bytes + 24,
            times: 1,
        })
    };
    match expression {
        Expr::Const(constant) => Some(size_of(&constant.value)),
        Expr::List(list) => sum(&list.items),
        Expr::Tuple(tuple) => sum(&tuple.items),
        Expr::UnaryOp(op) => constant(&op.expr),
        Expr::BinOp(op) => {
            let (left, right) = (constant(&op.left)?, constant(&op.right)?);
            Some(match op.op {
                BinOpKind::Mul => Size {
                    bytes: (left.bytes.saturating_mul(right.times)).max(right.bytes.saturating_mul(left.times)),
                    times: left.times.saturating_mul(right.times),
                },
                BinOpKind::Pow => Size {
                    bytes: 24,
                    times: u64::MAX,
                },
                _ => Size {
                    bytes: left.bytes.saturating_add(right.bytes),
                    times: left.times.saturating_add(right.times),
                },
            })
        }
        _ => None,
    }
}

fn size_of(value: &Value) -> Size {
    match (value.as_str(), value.as_usize()) {
        (Some(text), _) => Size {
            bytes: text.len() as u64,
            times: 1,
        },
        (None, Some(number)) => Size {
            bytes: 0,
            times: number as u64,
        },
        (None, None) => Size { bytes: 24, times: 1 },
    }
}
