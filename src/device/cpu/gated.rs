//! The gated activation: `activation(gate) * up` (Shazeer 2020, SwiGLU and GEGLU), or its clamped
//! form.

#![expect(unsafe_code, reason = "tiles write parts of rows of one buffer")]

use super::gemm::tile::PANEL;
use super::isa::multiversion;
use super::math::{exp, gelu_tanh, round_bf16, silu};
use super::{Buffer, ExecContext};
use crate::device::Activation;

#[inline(always)]
fn gated_row(activation: Activation, gate: &[f32], up: &[f32], round_to_bf16: bool, out: &mut [f32]) {
    match activation {
        Activation::Silu => gated_row_with(silu, |u| u, gate, up, round_to_bf16, out),
        Activation::GeluTanh => gated_row_with(gelu_tanh, |u| u, gate, up, round_to_bf16, out),
        Activation::ClampedSwiglu { alpha, limit } => gated_row_with(
            |g| clamped_gate(g, alpha, limit),
            |u| clamped_up(u, limit),
            gate,
            up,
            round_to_bf16,
            out,
        ),
        Activation::SquaredRelu => gated_row_with(relu, |u| u, gate, up, round_to_bf16, out),
    }
}

/// Not a number if `x` is none.
#[inline(always)]
fn relu(x: f32) -> f32 {
    if x < 0.0 { 0.0 } else { x }
}

/// `g / (1 + e^-(alpha g))`, where `g` is at most `limit`. Not a number if `gate` is none.
#[inline(always)]
fn clamped_gate(gate: f32, alpha: f32, limit: f32) -> f32 {
    let gate = if gate > limit { limit } else { gate };
    gate / (1.0 + exp(-alpha * gate))
}

/// 1 more than `up`, which is bounded by `limit` on both sides. Not a number if `up` is none.
#[inline(always)]
fn clamped_up(up: f32, limit: f32) -> f32 {
    up.clamp(-limit, limit) + 1.0
}

#[inline(always)]
fn gated_row_with(
    activate: impl Fn(f32) -> f32,
    factor: impl Fn(f32) -> f32,
    gate: &[f32],
    up: &[f32],
    round_to_bf16: bool,
    out: &mut [f32],
) {
    if round_to_bf16 {
        for ((y, g), u) in out.iter_mut().zip(gate).zip(up) {
            *y = round_bf16(round_bf16(activate(*g)) * round_bf16(factor(*u)));
        }
    } else {
        for ((y, g), u) in out.iter_mut().zip(gate).zip(up) {
            *y = activate(*g) * factor(*u);
        }
    }
}

multiversion! {
    pub(super) fn gated_row_on(activation: Activation, gate: &[f32], up: &[f32], round_to_bf16: bool, out: &mut [f32]) = gated_row;
}

/// A tile of `activation(gate) * up`, computed from alternating gate and up panels and written to
/// rows of an output.
pub(super) struct GatedTile<'a> {
    pub activation: Activation,
    /// `[rows][pairs_per_row]`: pairs of panels, 16 gate values and then 16 up values.
    pub panel_pairs: &'a [[f32; 2 * PANEL]],
    pub pairs_per_row: usize,
    /// Row 0 of the output. Rows are `out_stride` numbers apart, and `columns` numbers are written
    /// per row.
    pub out: *mut f32,
    pub out_stride: usize,
    pub columns: usize,
}

#[inline(always)]
fn gated_tile(op: &GatedTile<'_>) {
    match op.activation {
        Activation::Silu => gated_tile_with(silu, |u| u, op),
        Activation::GeluTanh => gated_tile_with(gelu_tanh, |u| u, op),
        Activation::ClampedSwiglu { alpha, limit } => {
            gated_tile_with(|g| clamped_gate(g, alpha, limit), |u| clamped_up(u, limit), op);
        }
        Activation::SquaredRelu => gated_tile_with(relu, |u| u, op),
    }
}

#[inline(always)]
fn gated_tile_with(activate: impl Fn(f32) -> f32, factor: impl Fn(f32) -> f32, op: &GatedTile<'_>) {
    let full_panels = op.columns / PANEL;
    for (r, pairs) in op.panel_pairs.chunks_exact(op.pairs_per_row).enumerate() {
        // SAFETY: within a row of the output, which the caller of `gated_tile_on` guarantees.
        let out = unsafe { std::slice::from_raw_parts_mut(op.out.add(r * op.out_stride), op.columns) };
        let (panels, rest) = out.as_chunks_mut::<PANEL>();
        for (pair, out) in pairs.iter().zip(panels) {
            for j in 0..PANEL {
                out[j] = activate(pair[j]) * factor(pair[PANEL + j]);
            }
        }
        if let Some(pair) = pairs.get(full_panels) {
            for (j, out) in rest.iter_mut().enumerate() {
                *out = activate(pair[j]) * factor(pair[PANEL + j]);
            }
        }
    }
}

multiversion! {
    /// The caller must have exclusive access to the output's rows.
    pub(super) fn gated_tile_on(op: &GatedTile<'_>) = gated_tile;
}

/// Writes `activation(gate) * up` to `out`. Rows of `gate_up` are `[gate][up]`; rows of `out` are
/// half as wide. Without a gate, rows of both are as wide, and up is its own gate.
pub(super) fn gated(
    ctx: ExecContext<'_>,
    activation: Activation,
    round_to_bf16: bool,
    gate_up: &Buffer,
    out: &mut Buffer,
) {
    let width = gate_up.width / if activation.has_gate() { 2 } else { 1 };
    out.reshape(gate_up.rows, width);
    out.each_row(ctx, |i, y| {
        let row = gate_up.row(i);
        let (gate, up) = (&row[..width], &row[row.len() - width..]);
        gated_row_on(ctx.isa, activation, gate, up, round_to_bf16, y);
    });
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::device::cpu::Isa;
    use crate::device::cpu::testing::{buffer, ctx, numbers};

    #[test]
    fn matches_the_formula_and_is_bit_identical_on_all_sets() {
        for (rows, width) in [(1, 1), (2, 15), (3, 16), (4, 17), (40, 500)] {
            let mut x = numbers(9, rows * 2 * width);
            x.iter_mut().for_each(|v| *v *= 20.0);
            let x = buffer(&x, rows, 2 * width);
            let clamped = Activation::ClampedSwiglu {
                alpha: 1.702,
                limit: 7.0,
            };
            for activation in [Activation::Silu, Activation::GeluTanh, clamped, Activation::SquaredRelu] {
                let mut first: Option<Vec<f32>> = None;
                for isa in Isa::available() {
                    let mut out = Buffer::default();
                    gated(ctx(isa), activation, false, &x, &mut out);
                    let columns = if activation.has_gate() { width } else { 2 * width };
                    assert_eq!(out.width, columns);
                    for i in 0..rows {
                        for j in 0..columns {
                            let (g, u) = (x.row(i)[j] as f64, x.row(i)[(width + j) % (2 * width)] as f64);
                            let inner = (2.0 / std::f64::consts::PI).sqrt() * (g + 0.044715 * g.powi(3));
                            let want = match activation {
                                Activation::Silu => u * g / (1.0 + (-g).exp()),
                                Activation::GeluTanh => u * g / (1.0 + (-2.0 * inner).exp()),
                                Activation::ClampedSwiglu { .. } => {
                                    let (g, u) = (g.min(7.0), u.clamp(-7.0, 7.0));
                                    (u + 1.0) * g / (1.0 + (-1.702f32 as f64 * g).exp())
                                }
                                Activation::SquaredRelu => g.max(0.0).powi(2),
                            };
                            let got = out.row(i)[j] as f64;
                            assert!(
                                (got - want).abs() <= 2e-5 * want.abs() + 1e-12,
                                "{activation:?} ({i}, {j}): {got} not {want}"
                            );
                        }
                    }
                    assert_eq!(*first.get_or_insert_with(|| out.data.to_vec()), out.data, "{isa:?}");
                }
            }
        }
    }
}
