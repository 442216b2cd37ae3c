//! Functions for the memory limit of carried columns (input columns that are copied to the output):
//! they measure rows, count the leading rows that fit, and replace the other rows by nulls.

use arrow::array::{ArrayRef, RecordBatch, new_null_array};
use arrow::compute::concat;

/// Memory of a batch's rows, in bytes; the batch may be a slice of a larger one.
pub fn memory_bytes(batch: &RecordBatch) -> usize {
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

/// The maximum number of leading rows that fit into `limit` bytes.
pub fn fitting_rows(batch: &RecordBatch, limit: usize) -> usize {
    if batch.num_columns() == 0 || memory_bytes(batch) <= limit {
        return batch.num_rows();
    }
    let (mut low, mut high) = (0, batch.num_rows());
    while low < high {
        let middle = (low + high).div_ceil(2);
        if memory_bytes(&batch.slice(0, middle)) <= limit {
            low = middle
        } else {
            high = middle - 1
        }
    }
    low
}

/// The batch with nulls from row `first_null` on.
pub fn with_nulls_from(batch: &RecordBatch, first_null: usize) -> Result<RecordBatch, arrow::error::ArrowError> {
    let with_nulls = |column: &ArrayRef| {
        let nulls = new_null_array(column.data_type(), batch.num_rows() - first_null);
        concat(&[column.slice(0, first_null).as_ref(), nulls.as_ref()])
    };
    let columns = batch.columns().iter().map(with_nulls).collect::<Result<Vec<_>, _>>()?;
    RecordBatch::try_new(batch.schema(), columns)
}
