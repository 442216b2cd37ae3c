//! How long a shard's inputs may take to answer. Only the time in which they are asked counts,
//! without waits for memory, rendering, and decompression of the rows before the shard.

use std::time::{Duration, Instant};

use crate::dataset::DatasetError;

/// Maximum time at the first try; doubles with each try. The intake begins no other shard
/// meanwhile.
const READ_MAX: Duration = Duration::from_secs(60);

/// Bytes per second. Decompression at this rate or above is work of this machine, not slowness of
/// the input.
const UNPACKED_A_SECOND: f64 = 4.0 * 1024.0 * 1024.0;
/// Shortest wait between two looks at the number of decompressed bytes.
const LOOK_MIN: Duration = Duration::from_millis(100);

/// See the module's description.
#[derive(Debug)]
pub(super) struct ReadTime {
    output: String,
    /// `None`: without a bound, where no other shard waits.
    most: Option<Duration>,
    taken: Duration,
}

impl ReadTime {
    /// Unbounded time for a shard of the job in `output`.
    pub(super) fn endless(output: String) -> ReadTime {
        ReadTime {
            output,
            most: None,
            taken: Duration::ZERO,
        }
    }

    /// Time for a shard of the job in `output` after `before` earlier tries.
    pub(super) fn of_try(output: String, before: u32) -> ReadTime {
        ReadTime {
            most: Some(READ_MAX.saturating_mul(1 << before.min(10))),
            ..ReadTime::endless(output)
        }
    }

    /// Waits for an answer as long as time is left. `unpacked`: bytes that were decompressed so
    /// far.
    pub(super) async fn count<T, E: From<DatasetError>>(
        &mut self,
        asked: impl Future<Output = Result<T, E>>,
        unpacked: impl Fn() -> u64,
    ) -> Result<T, E> {
        let Some(most) = self.most else {
            return asked.await;
        };
        let mut asked = std::pin::pin!(asked);
        loop {
            let (began, before) = (Instant::now(), unpacked());
            let left = most.saturating_sub(self.taken).max(LOOK_MIN);
            let answered = tokio::time::timeout(left, &mut asked).await;
            let unpacking = unpacked().saturating_sub(before) as f64 / UNPACKED_A_SECOND;
            self.taken += began.elapsed().saturating_sub(Duration::from_secs_f64(unpacking));
            match answered {
                Ok(answer) => return answer,
                Err(_) if self.taken >= most => return Err(DatasetError::slow(&self.output, most).into()),
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
            most: Some(SHORT),
            ..ReadTime::endless("s3://a/out".into())
        }
    }

    async fn answer_after(share: u32) -> Result<u32, DatasetError> {
        tokio::time::sleep(SHORT / share).await;
        Ok(share)
    }

    #[tokio::test]
    async fn only_time_in_which_the_inputs_are_asked_counts() {
        let mut time = short();
        for _ in 0..3 {
            // For example the wait for memory of carried columns.
            tokio::time::sleep(SHORT).await;
            assert_eq!(time.count(answer_after(20), || 0).await.unwrap(), 20);
        }
    }

    #[tokio::test]
    async fn the_answers_of_one_try_are_counted_together() {
        let mut time = short();
        assert!(time.count(answer_after(2), || 0).await.is_ok());
        let error = time.count(answer_after(1), || 0).await.unwrap_err();
        assert!(error.to_string().contains("s3://a/out"), "{error}");
        let mut endless = ReadTime::endless(String::new());
        assert!(endless.count(answer_after(1), || 0).await.is_ok());
    }

    /// A shard far behind in a compressed file is read to its end, however long decompressing the
    /// rows before it takes.
    #[tokio::test]
    async fn decompressing_is_no_slowness() {
        let made = std::cell::Cell::new(0);
        let unpacks = async {
            for _ in 0..20 {
                tokio::time::sleep(SHORT / 10).await;
                made.set(made.get() + UNPACKED_A_SECOND as u64);
            }
            Ok::<_, DatasetError>(1)
        };
        assert_eq!(short().count(unpacks, || made.get()).await.unwrap(), 1);
        // A trickle is slowness.
        let trickles = async {
            for _ in 0..20 {
                tokio::time::sleep(SHORT / 10).await;
                made.set(made.get() + 1);
            }
            Ok::<_, DatasetError>(1)
        };
        assert!(short().count(trickles, || made.get()).await.is_err());
    }

    #[test]
    fn each_try_has_twice_the_time_of_the_one_before() {
        let most = |before| ReadTime::of_try(String::new(), before).most.unwrap();
        assert_eq!((most(0), most(3)), (READ_MAX, 8 * READ_MAX));
    }
}
