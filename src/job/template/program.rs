//! Compiles a template's source to instructions with meters, on a thread with a large stack.
//!
//! The parser limits the nesting of brackets and blocks, but not the length of a chain of operators,
//! filters or attributes, each of which is a level of the syntax tree. So the operators, names and
//! brackets in each tag are counted before parsing. This limits the depth of the tree, and the
//! parser's thread has a stack that is large enough for it.

use std::collections::BTreeMap;
use std::thread;

use minijinja::machinery::ast::{BinOpKind, Expr};
use minijinja::machinery::{CodeGenerator, Instructions, Token, parse, tokenize};
use minijinja::syntax::SyntaxConfig;
use minijinja::{AutoEscape, Environment, Error, Value};
use self_cell::self_cell;

use super::super::names::Names;
use super::{describe, meter};

/// Maximum length of a template's source; the longest of a published model is under 100 KB.
const SOURCE_BYTES_MAX: usize = 1 << 20;
/// Maximum number of operators, names and brackets in one tag. Literals and the commas between them
/// do not count.
const TAG_LINKS_MAX: usize = 2_000;
/// Maximum number of `elif` in a template; in the tree, each is nested in the one before it.
const ELIF_MAX: usize = 1_000;
/// Maximum size of a value that the compiler computes from constants.
const CONSTANT_BYTES_MAX: u64 = 1 << 20;
/// Stack size of the parser's thread: several kilobytes for each level that a tree may have.
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
    /// Compiles a template, and collects the names in it and the fields of `variable`. The error is
    /// one line.
    pub(super) fn compile(
        name: &str,
        text: String,
        syntax: &SyntaxConfig,
        variable: &str,
    ) -> Result<(Program, Names), String> {
        check_source(&text, syntax)?;
        let source = Source {
            name: name.to_string(),
            text,
        };
        thread::scope(|scope| {
            let compiler_thread = thread::Builder::new()
                .name("template".into())
                .stack_size(STACK_BYTES)
                .spawn_scoped(scope, || {
                    let names = Names::of(&source.text, name, syntax, variable);
                    if let Some(line) = names.large_constant_line {
                        return Err(format!("line {line}: a constant of more than 1 MB"));
                    }
                    let program = Program::try_new(source, |source| Code::compile(source, syntax))?;
                    Ok((program, names))
                });
            let compiler_thread = compiler_thread.map_err(|e| format!("no thread to parse it on: {e}"))?;
            compiler_thread
                .join()
                .unwrap_or_else(|_| Err("it breaks the parser".into()))
        })
    }

    /// Runs the template; its output is appended to `text`.
    pub(super) fn run(&self, env: &Environment<'static>, context: Value, text: &mut String) -> Result<(), Error> {
        let code = self.borrow_dependent();
        let mut out = minijinja::machinery::make_string_output(text);
        let result = minijinja::machinery::eval(env, &code.main, context, &code.blocks, &mut out, AutoEscape::None);
        result.map(|_| ())
    }
}

impl<'a> Code<'a> {
    fn compile(source: &'a Source, syntax: &SyntaxConfig) -> Result<Code<'a>, String> {
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

/// Checks the limits of a source that bound the depth of its tree.
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

/// Whether the compiler would compute a large value from this constant expression.
pub(in crate::job) fn is_large_constant(expression: &Expr) -> bool {
    constant_size(expression).is_some_and(|size| size.bytes > CONSTANT_BYTES_MAX)
}

/// Upper bounds of a constant expression's value.
struct Size {
    bytes: u64,
    /// The value if it is a number; 1 for other values.
    number: u64,
}

/// The size of an expression's value; `None` if the expression is not constant.
fn constant_size(expression: &Expr) -> Option<Size> {
    let sum = |items: &[Expr]| {
        let sizes = items.iter().map(|item| constant_size(item).map(|size| size.bytes));
        let bytes = sizes.sum::<Option<u64>>()?;
        Some(Size {
            bytes: bytes + 24,
            number: 1,
        })
    };
    match expression {
        Expr::Const(constant) => Some(size_of(&constant.value)),
        Expr::List(list) => sum(&list.items),
        Expr::Tuple(tuple) => sum(&tuple.items),
        Expr::UnaryOp(op) => constant_size(&op.expr),
        Expr::BinOp(op) => {
            let (left, right) = (constant_size(&op.left)?, constant_size(&op.right)?);
            Some(match op.op {
                BinOpKind::Mul => Size {
                    bytes: (left.bytes.saturating_mul(right.number)).max(right.bytes.saturating_mul(left.number)),
                    number: left.number.saturating_mul(right.number),
                },
                BinOpKind::Pow => Size {
                    bytes: 24,
                    number: u64::MAX,
                },
                _ => Size {
                    bytes: left.bytes.saturating_add(right.bytes),
                    number: left.number.saturating_add(right.number),
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
            number: 1,
        },
        (None, Some(number)) => Size {
            bytes: 0,
            number: number as u64,
        },
        (None, None) => Size { bytes: 24, number: 1 },
    }
}
