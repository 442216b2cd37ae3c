//! What the targets of table files share.

use gristmill::dataset::{PlanRequest, ShardReader, plan_inputs};

/// Plans and reads a table file of these bytes.
pub fn plan_and_read(name: &str, data: &[u8]) {
    let dir = tempfile::tempdir().expect("a temporary folder");
    std::fs::write(dir.path().join(name), data).expect("a temporary file");
    let runtime = tokio::runtime::Builder::new_current_thread()
        .build()
        .expect("a runtime");
    runtime.block_on(async {
        let request = PlanRequest {
            uris: vec![name.into()],
            format: None,
            csv: Default::default(),
            options: Default::default(),
            used_columns: None,
            columns: None,
            carry: Vec::new(),
            reserved: Vec::new(),
            shard_rows: 100,
            output_row_bytes: 100,
            limit: Some(1000),
            output: None,
        };
        let Ok(plan) = plan_inputs(&request, dir.path()).await else {
            return;
        };
        let reader = ShardReader::new(plan.files.clone(), plan.carry_schema.clone(), None);
        for shard in &plan.shards {
            let _ = reader.read(shard).await;
        }
    });
}
