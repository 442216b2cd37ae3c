//! Carried columns within their bound.

use arrow::array::{ArrayRef, RecordBatch, new_null_array};
use arrow::compute::concat;

/// Bytes of the rows of a batch, which may be a part of a larger one.
pub fn memory(batch: &RecordBatch) -> usize {
    let columns = batch.columns().iter();
    columns
        .map(|column| {
            column
                .to_data()
                .get_slice_memory_size()
                .unwrap_or_else(|_| column.get_array_memory_size())
        })
        .sum()
}

/// How many of the first rows take no more than `bytes`.
pub fn fitting_rows(batch: &RecordBatch, bytes: usize) -> usize {
    if batch.num_columns() == 0 || memory(batch) <= bytes {
        return batch.num_rows();
    }
    let (mut fit, mut most) = (0, batch.num_rows());
    while fit < most {
        let middle = (fit + most).div_ceil(2);
        match memory(&batch.slice(0, middle)) <= bytes {
            true => fit = middle,
            false => most = middle - 1,
        }
    }
    fit
}

/// The batch with nulls from row `at` on.
pub fn blank_from(batch: &RecordBatch, at: usize) -> Result<RecordBatch, arrow::error::ArrowError> {
    let blank = |column: &ArrayRef| {
        let nulls = new_null_array(column.data_type(), batch.num_rows() - at);
        concat(&[column.slice(0, at).as_ref(), nulls.as_ref()])
    };
    let columns = batch.columns().iter().map(blank).collect::<Result<Vec<_>, _>>()?;
    RecordBatch::try_new(batch.schema(), columns)
}
