//! The recheck of a finished job: how many of its rows are run again, and in which precision.

use super::check::{FieldError, bad};
use super::file::RecheckFile;
use super::suggest;
use crate::device::Precision;

/// A job's checked `report.recheck` block.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Recheck {
    /// Number of rows, at least 1; a job with fewer rows is rechecked completely.
    pub rows: u64,
    /// One of [`Recheck::PRECISIONS`].
    pub precision: Precision,
}

impl Default for Recheck {
    /// 200 rows: if 99 % of them agree, the 95 % confidence interval is about three percentage points
    /// wide.
    fn default() -> Self {
        Recheck {
            rows: 200,
            precision: Precision::F32,
        }
    }
}

impl Recheck {
    /// The precisions that a recheck computes in.
    pub const PRECISIONS: [Precision; 2] = [Precision::F32, Precision::Bf16];

    pub(super) fn check(raw: RecheckFile) -> Result<Recheck, FieldError> {
        let default = Recheck::default();
        let rows = match raw.rows.map(u64::try_from) {
            None => default.rows,
            Some(Ok(rows @ 1..)) => rows,
            Some(_) => {
                let rows = raw.rows.unwrap_or_default();
                return bad("report.recheck.rows", format!("is {rows}; it must be at least 1"));
            }
        };
        let precision = match raw.precision.as_deref() {
            None => default.precision,
            Some(known @ ("auto" | "int8")) => {
                return bad(
                    "report.recheck.precision",
                    format!("is `{known}`; it must be `f32` or `bf16`, higher than the job's own"),
                );
            }
            Some(word) => match Recheck::PRECISIONS.into_iter().find(|known| known.name() == word) {
                Some(precision) => precision,
                None => {
                    return bad(
                        "report.recheck.precision",
                        format!("is `{word}`{}", suggest(word, Recheck::PRECISIONS.map(Precision::name))),
                    );
                }
            },
        };
        Ok(Recheck { rows, precision })
    }
}
