//! Commands to all workers of a job: the records of its control log. (In records and in the schema
//! they are called orders.)

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use super::job::{DEADLINE_MAX, Unfinished};
use super::keys::Id;
use super::record::{Record, SMALL_RECORD_BYTES, VERSION, VERSION_2, is_false, is_zero};
use crate::dataset::store::job_inputs::VerifiedVersion;
use crate::dataset::store::pinned_file::FileVersion;

/// Version of a command that a gristmill which reads up to [`VERSION_2`] does not know. Such a
/// gristmill must report the record as newer, and not as damaged.
const PIN_VERSION_3: u32 = 3;

/// `control/000.json`: what somebody decided about the job; the last one holds.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
#[schemars(transform = crate::signing::add_signature_field)]
pub struct ControlRecord {
    pub v: u32,
    pub job: Id,
    pub index: u32,
    pub nonce: Id,
    /// The generation that a stop is meant for: a later retry is not stopped by it.
    #[serde(default, skip_serializing_if = "is_zero")]
    pub generation: u32,
    #[serde(flatten)]
    pub command: JobCommand,
}

impl Record for ControlRecord {
    const MAX_BYTES: u64 = SMALL_RECORD_BYTES;
    const NEWEST: u32 = PIN_VERSION_3;
    const SIGNED: bool = true;

    fn check(&self) -> Result<(), String> {
        let JobCommand::Extend(extend) = &self.command else {
            return Ok(());
        };
        let price = extend.price.and_then(|price| price.usd_per_hour);
        for (field, amount) in [("budget_usd", extend.budget_usd), ("usd_per_hour", price)] {
            if amount.is_some_and(|usd| !usd.is_finite() || usd < 0.0) {
                return Err(format!("`{field}` is not an amount"));
            }
        }
        match extend.deadline_seconds {
            Some(seconds) if seconds > DEADLINE_MAX => {
                Err(format!("`deadline_seconds` is {seconds}: no job waits so long"))
            }
            _ => Ok(()),
        }
    }
}

/// An order to all workers of a job.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(tag = "order", rename_all = "snake_case")]
pub enum JobCommand {
    /// Start no further rows.
    Stop {
        why: StopWhy,
        /// Unfinished rows become `expired` or `cancelled` rows, and the job ends.
        #[serde(default, skip_serializing_if = "is_false")]
        close: bool,
        /// For people: what was found, in one line.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        note: Option<String>,
    },
    /// Go on, within these limits in place of those that held.
    Extend(Extension),
    /// No order to stop or go on: an input holds the planned bytes under another ETag.
    Pin(PinOrder),
}

/// An input that was held against the hash of the plan, and is the same.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct PinOrder {
    /// Index into the job's inputs.
    pub input: u32,
    /// As planned: the bytes are the same.
    pub size: u64,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub etag: Option<String>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub version: Option<String>,
}

impl From<&PinOrder> for VerifiedVersion {
    fn from(order: &PinOrder) -> VerifiedVersion {
        VerifiedVersion {
            input: order.input,
            version: FileVersion {
                etag: order.etag.clone(),
                version: order.version.clone(),
            },
        }
    }
}

impl JobCommand {
    /// A stop without a note.
    pub fn stop(why: StopWhy, close: bool) -> JobCommand {
        JobCommand::Stop { why, close, note: None }
    }

    /// Size of the command's texts in bytes.
    pub(super) fn text_bytes(&self) -> usize {
        let length = |text: &Option<String>| text.as_ref().map_or(0, String::len);
        match self {
            JobCommand::Stop { note, .. } => length(note),
            JobCommand::Extend(_) => 0,
            JobCommand::Pin(pin) => length(&pin.etag) + length(&pin.version),
        }
    }

    /// Lowest record version that can hold this command.
    pub(super) fn min_version(&self) -> u32 {
        match self {
            JobCommand::Stop { .. } => VERSION,
            JobCommand::Extend(extend) => extend.min_version(),
            JobCommand::Pin(_) => PIN_VERSION_3,
        }
    }
}

/// The limits that hold from here on.
#[derive(Debug, Clone, Copy, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct Extension {
    /// `None`: without.
    pub budget_usd: Option<f64>,
    /// `None`: without.
    pub deadline_seconds: Option<u64>,
    /// `None`: as before.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub unfinished: Option<Unfinished>,
    /// `None`: as before.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub price: Option<Price>,
    /// Who said so; `None`: nobody wrote it down.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub from: Option<LimitsFrom>,
}

impl Extension {
    /// Lowest record version that can hold this command. A gristmill that reads up to [`VERSION`]
    /// knows only budget and deadline.
    pub(super) fn min_version(&self) -> u32 {
        match (self.unfinished, self.price) {
            (None, None) => VERSION,
            _ => VERSION_2,
        }
    }
}

/// What a device hour costs.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct Price {
    /// `None`: the job has no price.
    pub usd_per_hour: Option<f64>,
}

/// Where limits come from.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum LimitsFrom {
    /// The job file, as it was when `run` or `submit` read it.
    JobFile,
    /// The command `extend`.
    Extend,
}

/// Why a job was stopped.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum StopWhy {
    Budget,
    Deadline,
    Cancelled,
    /// An input is not what it was when the job was planned.
    InputChanged,
}
