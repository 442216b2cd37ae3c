//! Reads the heads of attention.

use super::reader::Reader;
use super::{Family, LatentAttention};
use crate::device::HeadShape;
use crate::model::error::ModelError;

impl Reader<'_> {
    pub(super) fn heads(
        &self,
        family: Family,
        latent: Option<&LatentAttention>,
        hidden_size: usize,
    ) -> Result<HeadShape, ModelError> {
        if let Some(latent) = latent {
            return self.latent_heads(latent.shape);
        }
        let is_late_gemma = matches!(family, Family::Gemma2 | Family::Gemma3 | Family::Gemma4);
        let heads = self.size_or("num_attention_heads", 1 << 12, is_late_gemma.then_some(8))?;
        let kv_heads = match (self.size("num_key_value_heads", 1 << 12)?, family.kv_heads()) {
            (Some(n), _) => n,
            // An absent field takes the family's default. Null means one KV head per query head,
            // except for Gemma, which takes its default.
            (None, Some(n)) if is_late_gemma || !self.map.contains_key("num_key_value_heads") => n,
            (None, _) => heads,
        };
        let head_dim = match (self.size("head_dim", 1 << 10)?, family.head_dim()) {
            (Some(n), _) => n,
            (None, Some(n)) if is_late_gemma || !self.map.contains_key("head_dim") => n,
            _ if hidden_size.is_multiple_of(heads) => hidden_size / heads,
            _ => {
                return Err(self.broken(format!(
                    "`hidden_size` {hidden_size} is not a multiple of `num_attention_heads` {heads}, and there is no \
                     `head_dim`"
                )));
            }
        };
        let heads = HeadShape {
            heads,
            kv_heads,
            head_dim,
            value_in_key: None,
        };
        self.check_heads(heads, "num_key_value_heads")?;
        Ok(heads)
    }

    /// Refuses heads that are not supported. `kv_key` is the key that says their number.
    pub(super) fn check_heads(&self, shape: HeadShape, kv_key: &str) -> Result<(), ModelError> {
        let HeadShape {
            heads,
            kv_heads,
            head_dim,
            ..
        } = shape;
        if heads % kv_heads != 0 {
            return Err(self.broken(format!(
                "`num_attention_heads` {heads} is not a multiple of `{kv_key}` {kv_heads}"
            )));
        }
        if head_dim % 2 != 0 || head_dim > 1 << 10 {
            return Err(self.unsupported(format!(
                "heads of {head_dim} dimensions are not supported; even ones to 1,024 are"
            )));
        }
        Ok(())
    }
}
