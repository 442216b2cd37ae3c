//! Inputs of each layer (Gemma 4): a row has a part for each layer, made of the token's embedding in a
//! table of their own and of a projection of its embedding in the stream.

use super::gated::gated_row_on;
use super::isa::multiversion;
use super::math::round_bf16;
use super::norm::rms_norm;
use super::{Buffer, ExecContext, Vector};
use crate::device::{Activation, LayerInputs};

#[inline(always)]
fn add_row(projected: &[f32], weight: &[f32], (eps, scale): (f32, f32), round_to_bf16: bool, inputs: &mut [f32]) {
    let mut normed = vec![0.0; weight.len()];
    let parts = projected.chunks_exact(weight.len());
    for (projected, inputs) in parts.zip(inputs.chunks_exact_mut(weight.len())) {
        normed.copy_from_slice(projected);
        rms_norm(&mut normed, weight, eps, round_to_bf16);
        for (x, y) in inputs.iter_mut().zip(&normed) {
            let sum = if round_to_bf16 { round_bf16(*x + y) } else { *x + y };
            *x = if round_to_bf16 {
                round_bf16(sum * scale)
            } else {
                sum * scale
            };
        }
    }
}

multiversion! {
    fn add_row_on(
        projected: &[f32],
        weight: &[f32],
        eps_and_scale: (f32, f32),
        round_to_bf16: bool,
        inputs: &mut [f32],
    ) = add_row;
}

/// Adds the normalised projection to the rows of `inputs`, and scales the sum.
pub(super) fn add(
    ctx: ExecContext<'_>,
    round_to_bf16: bool,
    op: &LayerInputs<'_, Buffer, Vector>,
    inputs: &mut Buffer,
) {
    let (projected, weight) = (op.projected, &op.norm.0[..]);
    assert_eq!((projected.rows, projected.width), (inputs.rows, inputs.width));
    assert!(inputs.width.is_multiple_of(weight.len()));
    inputs.each_row(ctx, |i, row| {
        add_row_on(
            ctx.isa,
            projected.row(i),
            weight,
            (op.eps, op.scale),
            round_to_bf16,
            row,
        );
    });
}

/// Combines each row of `gate` with part `layer` of the same row of `inputs`.
pub(super) fn gate(
    ctx: ExecContext<'_>,
    round_to_bf16: bool,
    activation: Activation,
    gate: &Buffer,
    (inputs, layer): (&Buffer, usize),
    out: &mut Buffer,
) {
    let width = gate.width;
    assert!(gate.rows == inputs.rows && (layer + 1) * width <= inputs.width);
    out.reshape(gate.rows, width);
    out.each_row(ctx, |i, row| {
        let input = &inputs.row(i)[layer * width..][..width];
        gated_row_on(ctx.isa, activation, gate.row(i), input, round_to_bf16, row);
    });
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::device::cpu::Isa;
    use crate::device::cpu::testing::{buffer, ctx, numbers};

    #[test]
    fn each_layer_has_its_part_of_a_row() {
        let (rows, layers, width) = (5, 3, 18);
        let (tokens, projected) = (numbers(1, rows * layers * width), numbers(2, rows * layers * width));
        let (weight, gates) = (numbers(3, width), numbers(4, rows * width));
        let mut first: Option<(Vec<f32>, Vec<f32>)> = None;
        for isa in Isa::available() {
            let norm = Vector(weight.clone());
            let projected_rows = buffer(&projected, rows, layers * width);
            let op = LayerInputs {
                projected: &projected_rows,
                norm: &norm,
                eps: 1e-3,
                scale: 0.7,
            };
            let mut inputs = buffer(&tokens, rows, layers * width);
            add(ctx(isa), false, &op, &mut inputs);
            let mut out = Buffer::default();
            let gate_rows = buffer(&gates, rows, width);
            gate(ctx(isa), false, Activation::Silu, &gate_rows, (&inputs, 1), &mut out);
            for (row, layer) in (0..rows).flat_map(|row| (0..layers).map(move |layer| (row, layer))) {
                let at = (row * layers + layer) * width;
                let part = &projected[at..][..width];
                let mean = part.iter().map(|x| f64::from(*x).powi(2)).sum::<f64>() / width as f64;
                for d in 0..width {
                    let normed = f64::from(part[d]) / (mean + 1e-3).sqrt() * f64::from(weight[d]);
                    let want = 0.7 * (f64::from(tokens[at + d]) + normed);
                    let got = f64::from(inputs.row(row)[layer * width + d]);
                    assert!((got - want).abs() < 1e-5, "{isa:?} {row} {layer} {d}: {got} {want}");
                    if layer == 1 {
                        let g = f64::from(gates[row * width + d]);
                        let want = want * g / (1.0 + (-g).exp());
                        let got = f64::from(out.row(row)[d]);
                        assert!((got - want).abs() < 1e-5, "{isa:?} {row} {d}: {got} {want}");
                    }
                }
            }
            let found = (inputs.data.to_vec(), out.data.to_vec());
            assert!(*first.get_or_insert_with(|| found.clone()) == found, "{isa:?}");
        }
    }
}
