//! Checks operations with weights in codes of four bits.
//!
//! The reference multiplies by the numbers that the codes stand for. These are exact in BF16, and rows exact in the INT8 of their
//! groups, so results differ only by their rounding.

use super::inputs::{TestTensor, exact_rows, numbers};
use super::operations::{LinearInput, PreparedLinear, to_device_error};
use super::tolerance::Tolerance;
use super::{Comparison, Extent, Finding, compare};
use crate::device::codes::CODES;
use crate::device::{
    Activation, CodedMatrix, Device, DeviceError, ExpertInput, ExpertWeights, Linear, Precision, Routing, Score, Tensor,
};

/// Shapes as (rows, output features, input features, columns of a group): sizes just below and above those of tiles, groups that
/// are padded, rows that are one group or end within one's unit.
fn shapes(extent: Extent) -> Vec<(usize, usize, usize, usize)> {
    let mut shapes = vec![
        (1, 16, 16, 16),
        (1, 112, 144, 144),
        (15, 80, 96, 32),
        (17, 144, 256, 128),
        (33, 48, 64, 8),
        (65, 288, 192, 64),
        (129, 400, 192, 96),
        (129, 144, 1040, 1040),
    ];
    if extent == Extent::Full {
        for (n, k) in [(6144, 4096), (4096, 4096), (28672, 4096), (4096, 14336)] {
            for m in [1, 16, 64, 256, 2048] {
                shapes.push((m, n, k, 128));
            }
        }
    }
    shapes
}

/// A matrix in codes, and the numbers that they stand for.
struct TestCodes {
    matrix: CodedMatrix,
    numbers: TestTensor,
}

impl TestCodes {
    fn new(seed: u64, rows: usize, columns: usize, group: usize, has_zeros: bool) -> TestCodes {
        let codes = |seed, count| -> Vec<u8> {
            // A number may be rounded to 1.
            let code = |x: &f32| (((x + 1.0) * f32::from(CODES) / 2.0) as u8).min(CODES - 1);
            numbers(seed, count).iter().map(code).collect()
        };
        let groups = rows * columns / group;
        let matrix = CodedMatrix {
            rows,
            columns,
            group,
            codes: codes(seed, rows * columns),
            // Times codes, these are whole numbers of seven bits.
            factors: (0..groups).map(|i| [4.0, -5.0, 6.0, 7.0][i % 4] / 1024.0).collect(),
            zeros: has_zeros.then(|| codes(seed + 100, groups)),
        };
        let number = |(i, code): (usize, &u8)| {
            let zero = matrix.zeros.as_ref().map_or(CODES / 2, |zeros| zeros[i / group]);
            (f32::from(*code) - f32::from(zero)) * matrix.factors[i / group]
        };
        let values: Vec<f32> = matrix.codes.iter().enumerate().map(number).collect();
        TestCodes {
            numbers: TestTensor::from_values(&values, rows, columns, 1.0),
            matrix,
        }
    }

    /// The rows in halves.
    fn halves(&self) -> [CodedMatrix; 2] {
        let half = self.matrix.rows / 2;
        [0..half, half..2 * half].map(|rows| self.matrix.with_rows(&rows.collect::<Vec<_>>()))
    }

    /// As [`halves`](Self::halves), of the numbers.
    fn number_halves(&self) -> [Tensor<'_>; 2] {
        let tensor = self.numbers.tensor();
        let (first, second) = tensor.data.split_at(tensor.data.len() / 2);
        [first, second].map(|data| Tensor {
            rows: tensor.rows / 2,
            data,
            ..tensor
        })
    }
}

/// Rows of which each group is exact in INT8.
fn exact_groups(seed: u64, rows: usize, columns: usize, group: usize) -> Vec<f32> {
    exact_rows(Precision::Int8, seed, rows * columns / group, group)
}

pub(super) fn check_linears<D: Device>(
    comparison: &Comparison<'_, D>,
    report: &mut dyn FnMut(Finding),
) -> Result<(), DeviceError> {
    for (index, (m, n, k, group)) in shapes(comparison.extent).into_iter().enumerate() {
        for gated in [None, Some(Activation::Silu)] {
            // A gated operation has halves whose widths are multiples of 16.
            if gated.is_none() || n.is_multiple_of(32) && n < 1000 {
                check_linear(comparison, (m, n, k, group), (index.is_multiple_of(2), gated), report)?;
            }
        }
    }
    Ok(())
}

fn check_linear<D: Device>(
    comparison: &Comparison<'_, D>,
    (m, n, k, group): (usize, usize, usize, usize),
    (has_zeros, gated): (bool, Option<Activation>),
    report: &mut dyn FnMut(Finding),
) -> Result<(), DeviceError> {
    let codes = TestCodes::new(50, n, k, group, has_zeros);
    let mut input = LinearInput {
        x: exact_groups(51, m, k, group),
        weight: codes.numbers.clone(),
        bias: (n % 3 == 1).then(|| TestTensor::new(52, 1, n, 0.5)),
        columns: k,
        gated,
    };
    let mut cpu = PreparedLinear::new(&comparison.reference, &input)?;
    cpu.run(&comparison.reference)?;
    let want = comparison.reference.read(&cpu.out)?;
    let device = comparison.device;
    let prepare = |input: &LinearInput| {
        let matrix = match gated {
            Some(_) => device.coded_matrix(&codes.halves(), true),
            None => device.coded_matrix(std::slice::from_ref(&codes.matrix), false),
        };
        PreparedLinear::with_weight(device, input, to_device_error(matrix)?)
    };
    let mut prepared = prepare(&input)?;
    prepared.run(device)?;
    let got = device.read(&prepared.out)?;
    let (operation, tolerance, width) = match gated {
        Some(_) => ("gated_linear in codes", Tolerance::gated(comparison.precision), n / 2),
        None => ("linear in codes", Tolerance::matmul(), n),
    };
    let shape = format!("{m} x {n} x {k} in {group}s");
    let name = (operation, comparison.precision.name(), shape.clone());
    let mut finding = compare(name, tolerance, width, &want, &got);
    if m * n * k > 1 << 24 {
        finding.seconds = comparison.time(device, || prepared.run(device))?;
        finding.bytes = (n * k) as f64 * (0.5 + 5.0 / group as f64) + (m * (n + k)) as f64 * 2.0;
        finding.operations = 2.0 * (m * n * k) as f64;
    }
    report(finding);
    // Few rows are multiplied in another tile than many. With these rows every sum of groups rounds.
    input.x = numbers(53, m * k);
    let results = [m, 1].map(|rows| {
        input.x.truncate(rows * k);
        let mut prepared = prepare(&input)?;
        prepared.run(device)?;
        device.read(&prepared.out)
    });
    let [together, alone] = results;
    let name = ("the first row alone", comparison.precision.name(), shape);
    report(compare(name, Tolerance::exact(), width, &together?[..width], &alone?));
    Ok(())
}

/// Experts' matrices of codes, and the rows that go through them.
struct CodedExperts {
    routing: Routing,
    router: TestTensor,
    gate_up: Vec<TestCodes>,
    down: Vec<TestCodes>,
    x: Vec<f32>,
    hidden: usize,
}

impl CodedExperts {
    fn run<D: Device>(&self, device: &D, is_coded: bool) -> Result<Vec<f32>, DeviceError> {
        let linear = |codes: &[TestCodes], is_gated: bool| -> Result<Linear<D::Matrix, D::Vector>, DeviceError> {
            let matrix = if !is_coded && is_gated {
                let halves: Vec<Tensor<'_>> = codes.iter().flat_map(TestCodes::number_halves).collect();
                device.gated_matrix(&halves)
            } else if !is_coded {
                let tensors: Vec<Tensor<'_>> = codes.iter().map(|codes| codes.numbers.tensor()).collect();
                device.matrix(&tensors)
            } else if is_gated {
                let halves: Vec<CodedMatrix> = codes.iter().flat_map(TestCodes::halves).collect();
                device.coded_matrix(&halves, true)
            } else {
                let matrices: Vec<CodedMatrix> = codes.iter().map(|codes| codes.matrix.clone()).collect();
                device.coded_matrix(&matrices, false)
            };
            Ok(Linear {
                weight: to_device_error(matrix)?,
                bias: None,
            })
        };
        // Stacked, or one operation per expert.
        let linears = |codes: &[TestCodes], is_gated: bool| -> Result<Vec<_>, DeviceError> {
            let at_once = if device.stacks_experts() { codes.len() } else { 1 };
            codes.chunks(at_once).map(|codes| linear(codes, is_gated)).collect()
        };
        let weights = ExpertWeights {
            router: Linear {
                weight: to_device_error(device.router_matrix(&[self.router.tensor()]))?,
                bias: None,
            },
            routing: self.routing,
            correction: None,
            scales: None,
            gate_up: linears(&self.gate_up, true)?,
            down: linears(&self.down, false)?,
            shared: None,
        };
        let (mut x, mut out, mut workspace) = (device.buffer(), device.buffer(), device.workspace());
        device.write(&self.x, self.hidden, &mut x)?;
        device.experts(
            &weights,
            Activation::Silu,
            ExpertInput::same(&x),
            &mut out,
            &mut workspace,
        )?;
        device.read(&out)
    }
}

pub(super) fn check_experts<D: Device>(
    comparison: &Comparison<'_, D>,
    report: &mut dyn FnMut(Finding),
) -> Result<(), DeviceError> {
    let mut cases = vec![
        (1, [3, 1], [64, 64], 32),
        (160, [3, 2], [64, 64], 64),
        (5, [40, 8], [64, 64], 32),
    ];
    if comparison.extent == Extent::Full {
        cases.extend([1, 64, 2048].map(|tokens| (tokens, [128, 8], [2048, 768], 128)));
    }
    for (tokens, [experts, per_token], [hidden, width], group) in cases {
        let codes = |seed: u64, rows: usize, columns: usize| -> Vec<TestCodes> {
            let expert = |e: usize| TestCodes::new(seed + e as u64, rows, columns, group, e.is_multiple_of(2));
            (0..experts).map(expert).collect()
        };
        let input = CodedExperts {
            routing: Routing {
                per_token,
                score: Score::Softmax,
                groups: None,
                renormalized: true,
                scale: 1.0,
                scales_input: false,
            },
            router: TestTensor::new(60, experts, hidden, 1.0),
            gate_up: codes(1000, 2 * width, hidden),
            down: codes(2000, hidden, width),
            x: exact_groups(61, tokens, hidden, group),
            hidden,
        };
        let want = input.run(&comparison.reference, false)?;
        let got = input.run(comparison.device, true)?;
        let shape = format!("{tokens} through {per_token} of {experts} x {hidden} x {width} in {group}s");
        let name = ("experts in codes", comparison.precision.name(), shape);
        report(compare(
            name,
            Tolerance::experts(comparison.precision),
            hidden,
            &want,
            &got,
        ));
    }
    Ok(())
}
