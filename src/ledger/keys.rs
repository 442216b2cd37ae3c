//! Where everything lies below the output: the only place that spells a key.

use std::fmt;

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use super::error::{LedgerError, Result};

/// Created once; says which job the output belongs to.
pub const JOB: &str = "_gristmill/job.json";
/// Written last, when every row is published.
pub const SUCCESS: &str = "_SUCCESS";
/// Stages of local puts and the start-up probe; nothing here is ever read as truth.
pub const TMP: &str = "_gristmill/tmp";
/// Commits that one digest closes.
pub const SHARDS_PER_BLOCK: u32 = 100;

/// A random identifier in lower-case hex: of a job, an attempt, a nonce.
#[derive(Debug, Clone, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize, JsonSchema)]
#[serde(try_from = "String", into = "String")]
#[schemars(extend("pattern" = "^[0-9a-f]{20}$"))]
pub struct Id(String);

/// Hex digits of an id: 80 random bits, so that two are never equal in practice.
const ID_DIGITS: usize = 20;

impl Id {
    /// A new id from the operating system's randomness.
    pub fn random() -> Result<Id> {
        #[cfg(feature = "faults")]
        if let Some(bytes) = crate::faults::ids::next::<{ ID_DIGITS / 2 }>() {
            return Ok(Id(hex(&bytes)));
        }
        let mut bytes = [0u8; ID_DIGITS / 2];
        getrandom::fill(&mut bytes)
            .map_err(|error| LedgerError::stop(format!("the operating system gives no random bytes: {error}")))?;
        Ok(Id(hex(&bytes)))
    }

    pub fn as_str(&self) -> &str {
        &self.0
    }
}

/// Ids come from foreign bytes and become parts of keys: nothing but hex digits passes.
impl TryFrom<String> for Id {
    type Error = String;

    fn try_from(text: String) -> Result<Id, String> {
        let hex = text.len() == ID_DIGITS && text.bytes().all(|b| matches!(b, b'0'..=b'9' | b'a'..=b'f'));
        if hex {
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

/// Lower-case hex of `bytes`.
pub(crate) fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

/// SHA-256 of `bytes` in lower-case hex: the hash of every ledger record.
pub fn sha256(bytes: &[u8]) -> String {
    use sha2::Digest;
    hex(&sha2::Sha256::digest(bytes))
}

/// Whether `text` may be a worker's name: it becomes part of a key.
pub(crate) fn is_worker_name(text: &str) -> bool {
    (1..=64).contains(&text.len())
        && text
            .bytes()
            .all(|b| b.is_ascii_alphanumeric() || b == b'-' || b == b'_')
}

/// The keys of one job.
#[derive(Debug, Clone)]
pub struct Keys {
    /// Of the job.
    home: String,
    /// Of the generation: the job's own for the first one.
    generation_home: String,
    part_digits: usize,
    part_extension: String,
}

impl Keys {
    /// Keys of `job` with `shards` shards whose parts end in `part_extension` (no dot).
    pub fn new(job: &Id, shards: u32, part_extension: &str) -> Keys {
        // Names of one job have one width, so that sorting names is sorting rows.
        let part_digits = shards.saturating_sub(1).to_string().len().max(5);
        let home = format!("_gristmill/{job}");
        Keys {
            generation_home: home.clone(),
            home,
            part_digits,
            part_extension: part_extension.to_string(),
        }
    }

    /// The keys of the same job's `generation`: parts, orders and spendings are the job's, all else lies apart.
    pub fn of_generation(&self, generation: u32) -> Keys {
        Keys {
            generation_home: match generation {
                0 => self.home.clone(),
                later => format!("{}/gen/{later:03}", self.home),
            },
            ..self.clone()
        }
    }

    /// What a retry set out to do.
    pub fn generation(&self, generation: u32) -> String {
        format!("{}/gen/{generation:03}.json", self.home)
    }

    /// The rows of one block that the retry of that `nonce` set out to do.
    pub fn retried_rows(&self, generation: u32, nonce: &Id, block: u32) -> String {
        format!("{}/gen/{generation:03}/rows/{nonce}-{block:06}.json", self.home)
    }

    /// Says that the generation's logs, data and attempts may be gone.
    pub fn cleaned(&self) -> String {
        format!("{}/cleaned.json", self.generation_home)
    }

    /// Says that the end of the generation was told.
    pub fn told(&self) -> String {
        format!("{}/told.json", self.generation_home)
    }

    /// `part-00042.parquet`
    pub fn part(&self, shard: u32) -> String {
        format!("part-{shard:0width$}.{}", self.part_extension, width = self.part_digits)
    }

    /// Everything of one shard lies below this.
    pub fn shard(&self, shard: u32) -> String {
        format!("{}/shards/{shard:06}", self.generation_home)
    }

    /// Below this lie all shards.
    pub fn shards(&self) -> String {
        format!("{}/shards", self.generation_home)
    }

    pub fn log(&self, shard: u32, index: u32) -> String {
        format!("{}/log/{index:06}.json", self.shard(shard))
    }

    /// Whether `key` is one of [`Keys::log`]'s.
    pub(super) fn is_log_record(key: &str) -> bool {
        key.rsplit('/').nth(1) == Some("log")
    }

    /// Whether `name` is the last part of one of [`Keys::log`]'s.
    pub(super) fn is_log_name(name: &str) -> bool {
        let index = name.strip_suffix(".json");
        index.is_some_and(|digits| digits.parse::<u32>().is_ok_and(|index| format!("{index:06}") == digits))
    }

    /// The data object of that name (see [`Keys::data_name`]).
    pub fn data(&self, shard: u32, name: &str) -> String {
        format!("{}/data/{name}", self.shard(shard))
    }

    /// A name that no other attempt can have. It is Parquet, but does not say so: many readers of a folder take every
    /// `*.parquet` below it, and would count these rows beside those of the parts.
    pub fn data_name(attempt: &Id, count: u32) -> String {
        format!("{attempt}-{count}.rows")
    }

    /// Whether `name` can have come from [`Keys::data_name`], or from an older gristmill's, which ended in `.parquet`.
    pub fn is_data_name(name: &str) -> bool {
        let stem = name.strip_suffix(".rows").or(name.strip_suffix(".parquet"));
        let Some((attempt, count)) = stem.and_then(|stem| stem.split_once('-')) else {
            return false;
        };
        Id::try_from(attempt.to_string()).is_ok() && count.parse::<u32>().is_ok_and(|n| n.to_string() == count)
    }

    pub fn attempt(&self, shard: u32, attempt: &Id) -> String {
        format!("{}/attempts/{attempt}.json", self.shard(shard))
    }

    /// Written beside the attempt when it ends cleanly: a key of its own, so that no late put can undo it.
    pub fn attempt_end(&self, shard: u32, attempt: &Id) -> String {
        format!("{}/attempts/{attempt}.end.json", self.shard(shard))
    }

    pub fn block(shard: u32) -> u32 {
        shard / SHARDS_PER_BLOCK
    }

    /// Below this lie the commits of one block.
    pub fn commits(&self, block: u32) -> String {
        format!("{}/commits/{block:06}", self.generation_home)
    }

    pub fn commit(&self, shard: u32) -> String {
        format!("{}/{shard:06}.json", self.commits(Keys::block(shard)))
    }

    /// Below this lie the digests of all closed blocks.
    pub fn digests(&self) -> String {
        format!("{}/digests", self.generation_home)
    }

    pub fn digest(&self, block: u32) -> String {
        format!("{}/{block:06}.json", self.digests())
    }

    pub fn control(&self, index: u32) -> String {
        format!("{}/control/{index:03}.json", self.home)
    }

    /// Below this lie all workers' spendings.
    pub fn spends(&self) -> String {
        format!("{}/spend", self.home)
    }

    pub fn spend(&self, worker: &str) -> String {
        format!("{}/{worker}.json", self.spends())
    }

    /// The worker whose spending lies at `key`; `None`: it is none of [`Keys::spend`]'s.
    pub fn worker_of_spend<'a>(&self, key: &'a str) -> Option<&'a str> {
        let name = key.strip_prefix(&self.spends())?.strip_prefix('/')?;
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
