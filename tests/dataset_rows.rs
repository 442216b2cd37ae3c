//! What the tests of inputs share: plans, and all rows of one.

use arrow::array::RecordBatch;
use arrow::compute::concat_batches;
use gristmill::dataset::{DatasetError, InputPlan, InputRow, PlanRequest, ShardReader};
use serde_json::Value;

/// Two rows a shard.
pub(crate) fn request(uris: &[&str], carry: &[&str]) -> PlanRequest {
    PlanRequest {
        uris: uris.iter().map(|s| s.to_string()).collect(),
        format: None,
        csv: Default::default(),
        options: Default::default(),
        used_columns: None,
        columns: None,
        carry: carry.iter().map(|s| s.to_string()).collect(),
        reserved: vec!["row".into()],
        shard_rows: 2,
        output_row_bytes: 100,
        limit: None,
        output: None,
    }
}

/// All rows of a plan and the carried columns of each shard, read a shard at a time, the plan taken through its text form.
pub(crate) async fn read_shards(
    plan: &InputPlan,
    columns: Option<Vec<String>>,
) -> Result<(Vec<InputRow>, Vec<RecordBatch>), DatasetError> {
    let plan: InputPlan = serde_json::from_str(&serde_json::to_string(plan).unwrap()).unwrap();
    let reader =
        ShardReader::new(plan.files.clone(), plan.carry_schema.clone(), columns).with_layout(plan.layout.clone());
    let (mut rows, mut carry) = (Vec::new(), Vec::new());
    for shard in &plan.shards {
        let read = reader.read(shard).await?;
        assert_eq!((read.first_row, read.rows.len() as u64), (shard.first_row, shard.rows));
        assert_eq!(read.carry.num_rows(), read.rows.len());
        rows.extend(read.rows);
        carry.push(read.carry);
    }
    let numbers: Vec<u64> = rows.iter().map(|r| r.row).collect();
    assert_eq!(numbers, (0..plan.total_rows).collect::<Vec<_>>());
    Ok((rows, carry))
}

/// As [`read_shards`], the carried columns in one.
pub(crate) async fn read_all(
    plan: &InputPlan,
    columns: Option<Vec<String>>,
) -> Result<(Vec<InputRow>, RecordBatch), DatasetError> {
    let (rows, carry) = read_shards(plan, columns).await?;
    Ok((rows, concat_batches(&plan.carry_schema, &carry).unwrap()))
}

/// The fields of each row, or why there are none.
pub(crate) fn fields(rows: &[InputRow]) -> Vec<Result<Value, String>> {
    rows.iter().map(|r| r.fields.clone().map(Value::Object)).collect()
}
