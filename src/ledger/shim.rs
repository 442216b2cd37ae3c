//! A stand-in for what the ledger is about to give: limits, generations, progress, cleaning. To be deleted with its users' merge:
//! retries make nothing, cleaning removes nothing, and a shard counts as still while it has no commit.

use super::*;
use serde::*;
#[derive(Debug, Clone, Copy, PartialEq, Default, Serialize, Deserialize)]
pub struct Terms {
    pub usd: Option<f64>,
    pub deadline_seconds: Option<u64>,
    pub unfinished: Unfinished,
}
#[derive(Debug, Clone, Copy, PartialEq, Default, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Unfinished {
    #[default]
    Keep,
    Expire,
}
pub struct Progress {
    pub uncommitted: Vec<u32>,
}
impl Progress {
    pub fn still_since(&self, b: &Progress) -> Vec<u32> {
        self.uncommitted
            .iter()
            .filter(|s| b.uncommitted.contains(s))
            .copied()
            .collect()
    }
}
pub struct Cleaned {
    pub objects: u64,
    pub bytes: u64,
}
impl Ledger {
    pub fn generation(&self) -> u32 {
        0
    }
    pub fn shard_numbers(&self) -> Vec<u32> {
        (0..self.job().shards.len() as u32).collect()
    }
    pub async fn retry(&self) -> Result<Option<Ledger>> {
        Ok(None)
    }
    pub async fn progress(&self) -> Result<Progress> {
        Ok(Progress {
            uncommitted: self.uncommitted().await?,
        })
    }
    pub async fn clean(&self, _dry: bool) -> Result<Cleaned> {
        Ok(Cleaned { objects: 0, bytes: 0 })
    }
    pub fn terms(&self, control: &control::Control) -> Terms {
        let last = control.orders().iter().rev().find_map(|o| match o {
            Order::Extend {
                budget_usd,
                deadline_seconds,
            } => Some((*budget_usd, *deadline_seconds)),
            _ => None,
        });
        match last {
            Some((usd, deadline_seconds)) => Terms {
                usd,
                deadline_seconds,
                ..self.job().terms
            },
            None => self.job().terms,
        }
    }
}
