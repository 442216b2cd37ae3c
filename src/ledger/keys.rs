//! The layout of keys below the output. Only this module builds keys.

use std::fmt;

use data_encoding::HEXLOWER;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use super::error::{LedgerError, Result};

/// The job record, created once: names the job that the output belongs to.
pub const JOB: &str = "_gristmill/job.json";
/// The result of the job, written last, when every row is published.
pub const SUCCESS: &str = "_SUCCESS";
/// Folder of the temporary files of local puts (`stage.rs`) and of the start-up probe. The ledger
/// never reads its state from here.
pub const TMP: &str = "_gristmill/tmp";
/// Number of commits in one digest.
pub const SHARDS_PER_BLOCK: u32 = 100;

/// A random identifier in lower-case hex: of a job, an attempt, a nonce.
#[derive(Debug, Clone, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize, JsonSchema)]
#[serde(try_from = "String", into = "String")]
#[schemars(extend("pattern" = "^[0-9a-f]{20}$"))]
pub struct Id(String);

/// Hex digits of an id: 80 random bits, so that two ids are never equal in practice.
const ID_DIGITS: usize = 20;

impl Id {
    /// A new id from the operating system's randomness.
    pub fn random() -> Result<Id> {
        #[cfg(feature = "faults")]
        if let Some(bytes) = crate::faults::ids::next_id::<{ ID_DIGITS / 2 }>() {
            return Ok(Id(HEXLOWER.encode(&bytes)));
        }
        let mut bytes = [0u8; ID_DIGITS / 2];
        getrandom::fill(&mut bytes)
            .map_err(|error| LedgerError::stop(format!("the operating system gives no random bytes: {error}")))?;
        Ok(Id(HEXLOWER.encode(&bytes)))
    }

    pub fn as_str(&self) -> &str {
        &self.0
    }
}

/// Ids are read from foreign bytes and become parts of keys, so only hex digits are accepted.
impl TryFrom<String> for Id {
    type Error = String;

    fn try_from(text: String) -> Result<Id, String> {
        let is_hex = text.len() == ID_DIGITS && text.bytes().all(|b| matches!(b, b'0'..=b'9' | b'a'..=b'f'));
        if is_hex {
            Ok(Id(text))
        } else {
            Err(format!("an id is {ID_DIGITS} lower-case hex digits"))
        }
    }
}

impl From<Id> for String {
    fn from(id: Id) -> String {
        id.0
    }
}

impl fmt::Display for Id {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

/// SHA-256 of `bytes` in lower-case hex: the hash of every ledger record.
pub fn sha256(bytes: &[u8]) -> String {
    use sha2::Digest;
    HEXLOWER.encode(&sha2::Sha256::digest(bytes))
}

/// Whether `text` is a valid worker name, which becomes part of a key.
pub(crate) fn is_worker_name(text: &str) -> bool {
    (1..=64).contains(&text.len())
        && text
            .bytes()
            .all(|b| b.is_ascii_alphanumeric() || b == b'-' || b == b'_')
}

/// The keys of one job.
#[derive(Debug, Clone)]
pub struct Keys {
    /// Prefix of the keys of the job.
    job_prefix: String,
    /// Prefix of the keys of the generation; equal to `home` for generation 0.
    generation_prefix: String,
    part_digits: usize,
    part_extension: String,
}

impl Keys {
    /// Keys of `job` with `shards` shards whose parts end in `part_extension` (no dot).
    pub fn new(job: &Id, shards: u32, part_extension: &str) -> Keys {
        // All part names of a job have equal length, so that name order is row order.
        let part_digits = shards.saturating_sub(1).to_string().len().max(5);
        let job_prefix = format!("_gristmill/{job}");
        Keys {
            generation_prefix: job_prefix.clone(),
            job_prefix,
            part_digits,
            part_extension: part_extension.to_string(),
        }
    }

    /// The keys of the same job at `generation`. All generations share parts, commands and
    /// spendings.
    pub fn at_generation(&self, generation: u32) -> Keys {
        Keys {
            generation_prefix: match generation {
                0 => self.job_prefix.clone(),
                later => format!("{}/gen/{later:03}", self.job_prefix),
            },
            ..self.clone()
        }
    }

    /// The record of a retry.
    pub fn generation(&self, generation: u32) -> String {
        format!("{}/gen/{generation:03}.json", self.job_prefix)
    }

    /// The rows of one block of shards in the retry with that `nonce`.
    pub fn retried_rows(&self, generation: u32, nonce: &Id, block: u32) -> String {
        format!("{}/gen/{generation:03}/rows/{nonce}-{block:06}.json", self.job_prefix)
    }

    /// The mark that the logs, data and attempts of the generation may be gone.
    pub fn cleaned_mark(&self) -> String {
        format!("{}/cleaned.json", self.generation_prefix)
    }

    /// The mark that the end of the generation was announced (see `told.rs`).
    pub fn told_mark(&self) -> String {
        format!("{}/told.json", self.generation_prefix)
    }

    /// `part-00042.parquet`
    pub fn part(&self, shard: u32) -> String {
        format!("part-{shard:0width$}.{}", self.part_extension, width = self.part_digits)
    }

    /// Prefix of all keys of one shard.
    pub fn shard_prefix(&self, shard: u32) -> String {
        format!("{}/shards/{shard:06}", self.generation_prefix)
    }

    /// Prefix of the keys of all shards.
    pub fn shards_prefix(&self) -> String {
        format!("{}/shards", self.generation_prefix)
    }

    pub fn log(&self, shard: u32, index: u32) -> String {
        format!("{}/log/{index:06}.json", self.shard_prefix(shard))
    }

    /// Whether `key` has the form of [`Keys::log`].
    pub(super) fn is_log_record(key: &str) -> bool {
        key.rsplit('/').nth(1) == Some("log")
    }

    /// Whether `name` is a file name in the form of [`Keys::log`].
    pub(super) fn is_log_name(name: &str) -> bool {
        let index = name.strip_suffix(".json");
        index.is_some_and(|digits| digits.parse::<u32>().is_ok_and(|index| format!("{index:06}") == digits))
    }

    /// The key of the data object of that name (see [`Keys::data_name`]).
    pub fn data(&self, shard: u32, name: &str) -> String {
        format!("{}/data/{name}", self.shard_prefix(shard))
    }

    /// The name of a data object: the attempt that wrote it, and a count within the attempt. The
    /// object is Parquet, but its name does not end in `.parquet`: many readers of a folder read
    /// every `*.parquet` below it, and would count its rows in addition to those of the parts.
    pub fn data_name(attempt: &Id, count: u32) -> String {
        format!("{attempt}-{count}.rows")
    }

    /// Whether `name` has the form of [`Keys::data_name`], or the form of an older gristmill, whose
    /// names ended in `.parquet`.
    pub fn is_data_name(name: &str) -> bool {
        let stem = name.strip_suffix(".rows").or(name.strip_suffix(".parquet"));
        let Some((attempt, count)) = stem.and_then(|stem| stem.split_once('-')) else {
            return false;
        };
        Id::try_from(attempt.to_string()).is_ok() && count.parse::<u32>().is_ok_and(|n| n.to_string() == count)
    }

    pub fn attempt(&self, shard: u32, attempt: &Id) -> String {
        format!("{}/attempts/{attempt}.json", self.shard_prefix(shard))
    }

    /// The record that an attempt ended cleanly. It has a key of its own, so that no late put of
    /// the attempt's record can replace it.
    pub fn attempt_end(&self, shard: u32, attempt: &Id) -> String {
        format!("{}/attempts/{attempt}.end.json", self.shard_prefix(shard))
    }

    pub fn block_of(shard: u32) -> u32 {
        shard / SHARDS_PER_BLOCK
    }

    /// Prefix of the commits of one block.
    pub fn commits_prefix(&self, block: u32) -> String {
        format!("{}/commits/{block:06}", self.generation_prefix)
    }

    pub fn commit(&self, shard: u32) -> String {
        format!("{}/{shard:06}.json", self.commits_prefix(Keys::block_of(shard)))
    }

    /// Prefix of the digests of all closed blocks.
    pub fn digests_prefix(&self) -> String {
        format!("{}/digests", self.generation_prefix)
    }

    pub fn digest(&self, block: u32) -> String {
        format!("{}/{block:06}.json", self.digests_prefix())
    }

    pub fn control(&self, index: u32) -> String {
        format!("{}/control/{index:03}.json", self.job_prefix)
    }

    /// Prefix of the spendings of all workers.
    pub fn spends_prefix(&self) -> String {
        format!("{}/spend", self.job_prefix)
    }

    pub fn spend(&self, worker: &str) -> String {
        format!("{}/{worker}.json", self.spends_prefix())
    }

    /// The worker whose spending has this `key`. `None`: the key is no spending.
    pub fn worker_of_spend<'a>(&self, key: &'a str) -> Option<&'a str> {
        let name = key.strip_prefix(&self.spends_prefix())?.strip_prefix('/')?;
        name.strip_suffix(".json").filter(|worker| is_worker_name(worker))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn layout() {
        let job = Id::try_from("0123456789abcdef0123".to_string()).unwrap();
        let keys = Keys::new(&job, 43, "parquet");
        assert_eq!(keys.part(42), "part-00042.parquet");
        assert_eq!(
            keys.log(42, 0),
            "_gristmill/0123456789abcdef0123/shards/000042/log/000000.json"
        );
        assert_eq!(
            keys.commit(142),
            "_gristmill/0123456789abcdef0123/commits/000001/000142.json"
        );
        assert_eq!(keys.control(0), "_gristmill/0123456789abcdef0123/control/000.json");
    }

    #[test]
    fn part_names_sort_as_rows_do_in_large_jobs() {
        let keys = Keys::new(&Id::random().unwrap(), 123_456, "parquet");
        assert!(keys.part(99_999) < keys.part(100_000));
    }

    #[test]
    fn foreign_names_cannot_leave_their_folder() {
        for bad in [
            "",
            "../../etc",
            "0123456789ABCDEF0123",
            "0123456789abcdef012/",
            "0123456789abcdef01234",
        ] {
            assert!(Id::try_from(bad.to_string()).is_err(), "{bad}");
        }
        let good = Keys::data_name(&Id::random().unwrap(), 7);
        assert!(good.ends_with("-7.rows") && Keys::is_data_name(&good), "{good}");
        let older = good.replace(".rows", ".parquet");
        assert!(Keys::is_data_name(&older), "{older}");
        for bad in [
            "../x-1.rows",
            "0123456789abcdef0123-+1.rows",
            "0123456789abcdef0123-1.rows/../x",
            "0123456789abcdef0123-1.rows.parquet",
            "0123456789abcdef0123-1.json",
            "a-1",
        ] {
            assert!(!Keys::is_data_name(bad), "{bad}");
        }
        assert!(is_worker_name("host-1_a") && !is_worker_name("a/b") && !is_worker_name("..") && !is_worker_name(""));
    }
}
