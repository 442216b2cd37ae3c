//! Routed experts: a router chooses each token's experts, the rows are sorted by expert, and all
//! experts' MLPs are two grouped products.
//!
//! The host never learns what was chosen. It knows the number of rows, since each token has as many
//! experts, and launches as many tiles as there may be.
//!
//! See docs/decisions/102-a-gpu-sorts-experts-rows-by-itself.md.

use std::sync::Arc;

use super::coded_plan::expert_tile_rows;
use super::driver::{Argument, Context, Memory};
use super::expert_plan::{self, ExpertShape};
use super::memory::{Buffer, Workspace, address, ensure_capacity};
use super::plan::{KernelFormat, Tile};
use super::{Cuda, Matrix, Vector};
use crate::device::{Activation, DeviceError, ExpertGroups, ExpertInput, ExpertWeights, Linear, Score};

/// Bytes of a `RowTile` in `kernels/common/experts.cuh`.
const ROW_TILE_BYTES: usize = 12;

/// Scratch memory of [`Cuda::run_experts`].
pub(super) struct ExpertsScratch {
    router_logits: Option<Memory>,
    routes: Option<Memory>,
    /// Sorted rows times their weights, where these are factors of what experts read.
    scaled: Buffer,
    gated: Buffer,
    /// Outputs of the experts, `[sorted rows][hidden]`, and of the shared one.
    outputs: Buffer,
    shared: Buffer,
}

impl ExpertsScratch {
    pub(super) fn new() -> ExpertsScratch {
        ExpertsScratch {
            router_logits: None,
            routes: None,
            scaled: Buffer::new(),
            gated: Buffer::new(),
            outputs: Buffer::new(),
            shared: Buffer::new(),
        }
    }
}

/// Addresses of the arrays of kernels `choose_experts` and `sort_rows`.
pub(super) struct Routes {
    pub shape: ExpertShape,
    chosen: Argument,
    weights: Argument,
    tokens: Argument,
    rows: Argument,
    pub tiles: Argument,
    pub tile_count: Argument,
}

impl Routes {
    /// All arrays in one allocation.
    fn reserve(context: &Arc<Context>, memory: &mut Option<Memory>, shape: ExpertShape) -> Result<Routes, DeviceError> {
        let (entries, tiles) = (shape.rows * 4, shape.tiles_max() * ROW_TILE_BYTES);
        ensure_capacity(context, memory, 4 * entries + tiles + 4, "routes to experts")?;
        let start = memory.as_ref().map_or(0, Memory::address);
        let at = |offset: usize| Argument::Address(start + offset as u64);
        Ok(Routes {
            shape,
            chosen: at(0),
            weights: at(entries),
            tokens: at(2 * entries),
            rows: at(3 * entries),
            tiles: at(4 * entries),
            tile_count: at(4 * entries + tiles),
        })
    }
}

/// The products of `count` experts with so many sorted rows. Those with codes have tiles of several sizes.
fn shape_of(experts: &ExpertWeights<Matrix, Vector>, count: usize, rows: usize) -> ExpertShape {
    let mut linears = experts.gate_up.iter().chain(&experts.down);
    ExpertShape {
        experts: count,
        rows,
        tile_rows: if linears.all(|linear| linear.weight.codes.is_some()) {
            expert_tile_rows(rows, count)
        } else {
            Tile::MMA_SYNC.rows() as usize
        },
    }
}

impl Cuda {
    /// Implements [`experts`](crate::device::Device::experts).
    pub(super) fn run_experts(
        &self,
        experts: &ExpertWeights<Matrix, Vector>,
        activation: Activation,
        input: &ExpertInput<'_, Buffer>,
        out: &mut Buffer,
        workspace: &mut Workspace,
    ) -> Result<(), DeviceError> {
        let x = input.rows;
        let ([gate_up], [down]) = (&experts.gate_up[..], &experts.down[..]) else {
            return Err(DeviceError::Unsupported("experts that are not stacked".into()));
        };
        let Workspace {
            quantized,
            gate_up: both,
            experts: scratch,
            deterministic,
            ..
        } = workspace;
        let routes = self.route(experts, input.router_rows, scratch)?;
        let width = down.weight.rows / routes.shape.experts;
        out.reshape(&self.context, x.rows, width, KernelFormat::Bf16)?;
        let sorted = Argument::Address(0);
        // What multiplies the rows that experts read is no factor of those that they write.
        let (rows, picked, weights) = if experts.routing.scales_input {
            self.scale_input(x, &routes, &mut scratch.scaled)?;
            (&scratch.scaled, sorted, Argument::Address(0))
        } else {
            (x, routes.tokens, routes.weights)
        };
        let read = self.rows_for(&gate_up.weight, rows, quantized)?;
        self.multiply_grouped(gate_up, &routes, (read, picked), both)?;
        self.activate(activation, both, &mut scratch.gated)?;
        let read = self.rows_for(&down.weight, &scratch.gated, quantized)?;
        self.multiply_grouped(down, &routes, (read, sorted), &mut scratch.outputs)?;
        let (mut shared, mut shared_logits) = (Argument::Address(0), Argument::Address(0));
        if let Some(mlp) = &experts.shared {
            self.linear_into(&mlp.gate_up, x, both, (quantized, *deterministic))?;
            self.activate(activation, both, &mut scratch.gated)?;
            self.linear_into(
                &mlp.down,
                &scratch.gated,
                &mut scratch.shared,
                (quantized, *deterministic),
            )?;
            shared = scratch.shared.data();
            if mlp.is_weighted {
                let logits = scratch.router_logits.as_ref().map_or(0, Memory::address);
                shared_logits = Argument::Address(logits + routes.shape.experts as u64 * 4);
            }
        }
        self.launch(
            &expert_plan::combine_experts(x.rows),
            &[
                scratch.outputs.data(),
                routes.rows,
                weights,
                shared,
                shared_logits,
                out.data(),
                Argument::Int(experts.routing.per_token as i32),
                Argument::Int(width as i32),
                Argument::Int(experts.router.weight.rows as i32),
            ],
        )
    }

    /// Chooses the experts of all rows of `x`, and sorts the rows by expert.
    fn route(
        &self,
        experts: &ExpertWeights<Matrix, Vector>,
        x: &Buffer,
        scratch: &mut ExpertsScratch,
    ) -> Result<Routes, DeviceError> {
        let Linear { weight, bias } = &experts.router;
        let per_token = experts.routing.per_token;
        // A weighted shared expert has the last row of the router.
        let is_weighted = experts.shared.as_ref().is_some_and(|shared| shared.is_weighted);
        let (stride, count) = (weight.rows, weight.rows - usize::from(is_weighted));
        assert!(x.format == KernelFormat::Bf16 && weight.format == KernelFormat::F32);
        assert!(x.width == weight.columns && per_token > 0);
        let shape = shape_of(experts, count, x.rows * per_token);
        let routes = Routes::reserve(&self.context, &mut scratch.routes, shape)?;
        let logits = &mut scratch.router_logits;
        ensure_capacity(&self.context, logits, x.rows * stride * 4, "a router's logits")?;
        let logits = address(logits);
        self.launch(
            &expert_plan::router(x.rows, weight.rows),
            &[
                x.data(),
                Argument::Address(weight.data.address()),
                Argument::Address(bias.as_ref().map_or(0, |bias| bias.0.address())),
                logits,
                Argument::Int(x.rows as i32),
                Argument::Int(stride as i32),
                Argument::Int(weight.columns as i32),
            ],
        )?;
        self.choose_experts(experts, &routes, (logits, x.rows), (count, stride))?;
        self.launch(
            &shape.sort_rows(),
            &[
                routes.chosen,
                routes.tokens,
                routes.rows,
                routes.tiles,
                routes.tile_count,
                Argument::Int(shape.rows as i32),
                Argument::Int(per_token as i32),
                Argument::Int(shape.tile_rows as i32),
            ],
        )?;
        Ok(routes)
    }

    /// Chooses the experts of so many rows of logits. A row has `stride` logits, of which the first `count` are those of the experts.
    fn choose_experts(
        &self,
        experts: &ExpertWeights<Matrix, Vector>,
        routes: &Routes,
        (logits, rows): (Argument, usize),
        (count, stride): (usize, usize),
    ) -> Result<(), DeviceError> {
        let routing = experts.routing;
        let groups = routing.groups.unwrap_or(ExpertGroups {
            count: 1,
            chosen: 1,
            best: 1,
        });
        // A row's experts are those of its groups.
        assert!(groups.chosen <= groups.count && count.is_multiple_of(groups.count));
        let (group, usable) = (count / groups.count, count / groups.count * groups.chosen);
        assert!((1..=group).contains(&groups.best) && (1..=usable).contains(&routing.per_token));
        let correction = experts.correction.as_ref();
        let is_sigmoid = match routing.score {
            Score::Softmax => false,
            Score::Sigmoid => true,
        };
        self.launch(
            &expert_plan::choose_experts(rows, groups.count),
            &[
                logits,
                Argument::Address(correction.map_or(0, |correction| correction.0.address())),
                routes.chosen,
                routes.weights,
                Argument::Int(rows as i32),
                Argument::Int(count as i32),
                Argument::Int(stride as i32),
                Argument::Int(routing.per_token as i32),
                Argument::Int(is_sigmoid.into()),
                Argument::Int(routing.renormalized.into()),
                Argument::Float(routing.scale),
                Argument::Address(experts.scales.as_ref().map_or(0, |scales| scales.0.address())),
                Argument::Int(groups.count as i32),
                Argument::Int(groups.chosen as i32),
                Argument::Int(groups.best as i32),
            ],
        )
    }

    /// Writes what each expert reads: its tokens' rows of `x`, times its weights, as sorted rows.
    fn scale_input(&self, x: &Buffer, routes: &Routes, out: &mut Buffer) -> Result<(), DeviceError> {
        assert!(x.format == KernelFormat::Bf16 && x.width.is_multiple_of(8));
        out.reshape(&self.context, routes.shape.rows, x.width, KernelFormat::Bf16)?;
        let per_token = routes.shape.rows / x.rows.max(1);
        self.launch(
            &expert_plan::scale_rows(routes.shape.rows),
            &[
                x.data(),
                routes.rows,
                routes.weights,
                out.data(),
                Argument::Int(per_token as i32),
                Argument::Int(x.width as i32),
            ],
        )
    }

    /// Multiplies each sorted row with its expert's matrix. `picked`: the address of each sorted
    /// row's row of `x`, or null if `x` has sorted rows.
    fn multiply_grouped(
        &self,
        linear: &Linear<Matrix, Vector>,
        routes: &Routes,
        (x, picked): (&Buffer, Argument),
        out: &mut Buffer,
    ) -> Result<(), DeviceError> {
        let weight = &linear.weight;
        if let Some(codes) = &weight.codes {
            return self.multiply_grouped_codes((linear, codes), routes, (x, picked), out);
        }
        let (shape, format) = (routes.shape, weight.format);
        let columns = weight.rows / shape.experts;
        assert!(x.format == format && x.width == weight.columns && weight.rows.is_multiple_of(shape.experts));
        // Another matrix has rows as wide as these columns, or as half of them.
        assert!(columns.is_multiple_of(16));
        out.reshape(&self.context, shape.rows, columns, KernelFormat::Bf16)?;
        self.launch(
            &shape.grouped_linear(format, columns),
            &[
                x.data(),
                Argument::Address(weight.data.address()),
                x.scales(),
                address(&weight.scales),
                Argument::Address(linear.bias.as_ref().map_or(0, |bias| bias.0.address())),
                out.data(),
                routes.tiles,
                routes.tile_count,
                picked,
                Argument::Int(columns as i32),
                Argument::Int((weight.columns * format.bytes()) as i32),
            ],
        )
    }
}
