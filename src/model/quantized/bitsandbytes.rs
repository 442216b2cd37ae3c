//! What is special about bitsandbytes: factors run on from row to row, and may be quantized themselves.

use std::borrow::Cow;

use safetensors::Dtype;
use serde::Deserialize;

use super::matrix::{FactorSource, Found, Meaning, Numbers, Problem, Shared, StoredMatrix};
use super::numbers;
use super::packing::Packing;
use crate::model::error::ModelError;
use crate::model::weights::{WeightSource, Weights};

/// What INT8's factors are multiples of: the largest number.
const LARGEST: f32 = 127.0;
/// Largest number of numbers with a factor in common.
const RUN_MAX: usize = 1 << 16;

/// The tensors that factors come from.
#[derive(Debug)]
pub(super) enum Factors {
    /// The largest magnitude of each row of whole numbers, and the order in which these lie.
    Rows { largest: String, order: Option<String> },
    /// The largest magnitude of each run of numbers.
    Runs {
        largest: String,
        state: String,
        nested: Option<Nested>,
    },
}

/// Magnitudes as codes of a table, with magnitudes of runs of these.
#[derive(Debug)]
pub(super) struct Nested {
    largest: String,
    table: String,
    runs: usize,
}

/// What is said of a matrix in a tensor of JSON.
#[derive(Debug, Deserialize)]
struct State {
    blocksize: usize,
    shape: [usize; 2],
    nested_blocksize: Option<usize>,
    nested_offset: Option<f32>,
}

impl Factors {
    pub(super) fn tensors(&self) -> Vec<&str> {
        match self {
            Factors::Rows { largest, order } => std::iter::once(largest).chain(order).map(String::as_str).collect(),
            Factors::Runs { largest, state, nested } => {
                let nested = nested.iter().flat_map(|nested| [&nested.largest, &nested.table]);
                [largest, state].into_iter().chain(nested).map(String::as_str).collect()
            }
        }
    }
}

impl Found<'_> {
    pub(super) fn bitsandbytes_bytes(&self) -> Result<StoredMatrix, Problem> {
        let numbers = self.numbers(Packing::Bytes, numbers::signed_bytes())?;
        let (largest, entry) = self.beside.required("SCB")?;
        if entry.dtype != Dtype::F32 || entry.shape != [self.size.0] {
            return Err(self.wrong(&largest, entry, "the factors"));
        }
        let order = self.beside.optional("weight_format").map(|(name, _)| name);
        let source = FactorSource::BitsAndBytes(Factors::Rows { largest, order });
        Ok(self.matrix(numbers, source, Shared::Groups(1)))
    }

    pub(super) fn bitsandbytes_halves(&self) -> Result<StoredMatrix, Problem> {
        let (rows, columns) = self.size;
        let bytes = (rows * columns).div_ceil(2);
        if self.entry.shape.iter().product::<usize>() != bytes {
            return Err(self.wrong(self.name, self.entry, "the shapes"));
        }
        let vector = |suffix: &str, dtype: Dtype| {
            let (name, entry) = self.beside.required(suffix)?;
            match entry.shape[..] {
                [count] if entry.dtype == dtype && count > 0 => Ok((name, count)),
                _ => Err(self.wrong(&name, entry, "the factors")),
            }
        };
        let (table, count) = vector("weight.quant_map", Dtype::F32)?;
        if count != 16 {
            return Err(Problem::Wrong(format!("tensor `{table}` has {count} numbers, not 16")));
        }
        let states = ["nf4", "fp4"].map(|kind| format!("weight.quant_state.bitsandbytes__{kind}"));
        let [state, other] = &states;
        let state = if self.beside.optional(other).is_some() {
            other
        } else {
            state
        };
        let (state, _) = vector(state, Dtype::U8)?;
        let nested = match self.beside.optional("weight.nested_absmax") {
            None => None,
            Some(_) => {
                let (largest, runs) = vector("weight.nested_absmax", Dtype::F32)?;
                let (table, count) = vector("weight.nested_quant_map", Dtype::F32)?;
                if count != 256 {
                    return Err(Problem::Wrong(format!("tensor `{table}` has {count} numbers, not 256")));
                }
                Some(Nested { largest, table, runs })
            }
        };
        let dtype = if nested.is_some() { Dtype::U8 } else { Dtype::F32 };
        let (largest, count) = vector("weight.absmax", dtype)?;
        // Its state says how long a run is; this is the shortest that gives as many.
        let run = Shared::Run((rows * columns).div_ceil(count));
        let source = FactorSource::BitsAndBytes(Factors::Runs { largest, state, nested });
        let numbers = Numbers {
            tensor: self.name.to_owned(),
            packing: Packing::Halves { first_is_high: true },
            meaning: Meaning::Stored(table),
        };
        Ok(self.matrix(numbers, source, run))
    }
}

impl Weights {
    /// The factors of a matrix, and which numbers share one.
    pub(super) fn bitsandbytes_factors(
        &self,
        factors: &Factors,
        (rows, columns): (usize, usize),
    ) -> Result<(Vec<f32>, Shared), ModelError> {
        let floats = |name: &str| Ok::<_, ModelError>(numbers::floats(Dtype::F32, &self.part(name)?.1));
        let broken = |name: &str, why: String| ModelError::broken(self.path_of(name), format!("tensor `{name}` {why}"));
        match factors {
            Factors::Rows { largest, order } => {
                if let Some(order) = order
                    && self.part(order)?.1.iter().any(|byte| *byte != 0)
                {
                    let why = "says that numbers lie in an order of a GPU, not row by row".to_owned();
                    return Err(broken(order, why));
                }
                Ok((
                    floats(largest)?.iter().map(|x| x / LARGEST).collect(),
                    Shared::Groups(1),
                ))
            }
            Factors::Runs { largest, state, nested } => {
                let text = self.part(state)?.1;
                let stated: State =
                    serde_json::from_slice(&text).map_err(|e| broken(state, format!("is no state: {e}")))?;
                let run = stated.blocksize;
                let magnitudes: Cow<'_, [u8]> = self.part(largest)?.1;
                let count = if nested.is_some() {
                    magnitudes.len()
                } else {
                    magnitudes.len() / 4
                };
                let fits = (1..=RUN_MAX).contains(&run) && Shared::Run(run).count((rows, columns)) == (1, count);
                if !fits || stated.shape != [rows, columns] {
                    let why = format!(
                        "describes a matrix of {:?} in runs of {run}, not one of {rows} × {columns}",
                        stated.shape
                    );
                    return Err(broken(state, why));
                }
                let Some(nested) = nested else {
                    return Ok((numbers::floats(Dtype::F32, &magnitudes), Shared::Run(run)));
                };
                let (Some(length), Some(offset)) = (stated.nested_blocksize, stated.nested_offset) else {
                    return Err(broken(
                        state,
                        "does not describe the magnitudes of magnitudes".to_owned(),
                    ));
                };
                if length == 0 || count.div_ceil(length) != nested.runs {
                    let why = format!(
                        "has runs of {length} magnitudes, and there are {} of {count}",
                        nested.runs
                    );
                    return Err(broken(state, why));
                }
                let (table, of_runs) = (floats(&nested.table)?, floats(&nested.largest)?);
                let magnitude = |(i, code): (usize, &u8)| table[usize::from(*code)] * of_runs[i / length] + offset;
                let magnitudes = magnitudes.iter().enumerate().map(magnitude).collect();
                Ok((magnitudes, Shared::Run(run)))
            }
        }
    }
}
