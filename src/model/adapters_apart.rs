//! Adapters beside a model's weights, each of which changes the model for some of a batch's sequences.
//!
//! A linear operation's matrix may be made of several of the checkpoint's, or of rows of one, and its channels may be balanced.
//! What an adapter adds to it goes the same way: its second matrix has the rows of the checkpoint's matrix, so it passes through
//! the same readers, and its first matrix has the columns.
//!
//! See docs/decisions/113-adapters-beside-a-model-share-its-batches.md.

use std::borrow::Cow;
use std::collections::{HashMap, HashSet};
use std::ops::Range;
use std::path::Path;

use crate::device::{Activation, Device, DeviceError, Dtype, Linear, Tensor};
use crate::model::adapter::Adapter;
use crate::model::balance::ChannelFactors;
use crate::model::canonical::CanonicalWeights;
use crate::model::config::Config;
use crate::model::error::ModelError;
use crate::model::tensors::{LinearTensors, MixerTensors, MlpTensors, ModelTensors};
use crate::model::weights::{StoredTensor, WeightSource};
use crate::printable::printable_name;

/// Refuses an adapter that changes other matrices than those of attention's projections and of plain MLPs.
pub(super) fn check(adapter: &Adapter, config: &Config) -> Result<(), ModelError> {
    let tensors = ModelTensors::of(config);
    let names: HashSet<&str> = linears(&tensors)
        .flat_map(LinearTensors::stored)
        .map(|spec| spec.name.as_str())
        .collect();
    match adapter.changed().find(|name| !names.contains(name)) {
        None => Ok(()),
        Some(name) => {
            let why = format!(
                "the adapter changes `{}`: beside a model, adapters change projections of attention and plain MLPs alone. Give it a \
                 worker of its own (`--adapter`)",
                printable_name(name)
            );
            Err(ModelError::unsupported(adapter.path(), why))
        }
    }
}

/// The linear operations that adapters beside a model may change.
fn linears(tensors: &ModelTensors) -> impl Iterator<Item = &LinearTensors> {
    tensors.layers.iter().flat_map(|layer| {
        let mixer: Vec<&LinearTensors> = match &layer.mixer {
            Some(MixerTensors::Attention(attention)) => attention.gate.iter().chain([&attention.qkv]).collect(),
            _ => Vec::new(),
        };
        let mlp: Vec<&LinearTensors> = match &layer.mlp {
            Some(MlpTensors::Plain(mlp)) => vec![&mlp.gate_up, &mlp.down],
            _ => Vec::new(),
        };
        mixer.into_iter().chain(&layer.o).chain(mlp)
    })
}

/// First matrices are kept in panels of as many rows.
const PANEL_ROWS: usize = 16;

/// How many numbers a device keeps of these adapters: somewhat more than their files hold, because all adapters of an operation have
/// the largest one's rank there.
pub fn kept_values(adapters: &[Adapter], config: &Config) -> u64 {
    let tensors = ModelTensors::of(config);
    linears(&tensors).map(|linear| kept_of(adapters, config, linear)).sum()
}

fn kept_of(adapters: &[Adapter], config: &Config, linear: &LinearTensors) -> u64 {
    let of_adapter = |adapter: &Adapter| {
        let source = UpMatrices(adapter);
        let canonical = CanonicalWeights::new(&source, config);
        // Parts that are rows of one stored matrix have one first matrix.
        let (mut known, mut rank, mut second) = (HashSet::new(), 0, 0);
        for part in &linear.weights {
            let stored = canonical.stored_name(&part.name);
            let own = adapter.rank(&stored).unwrap_or(0);
            second += own * part.rows.unwrap_or(1);
            if known.insert(stored) {
                rank += own;
            }
        }
        (rank, second)
    };
    let kept: Vec<(usize, usize)> = adapters.iter().map(of_adapter).filter(|(rank, _)| *rank > 0).collect();
    let rank = kept.iter().map(|(rank, _)| *rank).max().unwrap_or(0);
    let columns = linear.weights.first().map_or(0, |part| part.columns);
    let first = rank.next_multiple_of(PANEL_ROWS) * columns;
    kept.iter().map(|(_, second)| (first + second) as u64).sum()
}

/// A linear operation of a model, and what adapters add to it.
pub(super) struct AdaptedLinear<D: Device> {
    pub linear: Linear<D::Matrix, D::Vector>,
    /// Empty: no adapter adds anything.
    pub adapters: Vec<Option<D::LowRank>>,
}

impl<D: Device> AdaptedLinear<D> {
    pub(super) fn run(
        &self,
        device: &D,
        (step, x): (&D::Step, &D::Buffer),
        out: &mut D::Buffer,
        workspace: &mut D::Workspace,
    ) -> Result<(), DeviceError> {
        if self.adapters.is_empty() {
            return device.linear(&self.linear, x, out, workspace);
        }
        device.adapted_linear(&self.linear, &self.adapters, (step, x), out, workspace)
    }

    /// As [`run`](Self::run), of a gate and an up projection.
    pub(super) fn run_gated(
        &self,
        device: &D,
        activation: Activation,
        (step, x): (&D::Step, &D::Buffer),
        out: &mut D::Buffer,
        workspace: &mut D::Workspace,
    ) -> Result<(), DeviceError> {
        if self.adapters.is_empty() {
            return device.gated_linear(&self.linear, activation, x, out, workspace);
        }
        device.adapted_gated_linear(&self.linear, &self.adapters, activation, (step, x), out, workspace)
    }
}

/// The second matrices of an adapter, each in place of the matrix that it changes, of as many columns as the rank.
struct UpMatrices<'a>(&'a Adapter);

impl WeightSource for UpMatrices<'_> {
    fn tensor(&self, name: &str, rows: Option<usize>, columns: usize) -> Result<StoredTensor<'_>, ModelError> {
        let values = self.0.up(name, rows.unwrap_or(1))?;
        Ok(StoredTensor {
            dtype: Dtype::F32,
            rows: rows.unwrap_or(1),
            columns,
            data: Cow::Owned(bytes_of(&values)),
        })
    }

    fn path_of(&self, _name: &str) -> &Path {
        self.0.path()
    }
}

fn bytes_of(values: &[f32]) -> Vec<u8> {
    values.iter().flat_map(|x| x.to_le_bytes()).collect()
}

/// What builds the matrices of adapters for a model's linear operations.
pub(super) struct LowRanks<'a> {
    pub adapters: &'a [Adapter],
    pub config: &'a Config,
    /// The factors of tensors that are balanced.
    pub factors: Option<&'a HashMap<String, ChannelFactors>>,
}

/// What an adapter adds to a linear operation, before a device has it.
#[derive(Default)]
struct Change {
    rank: usize,
    /// The first matrices, below each other.
    down: Vec<f32>,
    parts: Vec<PartChange>,
}

/// The change of a part of a linear operation's matrix.
struct PartChange {
    /// Rows of the part.
    rows: usize,
    /// The rows of `down` that belong to it; none if it is not changed.
    columns: Range<usize>,
    /// Its second matrix, `[rows][columns]`.
    up: Vec<f32>,
}

impl Change {
    /// The second matrix of the whole, `[rows of all parts][rank]`, with its rows: zeros where a part has nothing to do with a first
    /// matrix. `rank`: at least the change's.
    fn up(&self, rank: usize) -> (usize, Vec<f32>) {
        let rows = self.parts.iter().map(|part| part.rows).sum();
        let mut up = vec![0.0f32; rows * rank];
        let mut rest = up.chunks_exact_mut(rank);
        for part in &self.parts {
            let width = part.columns.len();
            for (index, row) in rest.by_ref().take(part.rows).enumerate() {
                row[part.columns.clone()].copy_from_slice(&part.up[index * width..][..width]);
            }
        }
        (rows, up)
    }
}

impl LowRanks<'_> {
    /// What each adapter adds to a linear operation. Empty: none adds anything.
    pub(super) fn of<D: Device>(
        &self,
        device: &D,
        tensors: &LinearTensors,
        is_gated: bool,
    ) -> Result<Vec<Option<D::LowRank>>, ModelError> {
        let columns = tensors.weights.first().map_or(0, |part| part.columns);
        let changes = self
            .adapters
            .iter()
            .map(|adapter| self.change(adapter, tensors, columns));
        let mut changes: Vec<Change> = changes.collect::<Result<_, _>>()?;
        // The rows of all adapters are multiplied at once, so all have one rank here: what some lack is zeros.
        let rank = changes.iter().map(|change| change.rank).max().unwrap_or(0);
        let upload = |(adapter, change): (&Adapter, &mut Change)| {
            if change.rank == 0 {
                return Ok(None);
            }
            let (rows, up) = change.up(rank);
            change.down.resize(rank * columns, 0.0);
            let (down, up) = (bytes_of(&change.down), bytes_of(&up));
            let tensor = |rows, columns, data| Tensor {
                dtype: Dtype::F32,
                rows,
                columns,
                data,
            };
            let (down, up) = (tensor(rank, columns, &down), tensor(rows, rank, &up));
            device.low_rank(down, up, is_gated).map(Some).map_err(|error| {
                let name = tensors.weights.first().map_or("", |part| part.name.as_str());
                ModelError::broken(adapter.path(), format!("the change of `{name}`: {error}"))
            })
        };
        let parts: Vec<_> = self
            .adapters
            .iter()
            .zip(&mut changes)
            .map(upload)
            .collect::<Result<_, _>>()?;
        let changes_it = parts.iter().any(Option::is_some);
        Ok(if changes_it { parts } else { Vec::new() })
    }

    fn change(&self, adapter: &Adapter, tensors: &LinearTensors, columns: usize) -> Result<Change, ModelError> {
        let source = UpMatrices(adapter);
        let canonical = CanonicalWeights::new(&source, self.config);
        let mut change = Change::default();
        // Parts that are rows of one stored matrix have one first matrix.
        let mut known: HashMap<String, Range<usize>> = HashMap::new();
        for part in &tensors.weights {
            let rows = part.rows.unwrap_or(1);
            let stored = canonical.stored_name(&part.name);
            let Some(rank) = adapter.rank(&stored) else {
                change.parts.push(PartChange {
                    rows,
                    columns: 0..0,
                    up: Vec::new(),
                });
                continue;
            };
            let factors = self.factors.and_then(|factors| factors.get(&part.name));
            let columns = match known.get(&stored) {
                // They read the same channels, so one set of factors serves all.
                Some(columns) => columns.clone(),
                None => {
                    let mut down = adapter.down(&stored, columns)?;
                    if let Some(factors) = factors.and_then(|factors| factors.columns.as_ref()) {
                        let rows = down.chunks_exact_mut(columns);
                        rows.for_each(|row| row.iter_mut().zip(factors).for_each(|(x, f)| *x *= f));
                    }
                    change.down.extend(down);
                    let own = change.rank..change.rank + rank;
                    change.rank = own.end;
                    known.insert(stored, own.clone());
                    own
                }
            };
            let tensor = canonical.tensor(&part.name, Some(rows), rank)?;
            let mut up = vec![0.0; rows * rank];
            for (row, values) in up.chunks_exact_mut(rank).enumerate() {
                tensor.view().read_row(row, values);
                if let Some(factors) = factors.and_then(|factors| factors.rows.as_ref()) {
                    values.iter_mut().for_each(|x| *x *= factors[row]);
                }
            }
            change.parts.push(PartChange { rows, columns, up });
        }
        Ok(change)
    }
}
