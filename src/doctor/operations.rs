//! Checks row-wise operations (embedding, norms) and linear operations.

use std::fmt::Display;

use super::inputs::{TestTensor, exact_rows, numbers};
use super::tolerance::Tolerance;
use super::{Comparison, Extent, Finding, LibraryResult, compare};
use crate::device::batch::StepBatch;
use crate::device::{
    Activation, AddNorm, Delta, Device, DeviceError, HeadShape, KvSpec, Linear, OutputHead, Placeholders, Precision,
    RopeSpec, TensorError,
};

const EPS: f32 = 1e-5;

/// Converts the error to a device error. The weights of these checks are finite, so only the device
/// can refuse them.
pub(super) fn to_device_error<T>(result: Result<T, TensorError>) -> Result<T, DeviceError> {
    result.map_err(|error| match error {
        TensorError::Device(error) => error,
        TensorError::NotFinite { .. } => DeviceError::Unsupported(error.to_string()),
    })
}

/// A step of one sequence that has no earlier tokens.
fn prefill_batch(tokens: Vec<u32>, logits_at: Vec<u32>, block_tokens: u32) -> StepBatch {
    let length = tokens.len() as u32;
    let mut batch = StepBatch {
        logits_at,
        ..StepBatch::default()
    };
    batch.push(tokens, length, 0..length.div_ceil(block_tokens));
    batch
}

/// A step of any heads: for operations that do not read them.
pub(super) fn step_without_attention<D: Device>(device: &D) -> Result<D::Step, DeviceError> {
    let heads = HeadShape {
        heads: 1,
        kv_heads: 1,
        head_dim: 64,
        value_in_key: None,
    };
    let rope = RopeSpec {
        inverse_frequencies: vec![1.0; 32],
        scale: 1.0,
    };
    device.step(vec![rope], &[(KvSpec::Full, heads)])
}

fn upload_step<D: Device>(
    device: &D,
    (tokens, logits_at): (&[u32], &[u32]),
    workspace: &mut D::Workspace,
) -> Result<D::Step, DeviceError> {
    let mut step = step_without_attention(device)?;
    let batch = prefill_batch(tokens.to_vec(), logits_at.to_vec(), device.block_tokens());
    device.upload(&batch, &mut step, workspace)?;
    Ok(step)
}

/// Row widths: one vector, widths just below and above what one thread block loads at once, and
/// hidden sizes of models.
fn widths(extent: Extent) -> &'static [usize] {
    match extent {
        Extent::Quick => &[16, 1008, 1024, 1040, 4096],
        Extent::Full => &[16, 1008, 1024, 1040, 4096, 5120, 8192, 14336, 28672],
    }
}

fn run_embed<D: Device>(
    device: &D,
    table: &TestTensor,
    how: (f32, Option<&Placeholders>),
    tokens: &[u32],
) -> Result<Vec<f32>, DeviceError> {
    let table = to_device_error(device.embedding_table(table.tensor()))?;
    let (mut out, mut workspace) = (device.buffer(), device.workspace());
    let step = upload_step(device, (tokens, &[]), &mut workspace)?;
    device.embed(&table, how, &step, &mut out, &workspace)?;
    device.read(&out)
}

pub(super) fn check_embed<D: Device>(
    comparison: &Comparison<'_, D>,
    report: &mut dyn FnMut(Finding),
) -> Result<(), DeviceError> {
    for width in [16, 896, 4096] {
        let table = TestTensor::new(1, 131, width, 1.0);
        let tokens = [0, 130, 7, 7, 64];
        let one_rounding = Tolerance::rounded_rows(Precision::Bf16, 1);
        let placeholders = Placeholders {
            ids: [200, 7, 64],
            read_as: 3,
        };
        for (operation, how, tolerance) in [
            ("embed", (1.0, None), Tolerance::exact()),
            ("embed, scaled", (55.5, None), one_rounding),
            ("embed, placeholders", (1.0, Some(&placeholders)), Tolerance::exact()),
        ] {
            let want = run_embed(&comparison.reference, &table, how, &tokens)?;
            let got = run_embed(comparison.device, &table, how, &tokens)?;
            let name = (operation, "bf16", format!("{} x {width}", tokens.len()));
            report(compare(name, tolerance, width, &want, &got));
        }
    }
    Ok(())
}

/// Inputs of a norm.
struct NormInput {
    residual: Vec<f32>,
    delta: Vec<f32>,
    /// Weight of a norm that is applied to the delta before the addition.
    delta_weight: Option<TestTensor>,
    weight: TestTensor,
    /// Factor of the sum.
    scale: f32,
    width: usize,
    /// Rows to normalise. `None` means all rows.
    picked_rows: Option<Vec<u32>>,
}

/// The normalised rows, and the residual stream afterwards (empty with `picked_rows`, where the
/// stream is undefined).
fn run_norm<D: Device>(device: &D, input: &NormInput) -> Result<(Vec<f32>, Vec<f32>), DeviceError> {
    let (mut residual, mut delta, mut out) = (device.buffer(), device.buffer(), device.buffer());
    device.write(&input.residual, input.width, &mut residual)?;
    device.write(&input.delta, input.width, &mut delta)?;
    let weight = to_device_error(device.norm(input.weight.tensor()))?;
    let delta_weight = input
        .delta_weight
        .as_ref()
        .map(|weight| to_device_error(device.norm(weight.tensor())));
    let delta_weight = delta_weight.transpose()?;
    let op = AddNorm {
        delta: Some(Delta {
            rows: &delta,
            norm: delta_weight.as_ref(),
            scale: input.scale,
        }),
        weight: &weight,
        eps: EPS,
        centered: false,
        in_f32: false,
    };
    match &input.picked_rows {
        None => {
            device.add_norm(op, &mut residual, &mut out)?;
            Ok((device.read(&out)?, device.read(&residual)?))
        }
        Some(picked_rows) => {
            let tokens = vec![0; input.residual.len() / input.width];
            let step = upload_step(device, (&tokens, picked_rows), &mut device.workspace())?;
            device.add_norm_logits_rows(op, &step, &mut residual, &mut out)?;
            Ok((device.read(&out)?, vec![]))
        }
    }
}

pub(super) fn check_norms<D: Device>(
    comparison: &Comparison<'_, D>,
    report: &mut dyn FnMut(Finding),
) -> Result<(), DeviceError> {
    for &width in widths(comparison.extent) {
        for kind in [NormCase::Plain, NormCase::PostNorm, NormCase::Scaled] {
            check_norm(comparison, width, kind, report)?;
        }
    }
    Ok(())
}

/// What happens to a delta.
#[derive(Clone, Copy, PartialEq, Eq)]
enum NormCase {
    Plain,
    /// It is normalised first, which adds one rounding.
    PostNorm,
    /// As `PostNorm`, and the sum has a factor, which adds a further one.
    Scaled,
}

/// Checks norms of rows of `width`.
fn check_norm<D: Device>(
    comparison: &Comparison<'_, D>,
    width: usize,
    kind: NormCase,
    report: &mut dyn FnMut(Finding),
) -> Result<(), DeviceError> {
    let (rows, format) = (5, comparison.precision.name());
    let mut input = NormInput {
        residual: numbers(2, rows * width).iter().map(|x| x * 4.0).collect(),
        delta: numbers(3, rows * width),
        delta_weight: (kind != NormCase::Plain).then(|| TestTensor::new(21, 1, width, 2.0)),
        weight: TestTensor::new(4, 1, width, 2.0),
        scale: if kind == NormCase::Scaled { 0.7 } else { 1.0 },
        width,
        picked_rows: None,
    };
    let extra_roundings = kind as u32;
    let [all, residual, picked] = match kind {
        NormCase::Plain => ["add_norm", "residual", "add_norm of picked rows"],
        NormCase::PostNorm => [
            "add_norm with post-norm",
            "residual with post-norm",
            "add_norm with post-norm, picked",
        ],
        NormCase::Scaled => [
            "add_norm with a factor",
            "residual with a factor",
            "add_norm with a factor, picked",
        ],
    };
    let (want, got) = (
        run_norm(&comparison.reference, &input)?,
        run_norm(comparison.device, &input)?,
    );
    let shape = format!("{rows} x {width}");
    let tolerance = Tolerance::rounded_rows(comparison.precision, 2 + extra_roundings);
    report(compare((all, format, shape.clone()), tolerance, width, &want.0, &got.0));
    let tolerance = Tolerance::rounded_rows(Precision::Bf16, 1 + extra_roundings);
    report(compare((residual, "bf16", shape), tolerance, width, &want.1, &got.1));
    input.picked_rows = Some(vec![1, 4]);
    let (want, got) = (
        run_norm(&comparison.reference, &input)?,
        run_norm(comparison.device, &input)?,
    );
    let tolerance = Tolerance::rounded_rows(Precision::Bf16, 2 + extra_roundings);
    let name = (picked, "bf16", format!("2 x {width}"));
    report(compare(name, tolerance, width, &want.0, &got.0));
    Ok(())
}

fn run_pick<D: Device>(device: &D, values: &[f32], width: usize, picked: &[u32]) -> Result<Vec<f32>, DeviceError> {
    let (mut rows, mut out) = (device.buffer(), device.buffer());
    device.write(values, width, &mut rows)?;
    let tokens = vec![0; values.len() / width];
    let step = upload_step(device, (&tokens, picked), &mut device.workspace())?;
    device.pick_logits_rows(&step, &rows, &mut out)?;
    device.read(&out)
}

pub(super) fn check_picked_rows<D: Device>(
    comparison: &Comparison<'_, D>,
    report: &mut dyn FnMut(Finding),
) -> Result<(), DeviceError> {
    for (rows, width, picked) in [(5, 16, vec![0, 4]), (40, 1152, (3..40).step_by(4).collect())] {
        let values: Vec<f32> = (0..rows * width).map(|i| (i % 251) as f32).collect();
        let want = run_pick(&comparison.reference, &values, width, &picked)?;
        let got = run_pick(comparison.device, &values, width, &picked)?;
        let name = ("picked rows", "bf16", format!("{} of {rows} x {width}", picked.len()));
        report(compare(name, Tolerance::exact(), width, &want, &got));
    }
    Ok(())
}

/// Shapes as (rows, output features, input features).
fn linear_shapes(extent: Extent) -> Vec<(usize, usize, usize)> {
    let mut shapes = vec![
        (1, 16, 16),
        (1, 112, 144),
        (63, 128, 128),
        (64, 144, 256),
        (65, 272, 112),
        (127, 128, 400),
        (129, 400, 64),
        // Large enough for a device to measure which matmul kernel is fastest.
        (256, 1024, 1024),
    ];
    if extent == Extent::Full {
        for (n, k) in [(6144, 4096), (4096, 4096), (28672, 4096), (4096, 14336), (896, 4864)] {
            for m in [1, 16, 64, 256, 2048] {
                shapes.push((m, n, k));
            }
        }
    }
    shapes
}

/// Inputs of a linear operation.
#[derive(Clone)]
pub(super) struct LinearInput {
    pub x: Vec<f32>,
    pub weight: TestTensor,
    pub bias: Option<TestTensor>,
    pub columns: usize,
    pub gated: Option<Activation>,
}

pub(super) struct PreparedLinear<D: Device> {
    linear: Linear<D::Matrix, D::Vector>,
    x: D::Buffer,
    pub out: D::Buffer,
    workspace: D::Workspace,
    gated: Option<Activation>,
}

impl<D: Device> PreparedLinear<D> {
    pub(super) fn new(device: &D, input: &LinearInput) -> Result<PreparedLinear<D>, DeviceError> {
        let tensor = input.weight.tensor();
        let weight = if input.gated.is_some_and(Activation::has_gate) {
            let (gate, up) = tensor.data.split_at(tensor.data.len() / 2);
            let half = |data| crate::device::Tensor {
                rows: tensor.rows / 2,
                data,
                ..tensor
            };
            to_device_error(device.gated_matrix(&[half(gate), half(up)]))?
        } else {
            to_device_error(device.matrix(&[tensor]))?
        };
        PreparedLinear::with_weight(device, input, weight)
    }

    /// The operation with these weights in place of the input's.
    pub(super) fn with_weight(
        device: &D,
        input: &LinearInput,
        weight: D::Matrix,
    ) -> Result<PreparedLinear<D>, DeviceError> {
        let bias = input
            .bias
            .as_ref()
            .map(|bias| to_device_error(device.vector(&[bias.tensor()])));
        let mut x = device.buffer();
        device.write(&input.x, input.columns, &mut x)?;
        Ok(PreparedLinear {
            linear: Linear {
                weight,
                bias: bias.transpose()?,
            },
            x,
            out: device.buffer(),
            workspace: device.workspace(),
            gated: input.gated,
        })
    }

    pub(super) fn run(&mut self, device: &D) -> Result<(), DeviceError> {
        match self.gated {
            Some(activation) => {
                device.gated_linear(&self.linear, activation, &self.x, &mut self.out, &mut self.workspace)
            }
            None => device.linear(&self.linear, &self.x, &mut self.out, &mut self.workspace),
        }
    }
}

pub(super) fn check_linears<D: Device>(
    comparison: &Comparison<'_, D>,
    report: &mut dyn FnMut(Finding),
) -> Result<(), DeviceError> {
    let format = comparison.precision.name();
    for (m, n, k) in linear_shapes(comparison.extent) {
        for (operation, gated) in [
            ("linear", None),
            ("gated_linear", Some(Activation::Silu)),
            ("gated_linear, GELU", Some(Activation::GeluTanh)),
            ("linear, squared ReLU", Some(Activation::SquaredRelu)),
        ] {
            // Gated operations are checked at widths whose halves are multiples of 16. Above 1000,
            // only 28672 is checked: the gate and up matrices of a published model.
            if gated.is_some() && (!n.is_multiple_of(32) || n > 1000 && n != 28672) {
                continue;
            }
            let input = LinearInput {
                x: exact_rows(comparison.precision, 5, m, k),
                weight: TestTensor::from_values(&exact_rows(comparison.precision, 6, n, k), n, k, 1.0 / 16.0),
                bias: (n % 3 == 1).then(|| TestTensor::new(7, 1, n, 0.5)),
                columns: k,
                gated,
            };
            let mut cpu = PreparedLinear::new(&comparison.reference, &input)?;
            cpu.run(&comparison.reference)?;
            let want = comparison.reference.read(&cpu.out)?;
            let mut prepared = PreparedLinear::new(comparison.device, &input)?;
            prepared.run(comparison.device)?;
            let got = comparison.device.read(&prepared.out)?;
            let tolerance = match gated {
                Some(_) => Tolerance::gated(comparison.precision),
                // The operands are exact in 8 bits.
                None => Tolerance::matmul(),
            };
            let width = if gated.is_some_and(Activation::has_gate) {
                n / 2
            } else {
                n
            };
            let name = (operation, format, format!("{m} x {n} x {k}"));
            let mut finding = compare(name, tolerance, width, &want, &got);
            if m * n * k > 1 << 24 {
                finding.seconds = comparison.time(comparison.device, || prepared.run(comparison.device))?;
                let bits = f64::from(comparison.precision.bits());
                finding.bytes = (n * k) as f64 * bits / 8.0 + (m * (n + k)) as f64 * 2.0;
                finding.operations = 2.0 * (m * n * k) as f64;
            }
            if let Some(library) = comparison.library.filter(|_| gated.is_none()) {
                finding.by_library = run_library(comparison, library, &input, &finding, &want)?;
            }
            report(finding);
        }
    }
    Ok(())
}

/// Checks that a matmul gives the same bits with each of `variants`; `select` selects one of them
/// on the device. With these inputs every addition rounds.
pub(super) fn check_bitwise_equal<D: Device, W: Display>(
    comparison: &Comparison<'_, D>,
    device: &mut D,
    variants: impl IntoIterator<Item = W>,
    select: impl Fn(&mut D, W),
    report: &mut dyn FnMut(Finding),
) -> Result<(), DeviceError> {
    let (m, n, k) = (129, 272, 1040);
    let input = LinearInput {
        x: numbers(3, m * k),
        weight: TestTensor::new(4, n, k, 1.0 / 16.0),
        bias: None,
        columns: k,
        gated: None,
    };
    let mut first: Option<Vec<f32>> = None;
    for variant in variants {
        let shape = format!("{m} x {n} x {k} in {variant}");
        select(device, variant);
        // Logits are F32, which shows differences in the last bit of a sum. With 8-bit operands,
        // another order of additions causes larger differences.
        let (operation, got) = match comparison.precision {
            Precision::Bf16 => (
                "logits, bitwise equal",
                run_logits(device, &input.weight, (n, None), &input.x, k)?,
            ),
            _ => {
                let mut prepared = PreparedLinear::new(device, &input)?;
                prepared.run(device)?;
                ("linear, bitwise equal", device.read(&prepared.out)?)
            }
        };
        let want = first.get_or_insert_with(|| got.clone());
        let name = (operation, comparison.precision.name(), shape);
        report(compare(name, Tolerance::exact(), n, want, &got));
    }
    Ok(())
}

/// The library's result for the operation of a finding. `None` if the library does not support the
/// operation, or fails. If the failure lost the device, the next operation reports the loss.
fn run_library<D: Device>(
    comparison: &Comparison<'_, D>,
    library: &D,
    input: &LinearInput,
    finding: &Finding,
    want: &[f32],
) -> Result<Option<LibraryResult>, DeviceError> {
    let mut prepared = PreparedLinear::new(library, input)?;
    let computed = prepared.run(library).and_then(|()| library.read(&prepared.out));
    let Ok(got) = computed else {
        return Ok(None);
    };
    let name = (finding.operation, finding.format, finding.shape.clone());
    let theirs = compare(name, finding.tolerance, input.weight.rows(), want, &got);
    let right = theirs.is_right();
    let seconds = match finding.seconds.filter(|_| right) {
        Some(_) => comparison.time(library, || prepared.run(library))?,
        None => None,
    };
    Ok(Some(LibraryResult {
        seconds,
        error: theirs.error,
        right,
    }))
}

/// Logits of the first `vocab_size` ids of an output head.
fn run_logits<D: Device>(
    device: &D,
    head: &TestTensor,
    (vocab_size, soft_cap): (usize, Option<f32>),
    x: &[f32],
    width: usize,
) -> Result<Vec<f32>, DeviceError> {
    let head = to_device_error(device.embedding_table(head.tensor()))?;
    let (mut rows, mut workspace) = (device.buffer(), device.workspace());
    device.write(x, width, &mut rows)?;
    let head = OutputHead {
        weight: &head,
        vocab_size,
        soft_cap,
    };
    device.logits(head, &rows, &mut workspace)?;
    Ok(device.read_logits(&mut workspace)?.to_vec())
}

pub(super) fn check_logits<D: Device>(
    comparison: &Comparison<'_, D>,
    report: &mut dyn FnMut(Finding),
) -> Result<(), DeviceError> {
    let mut shapes = vec![
        (1, 128, 127, 64, None),
        (5, 400, 389, 192, None),
        (66, 144, 144, 48, None),
        // Some logits are far above the cap, others far below it.
        (5, 1040, 1029, 64, Some(0.25)),
    ];
    if comparison.extent == Extent::Full {
        shapes.push((64, 128_256, 128_256, 4096, None));
        shapes.push((64, 256_000, 256_000, 2304, Some(0.5)));
    }
    for (m, rows, ids, k, soft_cap) in shapes {
        let (x, head) = (numbers(8, m * k), TestTensor::new(9, rows, k, 1.0 / 16.0));
        let want = run_logits(&comparison.reference, &head, (ids, soft_cap), &x, k)?;
        let got = run_logits(comparison.device, &head, (ids, soft_cap), &x, k)?;
        let finding = |got: &[f32]| {
            let operation = if soft_cap.is_some() { "logits, capped" } else { "logits" };
            let name = (operation, "bf16", format!("{m} x {ids} x {k}"));
            compare(name, Tolerance::matmul(), ids, &want, got)
        };
        let mut ours = finding(&got);
        if let Some(Ok(got)) = comparison
            .library
            .map(|library| run_logits(library, &head, (ids, soft_cap), &x, k))
        {
            let theirs = finding(&got);
            ours.by_library = Some(LibraryResult {
                seconds: None,
                error: theirs.error,
                right: theirs.is_right(),
            });
        }
        report(ours);
    }
    Ok(())
}
