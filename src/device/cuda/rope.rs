//! Rotation of query and key heads, and the storage of keys and values.

use super::driver::{Argument, Memory};
use super::memory::{Buffer, KvPool};
use super::{Cuda, Norm, Step, plan};
use crate::device::{DeviceError, HeadShape, QkNorm, RopeStore};

impl Cuda {
    /// Implements [`rope_store`](crate::device::Device::rope_store). Norms of single heads are part of
    /// the kernel; norms of all heads together come before it.
    pub(super) fn rotate_and_store(
        &self,
        op: RopeStore<'_, Norm>,
        step: &Step,
        qkv: &mut Buffer,
        pool: &mut KvPool,
    ) -> Result<(), DeviceError> {
        let heads = op.place.heads;
        let width = if op.stores { heads.qkv_width() } else { heads.q_width() };
        assert_eq!(qkv.width, width, "rows of another layer");
        let mut own_norms = [Argument::Address(0); 2];
        if let Some(QkNorm { q, k, eps }) = op.qk_norm {
            let sides = [(Some(q), 0, heads.heads), (k, heads.heads, heads.kv_heads)];
            for ((norm, first_head, count), own) in sides.into_iter().zip(&mut own_norms) {
                let Some(norm) = norm else { continue };
                if norm.values() == heads.head_dim {
                    *own = Argument::Address(norm.0.address());
                } else {
                    self.normalise_jointly(heads, (first_head, count), (norm, eps), qkv)?;
                }
            }
        }
        let [keys, values, key_scales, value_scales] = pool.arguments(op.place);
        let shape = self.layer_shape(heads, pool, !op.stores);
        self.launch(
            &shape.rope_store(op.value_norm.is_some(), step.tokens),
            &[
                qkv.data(),
                Argument::Address(step.rotations(op.rope)),
                Argument::Address(step.positions()),
                Argument::Address(step.slots(op.place.table)),
                own_norms[0],
                own_norms[1],
                Argument::Float(op.qk_norm.as_ref().map_or(0.0, |norm| norm.eps)),
                Argument::Float(op.value_norm.unwrap_or(0.0)),
                keys,
                values,
                key_scales,
                value_scales,
            ],
        )
    }

    /// Normalises `count` heads of each row of `qkv` together, from head `first_head` on.
    fn normalise_jointly(
        &self,
        heads: HeadShape,
        (first_head, count): (usize, usize),
        (norm, eps): (&Norm, f32),
        qkv: &Buffer,
    ) -> Result<(), DeviceError> {
        let width = count * heads.head_dim;
        assert_eq!(norm.values(), width, "a norm is of one head or of all");
        let start = qkv.data.as_ref().map_or(0, Memory::address) + (first_head * heads.head_dim * 2) as u64;
        self.launch(
            &plan::norm_heads(width, qkv.rows),
            &[
                Argument::Address(start),
                Argument::Address(norm.0.address()),
                Argument::Float(eps),
                Argument::Int(qkv.width as i32),
            ],
        )
    }
}
