//! The ledger as one JSON Schema: an object that maps keys below the output to the records there.

use schemars::generate::SchemaSettings;
use serde_json::{Map, Value, json};

use super::entry::LogEntry;
use super::job::JobRecord;
use super::order::ControlRecord;
use super::record::{AttemptEnd, AttemptRecord, CleanedMark, Commit, Digest, Generation, RetriedRows, Spend, Success};
use super::told::ToldMark;

/// The schema in `schemas/ledger.schema.json`. Parts and data objects, which are no
/// records, are left out.
pub fn schema() -> Value {
    let home = "_gristmill/[0-9a-f]{20}";
    // The keys of the first generation are directly below `home`, and each retry has a folder of
    // its own.
    let generation = format!("{home}(/gen/[0-9]{{3,}})?");
    let shard = format!("{generation}/shards/[0-9]{{6}}");
    let mut generator = SchemaSettings::draft2020_12().into_generator();
    let records = [
        ("_SUCCESS".to_string(), generator.subschema_for::<Success>()),
        ("_gristmill/job[.]json".into(), generator.subschema_for::<JobRecord>()),
        (
            format!("{shard}/log/[0-9]{{6}}[.]json"),
            generator.subschema_for::<LogEntry>(),
        ),
        (
            format!("{shard}/attempts/[0-9a-f]{{20}}[.]json"),
            generator.subschema_for::<AttemptRecord>(),
        ),
        (
            format!("{shard}/attempts/[0-9a-f]{{20}}[.]end[.]json"),
            generator.subschema_for::<AttemptEnd>(),
        ),
        (
            format!("{generation}/commits/[0-9]{{6}}/[0-9]{{6}}[.]json"),
            generator.subschema_for::<Commit>(),
        ),
        (
            format!("{generation}/digests/[0-9]{{6}}[.]json"),
            generator.subschema_for::<Digest>(),
        ),
        (
            format!("{generation}/cleaned[.]json"),
            generator.subschema_for::<CleanedMark>(),
        ),
        (
            format!("{generation}/told[.]json"),
            generator.subschema_for::<ToldMark>(),
        ),
        (
            format!("{home}/gen/[0-9]{{3,}}[.]json"),
            generator.subschema_for::<Generation>(),
        ),
        (
            format!("{home}/gen/[0-9]{{3,}}/rows/[0-9a-f]{{20}}-[0-9]{{6}}[.]json"),
            generator.subschema_for::<RetriedRows>(),
        ),
        (
            format!("{home}/control/[0-9]{{3,}}[.]json"),
            generator.subschema_for::<ControlRecord>(),
        ),
        (
            format!("{home}/spend/[A-Za-z0-9_-]{{1,64}}[.]json"),
            generator.subschema_for::<Spend>(),
        ),
    ];
    let patterns: Map<String, Value> = records
        .into_iter()
        .map(|(key, record)| (format!("^{key}$"), record.to_value()))
        .collect();
    json!({
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "gristmill ledger",
        "description": "The records of a job's ledger, by their keys below the job's output.",
        "type": "object",
        "patternProperties": patterns,
        "additionalProperties": false,
        "$defs": generator.take_definitions(true),
    })
}
