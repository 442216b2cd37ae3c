//! The form in which a checkpoint's files store weights.

use super::config::{Config, ExpertForm};
use super::quantized::Quantization;

/// How weights are stored, as far as it is undone while files are opened and tensors are read.
#[derive(Debug, Clone, Copy)]
pub struct StoredForm {
    pub experts: ExpertForm,
    /// `None`: no matrices are quantized.
    pub quantization: Option<Quantization>,
}

impl StoredForm {
    pub fn of(config: &Config) -> StoredForm {
        StoredForm {
            experts: config.expert_form(),
            quantization: config.quantization,
        }
    }
}

impl From<ExpertForm> for StoredForm {
    fn from(experts: ExpertForm) -> StoredForm {
        StoredForm {
            experts,
            quantization: None,
        }
    }
}
