//! Soft capping of logits (Gemma 2, 2024): `cap * tanh(x / cap)`.

use super::isa::multiversion;
use super::{Buffer, ExecContext, math};

#[inline(always)]
fn row(cap: f32, row: &mut [f32]) {
    row.iter_mut().for_each(|x| *x = math::soft_cap(*x, cap));
}

multiversion! {
    fn row_on(cap: f32, values: &mut [f32]) = row;
}

/// Applies the soft cap to all of `logits`.
pub(super) fn soft_cap(ctx: ExecContext<'_>, cap: f32, logits: &mut Buffer) {
    let elements = logits.data.len();
    let mut parts: Vec<_> = logits.parts_mut(ctx.threads.parts(elements)).collect();
    ctx.threads.parallel_for_each(elements, &mut parts, |_, parts| {
        parts.for_each(|(_, part)| row_on(ctx.isa, cap, part));
    });
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::device::cpu::Isa;
    use crate::device::cpu::testing::{buffer, ctx, numbers};

    #[test]
    fn matches_the_formula_and_is_bit_identical_on_all_sets() {
        for (rows, width) in [(1, 1), (3, 17), (40, 500)] {
            let x: Vec<f32> = numbers(3, rows * width).iter().map(|x| x * 90.0).collect();
            let mut first: Option<Vec<f32>> = None;
            for isa in Isa::available() {
                let mut logits = buffer(&x, rows, width);
                soft_cap(ctx(isa), 30.0, &mut logits);
                for (x, got) in x.iter().zip(&*logits.data) {
                    let want = 30.0 * (f64::from(*x) / 30.0).tanh();
                    assert!((f64::from(*got) - want).abs() < 9e-6, "{isa:?} {x}: {got} not {want}");
                }
                assert_eq!(
                    *first.get_or_insert_with(|| logits.data.to_vec()),
                    logits.data,
                    "{isa:?}"
                );
            }
        }
    }
}
