//! Weights in codes of four bits: their layout on the card, and the products with them.
//!
//! Rows that they multiply are quantized to INT8 for each matrix, in its groups. Norms and activations therefore write BF16 where
//! weights are in codes.
//!
//! See docs/decisions/115-a-gpu-expands-four-bits-in-registers.md.

use rayon::prelude::*;

use super::coded_plan::{CodeGroups, PANEL, RECORD_BYTES, STEP, UNIT, UNIT_BYTES};
use super::driver::{Argument, Memory};
use super::experts::Routes;
use super::memory::{Buffer, ensure_capacity};
use super::plan::KernelFormat;
use super::weights::check_width;
use super::{Cuda, Matrix, Vector};
use crate::device::codes::{CODES, MIDDLE};
use crate::device::{CodedMatrix, DeviceError, Linear, TensorError};

/// What a [`Matrix`] of codes has besides them.
pub(super) struct Codes {
    pub groups: CodeGroups,
    /// Factors and zero points, `[panel][group]`.
    pub records: Memory,
}

impl Codes {
    /// Address of the factors, as a kernel's argument.
    fn records(&self) -> Argument {
        Argument::Address(self.records.address())
    }
}

impl Cuda {
    /// Loads matrices of codes, stacked by rows, with groups of one size.
    pub(super) fn load_codes(&self, parts: &[CodedMatrix]) -> Result<Matrix, TensorError> {
        let columns = parts.first().map_or(0, |part| part.columns);
        check_width(columns)?;
        let (codes, records) = pack(parts)?;
        let group = parts.first().map_or(columns, |part| part.group);
        Ok(Matrix {
            rows: parts.iter().map(|part| part.rows).sum(),
            columns,
            format: KernelFormat::Int8,
            data: self.context.allocate_copy(&codes, "weights")?,
            scales: None,
            codes: Some(Codes {
                groups: CodeGroups { columns, group },
                records: self.context.allocate_copy(&records, "factors of weights")?,
            }),
        })
    }

    /// `x`, quantized into `quantized` with a scale for each row and group.
    pub(super) fn in_groups<'a>(
        &self,
        x: &Buffer,
        groups: CodeGroups,
        quantized: &'a mut Buffer,
    ) -> Result<&'a Buffer, DeviceError> {
        assert!(x.format == KernelFormat::Bf16 && x.width == groups.columns);
        quantized.reshape(&self.context, x.rows, groups.row_bytes(), KernelFormat::Int8)?;
        let bytes = x.rows * groups.count() * 4;
        ensure_capacity(&self.context, &mut quantized.scales, bytes, "scales of activations")?;
        let mut arguments = vec![x.data(), quantized.data(), quantized.scales()];
        if groups.count() > 1 {
            arguments.extend([x.rows, groups.count()].map(|n| Argument::Int(n as i32)));
        }
        self.launch(&groups.quantize(x.rows), &arguments)?;
        Ok(quantized)
    }

    /// Computes a linear operation with codes over all rows of `x`, which is [in their groups](Self::in_groups).
    pub(super) fn multiply_codes(
        &self,
        (linear, codes): (&Linear<Matrix, Vector>, &Codes),
        x: &Buffer,
        out: &mut Buffer,
    ) -> Result<(), DeviceError> {
        let weight = &linear.weight;
        let groups = codes.groups;
        assert!(x.format == KernelFormat::Int8 && x.width == groups.row_bytes());
        out.reshape(&self.context, x.rows, weight.rows, KernelFormat::Bf16)?;
        let sizes = [x.rows, weight.rows, x.width, groups.count(), weight.rows];
        let mut arguments = operands((linear, codes), x, out).to_vec();
        arguments.extend(sizes.map(|n| Argument::Int(n as i32)));
        self.launch(&groups.linear(x.rows, weight.rows), &arguments)
    }

    /// Multiplies each sorted row with its expert's matrix of codes. `picked`: see
    /// [`multiply_grouped`](Self::multiply_grouped).
    pub(super) fn multiply_grouped_codes(
        &self,
        (linear, codes): (&Linear<Matrix, Vector>, &Codes),
        routes: &Routes,
        (x, picked): (&Buffer, Argument),
        out: &mut Buffer,
    ) -> Result<(), DeviceError> {
        let weight = &linear.weight;
        let (shape, groups) = (routes.shape, codes.groups);
        let columns = weight.rows / shape.experts;
        assert!(x.format == KernelFormat::Int8 && x.width == groups.row_bytes());
        // So an expert's panels are whole, and its rows of results aligned.
        assert!(weight.rows.is_multiple_of(shape.experts) && columns.is_multiple_of(16));
        out.reshape(&self.context, shape.rows, columns, KernelFormat::Bf16)?;
        let mut arguments = operands((linear, codes), x, out).to_vec();
        arguments.extend([routes.tiles, routes.tile_count, picked]);
        arguments.extend([x.rows, columns, x.width, groups.count()].map(|n| Argument::Int(n as i32)));
        self.launch(&groups.grouped_linear(&shape, columns), &arguments)
    }
}

/// What each kernel of a linear operation with codes takes first.
fn operands((linear, codes): (&Linear<Matrix, Vector>, &Codes), x: &Buffer, out: &Buffer) -> [Argument; 6] {
    [
        x.data(),
        Argument::Address(linear.weight.data.address()),
        codes.records(),
        x.scales(),
        Argument::Address(linear.bias.as_ref().map_or(0, |bias| bias.0.address())),
        out.data(),
    ]
}

/// Codes, and factors with zero points, of stacked matrices in the kernels' layout. Features and columns that are not there have
/// factors and codes of zero.
fn pack(parts: &[CodedMatrix]) -> Result<(Vec<u8>, Vec<u8>), TensorError> {
    let Some(CodedMatrix { columns, group, .. }) = parts.first() else {
        return Ok((vec![], vec![]));
    };
    let groups = CodeGroups {
        columns: *columns,
        group: *group,
    };
    assert!(
        parts
            .iter()
            .all(|part| (part.columns, part.group) == (groups.columns, groups.group))
    );
    assert!(CodedMatrix::has_groups_of(groups.columns, groups.group));
    // Part and row of each row of the stack.
    let rows: Vec<(usize, usize)> = (parts.iter().enumerate())
        .flat_map(|(part, matrix)| (0..matrix.rows).map(move |row| (part, row)))
        .collect();
    let (code_bytes, record_bytes) = groups.matrix_bytes(rows.len());
    let (mut codes, mut records) = (vec![0; code_bytes], vec![0; record_bytes]);
    codes
        .par_chunks_mut(groups.units() * UNIT_BYTES)
        .zip(records.par_chunks_mut(groups.count() * RECORD_BYTES))
        .zip(rows.par_chunks(PANEL))
        .try_for_each(|((codes, records), rows)| {
            for (feature, &(part, row)) in rows.iter().enumerate() {
                if !pack_feature(&parts[part], row, groups, (codes, records), feature) {
                    return Err(TensorError::NotFinite { part, row });
                }
            }
            Ok(())
        })?;
    Ok((codes, records))
}

/// Writes a row to its place in a panel; returns whether its factors are finite.
fn pack_feature(
    matrix: &CodedMatrix,
    row: usize,
    groups: CodeGroups,
    (codes, records): (&mut [u8], &mut [u8]),
    feature: usize,
) -> bool {
    for (k, code) in matrix.codes[row * groups.columns..][..groups.columns]
        .iter()
        .enumerate()
    {
        assert!(*code < CODES);
        let k = k / groups.group * groups.padded() + k % groups.group;
        let (unit, step, at) = (k / UNIT, k % UNIT / STEP, k % STEP);
        // A lane has four columns of the step's first half in the lower halves of a word's bytes, and of its second half in the
        // upper ones.
        let lane = feature * 4 + at % 16 / 4;
        codes[unit * UNIT_BYTES + lane * 16 + step * 4 + at % 4] |= code << (at / 16 * 4);
    }
    let mut is_finite = true;
    for (group, record) in records.chunks_exact_mut(RECORD_BYTES).enumerate() {
        let at = row * groups.count() + group;
        let factor = matrix.factors[at];
        is_finite &= factor.is_finite();
        record[feature * 4..][..4].copy_from_slice(&factor.to_ne_bytes());
        let zero = matrix.zeros.as_ref().map_or(MIDDLE, |zeros| zeros[at]);
        assert!(zero < CODES);
        record[PANEL * 4 + feature] = zero;
    }
    is_finite
}

#[cfg(test)]
mod tests {
    use super::*;

    fn matrix(rows: usize, columns: usize, group: usize, has_zeros: bool) -> CodedMatrix {
        let count = rows * columns / group;
        CodedMatrix {
            rows,
            columns,
            group,
            codes: (0..rows * columns).map(|i| (i * 7 % 37 % 16) as u8).collect(),
            factors: (0..count).map(|i| i as f32 - 3.5).collect(),
            zeros: has_zeros.then(|| (0..count).map(|i| (i * 5 % 16) as u8).collect()),
        }
    }

    /// Each number is where the kernel's lanes look for it, also where groups are padded and a panel is of two matrices.
    #[test]
    fn codes_lie_as_products_take_them() {
        for (columns, group) in [(144, 144), (64, 8), (96, 32), (256, 128), (192, 96)] {
            let parts = [matrix(3, columns, group, true), matrix(9, columns, group, false)];
            let (codes, records) = pack(&parts).unwrap();
            let groups = CodeGroups { columns, group };
            for (feature, (part, row)) in (0..3).map(|r| (0, r)).chain((0..9).map(|r| (1, r))).enumerate() {
                let (panel, part) = (feature / PANEL, &parts[part]);
                for k in 0..columns {
                    let g = k / group;
                    let padded = g * groups.padded() + k % group;
                    // The fragment of `b` of m16n8k32: lane / 4 is the column, registers are 16 apart.
                    let (step, register, byte) = (padded / 32, padded % 32 / 16, padded % 4);
                    let lane = feature % 8 * 4 + padded % 16 / 4;
                    let unit = &codes[(panel * groups.units() + step / 4) * 512..][..512];
                    let code = unit[lane * 16 + step % 4 * 4 + byte] >> (register * 4) & 15;
                    assert_eq!(code, part.codes[row * columns + k]);
                    let record = &records[(panel * groups.count() + g) * RECORD_BYTES..][..RECORD_BYTES];
                    let factor = f32::from_ne_bytes(*record[feature % 8 * 4..].first_chunk().unwrap());
                    assert_eq!(factor, part.factors[row * groups.count() + g]);
                    let zero = part.zeros.as_ref().map_or(8, |zeros| zeros[row * groups.count() + g]);
                    assert_eq!(record[32 + feature % 8], zero);
                }
            }
        }
    }

    #[test]
    fn a_factor_that_is_not_finite_is_named() {
        let mut parts = [matrix(3, 64, 32, true), matrix(5, 64, 32, true)];
        parts[1].factors[7] = f32::NAN;
        let error = pack(&parts).unwrap_err();
        assert_eq!(error, TensorError::NotFinite { part: 1, row: 3 });
    }
}
