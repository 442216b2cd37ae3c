//! Memory on the card: activations, scratch memory, keys and values.
//!
//! See docs/decisions/073-kv-scales-are-per-token-and-head.md.

use std::sync::Arc;

use half::bf16;

use super::attention_plan::{BLOCK_TOKENS, BlockSizes};
use super::draw::Drawing;
use super::driver::{Argument, Context, Memory, Pinned, PinnedTransfer};
use super::experts::ExpertsScratch;
use super::plan::KernelFormat;
use crate::device::batch::BlockCopy;
use crate::device::{DeviceError, HeadShape, KvFormat, KvPlace, KvShape};

/// Activations: `[rows][width]`.
pub struct Buffer {
    pub(super) rows: usize,
    pub(super) width: usize,
    pub(super) format: KernelFormat,
    pub(super) data: Option<Memory>,
    /// `[rows]`; 8-bit formats only.
    pub(super) scales: Option<Memory>,
}

impl Buffer {
    pub(super) fn new() -> Buffer {
        Buffer {
            rows: 0,
            width: 0,
            format: KernelFormat::Bf16,
            data: None,
            scales: None,
        }
    }

    /// Sets the shape. The contents become undefined; the allocation is reused if it is large
    /// enough.
    pub(super) fn reshape(
        &mut self,
        context: &Arc<Context>,
        rows: usize,
        width: usize,
        format: KernelFormat,
    ) -> Result<(), DeviceError> {
        (self.rows, self.width, self.format) = (rows, width, format);
        ensure_capacity(context, &mut self.data, rows * width * format.bytes(), "activations")?;
        if format.is_scaled() {
            ensure_capacity(context, &mut self.scales, rows * 4, "scales of activations")
        } else {
            Ok(())
        }
    }

    pub(super) fn data(&self) -> Argument {
        address(&self.data)
    }

    pub(super) fn scales(&self) -> Argument {
        if self.format.is_scaled() {
            address(&self.scales)
        } else {
            Argument::Address(0)
        }
    }
}

/// Grows `memory` to at least `bytes`. Growing loses the contents. `what` names it in messages.
pub(super) fn ensure_capacity(
    context: &Arc<Context>,
    memory: &mut Option<Memory>,
    bytes: usize,
    what: &str,
) -> Result<(), DeviceError> {
    if memory.as_ref().is_none_or(|memory| memory.bytes() < bytes) {
        *memory = None;
        *memory = Some(context.allocate(bytes, what)?);
    }
    Ok(())
}

/// Pinned memory of at least `bytes` bytes: `previous` if it is large enough, else a new
/// allocation.
pub(super) fn reuse_pinned(
    context: &Arc<Context>,
    previous: Option<Pinned>,
    bytes: usize,
) -> Result<Pinned, DeviceError> {
    match previous {
        Some(pinned) if pinned.len() >= bytes => Ok(pinned),
        _ => context.allocate_pinned(bytes.next_power_of_two()),
    }
}

/// Waits for the `previous` transfer, and then does the same as [`reuse_pinned`] with its memory.
pub(super) fn reuse_staging(
    context: &Arc<Context>,
    previous: Option<PinnedTransfer>,
    bytes: usize,
) -> Result<Pinned, DeviceError> {
    reuse_pinned(context, previous.map(PinnedTransfer::wait).transpose()?, bytes)
}

/// The memory's address as a kernel argument; null for `None`.
pub(super) fn address(memory: &Option<Memory>) -> Argument {
    Argument::Address(memory.as_ref().map_or(0, Memory::address))
}

/// Scratch memory of operations.
pub struct Workspace {
    /// Quantized input of a linear layer.
    pub(super) quantized: Buffer,
    /// Gate and up projections, side by side in each row.
    pub(super) gate_up: Buffer,
    pub(super) experts: ExpertsScratch,
    /// Partial attention results: unnormalised sums, and (maximum score, sum of weights) pairs.
    pub(super) part_sums: Option<Memory>,
    pub(super) part_states: Option<Memory>,
    pub(super) logits: Logits,
    pub(super) drawing: Drawing,
    /// Whether a row's results must not depend on the other rows of the step, so that matmuls
    /// keep one summation order.
    pub(super) deterministic: bool,
}

/// Rows of logits in F32.
#[derive(Default)]
pub(super) struct Logits {
    pub(super) rows: usize,
    /// Logits per row, without padding.
    pub(super) vocab_size: usize,
    /// Distance between the beginnings of rows, in values.
    pub(super) stride: usize,
    pub(super) memory: Option<Memory>,
    /// For the copy on the host.
    pub(super) host: Option<Pinned>,
}

/// Keys and values of one layer per block or of several; the layout is described in
/// `kernels/rope_store.cu` and `kernels/common/kv_blocks.cuh`.
pub struct KvPool {
    shapes: Vec<KvShape>,
    format: KernelFormat,
    keys: Memory,
    /// `None`: keys have their values in them.
    values: Option<Memory>,
    /// Scales of keys and of values; 8-bit formats only.
    scales: Option<(Memory, Memory)>,
}

impl KvPool {
    pub(super) fn new(
        context: &Arc<Context>,
        shapes: &[KvShape],
        format: KernelFormat,
        blocks: usize,
    ) -> Result<KvPool, DeviceError> {
        let format = stored_format(shapes, format);
        let (data, scales) = block_bytes(shapes, format);
        let allocate = |bytes: usize| context.allocate(bytes * blocks, "a layer's keys and values");
        Ok(KvPool {
            shapes: shapes.to_vec(),
            format,
            keys: allocate(data)?,
            values: keep_values(shapes).then(|| allocate(data)).transpose()?,
            scales: match scales {
                0 => None,
                bytes => Some((allocate(bytes)?, allocate(bytes)?)),
            },
        })
    }

    /// The sizes of blocks, where they are not those of one layer alone.
    pub(super) fn block_sizes(&self) -> Option<BlockSizes> {
        if matches!(self.shapes[..], [KvShape { layers: 1, .. }]) && self.values.is_some() {
            return None;
        }
        let (data, scales) = block_bytes(&self.shapes, self.format);
        Some(BlockSizes {
            bytes: data as u32,
            scales: scales as u32 / 4,
        })
    }

    /// Keys, values, key scales and value scales of a layer, in the kernels' argument order.
    ///
    /// # Panics
    /// The pool was made without layers of this shape.
    pub(super) fn arguments(&self, place: KvPlace) -> [Argument; 4] {
        let has = |shape: &KvShape| shape.heads == place.heads && place.part < shape.layers;
        assert!(self.shapes.iter().any(has), "{place:?} in a pool of {:?}", self.shapes);
        let (data, scales) = layer_bytes(place.heads, self.format);
        let at = |memory: &Memory, bytes: usize| memory.address() + (place.part * bytes) as u64;
        let (key_scales, value_scales) = match &self.scales {
            Some((keys, values)) => (at(keys, scales), at(values, scales)),
            None => (0, 0),
        };
        let values = self.values.as_ref().map_or(0, |values| at(values, data));
        [at(&self.keys, data), values, key_scales, value_scales].map(Argument::Address)
    }

    /// Copies blocks, in order.
    pub(super) fn copy_blocks(&self, context: &Context, copies: &[BlockCopy]) -> Result<(), DeviceError> {
        let (data, scales) = block_bytes(&self.shapes, self.format);
        let mut memories = vec![(&self.keys, data)];
        memories.extend(self.values.as_ref().map(|values| (values, data)));
        memories.extend(
            self.scales
                .iter()
                .flat_map(|(keys, values)| [(keys, scales), (values, scales)]),
        );
        for &BlockCopy { from, to } in copies {
            for (memory, bytes) in &memories {
                context.copy_within(memory, from as usize * bytes, to as usize * bytes, *bytes)?;
            }
        }
        Ok(())
    }
}

/// Bytes of a layer's keys in a KV block (values have the same size), and of their scales.
fn layer_bytes(heads: HeadShape, format: KernelFormat) -> (usize, usize) {
    let vectors = heads.kv_heads * BLOCK_TOKENS as usize;
    let scales = if format.is_scaled() { vectors * 4 } else { 0 };
    (vectors * heads.head_dim * format.bytes(), scales)
}

/// As [`layer_bytes`], of a block that has room for the layers of each shape.
fn block_bytes(shapes: &[KvShape], format: KernelFormat) -> (usize, usize) {
    let of_shape = |shape: &KvShape| {
        let (data, scales) = layer_bytes(shape.heads, format);
        (data * shape.layers, scales * shape.layers)
    };
    let sizes = shapes.iter().map(of_shape);
    sizes.fold((0, 0), |most, size| (most.0.max(size.0), most.1.max(size.1)))
}

/// Whether a pool has values beside keys.
fn keep_values(shapes: &[KvShape]) -> bool {
    shapes.iter().any(|shape| shape.heads.value_in_key.is_none())
}

/// The format of a pool's numbers, where `format` is asked for: latents are kept in BF16 (docs/decisions/104).
fn stored_format(shapes: &[KvShape], format: KernelFormat) -> KernelFormat {
    if keep_values(shapes) {
        format
    } else {
        KernelFormat::Bf16
    }
}

/// Bytes of a block of a pool with these shapes. `None`: a GPU keeps none in this format.
pub fn kv_block_bytes(shapes: &[KvShape], format: KvFormat) -> Option<usize> {
    KernelFormat::of_kv(format).map(|format| block_pair_bytes(shapes, format))
}

/// Bytes of keys and values of one block, with their scales.
pub(super) fn block_pair_bytes(shapes: &[KvShape], format: KernelFormat) -> usize {
    let (data, scales) = block_bytes(shapes, stored_format(shapes, format));
    if keep_values(shapes) { 2 * (data + scales) } else { data }
}

/// Copies a buffer's rows to the host as F32; quantized values are multiplied by their scales.
pub(super) fn download_f32(context: &Context, buffer: &Buffer) -> Result<Vec<f32>, DeviceError> {
    let count = buffer.rows * buffer.width;
    let mut bytes = vec![0u8; count * buffer.format.bytes()];
    let mut scales = vec![0u8; if buffer.format.is_scaled() { buffer.rows * 4 } else { 0 }];
    for (memory, bytes) in [(&buffer.data, &mut bytes), (&buffer.scales, &mut scales)] {
        if let Some(memory) = memory {
            context.download(memory, 0, bytes)?;
        }
    }
    if !buffer.format.is_scaled() {
        return Ok(bytes
            .as_chunks::<2>()
            .0
            .iter()
            .map(|b| bf16::from_ne_bytes(*b).to_f32())
            .collect());
    }
    let scales = scales.as_chunks::<4>().0.iter().map(|b| f32::from_ne_bytes(*b));
    let rows = bytes.chunks_exact(buffer.width).zip(scales);
    let decode = |byte: u8| match buffer.format {
        KernelFormat::Int8 => f32::from(byte as i8),
        _ => e4m3_to_f32(byte),
    };
    Ok(rows
        .flat_map(|(row, scale)| row.iter().map(move |byte| decode(*byte) * scale))
        .collect())
}

/// Decodes an E4M3 number (OCP 8-bit floating point specification, revision 1.0). The format has no
/// infinities; NaN has all bits but the sign set.
fn e4m3_to_f32(byte: u8) -> f32 {
    let (exponent, mantissa) = (i32::from(byte >> 3 & 15), f32::from(byte & 7));
    let magnitude = match (exponent, byte & 0x7f) {
        (_, 0x7f) => f32::NAN,
        (0, _) => mantissa * 2f32.powi(-9),
        _ => (8.0 + mantissa) * 2f32.powi(exponent - 10),
    };
    if byte >> 7 == 1 { -magnitude } else { magnitude }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_block_has_room_for_the_layers_of_each_shape() {
        let shape = |kv_heads, head_dim, layers| KvShape {
            heads: HeadShape {
                heads: 8,
                kv_heads,
                head_dim,
                value_in_key: None,
            },
            layers,
        };
        // Gemma 4 31B: two layers without windows are as large as one with, and have half of its scales.
        let [window, full] = [shape(16, 256, 1), shape(4, 512, 2)];
        let sizes = |shapes: &[KvShape], format| block_bytes(shapes, format);
        assert_eq!(sizes(&[window, full], KernelFormat::Bf16), (64 * 4096 * 2, 0));
        for shapes in [[window, full], [full, window]] {
            assert_eq!(sizes(&shapes, KernelFormat::Int8), (64 * 4096, 64 * 16 * 4));
        }
        // One has more numbers, the other more scales.
        let odd = [shape(2, 24, 1), shape(1, 64, 1)];
        assert_eq!(sizes(&odd, KernelFormat::E4m3), (64 * 64, 64 * 2 * 4));
        assert_eq!(kv_block_bytes(&odd, KvFormat::Fp8), Some(2 * (64 * 64 + 64 * 2 * 4)));
    }
}
