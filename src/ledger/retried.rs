//! A retry's record, in one object or with one object per block of shards: millions of scattered
//! rows exceed the size of one record.

use std::sync::Arc;

use bytes::Bytes;
use futures::{StreamExt, TryStreamExt};

use super::Ledger;
use super::error::{LedgerError, Result};
use super::finish::READS_AT_ONCE;
use super::keys::{Id, Keys, sha256};
use super::record::{
    Generation, RETRY_VERSION_3, Record, RetriedBlock, RetriedRows, RetriedShard, VERSION, check_shards, decode, encode,
};
use super::store::CreateOutcome;

/// Maximum size of a retry's record without block records. Older gristmills read only this form.
const SINGLE_RECORD_BYTES_MAX: usize = 4 << 20;

impl Ledger {
    /// Encodes a retry's record for `key`. For a large retry, this also creates one record per
    /// block of shards, and the encoded record names these.
    pub(super) async fn encode_retry(&self, record: &Generation, key: &str) -> Result<Bytes> {
        let bytes = self.encode_signed(key, record)?;
        if bytes.len() <= SINGLE_RECORD_BYTES_MAX {
            return Ok(bytes);
        }
        drop(bytes);
        let by_block = record
            .shards
            .chunk_by(|a, b| Keys::block_of(a.shard) == Keys::block_of(b.shard));
        let block_records: Vec<RetriedRows> = by_block
            .map(|shards| RetriedRows {
                v: VERSION,
                job: record.job.clone(),
                generation: record.generation,
                block: Keys::block_of(shards[0].shard),
                shards: shards.to_vec(),
            })
            .collect();
        let blocks = futures::stream::iter(block_records)
            .map(|rows| {
                // Clones these so that the future is `Send` wherever it is awaited.
                let (ledger, nonce) = (self.clone(), record.nonce.clone());
                async move { ledger.write_block(nonce, rows).await }
            })
            .buffered(READS_AT_ONCE)
            .try_collect()
            .await?;
        let head = Generation {
            v: RETRY_VERSION_3,
            shards: Vec::new(),
            blocks,
            ..record.clone()
        };
        self.encode_signed(key, &head)
    }

    async fn write_block(&self, nonce: Id, rows: RetriedRows) -> Result<RetriedBlock> {
        let block = rows.block;
        let (key, bytes) = (self.keys().retried_rows(rows.generation, &nonce, block), encode(&rows)?);
        if bytes.len() as u64 > RetriedRows::MAX_BYTES {
            return Err(LedgerError::stop(format!(
                "job `{}`: its retry would need a record of {} MB for shards {} and on, more than any gristmill reads: \
                 run the failed rows as a job of their own",
                self.job().name,
                bytes.len() >> 20,
                rows.shards[0].shard
            )));
        }
        match self.store().create(&key, bytes.clone()).await? {
            CreateOutcome::Ours => Ok(RetriedBlock {
                block,
                size: bytes.len() as u64,
                sha256: sha256(&bytes),
            }),
            CreateOutcome::Theirs(_) => Err(LedgerError::damaged(format!(
                "`{}` holds other bytes than this process wrote, under a name that only it knows",
                self.store().address(&key)
            ))),
        }
    }

    /// Completes a retry's record with the shards that its block records hold.
    pub(super) async fn with_block_rows(&self, mut record: Generation) -> Result<Generation> {
        if record.blocks.is_empty() {
            return Ok(record);
        }
        let blocks = std::mem::take(&mut record.blocks);
        let head = Arc::new(record.clone());
        let block_records: Vec<Vec<RetriedShard>> = futures::stream::iter(blocks)
            .map(|block| {
                let (ledger, head) = (self.clone(), head.clone());
                async move { ledger.read_block(&head, &block).await }
            })
            .buffered(READS_AT_ONCE)
            .try_collect()
            .await?;
        record.shards = block_records.concat();
        check_shards(&record.shards).map_err(LedgerError::damaged)?;
        Ok(record)
    }

    async fn read_block(&self, record: &Generation, named: &RetriedBlock) -> Result<Vec<RetriedShard>> {
        let key = self.keys().retried_rows(record.generation, &record.nonce, named.block);
        let damaged = |why: &str| LedgerError::damaged(format!("`{}` {why}", self.store().address(&key)));
        let bytes = self.store().get(&key, RetriedRows::MAX_BYTES).await?;
        let bytes = bytes.ok_or_else(|| damaged("is missing, though a retry names it"))?;
        if bytes.len() as u64 != named.size || sha256(&bytes) != named.sha256 {
            return Err(damaged("is not what its retry names"));
        }
        let rows: RetriedRows = decode(self.store(), &key, &bytes)?;
        let position = (&rows.job, rows.generation, rows.block);
        if position == (&record.job, record.generation, named.block) {
            Ok(rows.shards)
        } else {
            Err(damaged("is of another retry"))
        }
    }
}
