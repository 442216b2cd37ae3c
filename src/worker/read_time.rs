//! The maximum time that the reads of a shard may wait for the store of its inputs. Waiting for
//! memory, rendering, and decompressing the rows before the shard do not count.

use std::time::{Duration, Instant};

use crate::dataset::DatasetError;

/// Maximum time at the first try; doubles with each try. During the reads, the intake begins no
/// other shard.
const READ_MAX: Duration = Duration::from_secs(60);

/// Time in which the reader decompresses at this rate or faster counts as work of this machine, not
/// as waiting for the store.
const DECOMPRESSED_BYTES_PER_SECOND: f64 = 4.0 * 1024.0 * 1024.0;
/// Minimum time between two checks of the number of decompressed bytes.
const CHECK_WAIT_MIN: Duration = Duration::from_millis(100);

/// See the module's description.
#[derive(Debug)]
pub(super) struct ReadTime {
    output: String,
    /// `None`: unbounded.
    time_max: Option<Duration>,
    time_used: Duration,
}

impl ReadTime {
    /// Unbounded time for a shard of the job in `output`, for when no other shard waits.
    pub(super) fn unbounded(output: String) -> ReadTime {
        ReadTime {
            output,
            time_max: None,
            time_used: Duration::ZERO,
        }
    }

    /// Time for a shard of the job in `output` after this many earlier tries.
    pub(super) fn for_try(output: String, earlier_tries: u32) -> ReadTime {
        ReadTime {
            time_max: Some(READ_MAX.saturating_mul(1 << earlier_tries.min(10))),
            ..ReadTime::unbounded(output)
        }
    }

    /// Waits for `read`, as long as time is left. `decompressed_bytes`: returns the bytes
    /// decompressed so far.
    pub(super) async fn wait_for<T, E: From<DatasetError>>(
        &mut self,
        read: impl Future<Output = Result<T, E>>,
        decompressed_bytes: impl Fn() -> u64,
    ) -> Result<T, E> {
        let Some(time_max) = self.time_max else {
            return read.await;
        };
        let mut read = std::pin::pin!(read);
        loop {
            let (began, before) = (Instant::now(), decompressed_bytes());
            let left = time_max.saturating_sub(self.time_used).max(CHECK_WAIT_MIN);
            let answered = tokio::time::timeout(left, &mut read).await;
            let new_bytes = decompressed_bytes().saturating_sub(before);
            let decompression_seconds = new_bytes as f64 / DECOMPRESSED_BYTES_PER_SECOND;
            self.time_used += began
                .elapsed()
                .saturating_sub(Duration::from_secs_f64(decompression_seconds));
            match answered {
                Ok(answer) => return answer,
                Err(_) if self.time_used >= time_max => return Err(DatasetError::slow(&self.output, time_max).into()),
                Err(_) => {}
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SHORT: Duration = Duration::from_millis(400);

    fn short() -> ReadTime {
        ReadTime {
            time_max: Some(SHORT),
            ..ReadTime::unbounded("s3://a/out".into())
        }
    }

    async fn answer_after(share: u32) -> Result<u32, DatasetError> {
        tokio::time::sleep(SHORT / share).await;
        Ok(share)
    }

    #[tokio::test]
    async fn only_waiting_for_the_store_counts() {
        let mut time = short();
        for _ in 0..3 {
            // For example, waiting for memory for carried columns.
            tokio::time::sleep(SHORT).await;
            assert_eq!(time.wait_for(answer_after(20), || 0).await.unwrap(), 20);
        }
    }

    #[tokio::test]
    async fn the_reads_of_one_try_share_its_time() {
        let mut time = short();
        assert!(time.wait_for(answer_after(2), || 0).await.is_ok());
        let error = time.wait_for(answer_after(1), || 0).await.unwrap_err();
        assert!(error.to_string().contains("s3://a/out"), "{error}");
        let mut unbounded = ReadTime::unbounded(String::new());
        assert!(unbounded.wait_for(answer_after(1), || 0).await.is_ok());
    }

    /// A shard far behind in a compressed file is read to its end, however long decompressing the
    /// rows before it takes.
    #[tokio::test]
    async fn decompressing_is_no_slowness() {
        let made = std::cell::Cell::new(0);
        let unpacks = async {
            for _ in 0..20 {
                tokio::time::sleep(SHORT / 10).await;
                made.set(made.get() + DECOMPRESSED_BYTES_PER_SECOND as u64);
            }
            Ok::<_, DatasetError>(1)
        };
        assert_eq!(short().wait_for(unpacks, || made.get()).await.unwrap(), 1);
        // A trickle is slowness.
        let trickles = async {
            for _ in 0..20 {
                tokio::time::sleep(SHORT / 10).await;
                made.set(made.get() + 1);
            }
            Ok::<_, DatasetError>(1)
        };
        assert!(short().wait_for(trickles, || made.get()).await.is_err());
    }

    #[test]
    fn each_try_has_twice_the_time_of_the_one_before() {
        let time_max = |before| ReadTime::for_try(String::new(), before).time_max.unwrap();
        assert_eq!((time_max(0), time_max(3)), (READ_MAX, 8 * READ_MAX));
    }
}
