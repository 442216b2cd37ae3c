//! Routed experts: each token's row goes through the MLPs that a router chooses for it.
//!
//! Rows are sorted by expert, so that the MLPs of many experts are two grouped products, and an
//! expert's weights are read once per step. The router computes in F32 at every precision, because
//! a rounded logit may choose another expert. A token's results are added in the order of its
//! experts' numbers, whatever else is in the batch.
//!
//! A large step has several times as many sorted rows as tokens. So experts run in pieces, in the order
//! of their numbers, and what a piece's experts write is added up before the next piece overwrites it.
//!
//! See docs/decisions/097-experts-are-segments-of-grouped-products.md and 109-experts-run-in-pieces.md.

use std::ops::Range;

use super::gemm::linear::{PackedRows, Rows, Segment, gated_panels, grouped_linear};
use super::gemm::matrix::{Matrix, Panels, Vector};
use super::isa::multiversion;
use super::math::{exp, round_bf16};
use super::{Buffer, ExecContext, gated};
use crate::device::{Activation, ExpertGroups, ExpertInput, ExpertWeights, Linear, Routing, Score};

/// Maximum sorted rows of a piece, unless one expert has more. Threads are busy for long with so many,
/// and what is written of them stays in a processor's cache until it is added up.
const PIECE_ROWS: usize = 1024;

/// Scratch memory of [`experts`], reused from step to step.
#[derive(Default)]
pub(super) struct Scratch {
    router_logits: Buffer,
    routes: Routes,
    /// `[rows][gate][up]` of a piece, for all formats except INT8.
    gate_up: Buffer,
    gated: Buffer,
    /// Outputs of a piece's experts, or of the shared expert.
    down: Buffer,
    /// A piece's rows times their weights, where these are factors of what experts read.
    scaled: Buffer,
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
    /// The weight of each token's shared expert.
    shared_weights: Vec<f32>,
    /// The sorted rows: the token of each.
    tokens: Vec<u32>,
    /// For each entry of `experts`, its sorted row.
    rows: Vec<u32>,
    /// Experts that have rows, ascending, and their sorted rows.
    segments: Vec<(usize, Range<usize>)>,
}

/// Consecutive experts, and their sorted rows.
#[derive(Debug, PartialEq)]
struct Piece {
    /// Their place in [`Routes::segments`].
    segments: Range<usize>,
    rows: Range<usize>,
}

impl Routes {
    /// Drops all experts of all tokens.
    fn clear(&mut self) {
        self.experts.clear();
        self.weights.clear();
        self.shared_weights.clear();
    }

    /// Chooses the experts of the next tokens by the router's logits, `[tokens][experts]`. If shared
    /// experts are weighted, a row has the logit of their weight, too.
    fn choose(&mut self, ctx: ExecContext<'_>, router: Router<'_>, logits: &Buffer) {
        let per_token = router.routing.per_token;
        self.shared_weights
            .extend(logits.rows().map(|row| match row.get(router.experts) {
                Some(logit) => sigmoid(*logit),
                None => 1.0,
            }));
        let first = self.experts.len();
        self.experts.resize(first + logits.rows * per_token, 0);
        self.weights.resize(first + logits.rows * per_token, 0.0);
        let elements = logits.data.len();
        let tokens = logits.rows.div_ceil(ctx.threads.parts(elements)).max(1);
        let experts = self.experts[first..].chunks_mut(tokens * per_token);
        let weights = self.weights[first..].chunks_mut(tokens * per_token);
        let mut parts: Vec<_> = experts.zip(weights).enumerate().collect();
        ctx.threads.parallel_for_each(elements, &mut parts, |_, parts| {
            let mut ranked = Vec::new();
            for (part, (experts, weights)) in parts {
                let rows = experts.chunks_exact_mut(per_token);
                for (i, (experts, weights)) in rows.zip(weights.chunks_exact_mut(per_token)).enumerate() {
                    let logits = &logits.row(*part * tokens + i)[..router.experts];
                    choose_experts_on(ctx.isa, router, logits, &mut ranked, experts, weights);
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

    /// Divides the experts into pieces of at most `rows_max` rows, or of one expert.
    fn pieces(&self, rows_max: usize) -> Vec<Piece> {
        let mut pieces: Vec<Piece> = Vec::new();
        for (i, (_, rows)) in self.segments.iter().enumerate() {
            match pieces.last_mut() {
                Some(piece) if rows.end - piece.rows.start <= rows_max => {
                    (piece.segments.end, piece.rows.end) = (i + 1, rows.end);
                }
                _ => pieces.push(Piece {
                    segments: i..i + 1,
                    rows: rows.clone(),
                }),
            }
        }
        pieces
    }

    /// A token's rows of a piece, in the order of its experts' numbers: the index of each in
    /// [`rows`](Self::rows) and [`weights`](Self::weights), and its place in the piece.
    fn rows_of(&self, piece: &Piece, token: usize, per_token: usize) -> impl Iterator<Item = (usize, usize)> {
        let Range { start, end } = piece.rows;
        let entries = token * per_token..(token + 1) * per_token;
        let rows = entries.map(|entry| (entry, self.rows[entry] as usize));
        rows.filter(move |(_, row)| (start..end).contains(row))
            .map(move |(entry, row)| (entry, row - start))
    }

    /// Writes a piece's rows of `x`, each times its weight, to `out`.
    fn scale(&self, op: &ExpertsOp<'_>, piece: &Piece, x: &Buffer, out: &mut Buffer) {
        out.reshape(piece.rows.len(), x.width);
        for (token, x) in x.rows().enumerate() {
            for (entry, row) in self.rows_of(piece, token, op.weights.routing.per_token) {
                for (y, x) in out.row_mut(row).iter_mut().zip(x) {
                    *y = x * self.weights[entry];
                    if op.round_to_bf16 {
                        *y = round_bf16(*y);
                    }
                }
            }
        }
    }

    /// A piece's segments of a product with one matrix per expert.
    fn segments<'a>(&self, piece: &Piece, linears: &'a [Linear<Matrix, Vector>]) -> Vec<Segment<'a>> {
        let segment = |(expert, rows): &(usize, Range<usize>)| {
            let linear = &linears[*expert];
            Segment {
                rows: rows.start - piece.rows.start..rows.end - piece.rows.start,
                matrix: &linear.weight,
                bias: linear.bias.as_ref().map(|bias| &bias.0[..]),
                added: None,
            }
        };
        self.segments[piece.segments.clone()].iter().map(segment).collect()
    }
}

/// How a layer's router chooses among its experts.
#[derive(Clone, Copy)]
struct Router<'a> {
    routing: Routing,
    experts: usize,
    correction: Option<&'a [f32]>,
    /// A factor of each expert's weight.
    scales: Option<&'a [f32]>,
}

fn sigmoid(logit: f32) -> f32 {
    1.0 / (1.0 + exp(-logit))
}

#[inline(always)]
fn choose_experts(
    router: Router<'_>,
    logits: &[f32],
    ranked: &mut Vec<(u32, f32)>,
    experts: &mut [u32],
    weights: &mut [f32],
) {
    let routing = router.routing;
    let max = logits.iter().copied().fold(f32::NEG_INFINITY, f32::max);
    // Of a softmax, the numerator.
    let score = |logit: f32| match routing.score {
        Score::Softmax => exp(logit - max),
        Score::Sigmoid => sigmoid(logit),
    };
    let all: f32 = logits.iter().map(|logit| score(*logit)).sum();
    let denominator = match routing.score {
        Score::Softmax => all,
        Score::Sigmoid => 1.0,
    };
    ranked.clear();
    match (router.correction, routing.groups) {
        // Scores are in the order of their logits.
        (None, None) => ranked.extend((0..).zip(logits.iter().copied())),
        (None, Some(_)) => ranked.extend((0..).zip(logits.iter().map(|logit| score(*logit) / denominator))),
        (Some(correction), _) => {
            let corrected = logits.iter().zip(correction);
            ranked.extend((0..).zip(corrected.map(|(logit, c)| score(*logit) / denominator + c)));
        }
    }
    if let Some(groups) = routing.groups {
        keep_groups(groups, ranked);
    }
    ranked.select_nth_unstable_by(experts.len() - 1, |(i, a), (j, b)| b.total_cmp(a).then(i.cmp(j)));
    ranked.truncate(experts.len());
    ranked.sort_unstable_by_key(|(expert, _)| *expert);
    for ((expert, _), (chosen, weight)) in ranked.iter().zip(experts.iter_mut().zip(weights.iter_mut())) {
        (*chosen, *weight) = (*expert, score(logits[*expert as usize]));
    }
    let sum: f32 = if all.is_nan() {
        all
    } else if routing.renormalized {
        // As the reference adds to a sum that may be nearly zero.
        weights.iter().sum::<f32>() + 1e-20
    } else {
        denominator
    };
    weights
        .iter_mut()
        .for_each(|weight| *weight = *weight / sum * routing.scale);
    if let Some(scales) = router.scales {
        for (expert, weight) in experts.iter().zip(weights.iter_mut()) {
            *weight *= scales[*expert as usize];
        }
    }
}

/// Keeps the experts of the groups with the largest scores, among equal ones of those that come first.
/// `ranked` has all experts in order, with their scores.
fn keep_groups(groups: ExpertGroups, ranked: &mut Vec<(u32, f32)>) {
    let size = ranked.len() / groups.count;
    let mut scores: Vec<f32> = ranked.iter().map(|(_, score)| *score).collect();
    let mut order: Vec<(usize, f32)> = scores
        .chunks_exact_mut(size)
        .map(|group| {
            group.sort_unstable_by(|a, b| b.total_cmp(a));
            group[..groups.best.min(size)].iter().sum()
        })
        .enumerate()
        .collect();
    order.sort_unstable_by(|(i, x), (j, y)| y.total_cmp(x).then(i.cmp(j)));
    order.truncate(groups.chosen);
    ranked.retain(|(expert, _)| order.iter().any(|(group, _)| *group == *expert as usize / size));
}

multiversion! {
    /// Chooses the experts with the largest scores, among equal ones those with the lowest numbers,
    /// and sorts them by number. Every weight is NaN if a logit is NaN. `ranked` is scratch.
    fn choose_experts_on(
        router: Router<'_>,
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

/// MLPs, each with its rows.
struct Mlps<'a> {
    gate_up: Vec<Segment<'a>>,
    down: Vec<Segment<'a>>,
}

impl<'a> Mlps<'a> {
    /// One MLP for `rows` rows.
    fn one(gate_up: &'a Linear<Matrix, Vector>, down: &'a Linear<Matrix, Vector>, rows: usize) -> Mlps<'a> {
        let segment = |linear: &'a Linear<Matrix, Vector>| Segment {
            rows: 0..rows,
            matrix: &linear.weight,
            bias: linear.bias.as_ref().map(|bias| &bias.0[..]),
            added: None,
        };
        Mlps {
            gate_up: vec![segment(gate_up)],
            down: vec![segment(down)],
        }
    }
}

/// Runs MLPs of one shape, of which there is at least one.
fn mlps(
    op: &ExpertsOp<'_>,
    mlps: &Mlps<'_>,
    rows: Rows<'_>,
    (gate_up, gated): (&mut Buffer, &mut Buffer),
    out: &mut Buffer,
    packed: &mut PackedRows,
) {
    let (ctx, activation, round) = (op.ctx, op.activation, op.round_to_bf16);
    let (first, down) = (mlps.gate_up[0].matrix, mlps.down[0].matrix);
    if let (true, Panels::Int8(_) | Panels::Int4(_)) = (activation.has_gate(), &first.panels) {
        gated_panels(ctx, &mlps.gate_up, (first.rows / 2, activation), rows, gated, packed);
    } else {
        grouped_linear(ctx, &mlps.gate_up, first.rows, round, rows, gate_up, packed);
        gated::gated(ctx, activation, round, gate_up, gated);
    }
    let rows = Rows { x: gated, picked: None };
    grouped_linear(ctx, &mlps.down, down.rows, round, rows, out, packed);
}

/// Checks that weights and input fit each other.
fn check(op: &ExpertsOp<'_>, router: Router<'_>, input: &ExpertInput<'_, Buffer>) {
    let (matrix, x, per_token) = (&op.weights.router.weight, input.rows, router.routing.per_token);
    let is_weighted = op.weights.shared.as_ref().is_some_and(|shared| shared.is_weighted);
    let usable = match router.routing.groups {
        None => router.experts,
        Some(groups) => {
            assert!(groups.chosen <= groups.count && router.experts.is_multiple_of(groups.count));
            router.experts / groups.count * groups.chosen
        }
    };
    assert!((1..=usable).contains(&per_token) && x.quantized().is_none());
    assert!(matrix.rows == router.experts + usize::from(is_weighted));
    assert!(
        router
            .correction
            .is_none_or(|correction| correction.len() == router.experts)
    );
    assert!(router.scales.is_none_or(|scales| scales.len() == router.experts));
    assert!(input.router_rows.rows == x.rows && input.router_rows.quantized().is_none());
}

/// Writes each token's weighted sum of its experts' outputs to `out`.
pub(super) fn experts(
    op: &ExpertsOp<'_>,
    input: &ExpertInput<'_, Buffer>,
    out: &mut Buffer,
    scratch: &mut Scratch,
    packed: &mut PackedRows,
) {
    let (ctx, weights, x) = (op.ctx, op.weights, input.rows);
    let Scratch {
        router_logits,
        routes,
        gate_up,
        gated,
        down,
        scaled,
    } = scratch;
    let router = Router {
        routing: weights.routing,
        experts: weights.gate_up.len(),
        correction: weights.correction.as_ref().map(|correction| &correction.0[..]),
        scales: weights.scales.as_ref().map(|scales| &scales.0[..]),
    };
    let per_token = router.routing.per_token;
    check(op, router, input);
    out.reshape(x.rows, weights.down[0].weight.rows);
    out.data.fill(0.0);
    if x.rows == 0 {
        return;
    }
    routes.clear();
    let tokens: Vec<u32> = (0..x.rows as u32).collect();
    for tokens in tokens.chunks(PIECE_ROWS) {
        route(op, input.router_rows, tokens, router_logits, packed);
        routes.choose(ctx, router, router_logits);
    }
    routes.sort(router.experts, per_token);
    for piece in routes.pieces(PIECE_ROWS) {
        let rows = if router.routing.scales_input {
            routes.scale(op, &piece, x, scaled);
            Rows {
                x: scaled,
                picked: None,
            }
        } else {
            Rows {
                x,
                picked: Some(&routes.tokens[piece.rows.clone()]),
            }
        };
        let routed = Mlps {
            gate_up: routes.segments(&piece, &weights.gate_up),
            down: routes.segments(&piece, &weights.down),
        };
        mlps(op, &routed, rows, (gate_up, gated), down, packed);
        add_piece(op, (routes, &piece), down, out);
    }
    if let Some(weights) = &weights.shared {
        let one = Mlps::one(&weights.gate_up, &weights.down, x.rows);
        let rows = Rows { x, picked: None };
        mlps(op, &one, rows, (gate_up, gated), down, packed);
        for_tokens(ctx, x.rows, out, |token, sum| {
            add_scaled_on(ctx.isa, down.row(token), routes.shared_weights[token], sum);
        });
    }
    if op.round_to_bf16 {
        for_tokens(ctx, x.rows, out, |_, sum| {
            sum.iter_mut().for_each(|y| *y = round_bf16(*y))
        });
    }
}

/// Writes the router's logits of these rows of `x`. They are not rounded.
fn route(op: &ExpertsOp<'_>, x: &Buffer, picked: &[u32], logits: &mut Buffer, packed: &mut PackedRows) {
    let Linear { weight, bias } = &op.weights.router;
    let segment = Segment {
        rows: 0..picked.len(),
        matrix: weight,
        bias: bias.as_ref().map(|bias| &bias.0[..]),
        added: None,
    };
    let rows = Rows {
        x,
        picked: Some(picked),
    };
    grouped_linear(op.ctx, &[segment], weight.rows, false, rows, logits, packed);
}

/// Adds each token's rows of `down`, which a piece's experts wrote, to the token's sum, multiplied by their
/// weights. Those of rows that were read times their weights are 1.
fn add_piece(op: &ExpertsOp<'_>, (routes, piece): (&Routes, &Piece), down: &Buffer, out: &mut Buffer) {
    let Routing {
        per_token,
        scales_input,
        ..
    } = op.weights.routing;
    for_tokens(op.ctx, piece.rows.len(), out, |token, sum| {
        for (entry, row) in routes.rows_of(piece, token, per_token) {
            let weight = if scales_input { 1.0 } else { routes.weights[entry] };
            add_scaled_on(op.ctx.isa, down.row(row), weight, sum);
        }
    });
}

/// Calls `change` for each token's row of `out`. `rows`: how many rows it changes or adds.
fn for_tokens(ctx: ExecContext<'_>, rows: usize, out: &mut Buffer, change: impl Fn(usize, &mut [f32]) + Sync) {
    let width = out.width;
    let elements = rows * width;
    let mut parts: Vec<_> = out.parts_mut(ctx.threads.parts(elements)).collect();
    ctx.threads.parallel_for_each(elements, &mut parts, |_, parts| {
        for (first, part) in parts {
            for (i, row) in part.chunks_exact_mut(width).enumerate() {
                change(*first + i, row);
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
    use crate::device::{Dtype, Precision, SharedExpert, Tensor};

    const ROUTING: Routing = Routing {
        per_token: 2,
        score: Score::Softmax,
        groups: None,
        renormalized: false,
        scale: 1.0,
        scales_input: false,
    };

    fn choice(routing: Routing, logits: &[f32]) -> (Vec<u32>, Vec<f32>) {
        corrected_choice(routing, None, logits)
    }

    fn corrected_choice(routing: Routing, correction: Option<&[f32]>, logits: &[f32]) -> (Vec<u32>, Vec<f32>) {
        let router = Router {
            routing,
            experts: logits.len(),
            correction,
            scales: None,
        };
        let mut first = None;
        for isa in Isa::available() {
            let mut routes = Routes::default();
            routes.choose(ctx(isa), router, &buffer(logits, 1, logits.len()));
            let found = (routes.experts, routes.weights);
            assert_eq!(
                format!("{found:?}"),
                *first.get_or_insert(format!("{found:?}")),
                "{isa:?}"
            );
        }
        let (mut experts, mut weights) = (vec![0; routing.per_token], vec![0.0; routing.per_token]);
        choose_experts(router, logits, &mut Vec::new(), &mut experts, &mut weights);
        (experts, weights)
    }

    #[test]
    fn weights_are_sigmoids_divided_by_their_sum_and_scaled() {
        let logits = [0.0f32, -3.0, 1.0, 2.0];
        let s = |x: f64| 1.0 / (1.0 + (-x).exp());
        for (renormalized, sum) in [(false, 1.0), (true, s(1.0) + s(2.0))] {
            let routing = Routing {
                score: Score::Sigmoid,
                groups: None,
                renormalized,
                scale: 2.5,
                ..ROUTING
            };
            let (experts, weights) = choice(routing, &logits);
            assert_eq!(experts, [2, 3]);
            for (found, want) in weights.iter().zip([2.5 * s(1.0) / sum, 2.5 * s(2.0) / sum]) {
                assert!((f64::from(*found) - want).abs() < 1e-6, "{found} {want}");
            }
        }
        // Sigmoids that are nearly zero stay so.
        let small = Routing {
            score: Score::Sigmoid,
            groups: None,
            renormalized: true,
            ..ROUTING
        };
        let (_, weights) = choice(small, &[-200.0; 3]);
        assert!(weights.iter().all(|weight| *weight < 1e-15), "{weights:?}");
    }

    #[test]
    fn each_expert_has_a_factor_after_the_division() {
        let router = Router {
            routing: Routing {
                renormalized: true,
                ..ROUTING
            },
            experts: 4,
            correction: None,
            scales: Some(&[9.0, 0.5, 9.0, 3.0]),
        };
        let mut routes = Routes::default();
        routes.choose(ctx(Isa::detect()), router, &buffer(&[0.0, 3.0, 1.0, 2.0], 1, 4));
        let share = 1.0 / (1.0 + (-1.0f32).exp());
        assert_eq!(routes.experts, [1, 3]);
        for (found, want) in routes.weights.iter().zip([0.5 * share, 3.0 * (1.0 - share)]) {
            assert!((found - want).abs() < 1e-6, "{found} {want}");
        }
    }

    #[test]
    fn experts_are_chosen_from_the_best_groups() {
        // Sigmoids 0.5, 0.95, 0.88, 0.82, 0.92, 0.05: by their best experts groups 0 and 2 of three are chosen, by
        // their best two groups 0 and 1.
        let logits = [0.0f32, 3.0, 2.0, 1.5, 2.5, -3.0];
        let of = |count, chosen, best, correction: Option<&[f32]>| {
            let routing = Routing {
                score: Score::Sigmoid,
                groups: Some(ExpertGroups { count, chosen, best }),
                ..ROUTING
            };
            corrected_choice(routing, correction, &logits).0
        };
        assert_eq!(of(3, 1, 1, None), [0, 1]);
        assert_eq!(of(3, 2, 1, None), [1, 4]);
        assert_eq!(of(3, 1, 2, None), [2, 3]);
        assert_eq!(of(3, 2, 2, None), [1, 2]);
        assert_eq!(of(3, 3, 2, None), [1, 4]);
        assert_eq!(of(2, 1, 2, None), [1, 2]);
        // Corrections count in the scores of groups.
        let correction = [0.0, 0.0, 0.0, 0.0, 0.0, 1.0];
        assert_eq!(of(3, 1, 2, Some(&correction)), [4, 5]);
        // Of equal groups the first are chosen. Softmaxes are in the order of their logits.
        let routing = Routing {
            groups: Some(ExpertGroups {
                count: 3,
                chosen: 1,
                best: 1,
            }),
            ..ROUTING
        };
        assert_eq!(choice(routing, &[1.0; 6]).0, [0, 1]);
        assert_eq!(
            choice(routing, &[-200.0, -201.0, -150.0, -190.0, -160.0, -161.0]).0,
            [2, 3]
        );
    }

    #[test]
    fn a_correction_chooses_but_does_not_weigh() {
        let logits = [3.0f32, 0.0, 1.0, 2.0];
        let of = |score, correction: &[f32]| {
            let routing = Routing {
                score,
                renormalized: true,
                ..ROUTING
            };
            corrected_choice(routing, Some(correction), &logits)
        };
        let none = [0.0; 4];
        for score in [Score::Softmax, Score::Sigmoid] {
            let routing = Routing {
                score,
                renormalized: true,
                ..ROUTING
            };
            assert_eq!(of(score, &none), choice(routing, &logits));
        }
        // Of softmaxes, 0.64 and 0.03 are those of experts 0 and 1. Of sigmoids, 0.95 and 0.5.
        let (experts, weights) = of(Score::Softmax, &[-0.7, 0.3, 0.0, 0.0]);
        let e = |x: f32| x.exp();
        assert_eq!(experts, [1, 3]);
        assert!((weights[0] - e(0.0) / (e(0.0) + e(2.0))).abs() < 1e-6);
        assert_eq!(of(Score::Softmax, &[-0.5, 0.0, 0.0, 0.0]).0, [0, 3]);
        assert_eq!(of(Score::Sigmoid, &[-0.3, 0.2, 0.0, 0.0]).0, [2, 3]);
        assert_eq!(of(Score::Sigmoid, &[-0.3, 0.25, 0.0, 0.0]).0, [1, 3]);
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
            for (renormalized, score) in [
                (false, Score::Softmax),
                (true, Score::Softmax),
                (false, Score::Sigmoid),
                (true, Score::Sigmoid),
            ] {
                // An infinite logit has a sigmoid.
                if bad.is_infinite() && score == Score::Sigmoid {
                    continue;
                }
                let routing = Routing {
                    renormalized,
                    score,
                    ..ROUTING
                };
                let (_, weights) = choice(routing, &[1.0, bad, 0.0, 2.0]);
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

    #[test]
    fn pieces_are_whole_experts_in_order() {
        let mut routes = Routes {
            experts: vec![1, 3, 0, 3, 1, 3],
            ..Routes::default()
        };
        routes.sort(5, 2);
        let pieces = |rows_max| -> Vec<_> {
            let pieces = routes.pieces(rows_max).into_iter();
            pieces.map(|piece| (piece.segments, piece.rows)).collect()
        };
        assert_eq!(pieces(6), [(0..3, 0..6)]);
        assert_eq!(pieces(5), [(0..2, 0..3), (2..3, 3..6)]);
        assert_eq!(pieces(3), [(0..2, 0..3), (2..3, 3..6)]);
        // The last expert has more rows than that.
        assert_eq!(pieces(1), [(0..1, 0..1), (1..2, 1..3), (2..3, 3..6)]);
        let second = &routes.pieces(3)[1];
        let rows: Vec<Vec<_>> = (0..3).map(|token| routes.rows_of(second, token, 2).collect()).collect();
        assert_eq!(rows, [[(1, 0)], [(3, 1)], [(5, 2)]]);
    }

    struct Sizes {
        experts: usize,
        hidden: usize,
        width: usize,
        /// Width of the shared expert; 0: there is none.
        shared: usize,
    }

    /// Weights of a layer, as numbers and packed.
    struct Layer {
        router: Vec<f32>,
        gate_up: Vec<Vec<f32>>,
        down: Vec<Vec<f32>>,
        shared: (Vec<f32>, Vec<f32>),
        packed: ExpertWeights<Matrix, Vector>,
    }

    fn layer(sizes: &Sizes, pack: impl Fn(&[Tensor<'_>], bool) -> Matrix) -> Layer {
        let Sizes {
            experts,
            hidden,
            width,
            shared,
        } = *sizes;
        let is_shared = usize::from(shared > 0);
        let router = numbers(1, (experts + is_shared) * hidden);
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
        let both = (
            numbers(5, 2 * shared.max(1) * hidden),
            numbers(6, hidden * shared.max(1)),
        );
        let packed = ExpertWeights {
            routing: Routing {
                renormalized: true,
                ..ROUTING
            },
            correction: None,
            scales: None,
            shared: (shared > 0).then(|| SharedExpert {
                gate_up: linear(pack(&both.0, hidden, true)),
                down: linear(pack(&both.1, shared, false)),
                is_weighted: true,
            }),
            router: {
                let data = bytes_of(&router, Dtype::F32);
                let tensor = Tensor {
                    dtype: Dtype::F32,
                    rows: experts + is_shared,
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
            shared: both,
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
        experts(
            &op,
            &ExpertInput::same(x),
            &mut out,
            &mut Scratch::default(),
            &mut PackedRows::default(),
        );
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
        let of_expert = |&expert: &usize| {
            let weight = logits[expert].exp() / sum;
            (&layer.gate_up[expert], &layer.down[expert], sizes.width, weight)
        };
        let shared = logits.get(sizes.experts).map(|logit| {
            let weight = 1.0 / (1.0 + (-logit).exp());
            (&layer.shared.0, &layer.shared.1, sizes.shared, weight)
        });
        for (gate_up, down, width, weight) in ranked[..2].iter().map(of_expert).chain(shared) {
            let (gate, up) = gate_up.split_at(width * sizes.hidden);
            let gated: Vec<f32> = gate
                .chunks(sizes.hidden)
                .zip(up.chunks(sizes.hidden))
                .map(|(g, u)| {
                    let g = dot(g, x);
                    (g / (1.0 + (-g).exp()) * dot(u, x)) as f32
                })
                .collect();
            for (y, w) in out.iter_mut().zip(down.chunks(width)) {
                *y += weight * dot(w, &gated);
            }
        }
        out
    }

    /// The packings of each kernel, and how far a result may be from the sum in F64, relative to
    /// the largest result.
    fn check(name: &str, tolerance: f64, isa: Isa, pack: impl Fn(&[Tensor<'_>], bool) -> Matrix) -> Vec<Vec<f32>> {
        let all = [
            (1, 2, 5, 3, 0),
            (40, 5, 24, 20, 7),
            (130, 9, 40, 33, 0),
            // Of several pieces.
            (PIECE_ROWS + 3, 5, 16, 3, 4),
            (3, 64, 32, 16, 40),
        ];
        let mut outputs = Vec::new();
        for (tokens, experts, hidden, width, shared) in all {
            let sizes = Sizes {
                experts,
                hidden,
                width,
                shared,
            };
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
            outputs.push(out.data.to_vec());
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
