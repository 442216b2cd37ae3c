//! The machine code of the inner loops: what they multiply and load is what was meant, and nothing goes through memory besides.
//!
//! A compiler that runs out of registers, or stops unrolling, costs a kernel half its speed and no test its result. So the test
//! binary disassembles itself with `objdump`, which comes with the C compiler that building needs.

#![cfg(target_arch = "x86_64")]

use std::collections::BTreeSet;
use std::ops::RangeInclusive;
use std::process::Command;

use crate::skips::skip;

/// A kernel, compiled for several numbers of rows and panels.
struct Kernel {
    /// How the function's name ends.
    name: &'static str,
    /// What multiplies and adds.
    product: &'static str,
    /// Of the forms that matter. Loops of fewer products may have been unrolled further.
    expected: Vec<Loop>,
}

/// What an inner loop holds besides counting.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
struct Loop {
    products: usize,
    /// Of a whole register: weights.
    loads: usize,
    /// Of a number to all lanes: activations.
    broadcasts: usize,
}

/// A tile of rows times panels.
fn tile((rows, panels): (usize, usize)) -> Loop {
    Loop {
        products: rows * panels,
        loads: panels,
        broadcasts: rows,
    }
}

/// Few rows times a panel, so many lines of it at once.
fn stream((rows, lines): (usize, usize)) -> Loop {
    Loop {
        products: rows * lines,
        loads: lines,
        broadcasts: rows * lines,
    }
}

fn kernels() -> Vec<Kernel> {
    let tiles = |forms: &[(usize, usize)]| forms.iter().copied().map(tile).collect();
    let one_panel = |least: usize| (least..=12).map(|rows| (rows, 1));
    let wide = |least: usize| (least..=12).map(|rows| (rows, if rows < 7 { 4 } else { 2 }));
    let int8: Vec<_> = one_panel(5).chain(wide(5)).chain([(5, 2), (6, 2)]).collect();
    let bf16: Vec<_> = one_panel(4).chain(wide(5)).collect();
    let f32: Vec<_> = wide(4).chain([(1, 8), (2, 8), (3, 8)]).collect();
    vec![
        Kernel {
            name: "int8::x86::vnni_512",
            product: "vpdpbusd",
            expected: tiles(&int8),
        },
        Kernel {
            name: "int8::x86::stream_512",
            product: "vpdpbusd",
            expected: [(1, 4), (2, 4), (3, 2), (4, 2)].map(stream).to_vec(),
        },
        Kernel {
            name: "bf16::x86::pairs_512",
            product: "vdpbf16ps",
            expected: tiles(&bf16),
        },
        Kernel {
            name: "tile::x86::f32_512",
            product: "vfmadd",
            expected: tiles(&f32),
        },
    ]
}

/// An instruction of a function.
struct Instruction {
    address: u64,
    mnemonic: String,
    operands: String,
}

impl Instruction {
    /// A line of `objdump -d`: `  401000:<tab>vpaddd (%rax),%zmm0,%zmm1`.
    fn parse(line: &str) -> Option<Instruction> {
        let (address, code) = line.trim_start().split_once(":\t")?;
        let (mnemonic, operands) = code.split_once(' ').unwrap_or((code, ""));
        Some(Instruction {
            address: u64::from_str_radix(address, 16).ok()?,
            mnemonic: mnemonic.to_string(),
            operands: operands.trim().to_string(),
        })
    }

    /// Where it jumps to.
    fn jump(&self) -> Option<u64> {
        let target = self.operands.split(' ').next()?;
        self.mnemonic
            .starts_with('j')
            .then(|| u64::from_str_radix(target, 16).ok())?
    }

    fn reads_memory(&self) -> bool {
        self.operands.contains('(') && !self.mnemonic.starts_with("prefetch") && self.mnemonic != "lea"
    }

    fn writes_memory(&self) -> bool {
        let compares = self.mnemonic.starts_with("cmp") || self.mnemonic.starts_with("test");
        self.reads_memory() && self.operands.ends_with(')') && !compares
    }

    fn is_broadcast(&self) -> bool {
        self.reads_memory() && (self.mnemonic.contains("broadcast") || self.operands.contains("{1to16}"))
    }

    fn is_load(&self) -> bool {
        self.reads_memory() && !self.is_broadcast() && self.operands.contains("%zmm")
    }
}

fn objdump(arguments: &[&str]) -> String {
    let program = std::env::current_exe().unwrap();
    let out = Command::new("objdump").args(arguments).arg(&program).output();
    let out = out.unwrap_or_else(|e| panic!("`objdump` (of binutils) is needed to look at kernels: {e}"));
    assert!(out.status.success(), "{}", String::from_utf8_lossy(&out.stderr));
    String::from_utf8(out.stdout).unwrap()
}

/// First address and size of all functions whose names contain `name`, from a symbol table.
fn functions(symbols: &str, name: &str) -> Vec<(u64, u64)> {
    let of_line = |line: &str| -> Option<(u64, u64)> {
        let (place, rest) = line.split_once(".text\t")?;
        let address = u64::from_str_radix(place.split(' ').next()?, 16).ok()?;
        let size = u64::from_str_radix(rest.split(' ').next()?, 16).ok()?;
        (size > 0).then_some((address, size))
    };
    symbols
        .lines()
        .filter(|line| line.contains(name))
        .filter_map(of_line)
        .collect()
}

/// Addresses of the smallest loop that holds an instruction of this name.
fn inner_loop(code: &[Instruction], product: &str) -> Option<RangeInclusive<u64>> {
    let first = code.first()?.address;
    let loops = code.iter().filter_map(|jump| {
        let target = jump.jump()?;
        (first..jump.address).contains(&target).then_some(target..=jump.address)
    });
    loops
        .filter(|range| {
            code.iter()
                .any(|i| range.contains(&i.address) && i.mnemonic.starts_with(product))
        })
        .min_by_key(|range| range.end() - range.start())
}

/// What is wrong with one compiled form of a kernel; else what its inner loop holds.
fn look(code: &[Instruction], product: &str) -> Result<Loop, String> {
    let range = inner_loop(code, product).ok_or_else(|| format!("no loop holds `{product}`"))?;
    let body: Vec<&Instruction> = code.iter().filter(|i| range.contains(&i.address)).collect();
    if let Some(i) = body.iter().find(|i| i.writes_memory() || i.operands.contains("%rsp")) {
        return Err(format!("goes through memory: {} {}", i.mnemonic, i.operands));
    }
    let count = |is: &dyn Fn(&Instruction) -> bool| body.iter().filter(|i| is(i)).count();
    Ok(Loop {
        products: count(&|i| i.mnemonic.starts_with(product)),
        loads: count(&|i| i.is_load()),
        broadcasts: count(&|i| i.is_broadcast()),
    })
}

#[test]
fn inner_loops_keep_their_sums_in_registers() {
    if cfg!(debug_assertions) {
        return skip(
            "kernel_code::inner_loops_keep_their_sums_in_registers",
            "this build is not optimized",
        );
    }
    let symbols = objdump(&["-t", "-C"]);
    let mut wrong = Vec::new();
    for kernel in kernels() {
        let functions = functions(&symbols, kernel.name);
        let mut found = BTreeSet::new();
        let start = functions.iter().map(|(at, _)| *at).min().unwrap_or(0);
        let stop = functions.iter().map(|(at, size)| at + size).max().unwrap_or(0);
        let text = objdump(&[
            "-d",
            "--no-show-raw-insn",
            &format!("--start-address={start}"),
            &format!("--stop-address={stop}"),
        ]);
        let all: Vec<Instruction> = text.lines().filter_map(Instruction::parse).collect();
        for (at, size) in functions {
            let from = all.partition_point(|i| i.address < at);
            let to = all.partition_point(|i| i.address < at + size);
            match look(&all[from..to], kernel.product) {
                Ok(inner) => _ = found.insert(inner),
                Err(why) => wrong.push(format!("{} at {at:x}: {why}", kernel.name)),
            }
        }
        for form in kernel.expected.iter().filter(|form| !found.contains(form)) {
            wrong.push(format!("{}: no {form:?}, only {found:?}", kernel.name));
        }
    }
    assert!(wrong.is_empty(), "{wrong:#?}");
}
