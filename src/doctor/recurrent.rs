//! Checks recurrent layers, and gates of attention.

use super::inputs::{TestTensor, numbers};
use super::operations::{step_without_attention, to_device_error};
use super::tolerance::Tolerance;
use super::{Comparison, Extent, Finding, compare};
use crate::device::batch::{BlockCopy, StepBatch};
use crate::device::{Device, DeviceError, Linear, RecurrentKind, RecurrentShape, RecurrentWeights};

const EPS: f32 = 1e-5;
/// Tokens of two sequences.
const TOKENS: [u32; 2] = [37, 20];

fn shapes(extent: Extent) -> Vec<RecurrentShape> {
    let shape =
        |kind, [key_heads, value_heads]: [usize; 2], [key_dim, value_dim]: [usize; 2], conv_width| RecurrentShape {
            kind,
            key_heads,
            value_heads,
            key_dim,
            value_dim,
            conv_width,
        };
    let (delta, mamba) = (RecurrentKind::DeltaNet, RecurrentKind::Mamba2);
    let mut shapes = vec![
        shape(delta, [2, 4], [24, 16], 4),
        shape(mamba, [2, 4], [10, 32], 3),
        // Heads of published models.
        shape(delta, [1, 2], [128, 128], 4),
        shape(mamba, [1, 2], [128, 64], 4),
    ];
    if extent == Extent::Full {
        // Qwen3-Next 80B and Granite 4.0 H Small.
        shapes.push(shape(delta, [16, 32], [128, 128], 4));
        shapes.push(shape(mamba, [1, 128], [128, 64], 4));
    }
    shapes
}

/// A layer on a device, whose rows are given, with two slots of states and a further one.
struct Prepared<D: Device> {
    weights: RecurrentWeights<D::Matrix, D::Vector>,
    pool: D::StatePool,
    step: D::Step,
    workspace: D::Workspace,
    rows: D::Buffer,
    out: D::Buffer,
}

impl<D: Device> Prepared<D> {
    fn new(device: &D, shape: RecurrentShape) -> Result<Prepared<D>, DeviceError> {
        let vector = |seed: u64, count: usize, scale: f32| {
            to_device_error(device.f32_vector(TestTensor::new(seed, 1, count, scale).tensor()))
        };
        let is_mamba = shape.kind == RecurrentKind::Mamba2;
        let optional = |seed: u64, count: usize| is_mamba.then(|| vector(seed, count, 0.5)).transpose();
        let norm = if is_mamba { shape.value_width() } else { shape.value_dim };
        Ok(Prepared {
            weights: RecurrentWeights {
                shape,
                // Not used: rows are given.
                input: Linear {
                    weight: to_device_error(device.matrix(&[TestTensor::new(30, 16, 16, 1.0).tensor()]))?,
                    bias: None,
                },
                conv: vector(31, shape.conv_channels() * shape.conv_width, 1.0)?,
                conv_bias: optional(32, shape.conv_channels())?,
                decay: vector(33, shape.value_heads, 2.0)?,
                decay_bias: vector(34, shape.value_heads, 1.0)?,
                skip: optional(35, shape.value_heads)?,
                norm: vector(36, norm, 2.0)?,
                norm_eps: EPS,
            },
            pool: device.state_pool(shape, 3)?,
            step: step_without_attention(device)?,
            workspace: device.workspace(),
            rows: device.buffer(),
            out: device.buffer(),
        })
    }

    /// Runs a step of sequences, each with its slot, its number of tokens and of tokens before.
    fn run(
        &mut self,
        device: &D,
        rows: &[f32],
        sequences: &[(u32, u32, u32)],
        state_copies: Vec<BlockCopy>,
    ) -> Result<Vec<f32>, DeviceError> {
        let mut batch = StepBatch {
            state_copies,
            ..StepBatch::default()
        };
        for &(slot, tokens, before) in sequences {
            let blocks = 0..(before + tokens).div_ceil(device.block_tokens());
            batch.push((0..tokens).map(|_| 0), before + tokens, blocks);
            batch.state_slots.push(slot);
        }
        device.upload(&batch, &mut self.step, &mut self.workspace)?;
        device.write(rows, self.weights.shape.input_width(), &mut self.rows)?;
        device.copy_states(&self.step, &mut self.pool)?;
        device.recurrent(&self.weights, &self.rows, &self.step, &mut self.pool, &mut self.out)?;
        device.read(&self.out)
    }
}

pub(super) fn check_recurrent<D: Device>(
    comparison: &Comparison<'_, D>,
    report: &mut dyn FnMut(Finding),
) -> Result<(), DeviceError> {
    for shape in shapes(comparison.extent) {
        let (width, out_width) = (shape.input_width(), shape.value_width());
        let [first, second] = TOKENS.map(|tokens| tokens as usize);
        let rows: Vec<f32> = numbers(37, (first + second) * width).iter().map(|x| x * 4.0).collect();
        let both = [(2, TOKENS[0], 0), (0, TOKENS[1], 0)];
        let want = Prepared::new(&comparison.reference, shape)?.run(&comparison.reference, &rows, &both, vec![])?;
        let mut prepared = Prepared::new(comparison.device, shape)?;
        let whole = prepared.run(comparison.device, &rows, &both, vec![])?;
        let (operation, cut_operation) = match shape.kind {
            RecurrentKind::DeltaNet => ("delta network", "delta network, cut"),
            RecurrentKind::Mamba2 => ("mamba-2", "mamba-2, cut"),
        };
        let sizes = format!("{} of {} x {}", shape.value_heads, shape.key_dim, shape.value_dim);
        let name = (operation, "bf16", sizes.clone());
        let mut finding = compare(name, Tolerance::recurrent(shape.kind), out_width, &want, &whole);
        if comparison.extent == Extent::Full {
            let device = comparison.device;
            finding.seconds = comparison.time(device, || {
                let Prepared {
                    weights,
                    pool,
                    step,
                    rows,
                    out,
                    ..
                } = &mut prepared;
                device.recurrent(weights, rows, step, pool, out)
            })?;
            finding.bytes =
                (2 * TOKENS.len() * shape.state_bytes() + 2 * (first + second) * (width + out_width)) as f64;
            // Decay, two products with the state, and what is written to it.
            finding.operations = 7.0 * ((first + second) * out_width * shape.key_dim) as f64;
        }
        report(finding);
        // The first sequence in steps, from another slot after the second one; and what it left is read from a copy.
        let mut cut = prepared.run(comparison.device, &rows[..18 * width], &[(1, 18, 0)], vec![])?;
        cut.extend(prepared.run(comparison.device, &rows[18 * width..19 * width], &[(1, 1, 18)], vec![])?);
        let copies = vec![BlockCopy { from: 1, to: 0 }];
        cut.extend(prepared.run(
            comparison.device,
            &rows[19 * width..first * width],
            &[(0, 18, 19)],
            copies,
        )?);
        cut.extend(prepared.run(comparison.device, &rows[first * width..], &[(1, TOKENS[1], 0)], vec![])?);
        let name = (cut_operation, "bf16", sizes);
        report(compare(name, Tolerance::exact(), out_width, &whole, &cut));
    }
    check_gate(comparison, report)
}

fn run_gate<D: Device>(device: &D, gates: &[f32], values: &[f32], width: usize) -> Result<Vec<f32>, DeviceError> {
    let (mut gate, mut out) = (device.buffer(), device.buffer());
    device.write(gates, width, &mut gate)?;
    device.write(values, width, &mut out)?;
    device.gate(&gate, &mut out)?;
    device.read(&out)
}

fn check_gate<D: Device>(comparison: &Comparison<'_, D>, report: &mut dyn FnMut(Finding)) -> Result<(), DeviceError> {
    for (rows, width) in [(1, 16), (5, 4096)] {
        let gates: Vec<f32> = numbers(38, rows * width).iter().map(|x| x * 8.0).collect();
        let values = numbers(39, rows * width);
        let want = run_gate(&comparison.reference, &gates, &values, width)?;
        let got = run_gate(comparison.device, &gates, &values, width)?;
        let name = ("gates of attention", "bf16", format!("{rows} x {width}"));
        report(compare(name, Tolerance::gate(), width, &want, &got));
    }
    Ok(())
}
