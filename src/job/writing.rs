//! Checks a job's settings for writing parts.

use super::check::{FieldError, bad, integer_in};
use super::file::{OutputFile, OutputFormat};
use crate::dataset::writing::{PartCodec, WriteOptions};

/// Minimum rows of a row group: a footer has an entry for each group.
const GROUP_ROWS_MIN: u32 = 100;
/// Maximum rows of a row group: no part has more rows.
const GROUP_ROWS_MAX: u32 = 1_000_000;

/// Checks the settings in a job file's `output` block.
pub(super) fn checked_writing(file: &OutputFile) -> Result<WriteOptions, FieldError> {
    let settings = [
        ("output.compression", file.compression.is_some()),
        ("output.compression_level", file.compression_level.is_some()),
        ("output.row_group_rows", file.row_group_rows.is_some()),
    ];
    let is_lines = file.format == Some(OutputFormat::Openai);
    if let Some((field, _)) = settings.into_iter().find(|(_, is_set)| *is_set && is_lines) {
        return bad(
            field,
            "is for `parquet` output; result lines in OpenAI's form are plain text",
        );
    }
    let default = WriteOptions::default();

    let writing = WriteOptions {
        codec: file.compression.unwrap_or_default(),
        level: file.compression_level.map(|level| level.try_into().unwrap_or(u32::MAX)),
        group_rows: integer_in(
            "output.row_group_rows",
            file.row_group_rows,
            default.group_rows,
            GROUP_ROWS_MIN,
            GROUP_ROWS_MAX,
        )?,
    };
    check_writing(&writing)?;
    Ok(writing)
}

/// Checks settings that come from a job file or from a record.
pub(super) fn check_writing(writing: &WriteOptions) -> Result<(), FieldError> {
    let WriteOptions {
        codec,
        level,
        group_rows,
    } = *writing;
    integer_in(
        "output.row_group_rows",
        Some(group_rows.into()),
        GROUP_ROWS_MIN,
        GROUP_ROWS_MIN,
        GROUP_ROWS_MAX,
    )?;
    match (level, WriteOptions::level_range(codec)) {
        (None, _) => Ok(()),
        (Some(level), Some((low, high))) if (low..=high).contains(&level) => Ok(()),
        (Some(_), Some((low, high))) => {
            let name = if codec == PartCodec::Gzip { "gzip" } else { "zstd" };
            bad(
                "output.compression_level",
                format!("must be from {low} to {high} for {name}"),
            )
        }
        (Some(_), None) => bad(
            "output.compression_level",
            "is for `zstd` and `gzip`; other compressions have no level",
        ),
    }
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;

    fn check(file: Value) -> Result<WriteOptions, String> {
        let mut all = json!({"uri": "out"});
        all.as_object_mut().unwrap().extend(file.as_object().unwrap().clone());
        let file = serde_json::from_value(all).map_err(|e| e.to_string())?;
        checked_writing(&file).map_err(|e| e.to_string())
    }

    #[test]
    fn levels_belong_to_their_codec() {
        for file in [
            json!({}),
            json!({"compression": "zstd", "compression_level": 22}),
            json!({"compression": "gzip", "compression_level": 1}),
            json!({"compression": "snappy", "row_group_rows": 100}),
            json!({"compression_level": 1, "row_group_rows": 1_000_000}),
        ] {
            assert!(check(file.clone()).is_ok(), "{file}");
        }
        assert_eq!(check(json!({"compression": "zstd"})).unwrap(), WriteOptions::default());
        for (file, message) in [
            (
                json!({"compression": "zstd", "compression_level": 23}),
                "must be from 1 to 22 for zstd",
            ),
            (
                json!({"compression": "gzip", "compression_level": 10}),
                "must be from 1 to 9 for gzip",
            ),
            (json!({"compression_level": 0}), "must be from 1 to 22"),
            (json!({"compression_level": -1}), "must be from 1 to 22"),
            (
                json!({"compression": "none", "compression_level": 1}),
                "other compressions have no level",
            ),
            (
                json!({"compression": "snappy", "compression_level": 1}),
                "other compressions have no level",
            ),
            (json!({"compression": "lz4"}), "unknown variant `lz4`"),
            (
                json!({"row_group_rows": 99}),
                "`output.row_group_rows` is 99; it must be from 100 to 1000000",
            ),
            (
                json!({"format": "openai", "compression": "zstd"}),
                "`output.compression` is for `parquet` output",
            ),
            (
                json!({"format": "openai", "row_group_rows": 100}),
                "`output.row_group_rows` is for `parquet` output",
            ),
        ] {
            let error = check(file.clone()).unwrap_err();
            assert!(error.contains(message), "{file}: {error}");
        }
    }
}
