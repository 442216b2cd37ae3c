//! The form in which a checkpoint's files store weights.

use super::config::{Config, ExpertForm};
use super::fp8_blocks::Fp8Blocks;

/// How weights are stored, as far as it is undone while files are opened and tensors are read.
#[derive(Debug, Clone, Copy)]
pub struct StoredForm {
    pub experts: ExpertForm,
    /// The blocks of matrices in FP8. `None`: there are no such matrices.
    pub fp8_blocks: Option<Fp8Blocks>,
}

impl StoredForm {
    pub fn of(config: &Config) -> StoredForm {
        StoredForm {
            experts: config.expert_form(),
            fp8_blocks: config.fp8_blocks,
        }
    }
}

impl From<ExpertForm> for StoredForm {
    fn from(experts: ExpertForm) -> StoredForm {
        StoredForm {
            experts,
            fp8_blocks: None,
        }
    }
}
