//! Checks routed experts.

use super::inputs::{TestTensor, exact_rows};
use super::operations::to_device_error;
use super::tolerance::Tolerance;
use super::{Comparison, Extent, Finding, compare};
use crate::device::{
    Activation, Device, DeviceError, ExpertGroups, ExpertInput, ExpertWeights, Linear, Routing, Score, SharedExpert,
    Tensor,
};

/// A layer's experts, and the rows that go through them.
struct ExpertsCase {
    tokens: usize,
    experts: usize,
    routing: Routing,
    hidden: usize,
    /// Width of an expert.
    width: usize,
    activation: Activation,
    has_bias: bool,
    has_correction: bool,
    /// Whether each expert's weight has a factor, and the router reads other rows than the experts.
    is_beside_mlp: bool,
    /// Whether there is a shared expert, and whether it is weighted.
    shared: Option<bool>,
}

/// Plain experts.
fn case(tokens: usize, [experts, per_token]: [usize; 2], [hidden, width]: [usize; 2]) -> ExpertsCase {
    ExpertsCase {
        tokens,
        experts,
        routing: Routing {
            per_token,
            score: Score::Softmax,
            groups: None,
            renormalized: per_token < 8,
            scale: 1.0,
            scales_input: false,
        },
        hidden,
        width,
        activation: Activation::Silu,
        has_bias: false,
        has_correction: false,
        is_beside_mlp: false,
        shared: None,
    }
}

/// Routing by sigmoids.
fn by_sigmoids(per_token: usize) -> Routing {
    Routing {
        per_token,
        score: Score::Sigmoid,
        groups: None,
        renormalized: true,
        scale: 2.5,
        scales_input: false,
    }
}

/// Experts in groups, as Nemotron-H has them and DeepSeek-V2, and experts whose inputs are scaled, as Llama 4's.
fn cases_of_routing() -> [ExpertsCase; 3] {
    let groups = |count, chosen, best| Some(ExpertGroups { count, chosen, best });
    let plain = case(9, [12, 4], [64, 64]);
    [
        ExpertsCase {
            routing: Routing {
                groups: groups(4, 2, 2),
                ..by_sigmoids(3)
            },
            activation: Activation::SquaredRelu,
            has_correction: true,
            shared: Some(false),
            ..case(9, [12, 3], [64, 64])
        },
        ExpertsCase {
            routing: Routing {
                groups: groups(3, 1, 1),
                renormalized: false,
                ..plain.routing
            },
            ..plain
        },
        ExpertsCase {
            routing: Routing {
                renormalized: false,
                scale: 1.0,
                scales_input: true,
                ..by_sigmoids(2)
            },
            shared: Some(false),
            ..case(9, [3, 2], [64, 64])
        },
    ]
}

fn cases(extent: Extent) -> Vec<ExpertsCase> {
    // These sizes are those of other checks, so that few kernels are compiled for them.
    let mut cases = vec![
        case(1, [3, 1], [64, 64]),
        // Experts with more rows than a tile has.
        case(160, [3, 2], [64, 64]),
        // Most experts have no row.
        case(5, [140, 8], [64, 64]),
        ExpertsCase {
            activation: Activation::ClampedSwiglu {
                alpha: 1.702,
                limit: 1.0,
            },
            has_bias: true,
            shared: Some(true),
            ..case(9, [4, 4], [64, 64])
        },
        ExpertsCase {
            routing: by_sigmoids(3),
            has_correction: true,
            shared: Some(false),
            ..case(9, [8, 3], [64, 64])
        },
        ExpertsCase {
            activation: Activation::GeluTanh,
            is_beside_mlp: true,
            ..case(9, [8, 3], [64, 64])
        },
    ];
    cases.extend(cases_of_routing());
    if extent == Extent::Full {
        for tokens in [1, 64, 2048] {
            cases.push(case(tokens, [128, 8], [2048, 768]));
        }
    }
    cases
}

struct PreparedExperts<D: Device> {
    weights: ExpertWeights<D::Matrix, D::Vector>,
    activation: Activation,
    x: D::Buffer,
    /// What the router reads, if it is not `x`.
    router_rows: Option<D::Buffer>,
    out: D::Buffer,
    workspace: D::Workspace,
}

/// Linear operations of a layer's experts.
type ExpertLinears<D> = Vec<Linear<<D as Device>::Matrix, <D as Device>::Vector>>;

/// Matrices of all experts, each with `rows` rows, and biases.
struct TestMatrices {
    stacked: TestTensor,
    biases: Option<TestTensor>,
    rows: usize,
}

impl TestMatrices {
    /// The linear operation with all matrices, one below the other.
    fn linear<D: Device>(
        &self,
        device: &D,
        upload: impl Fn(&[Tensor<'_>]) -> Result<D::Matrix, DeviceError>,
    ) -> Result<Linear<D::Matrix, D::Vector>, DeviceError> {
        let biases = self.biases.as_ref();
        let bias = biases.map(|all| to_device_error(device.vector(&[all.tensor()])));
        Ok(Linear {
            weight: upload(&self.matrices())?,
            bias: bias.transpose()?,
        })
    }

    /// Each expert's matrix.
    fn matrices(&self) -> Vec<Tensor<'_>> {
        let experts = self.stacked.rows() / self.rows;
        (0..experts)
            .map(|e| part(self.stacked.tensor(), e * self.rows, self.rows))
            .collect()
    }

    /// The linear operations, one per expert or stacked; `upload` uploads a matrix.
    fn upload<D: Device>(
        &self,
        device: &D,
        upload: impl Fn(&[Tensor<'_>]) -> Result<D::Matrix, DeviceError>,
    ) -> Result<ExpertLinears<D>, DeviceError> {
        if device.stacks_experts() {
            return Ok(vec![self.linear(device, upload)?]);
        }
        let linear = |(e, tensor)| {
            let biases = self.biases.as_ref();
            let own =
                |all: &TestTensor| to_device_error(device.vector(&[columns(all.tensor(), e * self.rows, self.rows)]));
            Ok(Linear {
                weight: upload(&[tensor])?,
                bias: biases.map(own).transpose()?,
            })
        };
        self.matrices().into_iter().enumerate().map(linear).collect()
    }
}

/// Some rows of a tensor.
fn part(tensor: Tensor<'_>, first: usize, rows: usize) -> Tensor<'_> {
    let bytes = tensor.columns * tensor.dtype.bytes();
    Tensor {
        rows,
        data: &tensor.data[first * bytes..][..rows * bytes],
        ..tensor
    }
}

/// Some columns of a tensor of one row.
fn columns(tensor: Tensor<'_>, first: usize, columns: usize) -> Tensor<'_> {
    let bytes = tensor.dtype.bytes();
    Tensor {
        columns,
        data: &tensor.data[first * bytes..][..columns * bytes],
        ..tensor
    }
}

/// Rows of `width` numbers on a device.
fn written<D: Device>(device: &D, values: &[f32], width: usize) -> Result<D::Buffer, DeviceError> {
    let mut rows = device.buffer();
    device.write(values, width, &mut rows)?;
    Ok(rows)
}

impl<D: Device> PreparedExperts<D> {
    fn new<R: Device>(device: &D, comparison: &Comparison<'_, R>, case: &ExpertsCase) -> Result<Self, DeviceError> {
        let ExpertsCase {
            tokens,
            experts,
            hidden,
            width,
            ..
        } = *case;
        let matrices = |seed, experts: usize, [rows, columns]: [usize; 2]| TestMatrices {
            // Exact in 8 bits.
            stacked: TestTensor::from_values(
                &exact_rows(comparison.precision, seed, experts * rows, columns),
                experts * rows,
                columns,
                1.0 / 8.0,
            ),
            biases: case.has_bias.then(|| TestTensor::new(seed + 1, 1, experts * rows, 0.5)),
            rows,
        };
        let halves = if case.activation.has_gate() { 2 } else { 1 };
        let (gate_up, down) = ([halves * width, hidden], [hidden, width]);
        let plain = |parts: &[Tensor<'_>]| to_device_error(device.matrix(parts));
        let gated = |parts: &[Tensor<'_>]| {
            if halves == 1 {
                return plain(parts);
            }
            let halves = parts
                .iter()
                .flat_map(|tensor| [0, width].map(|first| part(*tensor, first, width)));
            to_device_error(device.gated_matrix(&halves.collect::<Vec<_>>()))
        };
        let rows = experts + usize::from(case.shared == Some(true));
        let router = TestTensor::new(31, rows, hidden, 1.0);
        let correction = case.has_correction.then(|| TestTensor::new(37, 1, experts, 1.0));
        let correction = correction.map(|correction| to_device_error(device.f32_vector(correction.tensor())));
        let shared = |is_weighted| {
            Ok::<_, DeviceError>(SharedExpert {
                gate_up: matrices(38, 1, gate_up).linear(device, gated)?,
                down: matrices(40, 1, down).linear(device, plain)?,
                is_weighted,
            })
        };
        let router_bias = case.has_bias.then(|| TestTensor::new(32, 1, rows, 1.0));
        let router_bias = router_bias.map(|bias| to_device_error(device.vector(&[bias.tensor()])));
        let scales = case.is_beside_mlp.then(|| TestTensor::new(42, 1, experts, 2.0));
        let scales = scales.map(|scales| to_device_error(device.f32_vector(scales.tensor())));
        let rows = |seed| written(device, &exact_rows(comparison.precision, seed, tokens, hidden), hidden);
        let x = rows(30)?;
        Ok(PreparedExperts {
            weights: ExpertWeights {
                router: Linear {
                    weight: to_device_error(device.router_matrix(&[router.tensor()]))?,
                    bias: router_bias.transpose()?,
                },
                routing: case.routing,
                correction: correction.transpose()?,
                scales: scales.transpose()?,
                gate_up: matrices(33, experts, gate_up).upload(device, gated)?,
                down: matrices(35, experts, down).upload(device, plain)?,
                shared: case.shared.map(shared).transpose()?,
            },
            activation: case.activation,
            x,
            router_rows: case.is_beside_mlp.then(|| rows(43)).transpose()?,
            out: device.buffer(),
            workspace: device.workspace(),
        })
    }

    fn run(&mut self, device: &D) -> Result<(), DeviceError> {
        device.experts(
            &self.weights,
            self.activation,
            ExpertInput {
                rows: &self.x,
                router_rows: self.router_rows.as_ref().unwrap_or(&self.x),
            },
            &mut self.out,
            &mut self.workspace,
        )
    }
}

pub(super) fn check_experts<D: Device>(
    comparison: &Comparison<'_, D>,
    report: &mut dyn FnMut(Finding),
) -> Result<(), DeviceError> {
    for case in cases(comparison.extent) {
        let mut cpu = PreparedExperts::new(&comparison.reference, comparison, &case)?;
        cpu.run(&comparison.reference)?;
        let want = comparison.reference.read(&cpu.out)?;
        let mut prepared = PreparedExperts::new(comparison.device, comparison, &case)?;
        prepared.run(comparison.device)?;
        let got = comparison.device.read(&prepared.out)?;
        let ExpertsCase {
            tokens,
            experts,
            routing,
            hidden,
            width,
            ..
        } = case;
        let shape = format!(
            "{tokens} through {} of {experts} x {hidden} x {width}",
            routing.per_token
        );
        let name = ("experts", comparison.precision.name(), shape);
        let mut finding = compare(name, Tolerance::experts(comparison.precision), hidden, &want, &got);
        let used = tokens * routing.per_token;
        if used * hidden * width > 1 << 24 {
            finding.seconds = comparison.time(comparison.device, || prepared.run(comparison.device))?;
            let bits = f64::from(comparison.precision.bits());
            finding.bytes = (3 * used.min(experts) * hidden * width) as f64 * bits / 8.0;
            finding.operations = 6.0 * (used * hidden * width) as f64;
        }
        report(finding);
    }
    Ok(())
}
