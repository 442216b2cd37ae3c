//! Size limits on carried columns.

use arrow::array::{ArrayRef, RecordBatch, new_null_array};
use arrow::compute::concat;

/// Memory of a batch's rows; the batch may be a slice of a larger one.
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

/// The maximum number of leading rows that fit into `bytes`.
pub fn fitting_rows(batch: &RecordBatch, bytes: usize) -> usize {
    if batch.num_columns() == 0 || memory(batch) <= bytes {
        return batch.num_rows();
    }
    let (mut fit, mut most) = (0, batch.num_rows());
    while fit < most {
        let middle = (fit + most).div_ceil(2);
        if memory(&batch.slice(0, middle)) <= bytes {
            fit = middle
        } else {
            most = middle - 1
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
