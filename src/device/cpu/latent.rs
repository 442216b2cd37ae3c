//! Latent attention: the rows that attention reads, and the values that its sums of latents stand for.
//!
//! Both multiply each head's numbers by a matrix of its own. The rows of one head lie together in
//! scratch memory, so that the products of all heads are one grouped product, as those of experts are.
//!
//! See docs/decisions/104-latents-are-key-and-value.md.

use super::gemm::linear::{PackedRows, Rows, Segment, grouped_linear};
use super::gemm::matrix::{Matrix, Vector};
use super::rope::{normalise_heads_on, rotate_heads_on};
use super::step::Step;
use super::{Buffer, ExecContext};
use crate::device::{LatentInput, LatentStore, Linear};

/// Scratch memory of these operations, reused from step to step. Rows are in order of heads, and of
/// tokens within a head.
#[derive(Default)]
pub(super) struct Scratch {
    queries: Buffer,
    products: Buffer,
    /// For each row, its place in the order of tokens, and of heads within a token.
    picked: Vec<u32>,
}

/// For each head its matrix, and its rows.
fn segments(heads: &[Linear<Matrix, Vector>], tokens: usize) -> Vec<Segment<'_>> {
    let heads = heads.iter().enumerate();
    heads
        .map(|(head, linear)| Segment {
            rows: head * tokens..(head + 1) * tokens,
            matrix: &linear.weight,
            bias: None,
            added: None,
        })
        .collect()
}

/// Implements [`latent_store`](crate::device::Device::latent_store), without the storing.
pub(super) fn rows(
    (ctx, round_to_bf16): (ExecContext<'_>, bool),
    op: &LatentStore<'_, Matrix, Vector, Vector>,
    input: &LatentInput<'_, Buffer>,
    step: &Step,
    qkv: &mut Buffer,
    (scratch, packed): (&mut Scratch, &mut PackedRows),
) {
    let LatentInput { queries, latents } = *input;
    let (shape, heads, tokens) = (op.shape, op.place.heads, queries.rows);
    let (count, rank, query_dim) = (heads.heads, shape.rank, shape.query_dim());
    let rotations = &step.rotations[op.rope].token_rotations;
    assert!(heads.kv_heads == 1 && heads.head_dim == shape.kept() && op.heads.len() == count);
    assert!(queries.width == count * query_dim && latents.width == shape.kept() && latents.rows == tokens);
    assert!(op.norm.0.len() == rank && rotations.len() == tokens * shape.rope_dim);
    let Scratch {
        queries: plain,
        products,
        ..
    } = scratch;
    plain.reshape(count * tokens, shape.plain_dim);
    plain.each_row(ctx, |i, out| {
        let (head, token) = (i / tokens, i % tokens);
        out.copy_from_slice(&queries.row(token)[head * query_dim..][..shape.plain_dim]);
    });
    // Attention reads queries in F32 at every precision: these are not rounded a second time.
    let segments = segments(op.heads, tokens);
    let read = Rows { x: plain, picked: None };
    grouped_linear(ctx, &segments, rank, false, read, products, packed);
    qkv.reshape(tokens, op.place.heads.row_width());
    qkv.each_row(ctx, |token, row| {
        let rotation = &rotations[token * shape.rope_dim..][..shape.rope_dim];
        let (own, key) = row.split_at_mut(count * shape.kept());
        for (head, own) in own.chunks_exact_mut(shape.kept()).enumerate() {
            let (product, rotating) = own.split_at_mut(rank);
            product.copy_from_slice(products.row(head * tokens + token));
            let query = &queries.row(token)[head * query_dim..][..query_dim];
            rotating.copy_from_slice(&query[shape.plain_dim..]);
            rotate_heads_on(ctx.isa, rotating, None, rotation, round_to_bf16);
        }
        key.copy_from_slice(latents.row(token));
        let (latent, rotating) = key.split_at_mut(rank);
        normalise_heads_on(ctx.isa, latent, (&op.norm.0, op.eps), round_to_bf16);
        rotate_heads_on(ctx.isa, rotating, None, rotation, round_to_bf16);
    });
}

/// Implements [`latent_values`](crate::device::Device::latent_values).
pub(super) fn values(
    (ctx, round_to_bf16): (ExecContext<'_>, bool),
    heads: &[Linear<Matrix, Vector>],
    latents: &mut Buffer,
    out: &mut Buffer,
    (scratch, packed): (&mut Scratch, &mut PackedRows),
) {
    let (tokens, count, width) = (latents.rows, heads.len(), heads[0].weight.rows);
    let (rows, row_width) = (latents.rows, latents.width);
    assert!(row_width == count * heads[0].weight.columns);
    let Scratch { products, picked, .. } = scratch;
    picked.clear();
    picked.extend((0..count).flat_map(|head| (0..tokens).map(move |token| (token * count + head) as u32)));
    // The same numbers, with a row for each head.
    (latents.rows, latents.width) = (rows * count, row_width / count);
    let read = Rows {
        x: latents,
        picked: Some(picked),
    };
    grouped_linear(
        ctx,
        &segments(heads, tokens),
        width,
        round_to_bf16,
        read,
        products,
        packed,
    );
    (latents.rows, latents.width) = (rows, row_width);
    out.reshape(tokens, count * width);
    out.each_row(ctx, |token, row| {
        for (head, value) in row.chunks_exact_mut(width).enumerate() {
            value.copy_from_slice(products.row(head * tokens + token));
        }
    });
}
