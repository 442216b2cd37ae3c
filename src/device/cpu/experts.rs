//! Routed experts: each token's row goes through the MLPs that a router chooses for it.
//!
//! Rows are sorted by expert, so that the MLPs of all experts are two grouped products, and an
//! expert's weights are read once per step. The router computes in F32 at every precision, because
//! a rounded logit may choose another expert. A token's results are added in the order of its
//! experts' numbers, whatever else is in the batch.
//!
//! See docs/decisions/097-experts-are-segments-of-grouped-products.md.

use std::ops::Range;

use super::gemm::linear::{Epilogue, PackedRows, Rows, Segment, gated_int8, grouped_linear, linear};
use super::gemm::matrix::{Matrix, Panels, Vector};
use super::isa::multiversion;
use super::math::{exp, round_bf16};
use super::{Buffer, ExecContext, gated};
use crate::device::{Activation, ExpertWeights, Linear, Routing};

/// Scratch memory of [`experts`], reused from step to step.
#[derive(Default)]
pub(super) struct Scratch {
    router_logits: Buffer,
    routes: Routes,
    /// `[rows][gate][up]`, for all formats except INT8.
    gate_up: Buffer,
    gated: Buffer,
    down: Buffer,
}

/// A layer's experts and how they compute.
pub(super) struct ExpertsOp<'a> {
    pub ctx: ExecContext<'a>,
    pub weights: &'a ExpertWeights<Matrix, Vector>,
    pub activation: Activation,
    pub round_to_bf16: bool,
}

/// The experts of each token, and all rows sorted by expert.
#[derive(Debug, Default, PartialEq)]
struct Routes {
    /// Experts of each token, `[tokens][per_token]`, ascending.
    experts: Vec<u32>,
    /// Their weights, in the same order.
    weights: Vec<f32>,
    /// The sorted rows: the token of each.
    tokens: Vec<u32>,
    /// For each entry of `experts`, its sorted row.
    rows: Vec<u32>,
    /// Experts that have rows, ascending, and their sorted rows.
    segments: Vec<(usize, Range<usize>)>,
}

impl Routes {
    /// Chooses experts by the router's logits, `[tokens][experts]`.
    fn choose(&mut self, ctx: ExecContext<'_>, routing: Routing, logits: &Buffer) {
        let per_token = routing.per_token;
        self.experts.resize(logits.rows * per_token, 0);
        self.weights.resize(logits.rows * per_token, 0.0);
        let elements = logits.data.len();
        let tokens = logits.rows.div_ceil(ctx.threads.parts(elements)).max(1);
        let experts = self.experts.chunks_mut(tokens * per_token);
        let weights = self.weights.chunks_mut(tokens * per_token);
        let mut parts: Vec<_> = experts.zip(weights).enumerate().collect();
        ctx.threads.parallel_for_each(elements, &mut parts, |_, parts| {
            let mut ranked = Vec::new();
            for (part, (experts, weights)) in parts {
                let rows = experts.chunks_exact_mut(per_token);
                for (i, (experts, weights)) in rows.zip(weights.chunks_exact_mut(per_token)).enumerate() {
                    let logits = logits.row(*part * tokens + i);
                    choose_experts_on(ctx.isa, routing, logits, &mut ranked, experts, weights);
                }
            }
        });
    }

    /// Sorts rows by expert. Rows of one expert stay in the order of their tokens.
    fn sort(&mut self, experts: usize, per_token: usize) {
        let mut ends = vec![0; experts];
        for expert in &self.experts {
            ends[*expert as usize] += 1;
        }
        self.segments.clear();
        let mut next = 0;
        for (expert, count) in ends.iter_mut().enumerate() {
            let rows = next..next + *count;
            (next, *count) = (rows.end, rows.start);
            if !rows.is_empty() {
                self.segments.push((expert, rows));
            }
        }
        let mut next_rows = ends;
        self.tokens.resize(self.experts.len(), 0);
        self.rows.clear();
        for (i, expert) in self.experts.iter().enumerate() {
            let row = &mut next_rows[*expert as usize];
            self.tokens[*row] = (i / per_token) as u32;
            self.rows.push(*row as u32);
            *row += 1;
        }
    }

    /// Segments of a product with one matrix per expert.
    fn segments<'a>(&self, linears: &'a [Linear<Matrix, Vector>]) -> Vec<Segment<'a>> {
        let segment = |(expert, rows): &(usize, Range<usize>)| {
            let linear = &linears[*expert];
            Segment {
                rows: rows.clone(),
                matrix: &linear.weight,
                bias: linear.bias.as_ref().map(|bias| &bias.0[..]),
            }
        };
        self.segments.iter().map(segment).collect()
    }
}

#[inline(always)]
fn choose_experts(
    routing: Routing,
    logits: &[f32],
    ranked: &mut Vec<(u32, f32)>,
    experts: &mut [u32],
    weights: &mut [f32],
) {
    let max = logits.iter().copied().fold(f32::NEG_INFINITY, f32::max);
    let all: f32 = logits.iter().map(|logit| exp(logit - max)).sum();
    ranked.clear();
    ranked.extend((0..).zip(logits.iter().copied()));
    ranked.select_nth_unstable_by(experts.len() - 1, |(i, a), (j, b)| b.total_cmp(a).then(i.cmp(j)));
    ranked.truncate(experts.len());
    ranked.sort_unstable_by_key(|(expert, _)| *expert);
    for ((expert, logit), (chosen, weight)) in ranked.iter().zip(experts.iter_mut().zip(weights.iter_mut())) {
        (*chosen, *weight) = (*expert, exp(logit - max));
    }
    let sum: f32 = if routing.renormalized && !all.is_nan() {
        weights.iter().sum()
    } else {
        all
    };
    weights.iter_mut().for_each(|weight| *weight /= sum);
}

multiversion! {
    /// Chooses the experts with the largest logits, among equal ones those with the lowest numbers,
    /// and sorts them by number. An expert's weight is its softmax over all experts, or over the
    /// chosen ones if weights are renormalized. It is NaN if a logit is NaN. `ranked` is scratch.
    fn choose_experts_on(
        routing: Routing,
        logits: &[f32],
        ranked: &mut Vec<(u32, f32)>,
        experts: &mut [u32],
        weights: &mut [f32],
    ) = choose_experts;
}

#[inline(always)]
fn add_scaled(values: &[f32], scale: f32, sum: &mut [f32]) {
    sum.iter_mut().zip(values).for_each(|(y, x)| *y = x.mul_add(scale, *y));
}

multiversion! {
    fn add_scaled_on(values: &[f32], scale: f32, sum: &mut [f32]) = add_scaled;
}

/// Writes each token's weighted sum of its experts' outputs to `out`.
pub(super) fn experts(
    op: &ExpertsOp<'_>,
    x: &Buffer,
    out: &mut Buffer,
    scratch: &mut Scratch,
    packed: &mut PackedRows,
) {
    let ExpertsOp {
        ctx,
        weights,
        activation,
        round_to_bf16,
    } = *op;
    let Scratch {
        router_logits,
        routes,
        gate_up,
        gated,
        down,
    } = scratch;
    let router = &weights.router.weight;
    let unrounded = Epilogue {
        bias: weights.router.bias.as_ref().map(|bias| &bias.0[..]),
        round_to_bf16: false,
    };
    let routing = weights.routing;
    assert!((1..=router.rows).contains(&routing.per_token) && x.quantized.is_none());
    linear(ctx, router, router.rows, unrounded, x, router_logits, packed);
    routes.choose(ctx, routing, router_logits);
    routes.sort(router.rows, routing.per_token);

    let rows = Rows {
        x,
        picked: Some(&routes.tokens),
    };
    let segments = routes.segments(&weights.gate_up);
    let (both, hidden) = (weights.gate_up[0].weight.rows, weights.down[0].weight.rows);
    if let Panels::Int8(_) = &weights.gate_up[0].weight.panels {
        gated_int8(ctx, &segments, (both / 2, activation), rows, gated, packed);
    } else {
        grouped_linear(ctx, &segments, both, round_to_bf16, rows, gate_up, packed);
        gated::gated(ctx, activation, round_to_bf16, gate_up, gated);
    }
    let rows = Rows { x: gated, picked: None };
    let segments = routes.segments(&weights.down);
    grouped_linear(ctx, &segments, hidden, round_to_bf16, rows, down, packed);
    combine(op, routes, down, x.rows, out);
}

/// Adds up each token's rows of `down`, multiplied by their weights.
fn combine(op: &ExpertsOp<'_>, routes: &Routes, down: &Buffer, tokens: usize, out: &mut Buffer) {
    let (width, per_token) = (down.width, op.weights.routing.per_token);
    let elements = down.data.len();
    out.reshape(tokens, width);
    let mut parts: Vec<_> = out.parts_mut(op.ctx.threads.parts(elements)).collect();
    op.ctx.threads.parallel_for_each(elements, &mut parts, |_, parts| {
        for (first, part) in parts {
            for (i, sum) in part.chunks_exact_mut(width).enumerate() {
                let entries = (*first + i) * per_token..(*first + i + 1) * per_token;
                sum.fill(0.0);
                for (row, weight) in routes.rows[entries.clone()].iter().zip(&routes.weights[entries]) {
                    add_scaled_on(op.ctx.isa, down.row(*row as usize), *weight, sum);
                }
                if op.round_to_bf16 {
                    sum.iter_mut().for_each(|y| *y = round_bf16(*y));
                }
            }
        }
    });
}

#[cfg(test)]
mod tests {
    use std::cell::Cell;

    use super::*;
    use crate::device::cpu::isa::Isa;
    use crate::device::cpu::testing::{buffer, bytes_of, ctx, ctx_with_threads, numbers};
    use crate::device::{Dtype, Precision, Tensor};

    const ROUTING: Routing = Routing {
        per_token: 2,
        renormalized: false,
    };

    fn choice(routing: Routing, logits: &[f32]) -> (Vec<u32>, Vec<f32>) {
        let mut first = None;
        for isa in Isa::available() {
            let mut routes = Routes::default();
            routes.choose(ctx(isa), routing, &buffer(logits, 1, logits.len()));
            let found = (routes.experts, routes.weights);
            assert_eq!(
                format!("{found:?}"),
                *first.get_or_insert(format!("{found:?}")),
                "{isa:?}"
            );
        }
        let (mut experts, mut weights) = (vec![0; routing.per_token], vec![0.0; routing.per_token]);
        choose_experts(routing, logits, &mut Vec::new(), &mut experts, &mut weights);
        (experts, weights)
    }

    #[test]
    fn the_largest_logits_win_and_of_equal_ones_the_lowest_numbers() {
        assert_eq!(choice(ROUTING, &[0.0, 3.0, 1.0, 2.0]).0, [1, 3]);
        assert_eq!(choice(ROUTING, &[1.0, 1.0, 2.0, 1.0]).0, [0, 2]);
        assert_eq!(choice(ROUTING, &[1.0; 5]).0, [0, 1]);
        let all = Routing {
            per_token: 3,
            ..ROUTING
        };
        assert_eq!(choice(all, &[1.0, -1.0, 0.0]).0, [0, 1, 2]);
    }

    #[test]
    fn weights_are_a_softmax_over_all_or_over_the_chosen_experts() {
        let logits = [0.0f32, 3.0, 1.0, 2.0];
        let e = |x: f64| x.exp();
        let all = e(0.0) + e(3.0) + e(1.0) + e(2.0);
        for (renormalized, sum) in [(false, all), (true, e(3.0) + e(2.0))] {
            let (_, weights) = choice(
                Routing {
                    renormalized,
                    ..ROUTING
                },
                &logits,
            );
            for (found, want) in weights.iter().zip([e(3.0) / sum, e(2.0) / sum]) {
                assert!((f64::from(*found) - want).abs() < 1e-6, "{found} {want}");
            }
        }
    }

    #[test]
    fn a_logit_that_is_not_a_number_reaches_every_weight() {
        for bad in [f32::NAN, -f32::NAN, f32::INFINITY] {
            for renormalized in [false, true] {
                let (_, weights) = choice(
                    Routing {
                        renormalized,
                        ..ROUTING
                    },
                    &[1.0, bad, 0.0, 2.0],
                );
                assert!(weights.iter().all(|weight| weight.is_nan()), "{bad} {weights:?}");
            }
        }
    }

    #[test]
    fn rows_are_sorted_by_expert_and_then_by_token() {
        let mut routes = Routes {
            experts: vec![1, 3, 0, 3, 1, 3],
            ..Routes::default()
        };
        routes.sort(5, 2);
        assert_eq!(routes.segments, [(0, 0..1), (1, 1..3), (3, 3..6)]);
        assert_eq!(routes.tokens, [1, 0, 2, 0, 1, 2]);
        assert_eq!(routes.rows, [1, 3, 0, 4, 2, 5]);
    }

    struct Sizes {
        experts: usize,
        hidden: usize,
        width: usize,
    }

    /// Weights of a layer, as numbers and packed.
    struct Layer {
        router: Vec<f32>,
        gate_up: Vec<Vec<f32>>,
        down: Vec<Vec<f32>>,
        packed: ExpertWeights<Matrix, Vector>,
    }

    fn layer(sizes: &Sizes, pack: impl Fn(&[Tensor<'_>], bool) -> Matrix) -> Layer {
        let Sizes { experts, hidden, width } = *sizes;
        let router = numbers(1, experts * hidden);
        let of = |seed, rows: usize, columns: usize| -> Vec<Vec<f32>> {
            (0..experts).map(|e| numbers(seed + e as u64, rows * columns)).collect()
        };
        let (gate_up, down) = (of(10, 2 * width, hidden), of(100, hidden, width));
        let pack = |values: &[f32], columns: usize, is_gated: bool| {
            let data = bytes_of(values, Dtype::F32);
            let rows = values.len() / columns;
            pack(
                &[Tensor {
                    dtype: Dtype::F32,
                    rows,
                    columns,
                    data: &data,
                }],
                is_gated,
            )
        };
        let linear = |weight| Linear { weight, bias: None };
        let packed = ExpertWeights {
            routing: Routing {
                per_token: 2,
                renormalized: true,
            },
            router: {
                let data = bytes_of(&router, Dtype::F32);
                let tensor = Tensor {
                    dtype: Dtype::F32,
                    rows: experts,
                    columns: hidden,
                    data: &data,
                };
                linear(Matrix::pack(&[tensor], Precision::F32).unwrap())
            },
            gate_up: gate_up.iter().map(|w| linear(pack(w, hidden, true))).collect(),
            down: down.iter().map(|w| linear(pack(w, width, false))).collect(),
        };
        Layer {
            router,
            gate_up,
            down,
            packed,
        }
    }

    fn run(ctx: ExecContext<'_>, layer: &Layer, x: &Buffer) -> Buffer {
        let op = ExpertsOp {
            ctx,
            weights: &layer.packed,
            activation: Activation::Silu,
            round_to_bf16: false,
        };
        let mut out = Buffer::default();
        experts(&op, x, &mut out, &mut Scratch::default(), &mut PackedRows::default());
        out
    }

    fn dot(a: &[f32], b: &[f32]) -> f64 {
        a.iter().zip(b).map(|(a, b)| f64::from(*a) * f64::from(*b)).sum()
    }

    /// Token by token and in F64, with the experts that the rows' logits choose.
    fn reference(layer: &Layer, sizes: &Sizes, x: &[f32]) -> Vec<f64> {
        let logits: Vec<f64> = layer.router.chunks(sizes.hidden).map(|w| dot(w, x)).collect();
        let mut ranked: Vec<usize> = (0..sizes.experts).collect();
        ranked.sort_by(|a, b| logits[*b].total_cmp(&logits[*a]));
        let sum = logits[ranked[0]].exp() + logits[ranked[1]].exp();
        let mut out = vec![0.0; sizes.hidden];
        for &expert in &ranked[..2] {
            let (gate, up) = layer.gate_up[expert].split_at(sizes.width * sizes.hidden);
            let gated: Vec<f32> = gate
                .chunks(sizes.hidden)
                .zip(up.chunks(sizes.hidden))
                .map(|(g, u)| {
                    let g = dot(g, x);
                    (g / (1.0 + (-g).exp()) * dot(u, x)) as f32
                })
                .collect();
            for (y, w) in out.iter_mut().zip(layer.down[expert].chunks(sizes.width)) {
                *y += logits[expert].exp() / sum * dot(w, &gated);
            }
        }
        out
    }

    /// The packings of each kernel, and how far a result may be from the sum in F64, relative to
    /// the largest result.
    fn check(name: &str, tolerance: f64, isa: Isa, pack: impl Fn(&[Tensor<'_>], bool) -> Matrix) -> Vec<Vec<f32>> {
        let all = [(1, 2, 5, 3), (40, 5, 24, 20), (130, 9, 40, 33), (3, 64, 32, 16)];
        let mut outputs = Vec::new();
        for (tokens, experts, hidden, width) in all {
            let sizes = Sizes { experts, hidden, width };
            let layer = layer(&sizes, &pack);
            let x = buffer(&numbers(7, tokens * hidden), tokens, hidden);
            let out = run(ctx_with_threads(isa, 3), &layer, &x);
            let largest = out.data.iter().fold(0.0f32, |max, y| max.max(y.abs()));
            for (i, row) in out.rows().enumerate() {
                let want = reference(&layer, &sizes, x.row(i));
                for (got, want) in row.iter().zip(want) {
                    let error = (f64::from(*got) - want).abs() / f64::from(largest);
                    assert!(
                        error <= tolerance,
                        "{name} {isa:?} {tokens} x {experts} row {i}: {got} not {want}"
                    );
                }
                let alone = run(ctx_with_threads(isa, 1), &layer, &buffer(x.row(i), 1, hidden));
                assert_eq!(alone.data, row, "{name} {isa:?} {tokens} x {experts}: row {i} alone");
            }
            outputs.push(out.data);
        }
        outputs
    }

    #[test]
    fn each_row_has_the_sum_of_its_experts_and_the_same_bits_alone_and_on_all_sets() {
        let mut first = None;
        for isa in Isa::available() {
            let found = check("f32", 1e-5, isa, |parts, _| {
                Matrix::pack(parts, Precision::F32).unwrap()
            });
            assert_eq!(*first.get_or_insert(found.clone()), found, "{isa:?}");
        }
    }

    #[test]
    fn int8_rows_have_the_same_bits_alone_and_on_all_sets() {
        let mut first = None;
        for isa in Isa::available() {
            let found = check("int8", 0.06, isa, |parts, is_gated| {
                if is_gated {
                    Matrix::pack_gated(parts).unwrap()
                } else {
                    Matrix::pack(parts, Precision::Int8).unwrap()
                }
            });
            assert_eq!(*first.get_or_insert(found.clone()), found, "{isa:?}");
        }
    }

    #[test]
    fn bf16_pairs_are_close_and_rows_have_the_same_bits_alone() {
        for isa in Isa::available()
            .into_iter()
            .filter(|isa| super::super::bf16::is_available(*isa))
        {
            check("bf16", 0.03, isa, |parts, _| Matrix::pack_bf16_pairs(parts).unwrap());
        }
    }

    /// The matrices of one product may be stored in different formats.
    #[test]
    fn experts_of_several_formats_are_one_product() {
        let packed = Cell::new(0);
        let pack = |parts: &[Tensor<'_>], _| {
            packed.set(packed.get() + 1);
            let precisions = [Precision::F32, Precision::Bf16];
            Matrix::pack(parts, precisions[packed.get() % 2]).unwrap()
        };
        check("mixed", 0.02, Isa::detect(), pack);
    }
}
