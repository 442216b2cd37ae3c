//! Sums of products of channels over rows, `XᵀX`: by these, weights are rounded so that what a layer
//! computes changes least.

use super::gemm::linear::{Epilogue, PackedRows, linear};
use super::gemm::matrix::Matrix;
use super::{Buffer, ExecContext, Isa, Threads};
use crate::device::{Dtype, Precision, Tensor, TensorError};

/// Adds the products of each two channels of `x`, over its rows, to `sums`, `[width][width]`.
///
/// # Errors
/// A number of `x` cannot be packed.
pub fn add_gram(threads: &Threads, x: &Buffer, sums: &mut [f32]) -> Result<(), TensorError> {
    let (rows, width) = (x.rows, x.width);
    assert_eq!(sums.len(), width * width);
    let mut channels = Buffer::default();
    channels.reshape(width, rows);
    for (i, row) in x.rows().enumerate() {
        for (channel, value) in row.iter().enumerate() {
            channels.data[channel * rows + i] = *value;
        }
    }
    let data: Vec<u8> = channels.data.iter().flat_map(|x| x.to_le_bytes()).collect();
    let tensor = Tensor {
        dtype: Dtype::F32,
        rows: width,
        columns: rows,
        data: &data,
    };
    let matrix = Matrix::pack(&[tensor], Precision::F32)?;
    let ctx = ExecContext {
        isa: Isa::detect(),
        threads,
    };
    let epilogue = Epilogue::default();
    let mut products = Buffer::default();
    linear(
        ctx,
        &matrix,
        width,
        epilogue,
        &channels,
        &mut products,
        &mut PackedRows::default(),
    );
    sums.iter_mut().zip(&*products.data).for_each(|(sum, x)| *sum += x);
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::super::testing::{buffer, numbers};
    use super::*;

    #[test]
    fn products_are_summed_over_rows_and_calls() {
        let (rows, width) = (37, 21);
        let values = numbers(4, rows * width);
        let threads = Threads::new(2).unwrap();
        let mut sums = vec![0.0; width * width];
        add_gram(&threads, &buffer(&values[..20 * width], 20, width), &mut sums).unwrap();
        add_gram(&threads, &buffer(&values[20 * width..], rows - 20, width), &mut sums).unwrap();
        for i in 0..width {
            for j in 0..width {
                let product = |row: usize| f64::from(values[row * width + i]) * f64::from(values[row * width + j]);
                let wanted: f64 = (0..rows).map(product).sum();
                assert!((f64::from(sums[i * width + j]) - wanted).abs() < 1e-4, "{i} {j}");
            }
        }
    }
}
